"""From a plan to a Program: tasks written out for every rank, registers sized, orders frozen, memory shared.

`lower(model, plan)` is the whole way: forward graph of one microbatch, backward, placement, actors. The same plan always gives the same Program.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ir.cluster import Cluster
from ir.errors import PlanError
from ir.graph import Graph, Tensor
from ir.mesh import JOINED, Mesh
from ir.op import Op, Rule
from ir.ops import catalogue
from ir.plan import Plan
from ir.program import Actor, Firing, Program, Queue, Register
from ir.sbp import local_region, split_sizes
from ir.units import DTYPE_BYTES
from ir.work import Work
from planner.arena import Life, share
from planner.autodiff import Joint, backward, scale_loss
from planner.check import check_plan
from planner.chunks import planned_chunks
from planner.elide import elide_copies
from planner.inplace import in_place
from planner.orders import firings, in_its_copy, orders_of
from planner.pieces import unroll, unrolled_plan, unrolled_recompute, unrolled_slots, whole_layer, whole_name
from planner.place import place
from planner.pricing import work_of
from planner.ring import is_zigzag, num_parts, ordered, ringed_plan, with_rings
from planner.schedules import Orders, Slot
from planner.schedules.slot import one_line
from planner.sites import SiteTasks, Task, Value
from planner.stack import Kept, Known, stack


class HasGraph(Protocol):
    """What `lower` needs of a model: its name and its forward graph for one microbatch."""

    @property
    def name(self) -> str: ...

    def graph(self, batch: int, seq: int, dtype: str) -> Graph: ...


def lower(model: HasGraph, plan: Plan, ranks: Collection[int] | None = None) -> Program:
    """The Program of `plan`, proved; with `ranks` only their part of it, the rest of each group being named but absent (for a simulation by representatives).

    Raises PlanError when the plan does not belong to the model or holds a value that is not legal.
    """
    graph = planned_chunks(model.graph(plan.microbatch, plan.seq, plan.dtype), plan)
    check_plan(graph, plan)
    return write(joint_graph(graph, plan), plan, ranks).check()


def joint_graph(graph: Graph, plan: Plan) -> Joint:
    """Forward and backward of one microbatch, of each of its pieces where sequences are cut; nothing in it depends on placements."""
    forward = scale_loss(unroll(ordered(planned_chunks(graph, plan), plan), plan), plan.num_microbatches)
    return with_rings(backward(forward, unrolled_recompute(plan, forward)), plan)


def write(joint: Joint, plan: Plan, ranks: Collection[int] | None = None, orders: Orders | None = None) -> Program:
    """What `lower` gives, without proofs; under other `orders` than the plan's where these are given."""
    orders, k = orders or orders_of(plan), max(1, len(plan.pieces))
    line, *slots = unrolled_slots(tuple(in_its_copy(row, plan) for row in (one_line(orders, k), *orders)), k)
    moments = {(p, slot.microbatch): at for at, slot in enumerate(line) for p in passes_of(slot)}
    chained = len(plan.sites) == len(plan.stages) and k == 1 and not any(slot.kind in "IW" for row in orders for slot in row)
    cuts = tuple(sorted({s.first for s in plan.stages}))
    plan = ringed_plan(unrolled_plan(plan.squeezed(), joint.graph), joint)
    sites = tuple(map(elide_copies, place(joint, plan)))
    wanted = tuple(sorted(ranks)) if ranks is not None else tuple(r for s in sites for r in s.mesh.ranks)
    actors: list[Actor] = []
    registers: list[Register] = []
    frozen: dict[Queue, tuple[Firing, ...]] = {}
    passes: dict[str, str] = {}
    known: Known = {}
    for i, site in enumerate(sites):
        writer = _Writer(plan, sites, i, slots[i], moments, frozenset(wanted))
        for rank in site.mesh.ranks:
            if rank in wanted:
                mine = writer.actors(rank)
                actors += mine
                registers += in_place(stack(writer.registers(rank), writer.kept(rank), known), mine)
                frozen.update(writer.orders(rank))
                passes.update(writer.passes(rank))
    meta = {
        "model": plan.model, "model_fingerprint": plan.model_fingerprint, "cluster": plan.cluster, "cluster_fingerprint": plan.cluster_fingerprint,
        "batch": plan.batch, "seq": plan.seq, "dtype": plan.dtype, "optimizer": dict(plan.optimizer), "layout": dict(plan.layout),
        "predicted_step_s": plan.predicted.get("step_s"), "num_ranks": plan.num_ranks, "chained": chained, "cuts": cuts,
        "loss": whole_name(joint.graph.outputs[0]),
    }  # fmt: skip
    return share(Program(plan.model, firings(plan), tuple(actors), tuple(registers), frozen, meta), passes)


def representatives(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """The ranks that a simulation needs: the first of every stage, since on equal devices all of a stage do the same at the same time.

    All ranks where the devices are cores of one machine (`num_cores`): what one of them does there slows the others.
    """
    return tuple(r for ranks in plan.sites for r in (ranks if "num_cores" in cluster.profile else ranks[:1]))


Pass = tuple[int, str]
"""(stage, F, I or W)."""

Moments = Mapping[tuple[Pass, int], int]
"""When each pass of each microbatch runs, as places in one order of all ranks' slots."""


def in_flight(slots: Sequence[Slot], written: Pass, read: Collection[Pass]) -> int:
    """The most microbatches for which pass `written` has begun and not all of the passes `read` have ended, over one pipeline rank's order."""
    last: dict[int, int] = {}
    for at, slot in enumerate(slots):
        if any(p in read for p in passes_of(slot)):
            last[slot.microbatch] = at
    live: set[int] = set()
    most = 1
    for at, slot in enumerate(slots):
        if written in passes_of(slot):
            live.add(slot.microbatch)
            most = max(most, len(live))
        if last.get(slot.microbatch) == at:
            live.discard(slot.microbatch)
    return most


def on_the_way(moments: Moments, sent: Pass, read: Collection[Pass], num_microbatches: int) -> int:
    """The most microbatches that pass `sent` of another rank has handed on and not all of the passes `read` have taken."""
    ends = [max(moments[p, m] for p in read) for m in range(num_microbatches)]
    starts = [moments[sent, m] for m in range(num_microbatches)]
    return max(sum(start <= at <= end for start, end in zip(starts, ends, strict=True)) for at in starts)


def passes_of(slot: Slot) -> tuple[Pass, ...]:
    """The passes that a slot runs: a B is I and W."""
    return tuple((slot.stage, part) for part in ("IW" if slot.kind == "B" else slot.kind))


@dataclass(frozen=True, slots=True)
class _Life:
    """Where a value is written and read, whether a transfer fills or empties it meanwhile, and the pass of another rank that sends it, if one does.

    `is_computed`: nothing but the compute queue touches it; `layer`: that of what writes it.
    """

    written: Pass
    read: frozenset[Pass]
    is_in_transit: bool
    sent: Pass | None
    is_computed: bool
    layer: int = field(compare=False)


_Named = tuple[list[Firing] | None, str, Queue, Pass]
"""A task of a rank: the order that it joins, none for a receive, its actor, its queue, and the pass that it belongs to, of a receive that of its sender."""


class _Writer:
    """Writes one site's tasks out for its ranks."""

    def __init__(
        self, plan: Plan, sites: tuple[SiteTasks, ...], site: int, slots: tuple[Slot, ...], moments: Moments, present: frozenset[int]
    ) -> None:  # fmt: skip
        self.plan, self.sites, self.slots, self.moments, self.present = plan, sites, slots, moments, present
        self.here = sites[site]
        self.mesh: Mesh = self.here.mesh
        # Where the schedule holds weight gradients back, a B is an I and then a W; elsewhere each weight gradient follows its input gradient.
        self.splits = any(slot.kind in "IW" for slot in slots)
        self.all_tasks = (*self._tasks("begin"), *(t for s in sorted({slot.stage for slot in slots}) for t in self._stage(s)), *self._tasks("end"))
        self.lives = self._lives()
        self.credits: dict[_Life, int] = {}
        self.kernels: dict[tuple[Any, ...], Work] = {}

    def _tasks(self, part: str, stage: int | None = None) -> tuple[Task, ...]:
        return tuple(t for t in self.here.tasks[part] if stage is None or t.stage == stage)

    def _stage(self, stage: int) -> tuple[Task, ...]:
        return (*self._tasks("F", stage), *self._backward(stage))

    def _backward(self, stage: int) -> tuple[Task, ...]:
        both = (*self._tasks("I", stage), *self._tasks("W", stage))
        return both if self.splits else tuple(sorted(both, key=lambda t: t.number))

    def passes(self, rank: int) -> dict[str, str]:
        """By actor the pass that it belongs to, as `planner.arena` asks for."""
        return {self._at(t.name, rank): self._pass(t.stage, t.part) for t in self.all_tasks}

    def _pass(self, stage: int, part: str) -> str:
        """What runs without anything between: where no schedule holds weight gradients back, I and W are one."""
        return f"{stage}{part if self.splits or part not in 'IW' else 'B'}"

    def _lives(self) -> Mapping[str, _Life]:
        writers: dict[str, Task] = {v: t for t in self.all_tasks for v in (*t.writes, *t.updates)}
        readers: dict[str, list[Task]] = {v: [] for v in self.here.values}
        for t in self.all_tasks:
            for v in (*t.reads, *t.waits):
                readers[v].append(t)
        lives = {}
        for name in self.here.values:
            writer = writers.get(name)
            moves = (writer is not None and writer.kind in ("load", "recv")) or any(t.kind == "send" for t in readers[name])
            written = (writer.stage, writer.part) if writer else (-1, "begin")
            sent = (writer.peers[0], writer.part) if writer is not None and writer.kind == "recv" else None
            is_computed = writer is not None and all(t.queue == "compute" for t in (writer, *readers[name]))
            lives[name] = _Life(written, frozenset((t.stage, t.part) for t in readers[name]), moves, sent, is_computed, writer.layer if writer else -1)
        return lives

    # ---- registers ---------------------------------------------------------------------------------------------------------------------------------

    def registers(self, rank: int) -> list[Register]:
        coords = self.mesh.coords(rank)
        rooms = [self._room(rank, t) for t in self.all_tasks if self._has_room(t)]
        return [*(self._register(rank, coords, v) for v in self.here.values.values()), *rooms]

    @staticmethod
    def _has_room(task: Task) -> bool:
        return task.kind == "compute" and catalogue(task.op).room is not None

    def _room(self, rank: int, task: Task) -> Register:
        """The memory that a kernel works in besides its operands: an item that nobody reads."""
        work, room = self._compute(rank, task), catalogue(task.op).room
        assert room is not None
        size = room(work.sizes, work.attrs)
        name = self._at(f"{task.name}.room", rank)
        return Register(name, rank, (size,), work.dtype, size * DTYPE_BYTES[work.dtype], memory="logits")

    def _register(self, rank: int, coords: tuple[int, ...], value: Value) -> Register:
        tensor = value.tensor
        region = local_region(tensor.shape, value.nd, self.mesh.shape, coords)
        shape = tuple(stop - start for start, stop in region)
        copy = any(s.is_broadcast and i > 0 for s, i in zip(value.nd, coords, strict=True))
        return Register(
            self._at(value.name, rank), rank, shape, tensor.dtype, math.prod(shape) * DTYPE_BYTES[tensor.dtype], value.clock, self._credits(value),
            int(value.initial), self._memory(value), tensor.name, region, dict(tensor.init) if value.initial else {}, copy or value.counted_elsewhere,
        )  # fmt: skip

    def _credits(self, value: Value) -> int:
        """One slot; as many as the schedule keeps where the backward reads what the forward wrote; one more where a transfer fills or empties it meanwhile.

        What comes from another rank has room for all that is sent before it is read: the sender has other passes to run, which must not wait for this one.
        """
        if value.clock == "step":
            return 1
        life, m = self.lives[value.name], firings(self.plan)
        if life not in self.credits:
            kept = in_flight(self.slots, life.written, life.read) if life.read - {life.written} else 1
            waiting = on_the_way(self.moments, life.sent, life.read or {life.written}, m) if life.sent else 1
            self.credits[life] = min(max(kept + life.is_in_transit, waiting), m)
        return self.credits[life]

    def kept(self, rank: int) -> dict[str, Kept]:
        """Where a rank runs several forwards (of virtual stages, of pieces), the life of each item of what passes keep for later ones, in places of the
        order, and its layer; see `planner.stack`.
        """
        at = {(p, slot.microbatch): place for place, slot in enumerate(self.slots) for p in passes_of(slot)}
        found = {}
        for value in self.here.values.values() if len({slot.stage for slot in self.slots}) > 1 else ():
            life = self.lives[value.name]
            later = {self._pass(*p) for p in life.read} - {self._pass(*life.written)}  # else its memory is the arena's
            if value.clock == "microbatch" and life.is_computed and later:
                spans = (Life(at[life.written, m], max(at[p, m] for p in life.read)) for m in range(firings(self.plan)))
                # the n-th item that is written lies in slot n, whichever microbatch's it is
                found[self._at(value.name, rank)] = Kept(tuple(sorted(spans)), life.layer)
        return found

    def _memory(self, value: Value) -> str:
        life = self.lives[value.name]
        if value.clock == "microbatch" and life.written[1] == "F" and any(part in "IW" for _, part in life.read) and value.memory != "input":
            return "saved"
        return value.memory

    @staticmethod
    def _at(name: str, rank: int) -> str:
        return f"{name}@{rank}"

    def _all_at(self, names: Sequence[str], rank: int) -> tuple[str, ...]:
        return tuple(self._at(name, rank) for name in names)

    # ---- orders ------------------------------------------------------------------------------------------------------------------------------------

    def orders(self, rank: int) -> dict[Queue, tuple[Firing, ...]]:
        """What each queue fires, in order: receives in the order in which their senders come to them, all else as the schedule runs the passes."""
        found: dict[Queue, list[Firing]] = {}
        received: dict[Queue, list[tuple[int, Firing]]] = {}
        named: dict[tuple[int, str], list[_Named]] = {}

        def name(tasks: Sequence[Task]) -> list[_Named]:
            listed: list[_Named] = []
            for t in tasks:
                queue = (rank, t.queue)
                if t.kind == "recv":
                    found.setdefault(queue, [])
                    received.setdefault(queue, [])
                    listed.append((None, self._at(t.name, rank), queue, (t.peers[0], t.part)))
                elif self._has(t, rank):
                    listed.append((found.setdefault(queue, []), self._at(t.name, rank), queue, (t.stage, t.part)))
            return listed

        def fire(tasks: Sequence[_Named], microbatch: int) -> None:
            for order, actor, queue, sent in tasks:
                if order is None:
                    received[queue].append((self.moments[sent, microbatch], (actor, microbatch)))
                else:
                    order.append((actor, microbatch))

        fire(name(self._tasks("begin")), 0)
        for stage, kind, microbatch in self.slots:
            if (stage, kind) not in named:
                named[stage, kind] = name(self._backward(stage) if kind == "B" else self._tasks(kind, stage))
            fire(named[stage, kind], microbatch)
        fire(name(self._tasks("end")), 0)
        found |= {queue: [firing for _, firing in sorted(order, key=lambda x: x[0])] for queue, order in received.items()}
        return {queue: tuple(order) for queue, order in found.items()}

    def _has(self, task: Task, rank: int) -> bool:
        return task.kind != "store" or rank == self.mesh.ranks[0]

    # ---- actors ------------------------------------------------------------------------------------------------------------------------------------

    def actors(self, rank: int) -> list[Actor]:
        return [self._actor(rank, t) for t in self.all_tasks if self._has(t, rank)]

    def _actor(self, rank: int, task: Task) -> Actor:
        work, channel = self._work(rank, task)
        if len(self.present.intersection(work.group)) < 2:
            channel = ""  # its partners are represented by this rank, which then waits for nobody
        reads = () if work.op == "fill" else task.reads  # what a fill would have read counts on another rank
        writes = (*task.writes, f"{task.name}.room") if self._has_room(task) else task.writes
        return Actor(
            self._at(task.name, rank), rank, task.queue, task.clock, work, self._all_at(reads, rank), self._all_at(writes, rank),
            self._all_at(task.updates, rank), self._all_at(task.waits, rank), channel, task.origin, task.phase, whole_layer(self.plan, task.layer),
        )  # fmt: skip

    def _work(self, rank: int, task: Task) -> tuple[Work, str]:
        if task.kind == "compute":
            return self._compute(rank, task), ""
        if task.kind == "box":
            return self._box(rank, task)
        if task.kind == "join":
            return self._join(rank, task)
        if task.kind == "shift":
            return self._shift(rank, task)
        value = self.here.values[(task.reads or task.writes)[0]]
        region = local_region(value.tensor.shape, value.nd, self.mesh.shape, self.mesh.coords(rank))
        nbytes = float(math.prod(b - a for a, b in region) * DTYPE_BYTES[value.tensor.dtype])
        if task.kind in ("send", "recv"):
            src, dst = (self._site_of(s).mesh.ranks[self.mesh.ranks.index(rank)] for s in task.peers)
            channel = f"{task.name.rpartition('.')[0]}/{src}"
            return Work(task.kind, task.op, value.tensor.dtype, nbytes=nbytes, group=(src, dst)), channel
        stride = self.plan.microbatch if task.kind == "load" else 0
        if task.kind == "load":
            first = self._first_sample(task)
            region = ((region[0][0] + first, region[0][1] + first), *region[1:])
            region = region if task.first is None else _later(region, task.first)
        order = {"zigzag": num_parts(self.plan), "length": value.tensor.shape[1]} if task.kind == "load" and is_zigzag(self.plan) else {}
        return Work(task.kind, task.op, value.tensor.dtype, nbytes=nbytes, attrs={"dst_region": region, **order}, batch_stride=stride), ""

    def _first_sample(self, task: Task) -> int:
        """Where in the batch the first microbatch of the task's copy of the pipeline begins."""
        return self.plan.copy_of(task.stage) * firings(self.plan) * self.plan.microbatch

    def _compute(self, rank: int, task: Task) -> Work:
        tensors = [self.here.values[v].tensor for v in (*task.reads, *task.updates)]
        attrs = dict(task.attrs)
        if task.op == "sum_squares":
            value = self.here.values[task.reads[0]]
            copy = any(s.is_broadcast and i > 0 for s, i in zip(value.nd, self.mesh.coords(rank), strict=True))
            if attrs.pop("elsewhere") or copy:
                return Work("compute", "fill", value.tensor.dtype, attrs={"value": 0.0})
        first = self._first_sample(task) if task.clock == "microbatch" and catalogue(task.op).random else 0
        key = (rank, task.op, task.rules, task.clock, task.first, first, tuple((t.shape, t.dtype) for t in tensors), tuple(attrs.items()))
        if key not in self.kernels:
            self.kernels[key] = self._kernel(rank, task, tensors, attrs, first)
        return self.kernels[key]

    def _kernel(self, rank: int, task: Task, tensors: Sequence[Tensor], attrs: Mapping[str, Any], first_sample: int) -> Work:
        op = catalogue(task.op).for_ranks([len(t.shape) for t in tensors])
        total = op.bind([t.shape for t in tensors], attrs, task.name)
        sizes, at = local_sizes(op, task.rules, total, self.mesh, rank)
        if task.first is not None and "s" in total:
            at["s"] += task.first
            total |= dict.fromkeys({"s", op.past} & total.keys(), self.plan.seq)
        at["b"] = at.get("b", 0) + first_sample
        dtype = next((t.dtype for t in tensors if not t.dtype.startswith("int")), self.plan.dtype)
        coded = {o.name: DTYPE_BYTES[t.dtype] for o, t in zip(op.inputs, tensors, strict=True) if t.dtype == "uint8"}
        flops, traffic, gemm = work_of(op, sizes, attrs, DTYPE_BYTES[dtype], coded)
        if op.flops_at is not None and self.present.issuperset(self.mesh.ranks):
            here = op.flops_at(sizes, attrs, at, total)  # one rank that stands for all has the work of the busiest
            gemm = (*gemm[:-1], round(gemm[-1] * here / flops)) if gemm and here else ()
            flops = here
        return Work(
            "compute", task.op, dtype, flops, traffic, gemm, (), attrs, sizes, total,
            {k: v for k, v in at.items() if v}, self.plan.microbatch if task.clock == "microbatch" and op.random else 0,
        )  # fmt: skip

    def _box(self, rank: int, task: Task) -> tuple[Work, str]:
        src, dst = self.here.values[task.reads[0]], self.here.values[task.writes[0]]
        coords, shape = self.mesh.coords(rank), src.tensor.shape
        regions = [local_region(shape, nd, self.mesh.shape, coords) for nd in (src.nd, dst.nd)]
        width = DTYPE_BYTES[src.tensor.dtype]
        read, written = (math.prod(b - a for a, b in region) * width for region in regions)
        attrs: dict[str, Any] = {"src_region": regions[0], "dst_region": regions[1]}
        if task.queue == "compute":
            op = {"slice": "box.slice", "keep": "box.slice", "pad": "box.pad", "zero": "box.zero"}[task.op]
            if task.op == "zero":
                attrs["keep"] = coords[task.axes[0]] == 0
            return Work("compute", op, src.tensor.dtype, 0.0, float(read + written), attrs=attrs), ""
        group = self.mesh.group(rank, JOINED.join(self.plan.axes[axis] for axis in task.axes))
        partial = src.nd[task.axes[0]]
        attrs |= {"reduce": (partial.reduce if partial.is_partial else "")}
        attrs |= {key: " ".join(repr(value.nd[axis]) for axis in task.axes) for key, value in (("src", src), ("dst", dst))}
        nbytes = float(max(read, written)) * (src.share if len(self.present) < self.plan.num_ranks else 1.0)
        work = Work("collective", task.op, src.tensor.dtype, 0.0, nbytes, group=group, attrs=attrs)
        return work, f"{task.name}/{group[0]}"

    def _shift(self, rank: int, task: Task) -> tuple[Work, str]:
        value = self.here.values[task.reads[0]]
        region = local_region(value.tensor.shape, value.nd, self.mesh.shape, self.mesh.coords(rank))
        nbytes = float(math.prod(b - a for a, b in region) * DTYPE_BYTES[value.tensor.dtype])
        ring, at = self.mesh.group(rank, self.plan.axes[task.axes[0]]), repr(value.nd[task.axes[0]])
        inner, place_in_ring = task.attrs.get("inner", len(ring)), ring.index(rank)
        block = place_in_ring - place_in_ring % inner
        group = ring[place_in_ring % inner :: inner] if task.attrs.get("of_blocks", False) else ring[block : block + inner]
        attrs = {"src_region": region, "dst_region": region, "reduce": "", "src": at, "dst": at}
        return Work("collective", task.op, value.tensor.dtype, 0.0, nbytes, group=group, attrs=attrs), f"{task.name}/{group[0]}"

    def _site_of(self, stage: int) -> SiteTasks:
        return self.sites[self.plan.sites.index(self.plan.stages[stage].ranks)]

    def _join(self, rank: int, task: Task) -> tuple[Work, str]:
        value = self.here.values[task.reads[0]]
        place_in_mesh = self.mesh.ranks.index(rank)
        if task.everyone:
            group = tuple(r for s in self.sites for r in s.mesh.ranks)
        else:
            group = tuple(self._site_of(s).mesh.ranks[place_in_mesh] for s in task.peers)
        region = local_region(value.tensor.shape, value.nd, self.mesh.shape, self.mesh.coords(rank))
        nbytes = float(math.prod(b - a for a, b in region) * DTYPE_BYTES[value.tensor.dtype])
        attrs = {"src_region": region, "dst_region": region, "reduce": "sum", "src": "P", "dst": "B"}
        name = task.name if task.everyone else f"{task.name}/{group[0]}"
        return Work("collective", task.op, value.tensor.dtype, 0.0, nbytes, group=group, attrs=attrs), name


def _later(region: Sequence[tuple[int, int]], tokens: int) -> tuple[tuple[int, int], ...]:
    """The region of a piece's input [batch, tokens, ...] in that of the whole sequence."""
    return (region[0], (region[1][0] + tokens, region[1][1] + tokens), *region[2:])


def local_sizes(op: Op, rules: tuple[Rule, ...], total: Mapping[str, int], mesh: Mesh, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """(local size, offset) of every label on `rank`, one rule for each mesh axis; raises PlanError where a label must divide and does not."""
    sizes, at = dict(total), dict.fromkeys(total, 0)
    for rule, axis, parts, i in zip(rules, mesh.axes, mesh.shape, mesh.coords(rank), strict=True):
        if rule.kind != "split":
            continue
        here = sizes[rule.on]
        if here < parts or (op.must_divide(rule.on) and here % parts):
            raise PlanError(f"{op.sentence}: label {rule.on} = {here} cannot be split {parts} ways over axis {axis}")
        slices = split_sizes(here, parts)
        at[rule.on] += sum(slices[:i])
        sizes[rule.on] = slices[i]
    return sizes, at


__all__ = ["in_flight", "joint_graph", "local_sizes", "lower", "representatives", "write"]

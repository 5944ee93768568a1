"""From one step's graph and a plan to tasks: what every rank of a stage does, boxing and hops written out, in order.

All ranks of a site (a pipeline rank: one stage, or several virtual ones) do the same tasks on their own shards (SPMD), so a site is one list. A task belongs to
a part of the step: `begin` (once, before the first microbatch), `F`, `I` and `W` (once a microbatch: forward, recomputation and input gradients, weight
gradients), `end` (once, after the last). A value is a tensor in one placement on one site; a re-shard makes a new value of the same tensor, and whoever needs
the same placement in the same part of the same stage reads the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from ir.boxing import Step, cached_chain, crossing_ends
from ir.errors import PlanError
from ir.graph import Node, Tensor
from ir.mesh import Mesh
from ir.op import ALL_B, LEADING, Op, Rule, nd_placements
from ir.plan import Plan
from ir.sbp import B, NdSbp, Sbp, format_nd
from ir.units import DTYPE_BYTES
from planner.autodiff import Joint, cotangent
from planner.optimizers import Update, attrs_of, intermediate, is_hidden, update_of, updated, with_defaults
from planner.pieces import mark_of, start_of, whole_name

PARTS = ("begin", "F", "I", "W", "end")

SHIFT = "shift"
"""The operator that a split sequence makes a message of."""

BLOCKS = ".nodes"
"""Behind the queue of messages from one block of a ring to the next, which must not hold back those inside."""

AFTER = "after"
"""The attribute of a node that names tensors which must be there before it runs though it does not read them."""

READS_FROM = {"begin": ("begin",), "F": ("F",), "I": ("I",), "W": ("W", "I"), "end": ("end",)}
"""In each part, the parts whose re-shards it reads: weight gradients may run much later than input gradients, never before them."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in one placement on one stage. `clock` and `memory` as of `ir.program.Register`; `initial`: there before the first step."""

    name: str
    tensor: Tensor
    nd: NdSbp
    clock: str = "microbatch"
    memory: str = "activation"
    initial: bool = False
    counted_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """What each rank of a stage does once a microbatch, or once a step in the parts `begin` and `end`.

    `waits`: values that must be there though they are not looked at. `kind`: compute (operator `op` under `rules`), box (one step on mesh axes `axes`),
    shift (to the next rank on mesh axis `axes`), send and recv (between the two stages in `peers`), load, store, join (a sum over the stages in `peers`,
    rank by rank; over all ranks when `everyone`).
    `first`: where its tokens start in the sequence, None where sequences are whole or it has none.
    """

    name: str
    part: str
    queue: str
    kind: str
    op: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    axes: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    everyone: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    phase: str = "F"
    layer: int = 0
    clock: str = "microbatch"
    stage: int = 0
    number: int = 0
    first: int | None = None


@dataclass
class SiteTasks:
    """What one pipeline rank holds: its mesh, values by name, and the tasks of its stages by part. `Task.number` tells the order in which they were written."""

    mesh: Mesh
    values: dict[str, Value] = field(default_factory=dict)
    tasks: dict[str, list[Task]] = field(default_factory=lambda: {part: [] for part in PARTS})


def place(joint: Joint, plan: Plan) -> tuple[SiteTasks, ...]:
    """The tasks of every site. Raises PlanError when the plan misses a node, tensor or parameter of the graph."""
    return _Placer(joint, plan).run()


class _Placer:
    def __init__(self, joint: Joint, plan: Plan) -> None:
        self.joint, self.plan, self.graph = joint, plan, joint.graph
        self.sites = tuple(SiteTasks(plan.mesh([s.ranks for s in plan.stages].index(ranks))) for ranks in plan.sites)
        self.site_of = tuple(plan.sites.index(s.ranks) for s in plan.stages)
        self.hubbed: dict[tuple[int, int, str], str] = {}
        self.unboxed: dict[tuple[int, int, str], str] = {}
        self.accumulators: dict[tuple[int, str], str] = {}
        self.made: dict[tuple[int, str, NdSbp, str], str] = {}
        self.wide = DTYPE_BYTES[plan.dtype] < 4
        self.state_dtype = "float32" if self.wide else plan.dtype
        self.reboxed = frozenset(plan.reboxed)
        self.joins = "comm.copies" if plan.copies > 1 else "comm.tied"
        self.num_tasks = 0
        self.to_add: dict[int, list[tuple[Node, str, str]]] = {}
        self.last_of_layer: dict[tuple[int, str], dict[int, str]] = {}
        self.uses: dict[tuple[int, str], list[int]] = {}
        self.holders: dict[str, list[int]] = {p.name: [] for p in self.graph.params}
        self.boxed: set[str] = set()
        for copy, n in product(range(plan.copies), self.graph.nodes):
            at = plan.stage_of(n.layer, copy)
            for t in n.inputs:
                if n.phase in ("F", "R") or t.startswith("d."):
                    self.boxed.add(t)
                self._add_site(self.uses.setdefault((copy, t), []), at)
                if t in self.holders:
                    self._add_site(self.holders[t], at)

    def _add_site(self, stages: list[int], stage: int) -> None:
        """Adds a stage to those of which each stands for its site."""
        if self.site_of[stage] not in [self.site_of[i] for i in stages]:
            stages.append(stage)

    def run(self) -> tuple[SiteTasks, ...]:
        for p in self.graph.params:
            for i in sorted(self.holders[p.name]):
                self._begin_param(i, p)
        for copy, node in product(range(self.plan.copies), self.graph.nodes):
            self._node(node, copy)
        for stage in range(len(self.plan.stages)):
            self._add_up(stage, -2)
        firsts = [self.site_of.index(site) for site in range(len(self.sites))]
        for i in firsts:
            self._loss(i)
        final = [self._reduce_grads(i) for i in firsts]
        for i, grads in zip(firsts, final, strict=True):
            self._update(i, grads)
        return self.sites

    def _site(self, stage: int) -> SiteTasks:
        return self.sites[self.site_of[stage]]

    def _home(self, stage: int, tensor: str) -> tuple[int, int, str]:
        """Where a tensor of a microbatch lives: the stages of a site share it, but those of two copies run other microbatches."""
        return self.site_of[stage], self.plan.copy_of(stage), tensor

    # ---- values ------------------------------------------------------------------------------------------------------------------------------------

    def _value(self, stage: int, tensor: Tensor, nd: NdSbp, part: str, **more: Any) -> str:
        """A new value; the first of a tensor on a site has the tensor's name."""
        values = self._site(stage).values
        name = tensor.name
        if name in values:
            name = f"{tensor.name}{format_nd(nd, self.plan.axes)}"
        base = name
        k = 1
        while name in values:
            k += 1
            name = f"{base}.{k}"
        values[name] = Value(name, tensor, nd, **more)
        self.made[self._key(stage, part), tensor.name, nd, part] = name
        return name

    def _key(self, stage: int, part: str) -> int:
        """What happens once a step belongs to the site, whose first stage stands for it; the passes of its stages do not read each other's re-shards."""
        return self.site_of.index(self.site_of[stage]) if part in ("begin", "end") else stage

    def _made(self, stage: int, tensor: str, nd: NdSbp, part: str) -> str | None:
        """The value of a tensor in a placement that this part may read, if there is one."""
        return next((self.made[key] for p in READS_FROM[part] if (key := (self._key(stage, p), tensor, nd, p)) in self.made), None)

    def _task(self, stage: int, part: str, kind: str, op: str, name: str, **more: Any) -> None:
        clock = "step" if part in ("begin", "end") else "microbatch"
        self.num_tasks += 1
        self._site(stage).tasks[part].append(Task(name, part, more.pop("queue", "compute"), kind, op, clock=clock, stage=stage, number=self.num_tasks, **more))

    def _hub(self, tensor: str) -> NdSbp:
        """Where the tensor exists once: a forward value at its hub's value placement, a cotangent where it is summed."""
        behind = self.joint.stands_for.get(tensor, tensor)
        is_cotangent = tensor.startswith("d.")
        behind = behind.removeprefix("d.") if is_cotangent else behind
        if behind in self.graph.outputs:
            return (B,) * len(self.plan.axes)
        hub = self.plan.hubs.get(behind)
        if hub is None:
            raise PlanError(f"the plan says nothing about tensor `{behind}`; it was made for another model: plan again")
        return hub.cotangent if is_cotangent else hub.value

    def _box(
        self, stage: int, tensor: Tensor, have: str, want: NdSbp, part: str, like: Node | None, *, clock: str = "microbatch", memory: str = "buffer",
        waits: tuple[str, ...] = (),
    ) -> str:  # fmt: skip
        """The value of `tensor` in placement `want`, re-sharded step by step from the value called `have`."""
        for step in self._steps(stage, tensor, have, want):
            known = self._made(stage, tensor.name, step.dst, part)
            if known is None:
                known = self._value(stage, tensor, step.dst, part, clock=clock, memory=memory)
                self._step(stage, tensor, have, known, step, part, like, waits)
            have = known
        return have

    def _steps(self, stage: int, tensor: Tensor, have: str, want: NdSbp) -> tuple[Step, ...]:
        mesh, src = self._site(stage).mesh, self._site(stage).values[have].nd
        return cached_chain(src, want, tensor.shape, mesh.shape, DTYPE_BYTES[tensor.dtype], self.plan.links)

    def _step(self, stage: int, tensor: Tensor, have: str, to: str, step: Step, part: str, like: Node | None, waits: tuple[str, ...] = ()) -> None:
        """The task that re-shards the value `have` into the value `to`."""
        queue = "compute" if step.is_local else f"comm.{step.over(self.plan.axes)}"
        self._task(
            stage, part, "box", step.kind, f"{to}.{step.kind}.{part}", reads=(have,), writes=(to,), waits=waits, axes=step.axes, queue=queue,
            origin=like.name if like else tensor.name, phase=like.phase if like else "U", layer=like.layer if like else 0,
        )  # fmt: skip

    # ---- nodes -------------------------------------------------------------------------------------------------------------------------------------

    def _rules(self, node: Node, op: Op) -> tuple[Rule, ...]:
        if node.name in self.plan.rules:
            return self.plan.rules[node.name]
        if node.op == "add" and node.phase == "I":
            return tuple(_sum_rule(sbp) for sbp in self._hub(node.outputs[0]))
        if node.op == "fill":
            return (ALL_B,) * len(self.plan.axes)
        forward = self.graph.node[node.origin] if node.origin else node
        rules = self.plan.rules.get(forward.name)
        if rules is None:
            raise PlanError(f"the plan says nothing about node `{forward.name}`; it was made for another model: plan again")
        if node.phase in ("F", "R"):
            return rules
        forward_op = self.graph.op(forward)
        return tuple(forward_op.grad_rule(rule, op) for rule in rules)

    def _add_up(self, stage: int, layer: int) -> None:
        """Adds the boxed weight gradients of the layers that lie more than one above `layer` to what other microbatches have left."""
        rest = []
        for node, boxed, accumulator in self.to_add.get(stage, ()):
            if node.layer <= layer + 1:
                rest.append((node, boxed, accumulator))
                continue
            rules = _identity_rules(self._site(stage).values[boxed].nd)
            self._task(
                stage, "W", "compute", "cast", f"{accumulator}.add{mark_of(node.name)}", reads=(boxed,), writes=(accumulator,), rules=rules,
                attrs={"dtype": self.state_dtype}, origin=node.origin, phase="W", layer=node.layer,
            )  # fmt: skip
        self.to_add[stage] = rest

    def _node(self, node: Node, copy: int) -> None:
        stage = self.plan.stage_of(node.layer, copy)
        if node.phase not in ("F", "R"):
            self._add_up(stage, node.layer)
        part = node.phase if node.phase in ("F", "W") else "I"
        op = self.graph.op(node)
        rules = self._rules(node, op)
        ins, outs = nd_placements(rules, op)
        reads = tuple(self._read(stage, part, node, t, nd) for t, nd in zip(node.inputs, ins, strict=True))
        writes = []
        for t, nd in zip(node.outputs, outs, strict=True):
            tensor = self.graph.tensors[t]
            if t in self.graph.outputs:
                writes.append(self._output(stage, t, nd, part))
            elif self._adds_up(node, t, nd):
                writes.append(self._accumulator(stage, t, nd))
            else:
                writes.append(self._value(stage, tensor, nd, part))
        attrs = {k: v for k, v in node.attrs.items() if k != AFTER}
        more: dict[str, Any] = {"attrs": attrs, "first": start_of(self.plan, stage)}
        if node.op == SHIFT:  # a message from each rank to the next one along the axis that splits what is shifted
            axis = rules.index(Rule("split", "s"))
            of_blocks = attrs.get("of_blocks", False)
            more = {"axes": (axis,), "queue": f"comm.{self.plan.axes[axis]}{BLOCKS if of_blocks else ''}", "attrs": attrs}
        self._task(
            stage, part, "shift" if node.op == SHIFT else "compute", node.op, node.name, reads=reads, writes=tuple(writes), waits=self._after(stage, node),
            rules=rules, origin=node.origin or node.name, phase=node.phase, layer=node.layer, **more,
        )  # fmt: skip
        passing = [name for name in writes if self._site(stage).values[name].clock == "microbatch"]
        if passing:
            self.last_of_layer.setdefault((stage, part), {})[node.layer] = passing[0]
        for t, name in zip(node.outputs, writes, strict=True):
            if t not in self.graph.outputs and self._site(stage).values[name].clock == "microbatch":
                self._publish(stage, part, node, t, name)

    def _after(self, stage: int, node: Node) -> tuple[str, ...]:
        """The values of the tensors that a node waits for."""
        keys = [self._home(stage, t) for t in node.attrs.get(AFTER, ())]
        return tuple(self.hubbed.get(key) or self.unboxed[key] for key in keys)

    def _output(self, stage: int, tensor: str, nd: NdSbp, part: str) -> str:
        """Where a part of the loss is added up over the step: the pieces of a sequence add to one value."""
        name = whole_name(tensor)
        return name if name in self._site(stage).values else self._value(stage, replace(self.graph.tensors[tensor], name=name), nd, part, clock="step")

    def _publish(self, stage: int, part: str, node: Node, tensor: str, name: str) -> None:
        """Brings a fresh value to its hub, to the stages that use it, or into the gradient that it adds to."""
        spec = self.graph.tensors[tensor]
        param = self._param_of(tensor)
        if param is not None:
            # A weight gradient: boxed each microbatch. It is added two layers later, when the boxing is done, and no kernel waits for it.
            want = self.plan.params[param].grad
            boxed = self._box(stage, spec, name, want, part, node)
            self.to_add.setdefault(stage, []).append((node, boxed, self._accumulator(stage, tensor, want)))
            return
        if tensor not in self.boxed:
            self.unboxed[self._home(stage, tensor)] = name
            return
        hub = self._box(stage, spec, name, self._hub(tensor), part, node)
        self.hubbed[self._home(stage, tensor)] = hub
        for other in self.uses[self.plan.copy_of(stage), tensor]:
            if self.site_of[other] != self.site_of[stage]:
                self._hop(stage, other, part, node, spec, hub)

    def _hop(self, stage: int, other: int, part: str, node: Node, spec: Tensor, have: str) -> None:
        """Sends a value to another stage, every byte once, and brings it to its hub there."""
        src, dst = self._site(stage).mesh, self._site(other).mesh
        hub = self._site(stage).values[have].nd
        leaving, entering = crossing_ends(hub, src, hub, dst, spec.shape)
        leave = self._box(stage, spec, have, leaving, part, node)
        enter = self._value(other, spec, entering, part, memory="buffer")
        direction = "f" if part == "F" else "b"
        name = f"{spec.name}.{stage}to{other}.{part}"
        about: dict[str, Any] = {"origin": node.origin or node.name, "phase": node.phase, "layer": node.layer}
        self._task(stage, part, "send", "send", f"{name}.send", reads=(leave,), peers=(stage, other), queue=f"send.{direction}", **about)
        self._task(other, part, "recv", "recv", f"{name}.recv", writes=(enter,), peers=(stage, other), queue=f"recv.{direction}", **about)
        self.hubbed[self._home(other, spec.name)] = self._box(other, spec, enter, hub, part, node)

    def _read(self, stage: int, part: str, node: Node, tensor: str, nd: NdSbp) -> str:
        """The value of `tensor` in placement `nd` that a node reads in this part of the step."""
        spec = self.graph.tensors[tensor]
        if spec.role == "input":
            return self.made.get((stage, tensor, nd, "F")) or self._load(stage, spec, nd)
        if spec.role == "param":
            place = self.plan.params[tensor].held
            held = self.made[self._key(stage, "begin"), tensor, place, "begin"]
            return self._made(stage, tensor, nd, part) or self._box(stage, spec, held, nd, part, node, waits=self._two_layers_ago(stage, part, node.layer))
        found = self._made(stage, tensor, nd, part)
        if found is None and part != "F" and (tensor, node.origin) not in self.reboxed and node.layer not in self.plan.recompute:
            # What the forward node read is kept for the backward as it was.
            found = self.made.get((stage, tensor, nd, "F"))
        if found is not None:
            return found
        # What a recomputed layer's gradients alone read lies where its kernel left it.
        have = self.hubbed.get(self._home(stage, tensor)) or self.unboxed.get(self._home(stage, tensor))
        if have is None:
            raise PlanError(f"node `{node.name}` on stage {stage} needs `{tensor}`, which has not reached it")
        # What was kept from the forward is there long before: its boxing, too, must not run ahead.
        waits = self._two_layers_ago(stage, part, node.layer) if part != "F" else ()
        return self._box(stage, spec, have, nd, part, node, waits=waits)

    def _two_layers_ago(self, stage: int, part: str, layer: int) -> tuple[str, ...]:
        """What the gathering of a parameter waits for, so that no more than the next layer's parameters are gathered ahead of their use."""
        done = self.last_of_layer.get((stage, "F" if part == "F" else "I"), {})
        before = [value for at, value in done.items() if at != layer]
        return (before[-2],) if len(before) > 1 else ()

    def _load(self, stage: int, spec: Tensor, nd: NdSbp) -> str:
        name = self._value(stage, spec, nd, "F", memory="input")
        self._task(stage, "F", "load", whole_name(spec.name), f"{name}.load", writes=(name,), queue="load", origin=spec.name, first=start_of(self.plan, stage))
        return name

    # ---- parameters --------------------------------------------------------------------------------------------------------------------------------

    def _begin_param(self, stage: int, spec: Tensor) -> None:
        """The parameter's state, and the copy that the microbatches read where it differs."""
        if spec.name not in self.plan.params:
            raise PlanError(f"the plan says nothing about parameter `{spec.name}`; it was made for another model: plan again")
        place = self.plan.params[spec.name]
        elsewhere = self.site_of[stage] != self.site_of[min(self.holders[spec.name])]
        state = replace(spec, dtype=self.state_dtype)
        memory = "optimizer" if self.wide else "parameter"
        kept: dict[str, Any] = {"clock": "step", "initial": True, "counted_elsewhere": elsewhere}
        if spec.frozen:
            self._value(stage, spec, place.held, "begin", memory="parameter", **kept)
            return
        if self.wide:
            master = self._value(stage, replace(state, name=f"{spec.name}@master"), place.state, "begin", memory=memory, **kept)
            name = self._value(stage, spec, place.state, "begin", clock="step", memory="parameter")
            self._task(
                stage, "begin", "compute", "cast", f"{spec.name}.cast", reads=(master,), writes=(name,), rules=_identity_rules(place.state),
                attrs={"dtype": self.plan.dtype}, phase="U", origin=spec.name,
            )  # fmt: skip
        else:
            name = self._value(stage, state, place.state, "begin", memory=memory, **kept)
        self._box(stage, spec, name, place.held, "begin", None, clock="step", memory="parameter")

    def _param_of(self, tensor: str) -> str | None:
        behind = self.joint.stands_for.get(tensor)
        if not tensor.startswith("d.") or behind is None:
            return None
        spec = self.graph.tensors[behind]
        return behind if spec.role == "param" and not spec.frozen else None

    def _adds_up(self, node: Node, tensor: str, nd: NdSbp) -> bool:
        """Whether a kernel's output goes straight into the accumulator of a gradient."""
        param = self._param_of(tensor)
        return param is not None and nd == self.plan.params[param].grad

    def _accumulator(self, stage: int, tensor: str, nd: NdSbp) -> str:
        """What a use of a parameter adds to, in the passes of all pieces."""
        key = self.site_of[stage], whole_name(tensor)
        if key not in self.accumulators:
            spec = replace(self.graph.tensors[tensor], name=f"{whole_name(tensor)}@acc", dtype=self.state_dtype)
            self.accumulators[key] = self._value(stage, spec, nd, "W", clock="step", memory="gradient")
        return self.accumulators[key]

    def _reduce_grads(self, stage: int) -> dict[str, str]:
        """For each parameter of the stage the value of its whole gradient at its state's placement, in the order in which the backward completes them."""
        final: dict[str, str] = {}
        made = {t: i for i, n in enumerate(self.graph.nodes) for t in n.outputs}
        for p in sorted(self.graph.params, key=lambda p: max((made[c] for c in self.joint.grads.get(p.name, ())), default=-1)):
            users = sorted(self.holders[p.name])
            if self.site_of[stage] not in [self.site_of[i] for i in users]:
                continue
            place = self.plan.params[p.name]
            parts = []
            for contribution in dict.fromkeys(map(whole_name, self.joint.grads.get(p.name, ()))):
                acc = self.accumulators.get((self.site_of[stage], contribution))
                if acc is not None:
                    spec = self._site(stage).values[acc].tensor
                    parts.append(self._box(stage, spec, acc, place.state, "end", None, clock="step", memory="gradient"))
            if parts:
                final[p.name] = self._sum(stage, p, parts, users)
        return final

    def _sum(self, stage: int, spec: Tensor, parts: Sequence[str], users: Sequence[int]) -> str:
        """Adds the contributions, of this stage and of the other stages that hold the parameter, into `d.PARAM`."""
        state = self.plan.params[spec.name].state
        whole = replace(spec, name=cotangent(spec.name), dtype=self.state_dtype)
        total = parts[0]
        last = len(parts) - 1
        for k, part in enumerate(parts[1:], 1):
            tensor = whole if k == last and len(users) == 1 else replace(whole, name=f"{whole.name}@{k}")
            name = self._value(stage, tensor, state, "end", clock="step", memory="buffer")
            rules = tuple(_sum_rule(sbp) for sbp in state)
            self._task(stage, "end", "compute", "add", f"{name}.add", reads=(total, part), writes=(name,), rules=rules, phase="U", origin=spec.name)
            total = name
        if len(users) > 1:
            name = self._value(stage, whole, state, "end", clock="step", memory="gradient")
            self._task(
                stage, "end", "join", "all_reduce", f"{name}.tie", reads=(total,), writes=(name,), peers=tuple(users), queue=self.joins, phase="U",
                origin=spec.name,
            )  # fmt: skip
            total = name
        values = self._site(stage).values
        values[total] = replace(values[total], tensor=whole, memory="gradient")
        return total

    def _update(self, stage: int, grads: Mapping[str, str]) -> None:
        """The optimizer: the global norm of the gradient where it is clipped, then each parameter in place."""
        optimizer = with_defaults(self.plan.optimizer)
        norm2 = self._norm2(stage, grads, float(optimizer["max_norm"]))
        updates = [self._updating(stage, param, {"g": grad, "norm2": norm2}, optimizer) for param, grad in grads.items()]
        # Operator k of one parameter comes just after operator k - 1 of the next: what is re-sharded between the two has that long.
        longest = max((len(u.ops) for _, u, _ in updates), default=0)
        for when in range(len(updates) + longest):
            for k in reversed(range(longest)):
                if 0 <= when - k < len(updates) and k < len(updates[when - k][1].ops):
                    self._update_step(stage, *updates[when - k], k)

    def _updating(self, stage: int, param: str, values: Mapping[str, str], optimizer: Mapping[str, Any]) -> tuple[str, Update, dict[str, str]]:
        """The update of a parameter, and the values that its operators find under their names: gradient, norm, weights, states."""
        spec, state = self.graph.tensors[param], self.plan.params[param].state
        update = update_of(optimizer, spec, is_hidden(self.graph, param))
        weights = self.made[self._key(stage, "begin"), f"{param}@master" if self.wide else param, state, "begin"]
        elsewhere = self._site(stage).values[weights].counted_elsewhere
        kept: dict[str, Any] = {"clock": "step", "initial": True, "memory": "optimizer", "counted_elsewhere": elsewhere}
        states = {
            t.name: self._value(stage, replace(t, name=f"{param}@{t.name}"), nd, "end", **kept)
            for t, nd in zip(update.states, update.state_places(state), strict=True)
        }
        return param, update, {**values, "w": weights, **states}

    def _update_step(self, stage: int, param: str, update: Update, values: dict[str, str], k: int) -> None:
        """Operator `k` of an update; what an earlier one has given is brought to where this one reads it."""
        op, rules = update.ops[k], update.rules(self.plan.params[param].state)[k]
        ins, outs = nd_placements(rules, op)
        changed = updated(op)
        reads = []
        for operand, nd in zip(op.inputs, ins, strict=True):
            have = values[operand.name]
            if operand.name not in changed:
                tensor = self._site(stage).values[have].tensor
                reads.append(self._box(stage, tensor, have, nd, "end", None, clock="step"))
        made = {}
        for operand, nd in zip(op.outputs, outs, strict=True) if not changed else ():
            tensor = intermediate(update, op, operand.name, self.state_dtype)
            made[operand.name] = self._value(stage, replace(tensor, name=f"{param}@{operand.name}"), nd, "end", clock="step", memory="buffer")
        self._task(
            stage, "end", "compute", op.name, f"{param}.{op.name}", reads=tuple(reads), writes=tuple(made.values()),
            updates=tuple(values[name] for name in changed), rules=rules, attrs=attrs_of(update, op), phase="U", origin=param,
        )  # fmt: skip
        values |= made

    def _norm2(self, stage: int, grads: Mapping[str, str], max_norm: float) -> str:
        """The sum of squares of all gradients, each counted once; a constant where nothing is clipped."""
        scalar = Tensor("norm2", (), self.state_dtype)
        whole = (B,) * len(self.plan.axes)

        def fresh(name: str) -> str:
            return self._value(stage, replace(scalar, name=name), whole, "end", clock="step", memory="buffer")

        total = ""
        for param, grad in grads.items() if max_norm > 0 else ():
            square = fresh(f"norm2.{param}")
            rules = _identity_rules(self.plan.params[param].state)
            elsewhere = {"elsewhere": self.site_of[stage] != self.site_of[min(self.holders[param])]}
            self._task(
                stage, "end", "compute", "sum_squares", f"norm2.{param}", reads=(grad,), writes=(square,), rules=rules, attrs=elsewhere, phase="U", origin=param
            )
            if total:
                added = fresh(f"norm2.{param}.sum")
                self._task(stage, "end", "compute", "add", f"norm2.{param}.add", reads=(total, square), writes=(added,), rules=(ALL_B,) * len(whole), phase="U")
                square = added
            total = square
        if not total:
            total = fresh("norm2.local")
            self._task(stage, "end", "compute", "fill", "norm2.fill", writes=(total,), rules=(ALL_B,) * len(whole), attrs={"value": 0.0}, phase="U")
        if max_norm <= 0 or self.plan.num_ranks == 1:
            return total
        name = fresh("norm2")
        self._task(stage, "end", "join", "all_reduce", "norm2.join", reads=(total,), writes=(name,), everyone=True, queue="comm.world", phase="U")
        return name

    def _loss(self, stage: int) -> None:
        """Once a step the loss is summed over the mesh and over the copies of the last stage, and handed out."""
        for t in dict.fromkeys(map(whole_name, self.graph.outputs)):
            found = [v for v in self._site(stage).values.values() if v.tensor.name == t and v.clock == "step"]
            for value in found[:1]:
                like = self.graph.producer(self.graph.outputs[0])
                name = self._box(stage, value.tensor, value.name, (B,) * len(self.plan.axes), "end", None, clock="step")
                name = self._over_copies(stage, value.tensor, name)
                self._task(stage, "end", "store", t, f"{t}.store", reads=(name,), phase="U", layer=like.layer if like else 0)

    def _over_copies(self, stage: int, tensor: Tensor, have: str) -> str:
        """The sum of an output over the copies of the pipeline, each of which has run a part of the batch."""
        like = self.graph.producer(self.graph.outputs[0])
        if self.plan.copies == 1 or like is None:
            return have
        name = self._value(stage, tensor, self._site(stage).values[have].nd, "end", clock="step", memory="buffer")
        peers = tuple(self.plan.stage_of(like.layer, copy) for copy in range(self.plan.copies))
        self._task(stage, "end", "join", "all_reduce", f"{tensor.name}.join", reads=(have,), writes=(name,), peers=peers, queue=self.joins, phase="U")
        return name


def _sum_rule(sbp: Sbp) -> Rule:
    """The rule under which `add(x, y)` and other sums act on operands in this placement."""
    if sbp.is_split:
        return Rule("split", LEADING[sbp.dim])
    return Rule("linear", "x+y") if sbp.is_partial else ALL_B


def _identity_rules(nd: NdSbp) -> tuple[Rule, ...]:
    """The rules of an elementwise operator on operands in this placement; a P operand is read as it is."""
    return tuple(Rule("split", LEADING[s.dim]) if s.is_split else ALL_B for s in nd)


__all__ = ["PARTS", "SiteTasks", "Task", "Value", "place"]

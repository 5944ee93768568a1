"""The search: from a model, a cluster and a batch to the best plans.

Outside, every candidate (data, tensor, pipeline parallel, microbatch, recompute) gets a lower bound from its floating point operations alone and a guess that
orders the work. In that order each is placed exactly (`planner.placement`), lowered for one representative rank a stage and estimated in closed form; what
cannot beat the best found is pruned by its bound; when many in a row do not better it, the rest is left and told by its bounds. The best few are simulated.
The same input gives the same plans, but where the time runs out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ir.cluster import Cluster
from ir.errors import DoesNotFit, PlanError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.op import Rule
from ir.ops import catalogue
from ir.plan import Plan, Stage
from ir.program import Program
from ir.units import DTYPE_BYTES, dtype_name
from planner.autodiff import Joint
from planner.candidates import Candidate, block_layers, candidates, parse_fix
from planner.facts import analyse
from planner.frontends.model import Model
from planner.lower import joint_graph, representatives, write
from planner.placement import new_tables
from planner.placement import search as search_placement
from planner.pricing import MeshPricing, work_of
from planner.single import OPTIMIZERS
from planner.space import Limit, Space, layout_space
from planner.stages import cut
from planner.summary import layout, metrics
from planner.tables import Tables
from simulator.cost import CostModel
from simulator.engine import simulate as run_simulation
from simulator.estimate import estimate
from simulator.memory import Ledger, ledger

NEAR = 1.15
"""A candidate whose lower bound is this many times the best estimate is not worth placing, even where the list of plans could be longer."""

PATIENCE = 10
"""So many candidates in a row that do not better the best end the search; those left are told by their bounds (`gap`)."""

Progress = Callable[[str, int, int], None]
"""progress(what is done now, how many are done, how many there are)."""

PRICES = (0.0, 0.03, 1.0, 30.0)
"""Prices of memory that are tried until a plan fits, in steps per filling of the device: the n-th says that all of it is worth n steps."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate with its plan, the part of the Program that stands for all, its estimate and its memory."""

    candidate: Candidate
    plan: Plan
    program: Program
    estimate_s: float
    memory: Ledger


@dataclass(frozen=True)
class Result:
    """The best plans, best first, and what was searched for them.

    `searched`: candidates in the stated space; `evaluated`, `pruned`: what became of them. `optimal`: no candidate was left out but by its bound; `gap`: how
    far at most the best plan is from the best candidate by the lower bounds of those left out (0 when optimal).
    """

    plans: tuple[Plan, ...]
    searched: int
    evaluated: int
    pruned: int
    seconds: float
    optimal: bool
    gap: float
    interrupted: bool = False
    refused: tuple[str, ...] = field(default_factory=tuple)


def plan(
    model: Model, cluster: Cluster, *, batch: int, seq: int, dtype: str = "bfloat16", optimizer: str | Mapping[str, Any] = "adamw", top: int = 5,
    fix: Mapping[str, Any] | None = None, memory_fraction: float = 0.95, budget_s: float = 30.0, progress: Progress | None = None,
) -> Result:  # fmt: skip
    """The best `top` plans for a global `batch` of samples of `seq` tokens on all devices of the cluster.

    `memory_fraction` of the usable memory may be filled. After `budget_s` seconds, or at an interrupt, the best so far is returned. Raises DoesNotFit with the
    nearest plans when nothing fits, InputError or PlanError when `fix` contradicts the cluster or the model.
    """
    settings = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    if settings is None:
        raise PlanError(f"optimizer `{optimizer}` is not known; known are {', '.join(OPTIMIZERS)}")
    return _Search(model, cluster, batch, seq, dtype_name(dtype), settings, dict(fix or {}), memory_fraction).run(top, budget_s, progress)


def evaluate_fixed(model: Model, cluster: Cluster, like: Plan, fix: Mapping[str, Any]) -> Plan:
    """The best plan with the batch, dtype and optimizer of `like` that keeps `fix`, simulated, fit or not. Raises PlanError when it is not legal."""
    search = _Search(model, cluster, like.batch, like.seq, like.dtype, like.optimizer, fix, 1.0)
    space = sorted(candidates(search.fix, cluster.num_devices, like.batch, search.graph(1)), key=lambda c: (search.guess_s(c), str(c)))
    if not space:
        raise PlanError(f"no layout keeps {dict(fix)} on {cluster.num_devices} devices with batch {like.batch}")
    tried = [search.evaluate(c) for c in space[:4]]
    fitting = [e for e in tried if search.fits(e)]
    best = min(fitting or tried, key=lambda e: (e.estimate_s, str(e.candidate)))
    return search.simulate([best])[0]


NO_BATCH_ON_TP = Space(rules=(Limit("*", "tp", lambda rule: rule != Rule("split", "b")),))
"""A batch split over `tp` would be data parallelism under another name, which is a candidate of its own."""


class _Search:
    def __init__(
        self, model: Model, cluster: Cluster, batch: int, seq: int, dtype: str, optimizer: Mapping[str, Any], fix: Mapping[str, Any], memory_fraction: float
    ) -> None:
        self.model, self.cluster, self.batch, self.seq, self.dtype, self.optimizer = model, cluster, batch, seq, dtype, optimizer
        self.cost = CostModel(cluster)
        self.graphs: dict[int, Graph] = {}
        self.fix = parse_fix(fix, cluster.num_devices, batch, self.graph(1))
        self.memory_fraction = memory_fraction
        self.layers: dict[tuple[int, bool], Sequence[float]] = {}
        self.tables: dict[tuple[int, ...], Tables] = {}
        self.joints: dict[tuple[Any, ...], Joint] = {}
        self.layer_flops = _layer_flops(self.graph(1))
        self.peak = max(d.flops_per_s.get(dtype, 0.0) for d in cluster.devices)
        if not self.peak:
            raise PlanError(f"the devices of `{cluster.name}` have no rate for {dtype}; they have {', '.join(cluster.devices[0].flops_per_s)}")

    def graph(self, microbatch: int) -> Graph:
        if microbatch not in self.graphs:
            self.graphs[microbatch] = self.model.graph(microbatch, self.seq, self.dtype)
        return self.graphs[microbatch]

    # ---- the outer loop ----------------------------------------------------------------------------------------------------------------------------

    def run(self, top: int, budget_s: float, progress: Progress | None) -> Result:
        began = time.perf_counter()
        space = list(candidates(self.fix, self.cluster.num_devices, self.batch, self.graph(1)))
        if not space:
            raise PlanError(f"no layout of `{self.model.name}` uses all {self.cluster.num_devices} devices with batch {self.batch} and --fix {self.fix}")
        order = sorted(space, key=lambda c: (self.guess_s(c), str(c)))
        found: list[Evaluated] = []
        too_big: list[Evaluated] = []
        pruned = 0
        left: list[Candidate] = []
        interrupted, in_vain = False, 0
        for i, c in enumerate(order):
            if interrupted or in_vain >= PATIENCE or (found and time.perf_counter() - began > budget_s):
                left.append(c)
                continue
            if self._is_dominated(c, found) or self._cannot_win(c, found, top):
                pruned += 1
                continue
            if progress:
                progress(str(c), i, len(order))
            try:
                this = self.evaluate(c)
            except KeyboardInterrupt:
                interrupted = True
                left.append(c)
                continue
            better = self.fits(this) and this.estimate_s < min((e.estimate_s for e in found), default=math.inf)
            in_vain = 0 if better or not found else in_vain + 1
            (found if self.fits(this) else too_big).append(this)
        if not found:
            raise DoesNotFit(_what_is_missing(self.model, too_big, self.cluster))
        best = self.simulate(sorted(found, key=lambda e: (e.estimate_s, str(e.candidate)))[:top])
        step_s = best[0].predicted["step_s"]
        floor = min((self.lower_bound_s(c) for c in left), default=math.inf)
        return Result(
            _with_reasons(best), len(space), len(found) + len(too_big), pruned, time.perf_counter() - began, floor >= step_s,
            max(0.0, 1.0 - floor / step_s) if left else 0.0, interrupted,
        )  # fmt: skip

    def _is_dominated(self, c: Candidate, found: list[Evaluated]) -> bool:
        """Running layers again only costs time where the same candidate fits without; GPipe keeps more than 1F1B and is never faster."""
        twins = [e.candidate for e in found if replace(e.candidate, recompute=c.recompute, schedule=c.schedule) == c]
        return any((t.recompute == "none" and c.recompute == "full") or (t.schedule == "1f1b" and c.schedule == "gpipe") for t in twins)

    def _cannot_win(self, c: Candidate, found: list[Evaluated], top: int) -> bool:
        times = sorted(e.estimate_s for e in found)
        return len(times) >= top and self.lower_bound_s(c) > min(times[top - 1], NEAR * times[0])

    def fits(self, e: Evaluated) -> bool:
        usable = e.memory.usable_bytes
        return usable is None or e.memory.peak_bytes <= self.memory_fraction * usable

    # ---- bounds ------------------------------------------------------------------------------------------------------------------------------------

    def lower_bound_s(self, c: Candidate) -> float:
        """The time of the heaviest stage's kernels, each as fast on a part as on the whole, plus fill and drain; no communication, no optimizer."""
        weights = [s / c.tp for s in self.layer_s(c.mbs, c.recompute == "full")]
        stages = [sum(weights[a:b]) for a, b in self.stages(c.pp)]
        return c.num_microbatches * max(stages) + sum(stages) - max(stages)

    def layer_s(self, mbs: int, recompute: bool) -> Sequence[float]:
        """Kernel seconds of every layer, forward and backward, of `mbs` samples on one device."""
        if (mbs, recompute) not in self.layers:
            graph = self.graph(mbs)
            self.layers[mbs, recompute] = kernel_seconds(graph, self.cost, block_layers(graph) if recompute else ())
        return self.layers[mbs, recompute]

    def guess_s(self, c: Candidate) -> float:
        """What orders the work: the bound, two all-reduces a block and direction, the gradients' reduction. Not a bound, not a promise."""
        g = self.graph(1)
        block = next(n for n in g.nodes if n.layer == 1)
        elements = c.mbs * g.tensors[block.inputs[0]].num_elements
        width = 2 if self.dtype in ("bfloat16", "float16") else 4
        ranks = tuple(range(c.tp))
        blocks = len(self.layer_flops) - 2
        tensor_s = 4 * self.cost.collective_s("all_reduce", elements * width, ranks) * blocks if c.tp > 1 else 0.0
        per_microbatch = tensor_s / c.pp
        params = g.num_params / (c.tp * c.pp) * 4
        reduce_s = self.cost.collective_s("all_reduce", params, tuple(range(0, c.dp * c.tp, c.tp))) if c.dp > 1 else 0.0
        fill = (c.num_microbatches + c.pp - 1) / c.num_microbatches
        return self.lower_bound_s(c) + per_microbatch * c.num_microbatches * fill + 0.5 * reduce_s + (1e-9 if c.schedule == "gpipe" else 0.0)

    def stages(self, num_stages: int) -> tuple[tuple[int, int], ...]:
        return cut(self.layer_flops, num_stages)

    # ---- one candidate -----------------------------------------------------------------------------------------------------------------------------

    def evaluate(self, c: Candidate) -> Evaluated:
        """The cheapest plan of the candidate that fits; the smallest one where none does."""
        smallest: Evaluated | None = None
        for price in PRICES if "zero" not in self.fix else PRICES[:1]:
            this = self._evaluate_at(c, price)
            if self.fits(this):
                return this
            if smallest is None or this.memory.peak_bytes < smallest.memory.peak_bytes:
                smallest = this
        assert smallest is not None
        return smallest

    def _evaluate_at(self, c: Candidate, price: float) -> Evaluated:
        made = self.make_plan(c, price)
        key = (made.microbatch, c.num_microbatches, made.recompute)
        if key not in self.joints:
            self.joints[key] = joint_graph(self.graph(made.microbatch), made)
        program = write(self.joints[key], made, representatives(made, self.cluster))
        return Evaluated(c, made, program, estimate(program, self.cost), ledger(program, cluster=self.cluster))

    def make_plan(self, c: Candidate, price: float = 0.0) -> Plan:
        graph = self.graph(c.mbs * c.dp)
        mesh = Mesh(("dp", "tp"), (c.dp, c.tp), tuple(range(c.dp * c.tp)))
        recompute = block_layers(graph) if c.recompute == "full" else ()
        in_flight = min(c.pp, c.num_microbatches) if c.schedule == "1f1b" else c.num_microbatches
        per_byte = price * self.lower_bound_s(c) / self.cluster.devices[0].usable_bytes
        pricing = MeshPricing(self.cost, mesh)
        if mesh.shape not in self.tables:
            self.tables[mesh.shape] = new_tables(mesh.axes, mesh.shape, pricing)
        space = layout_space(graph, mesh.axes, zero=self.fix.get("zero"), sp=self.fix.get("sp")) & NO_BATCH_ON_TP
        placed = search_placement(
            graph, mesh.axes, mesh.shape, pricing, tables=self.tables[mesh.shape], num_microbatches=c.num_microbatches, memory_price=per_byte,
            in_flight=in_flight, recompute=recompute, optimizer=self.optimizer["name"], space=space,
        )  # fmt: skip
        size = mesh.size
        stages = tuple(Stage(a, b, tuple(range(i * size, (i + 1) * size))) for i, (a, b) in enumerate(self.stages(c.pp)))
        made = Plan(
            self.model.reference or self.model.name, self.model.fingerprint, self.cluster.name, self.cluster.fingerprint, self.batch, self.seq, self.dtype,
            dict(self.optimizer), mesh.axes, mesh.shape, stages, c.schedule, c.num_microbatches, recompute, placed.rules, placed.hubs, placed.params,
            placed.reboxed, links=placed.links,
        )  # fmt: skip
        return replace(made, layout=layout(graph, made))

    def simulate(self, best: list[Evaluated]) -> list[Plan]:
        plans = []
        for e in best:
            timeline = run_simulation(e.program, self.cost, steps=2)
            memory = ledger(e.program, timeline, cluster=self.cluster)
            plans.append(replace(e.plan, predicted=metrics(self.model, self.cluster, e.plan, e.program, timeline, memory)))
        return sorted(plans, key=lambda p: (p.predicted["step_s"], str(p.layout)))


def kernel_seconds(graph: Graph, cost: CostModel, recompute: Sequence[int] = ()) -> list[float]:
    """Seconds of the kernels of every layer of the chain, forward and backward, on one device; equal kernels are priced once."""
    facts = analyse(graph, recompute)
    out = [0.0] * graph.num_layers
    known: dict[tuple[Any, ...], float] = {}
    for n in graph.nodes:
        fact, sizes, dtype = facts.node[n.name], graph.sizes(n), graph.tensors[n.outputs[0]].dtype
        times = 2 if n.name in facts.rerun else 1
        key = (n.op, times, tuple(sizes.values()), len(fact.grads))
        if key not in known:
            ops = (*(fact.op,) * times, *fact.grads)
            known[key] = sum(cost.compute_s(o.name, dtype, *work_of(o, sizes, n.attrs, DTYPE_BYTES[dtype])) for o in ops if not o.copies)
        out[n.layer] += known[key]
    return out


def _layer_flops(graph: Graph) -> list[float]:
    """Forward floating point operations of every layer of the chain."""
    out = [0.0] * graph.num_layers
    for n in graph.nodes:
        out[n.layer] += catalogue(n.op).for_ranks([len(graph.tensors[t].shape) for t in n.inputs]).flops_of(graph.sizes(n), n.attrs)
    return out


def _what_is_missing(model: Model, too_big: list[Evaluated], cluster: Cluster) -> str:
    near = sorted(too_big, key=lambda e: (e.memory.peak_bytes, str(e.candidate)))[:3]
    gib = 2.0**30
    usable = cluster.devices[0].usable_bytes / gib
    told = "; ".join(f"{e.candidate}: {e.memory.peak_bytes / gib:.1f} GiB" for e in near)
    asked = f"`{model.name}` does not fit on {cluster.num_devices} x {cluster.devices[0].name} ({usable:.1f} GiB usable each)"
    return f"{asked}. Nearest: {told}. Add devices, shorten seq, or lower the batch."


def _with_reasons(plans: list[Plan]) -> tuple[Plan, ...]:
    from planner.explain import why

    return tuple(replace(p, predicted={**p.predicted, "rank": i + 1, "why": why(p, plans)}) for i, p in enumerate(plans))

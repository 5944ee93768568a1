"""A candidate evaluated: drafted at a low price of memory at which it fits, its schedule chosen by the times of its stages; the best are simulated whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from ir.cluster import Cluster
from ir.graph import Graph
from ir.mesh import Mesh
from ir.plan import Plan, Stage
from ir.units import DTYPE_BYTES, GIB
from planner.bounds import Bounds
from planner.candidates import Candidate, block_layers, splits_experts
from planner.chunks import in_chunks, usual_chunks
from planner.context import AXIS, context_space, form_of
from planner.drafts import EXPOSED, Drafts, decides_reruns
from planner.facts import analyse, uneven_labels
from planner.footprint import Footprint
from planner.foretell import foretell
from planner.hints import Hint, hinted_space
from planner.imports import layout_limits, tp_plan_limits
from planner.lower import joint_graph, representatives, write
from planner.orders import OWN, STAND_IN, kept, rows_of, schedule_of
from planner.pieces import balanced
from planner.pipeline_costs import Pipeline
from planner.placed import Placed
from planner.placement import search
from planner.schedules import Orders
from planner.schedules.auto import Effort, Limits, search_orders
from planner.schedules.slot import Slot
from planner.sketch import Sketches
from planner.space import Space, layout_space, no_batch, split_experts, zero_space
from planner.summary import layout
from planner.within import search_within
from simulator.cost import CostModel
from simulator.estimate import estimate
from simulator.memory import Ledger, ledger

HIGHEST = 30.0
"""The highest price of memory that is tried, in steps per filling of the device: all of it is worth so many steps."""

DEARER = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, HIGHEST)
"""Those at which a whole plan is tried that needs more than its draft."""

SLACK = 0.15
"""Share of its time that a draft at no price of memory may be slower than one at the best price: whatever is slower than what is known by more is left."""

SHORTFALL = 0.1
"""Share by which a draft is slower than its sketch where it is placed once more, with all communication exposed."""

MIDDLE = 0.3
"""The price that is asked first where memory has one."""

NOTHING = 0.003
"""Share of a step below which a lower price of memory gains nothing."""

TRIES = 3
"""Drafts at prices between one that is too low and one at which a candidate fits."""

FARTHEST = 10.0
"""Of a price, that of the lowest that is tried next, where none is known to be too low."""

NEARLY = 1.1
"""Two prices of this ratio are taken for one."""

SPARE = 0.005
"""Share of the usable memory that must be left over for a plan's layers to be placed again."""

GOOD_FILLING = 0.003
"""Share of a step that may be left to save where that ends."""

FILLINGS = 3
"""Limits that are tried for that: what a plan needs beside its tensors is known only when it is simulated."""

QUICK = Effort(passes=1_500_000, prove=0)
"""How long a schedule of its own is searched for where other schedules are tried as well."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate at the lowest price of memory at which it fits: what a step takes by its draft, a bound, what its
    busiest rank takes without waiting, its memory; orders where the schedule has its own; the share of communication that its placement takes for exposed.
    """

    candidate: Candidate
    price: float
    estimate_s: float
    floor_s: float
    busy_s: float
    memory: Ledger
    orders: tuple[str, ...] = ()
    exposed: float = EXPOSED

    def fits(self, memory_fraction: float) -> bool:
        """Whether it fills at most this share of the usable memory."""
        usable = self.memory.usable_bytes
        return usable is None or self.memory.peak_bytes <= memory_fraction * usable


@dataclass(frozen=True)
class Evaluator:
    """For one global batch of samples on one cluster. `fix` as `planner.candidates.parse_fix` gives it. Drafts and graphs are kept between candidates."""

    bounds: Bounds
    cluster: Cluster
    batch: int
    optimizer: Mapping[str, Any]
    fix: Mapping[str, Any]
    memory_fraction: float

    @property
    def cost(self) -> CostModel:
        return self.bounds.cost

    @cached_property
    def drafts(self) -> Drafts:
        return Drafts(self.bounds, self.cluster, self.batch, self.optimizer, self.space)

    @cached_property
    def footprint(self) -> Footprint:
        return Footprint(self.bounds, self.optimizer)

    @cached_property
    def sketches(self) -> Sketches:
        return Sketches(self.bounds, self.footprint, self.memory_fraction, self.fix.get("zero"))

    @property
    def usable_bytes(self) -> float:
        """What may be filled of a device."""
        return self.memory_fraction * self.cluster.devices[0].usable_bytes

    def in_loss_chunks(self, c: Candidate) -> Candidate:
        """The candidate with its loss over the usual number of chunks."""
        return replace(c, loss_chunks=usual_chunks(self.bounds.graph(1), c.mbs * self.bounds.seq // c.cp))

    def logit_bytes(self, c: Candidate) -> float:
        """What the loss over chunks saves at most: a microbatch's logits, their gradients and a copy of each, whole on every rank."""
        tables = [n.inputs[1] for n in in_chunks(self.bounds.graph(1), 2).nodes if n.op.startswith("head_lse")]
        rows = sum(self.bounds.graph(1).tensors[t].shape[0] for t in tables)
        return 4.0 * rows * c.mbs * self.bounds.seq / c.cp * DTYPE_BYTES[self.bounds.dtype]

    def may_fit(self, c: Candidate) -> bool:
        """Whether the least that the candidate needs fits; where not, no placement of it does."""
        return self.footprint.least_bytes(c) <= self.memory_fraction * max(d.usable_bytes for d in self.cluster.devices)

    def evaluate(self, c: Candidate, known_s: float = math.inf, above: float = 0.0) -> Evaluated:
        """The cheapest draft of the candidate that fits, of those at this price of memory or a higher one; the smallest one where none does, or one that is
        slower than `known_s` by far.

        Placed with little of the communication exposed; where memory has a price, and a sketch promises more than that gives, with all of it as well.
        """
        found = self._cheapest(c, known_s, above)
        promised_s = self.sketches.step_s(c)
        here_s = found.estimate_s if found.fits(self.memory_fraction) else math.inf
        if not found.price or self._is_far(found, known_s) or promised_s * (1 + SHORTFALL) > min(here_s, known_s * (1 + SLACK)):
            return found
        other = self.evaluate_at(c, found.price, 1.0)
        return min(found, self._refined(c, None, other) if other.fits(self.memory_fraction) else other, key=self._rank)

    def _cheapest(self, c: Candidate, known_s: float, above: float) -> Evaluated:
        """Of no price what cannot fit is not asked; then at a price that most layouts need who need any, and where that is not enough the highest."""
        below: Evaluated | None = None
        bare = replace(c, recompute="none") if c.recompute == "selective" else c
        fixed = "zero" in self.fix and c.recompute != "selective"
        if above or fixed or self.may_fit(bare):
            below = self.evaluate_at(c, above)
            if below.fits(self.memory_fraction) or fixed or self._is_far(below, known_s):
                return below
        for price in (MIDDLE, HIGHEST):
            if price <= above:
                continue
            this = self.evaluate_at(c, price)
            if this.fits(self.memory_fraction):
                return this if self._is_far(below or this, known_s) else self._refined(c, below, this)
            below = this if below is None or this.memory.peak_bytes < below.memory.peak_bytes else below
            if self._is_far(this, known_s):
                break
        assert below is not None
        return below

    def _refined(self, c: Candidate, below: Evaluated | None, fitting: Evaluated) -> Evaluated:
        """The fastest that fits of some drafts at prices between one that is too low, if any is known, and that of one that fits."""
        best, low, high = fitting, below.price if below else 0.0, fitting
        for _ in range(TRIES):
            price = math.sqrt(max(low, high.price / FARTHEST) * high.price)
            if high.price < price * NEARLY or (below and best.estimate_s <= below.estimate_s * (1 + NOTHING)):
                break
            this = self.evaluate_at(c, price, fitting.exposed)
            if this.fits(self.memory_fraction):
                high, best = this, min(best, this, key=self._rank)
            else:
                below, low = this, price
        return best

    def _rank(self, e: Evaluated) -> tuple[bool, float]:
        """What fits first, then what is faster."""
        return not e.fits(self.memory_fraction), e.estimate_s

    def _is_far(self, e: Evaluated, known_s: float) -> bool:
        """Whether it is slower than what is known by so much that no higher price of memory makes it win."""
        return e.estimate_s * (1 - SLACK) > known_s

    def evaluate_at(self, c: Candidate, price: float, exposed: float = EXPOSED) -> Evaluated:
        """The draft at this price of memory; the whole plan's bound where sequences are cut or parameters are there twice."""
        chosen = schedule_of(STAND_IN if c.schedule == "auto" else c.schedule, self.bounds.rows, c.pieces)
        if self._is_whole(c):
            return self._whole_at(c, price, exposed)
        if c.schedule in OWN:
            pipeline = self.drafts.pipeline(c, price, True, exposed)
            rows = self.bounds.rows or rows_of(self._auto(pipeline))
            step = pipeline.step(c.schedule, tuple(tuple(map(Slot.parse, row.split())) for row in rows))
            return Evaluated(c, price, step.step_s, step.floor_s, step.busy_s, step.memory, rows, exposed)
        step = self.drafts.pipeline(c, price, chosen.splits, exposed).step(c.schedule)
        return Evaluated(c, price, step.step_s, step.floor_s, step.busy_s, step.memory, (), exposed)

    def _is_whole(self, c: Candidate) -> bool:
        """Whether sequences are cut or parameters are there twice, of which there are no drafts."""
        chosen = schedule_of(STAND_IN if c.schedule == "auto" else c.schedule, self.bounds.rows, c.pieces)
        return bool(c.pieces or chosen.copies * chosen.pieces > 1)

    def _whole_at(self, c: Candidate, price: float, exposed: float) -> Evaluated:
        plan = self.plan(c, price, (), exposed)
        program = write(joint_graph(self.bounds.graph(plan.microbatch), plan), plan, representatives(plan, self.cluster))
        bound_s = estimate(program, self.cost)
        return Evaluated(c, price, bound_s, bound_s, bound_s, ledger(program, cluster=self.cluster), (), exposed)

    def _auto(self, pipeline: Pipeline) -> Orders:
        """The best orders for the stages' own times and for what memory the rest of them leaves to activations."""
        limits = Limits(pipeline.room(self.memory_fraction), (1.0,) * len(pipeline.stages))
        effort = Effort() if self.fix.get("schedule") == "auto" else QUICK
        return search_orders(pipeline.times(splits=True), pipeline.num_microbatches, limits, effort=effort).orders

    # ---- whole plans -----------------------------------------------------------------------------------------------------------------------------------

    def plan(self, c: Candidate, price: float = 0.0, orders: tuple[str, ...] = (), exposed: float = EXPOSED) -> Plan:
        """The candidate with the cheapest placement of all its layers at this price of memory, in steps per filling of the device, and with this share of
        communication exposed; `orders` of its own.
        """
        worth = price * self.bounds.lower_bound_s(c) / self.cluster.devices[0].usable_bytes
        return self._planned(c, self._whole(c, partial(search, memory_price=worth), decides_reruns(c, price), exposed), orders)

    def _whole(self, c: Candidate, ask: Callable[..., Placed], selective: bool, exposed: float) -> Placed:
        """All layers of the candidate placed by one of the searches."""
        bounds, model = self.bounds, self.bounds.model
        graph = bounds.graph_of(c)
        mesh = Mesh(*c.mesh, tuple(range(c.stage_ranks)))
        pieces = balanced(bounds.graph(1), c.pieces) if c.pieces else ()
        num_pieces = max(1, len(pieces))
        # What is boxed and added up is so for each piece: of these, one of middling length stands for all.
        piece = in_chunks(model.graph(c.mbs * c.dp, sorted(pieces)[num_pieces // 2], bounds.dtype), c.loss_chunks, c.tp) if pieces else graph
        in_flight = math.ceil(kept(c.schedule, c.pp, c.num_microbatches, c.vpp, c.pieces) * num_pieces) if c.pieces else self.drafts.in_flight(c)
        return ask(
            piece, mesh.axes, mesh.shape, self.drafts.pricing(mesh), tables=self.drafts.tables(mesh), num_microbatches=c.num_microbatches * num_pieces,
            in_flight=in_flight, recompute=block_layers(graph) if c.recompute == "full" else (), selective=selective, optimizer=self.optimizer,
            space=self.space(piece, mesh, c.context), exposed=exposed,
        )  # fmt: skip

    def _planned(self, c: Candidate, placed: Placed, orders: tuple[str, ...]) -> Plan:
        bounds, model = self.bounds, self.bounds.model
        mesh = Mesh(*c.mesh, tuple(range(c.stage_ranks)))
        pieces = balanced(bounds.graph(1), c.pieces) if c.pieces else ()
        rows = orders or bounds.rows
        chosen = schedule_of(STAND_IN if c.schedule == "auto" else c.schedule, rows)
        stages = tuple(
            Stage(a, b, tuple(range(site * mesh.size, (site + 1) * mesh.size)))
            for site, (a, b) in ((chosen.rank_of(i, c.pp), cut) for i, cut in enumerate(bounds.stages(c.pp, c.vpp, c.schedule) * chosen.copies))
        )
        plan = Plan(
            model.reference or model.name, model.fingerprint, self.cluster.name, self.cluster.fingerprint, self.batch, bounds.seq, bounds.dtype,
            dict(self.optimizer), mesh.axes, mesh.shape, stages, c.schedule, c.num_microbatches, placed.recompute, placed.rules, placed.hubs, placed.params,
            placed.reboxed, links=placed.links, orders=rows, pieces=pieces, context=self.drafts.context(c),
            loss_chunks=c.loss_chunks,
        )  # fmt: skip
        return replace(plan, layout=layout(bounds.graph_of(c), plan))

    def filled(self, e: Evaluated, plan: Plan) -> Plan:
        """The plan of a candidate on one stage, layer by layer placed for the memory that its price of memory left over; itself where nothing is faster."""
        c = e.candidate
        room = self.usable_bytes - plan.predicted["peak_gib"] * GIB
        if not e.price or c.pp > 1 or c.pieces or room < SPARE * self.usable_bytes:
            return plan
        worth = e.price * self.bounds.lower_bound_s(c) / self.cluster.devices[0].usable_bytes
        selective = c.recompute == "selective"
        least = sum(self._whole(c, partial(search, memory_price=worth), decides_reruns(c, e.price), e.exposed).nbytes.values())
        limit = least + room
        for _ in range(FILLINGS):
            placed = self._whole(c, partial(_placed_within, limit_bytes=limit, good_gap=GOOD_FILLING), selective, e.exposed)
            found = self._foretold(e, self._planned(c, placed, e.orders))
            over = found.predicted["peak_gib"] * GIB - self.usable_bytes
            if over <= 0:
                return min(plan, found, key=lambda p: float(p.predicted["step_s"]))
            limit -= over
            if limit <= least:
                break
        return plan

    def space(self, graph: Graph, mesh: Mesh, context: str = "") -> Space:
        """What the fixed keys and the way of attention over its ranks leave to choose on this mesh; PlanError where a fixed placement is not legal there."""
        space = layout_space(graph, mesh.axes, zero=self.fix.get("zero"), sp=self.fix.get("sp")) & no_batch(graph, "tp")
        if context:
            space &= context_space(graph, AXIS, mesh.axis_size(AXIS), form_of(context), mesh.axes) & zero_space(AXIS, self.fix.get("zero"))
        if "layout" in self.fix:
            space &= layout_limits(graph, mesh.axes, mesh.shape, self.fix["layout"])
        if "tp_plan" in self.fix:
            space &= tp_plan_limits(self.bounds.model, graph, self.fix["tp_plan"])
        if "ep" in self.fix:
            size = dict(zip(mesh.axes, mesh.shape, strict=True))
            space &= split_experts(graph, "tp", bool(splits_experts(self.fix["ep"], size.get("ep", 1), size["tp"])))
        hints = [value for value in self.fix.values() if isinstance(value, Hint)]
        if not hints:
            return space
        return space & hinted_space(graph, mesh.axes, mesh.shape, hints, uneven_labels(graph, analyse(graph), space.uneven)[1])

    def simulate(self, e: Evaluated) -> Plan:
        """Its plan with what the simulation of it says, at the draft's price of memory, or the next ones where the whole needs more than its draft."""
        dearer = [price for price in DEARER if price > e.price] if e.fits(self.memory_fraction) else []
        plans = []
        for price in (e.price, *dearer):
            plans.append(self._foretold(e, self.plan(e.candidate, price, e.orders, e.exposed)))
            if self._has_room(plans[-1]):
                return plans[-1]
        return min(plans, key=lambda p: p.predicted["peak_gib"])

    def _foretold(self, e: Evaluated, plan: Plan) -> Plan:
        predicted = foretell(self.bounds.model, self.cost, plan)
        if e.candidate.loss_chunks > 1:
            predicted["loss_chunks"] = self._trade(e, predicted)
        return replace(plan, predicted=predicted)

    def _trade(self, e: Evaluated, predicted: Mapping[str, Any]) -> dict[str, Any]:
        """What the loss over chunks of tokens saves and costs, by the candidate's draft with it and without."""
        whole = self.evaluate_at(replace(e.candidate, loss_chunks=1), e.price, e.exposed)
        longer = e.estimate_s / whole.estimate_s
        return {
            "chunks": e.candidate.loss_chunks, "saves_gib": (whole.memory.peak_bytes - e.memory.peak_bytes) / GIB,
            "costs_s": predicted["step_s"] * (1 - 1 / longer), "costs_mfu": predicted["mfu"] * (longer - 1), "fits_without": whole.fits(self.memory_fraction),
        }  # fmt: skip

    def _has_room(self, plan: Plan) -> bool:
        return bool(plan.predicted["peak_gib"] * GIB <= self.memory_fraction * self.cluster.devices[0].usable_bytes)


def _placed_within(*given: Any, **named: Any) -> Placed:
    return search_within(*given, **named).placed

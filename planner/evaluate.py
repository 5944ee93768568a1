"""A candidate evaluated: drafted at rising prices of memory until it fits, its schedule chosen by the times of its stages; the best are simulated whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ir.cluster import Cluster
from ir.graph import Graph
from ir.mesh import Mesh
from ir.plan import Plan, Stage
from ir.units import GIB
from planner.bounds import Bounds
from planner.candidates import Candidate, block_layers, splits_experts
from planner.context import AXIS, context_space
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
from planner.placement import search
from planner.schedules import Orders
from planner.schedules.auto import Effort, Limits, search_orders
from planner.schedules.slot import Slot
from planner.sketch import Sketches
from planner.space import Space, layout_space, no_batch, split_experts, zero_space
from planner.summary import layout
from simulator.cost import CostModel
from simulator.estimate import estimate
from simulator.memory import Ledger, ledger

PRICES = (0.0, 0.03, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Prices of memory among which the lowest is sought at which a plan fits, in steps per filling of the device: the n-th says that all of it is worth n steps."""

SLACK = 0.15
"""Share of its time that a draft at no price of memory may be slower than one at the best price: whatever is slower than what is known by more is left."""

NOTHING = 0.003
"""Share of a step below which a lower price of memory gains nothing."""

RERUN_PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 30.0)
"""The same where single operators may run again: activation functions, norms, attention and products are worth it one after the other."""

HALVINGS = 3
"""Of the ratio of the last two prices, where single operators may run again."""

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

    def may_fit(self, c: Candidate) -> bool:
        """Whether the least that the candidate needs fits; where not, no placement of it does."""
        return self.footprint.least_bytes(c) <= self.memory_fraction * max(d.usable_bytes for d in self.cluster.devices)

    def prices(self, c: Candidate) -> tuple[float, ...]:
        if c.recompute == "selective":
            return RERUN_PRICES
        return PRICES if "zero" not in self.fix else PRICES[:1]

    def evaluate(self, c: Candidate, known_s: float = math.inf) -> Evaluated:
        """The cheapest draft of the candidate that fits; the smallest one where none does, or one that is slower than `known_s` by far.

        The highest price is asked second: where even that does not fit, or costs nothing, those between need not be.
        """
        prices = self.prices(c)
        first = self.evaluate_at(c, prices[0])
        if first.fits(self.memory_fraction) or len(prices) == 1 or first.estimate_s * (1 - SLACK) > known_s:
            return first
        best = self.evaluate_at(c, prices[-1])
        if not best.fits(self.memory_fraction):
            return min(first, best, key=lambda e: e.memory.peak_bytes)
        low, high = 0, len(prices) - 1
        while high - low > 1 and best.estimate_s > first.estimate_s * (1 + NOTHING):
            middle = (low + high) // 2
            this = self.evaluate_at(c, prices[middle])
            low, high = (low, middle) if this.fits(self.memory_fraction) else (middle, high)
            best = this if high == middle and this.estimate_s < best.estimate_s else best
        return self._halved(c, prices[low], best)

    def _halved(self, c: Candidate, below: float, fitting: Evaluated) -> Evaluated:
        """Where single operators may run again: at the lowest price that fits, as far as some halvings find it, so that no more run again than need be."""
        for _ in range(HALVINGS if below and c.recompute == "selective" else 0):
            middle = self.evaluate_at(c, math.sqrt(below * fitting.price))
            if middle.fits(self.memory_fraction):
                fitting = middle
            else:
                below = middle.price
        return fitting

    def evaluate_at(self, c: Candidate, price: float, exposed: float = EXPOSED) -> Evaluated:
        """The draft at this price of memory; the whole plan's bound where sequences are cut or parameters are there twice."""
        chosen = schedule_of(STAND_IN if c.schedule == "auto" else c.schedule, self.bounds.rows, c.pieces)
        if c.pieces or chosen.copies * chosen.pieces > 1:
            return self._whole_at(c, price, exposed)
        if c.schedule in OWN:
            pipeline = self.drafts.pipeline(c, price, True, exposed)
            rows = self.bounds.rows or rows_of(self._auto(pipeline))
            step = pipeline.step(c.schedule, tuple(tuple(map(Slot.parse, row.split())) for row in rows))
            return Evaluated(c, price, step.step_s, step.floor_s, step.busy_s, step.memory, rows, exposed)
        step = self.drafts.pipeline(c, price, chosen.splits, exposed).step(c.schedule)
        return Evaluated(c, price, step.step_s, step.floor_s, step.busy_s, step.memory, (), exposed)

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
        bounds, model = self.bounds, self.bounds.model
        graph = bounds.graph(c.mbs * c.dp)
        mesh = Mesh(*c.mesh, tuple(range(c.stage_ranks)))
        recompute = block_layers(graph) if c.recompute == "full" else ()
        pieces = balanced(bounds.graph(1), c.pieces) if c.pieces else ()
        num_pieces = max(1, len(pieces))
        # What is boxed and added up is so for each piece: of these, one of middling length stands for all.
        piece = model.graph(c.mbs * c.dp, sorted(pieces)[num_pieces // 2], bounds.dtype) if pieces else graph
        in_flight = math.ceil(kept(c.schedule, c.pp, c.num_microbatches, c.vpp, c.pieces) * num_pieces) if c.pieces else self.drafts.in_flight(c)
        placed = search(
            piece, mesh.axes, mesh.shape, self.drafts.pricing(mesh), tables=self.drafts.tables(mesh), num_microbatches=c.num_microbatches * num_pieces,
            memory_price=price * bounds.lower_bound_s(c) / self.cluster.devices[0].usable_bytes,
            in_flight=in_flight, recompute=recompute, selective=decides_reruns(c, price), optimizer=self.optimizer,
            space=self.space(piece, mesh, c.context), exposed=exposed,
        )  # fmt: skip
        rows = orders or self.bounds.rows
        chosen = schedule_of(STAND_IN if c.schedule == "auto" else c.schedule, rows)
        stages = tuple(
            Stage(a, b, tuple(range(site * mesh.size, (site + 1) * mesh.size)))
            for site, (a, b) in ((chosen.rank_of(i, c.pp), cut) for i, cut in enumerate(bounds.stages(c.pp, c.vpp, c.schedule) * chosen.copies))
        )
        plan = Plan(
            model.reference or model.name, model.fingerprint, self.cluster.name, self.cluster.fingerprint, self.batch, bounds.seq, bounds.dtype,
            dict(self.optimizer), mesh.axes, mesh.shape, stages, c.schedule, c.num_microbatches, placed.recompute, placed.rules, placed.hubs, placed.params,
            placed.reboxed, links=placed.links, orders=rows, pieces=pieces, context=c.context,
        )  # fmt: skip
        return replace(plan, layout=layout(graph, plan))

    def space(self, graph: Graph, mesh: Mesh, context: str = "") -> Space:
        """What the fixed keys and the way of attention over its ranks leave to choose on this mesh; PlanError where a fixed placement is not legal there."""
        space = layout_space(graph, mesh.axes, zero=self.fix.get("zero"), sp=self.fix.get("sp")) & no_batch(graph, "tp")
        if context:
            space &= context_space(graph, AXIS, mesh.axis_size(AXIS), context.split()[0], mesh.axes) & zero_space(AXIS, self.fix.get("zero"))
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
        dearer = [price for price in self.prices(e.candidate) if price > e.price] if e.fits(self.memory_fraction) else []
        plans = []
        for price in (e.price, *dearer):
            plans.append(self._foretold(e, price))
            if self._has_room(plans[-1]):
                return plans[-1]
        return min(plans, key=lambda p: p.predicted["peak_gib"])

    def _foretold(self, e: Evaluated, price: float) -> Plan:
        plan = self.plan(e.candidate, price, e.orders, e.exposed)
        return replace(plan, predicted=foretell(self.bounds.model, self.cost, plan))

    def _has_room(self, plan: Plan) -> bool:
        return bool(plan.predicted["peak_gib"] * GIB <= self.memory_fraction * self.cluster.devices[0].usable_bytes)

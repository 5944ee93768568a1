"""A candidate evaluated: placed exactly, lowered for one rank of every stage, estimated in closed form, its memory counted; and simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ir.cluster import Cluster
from ir.graph import Graph
from ir.mesh import Mesh
from ir.plan import Plan, Stage
from ir.program import Program
from planner.autodiff import Joint
from planner.bounds import Bounds
from planner.candidates import Candidate, block_layers, splits_experts
from planner.facts import analyse, uneven_labels
from planner.footprint import Footprint
from planner.hints import Hint, hinted_space
from planner.imports import layout_limits, tp_plan_limits
from planner.lower import joint_graph, representatives, write
from planner.orders import STAND_IN, auto_orders, kept, rows_of, schedule_of
from planner.pieces import balanced
from planner.placement import new_tables, search
from planner.pricing import MeshPricing
from planner.space import Space, layout_space, no_batch, split_experts
from planner.summary import layout, metrics
from planner.tables import Tables
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.estimate import estimate
from simulator.memory import Ledger, ledger

EXPOSED = 0.25
"""The other share of the communication of parameters and gradients that is tried as exposed: most of it hides where the backward is long."""

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
    price: float = 0.0

    def fits(self, memory_fraction: float) -> bool:
        """Whether it fills at most this share of the usable memory."""
        usable = self.memory.usable_bytes
        return usable is None or self.memory.peak_bytes <= memory_fraction * usable


@dataclass(frozen=True)
class Evaluator:
    """For one global batch of samples on one cluster. `fix` as `planner.candidates.parse_fix` gives it. Tables and graphs are kept between candidates."""

    bounds: Bounds
    cluster: Cluster
    batch: int
    optimizer: Mapping[str, Any]
    fix: Mapping[str, Any]
    memory_fraction: float
    _tables: dict[tuple[int, ...], Tables] = field(default_factory=dict)
    _joints: dict[tuple[Any, ...], Joint] = field(default_factory=dict)

    @property
    def cost(self) -> CostModel:
        return self.bounds.cost

    @cached_property
    def footprint(self) -> Footprint:
        return Footprint(self.bounds, self.optimizer)

    def may_fit(self, c: Candidate) -> bool:
        """Whether the least that the candidate needs fits; where not, no placement of it does."""
        return self.footprint.least_bytes(c) <= self.memory_fraction * max(d.usable_bytes for d in self.cluster.devices)

    def evaluate(self, c: Candidate) -> Evaluated:
        """The cheapest plan of the candidate that fits; the smallest one where none does.

        The highest price is asked second: where even that does not fit, those between need not be.
        """
        free, *dearer = PRICES if "zero" not in self.fix else PRICES[:1]
        first = self._evaluate_at(c, free)
        if first.fits(self.memory_fraction) or not dearer:
            return first
        tightest = self._evaluate_at(c, dearer.pop())
        if not tightest.fits(self.memory_fraction):
            return min(first, tightest, key=lambda e: e.memory.peak_bytes)
        between = (self._evaluate_at(c, price) for price in dearer)
        return next((e for e in between if e.fits(self.memory_fraction)), tightest)

    def _evaluate_at(self, c: Candidate, price: float) -> Evaluated:
        return self._evaluated(c, self.plan(c, price), price)

    def _evaluated(self, c: Candidate, plan: Plan, price: float) -> Evaluated:
        cut = (plan.pieces, plan.stages) if plan.pieces else ()
        key = (plan.microbatch, plan.num_microbatches, plan.recompute, *cut)
        if key not in self._joints:
            self._joints[key] = joint_graph(self.bounds.graph(plan.microbatch), plan)
        program = self._write(key, plan)
        if c.schedule == "auto":
            plan = self._with_orders(plan, program)
            program = self._write(key, plan)
        return Evaluated(c, plan, program, estimate(program, self.cost), ledger(program, cluster=self.cluster), price)

    def _write(self, key: tuple[Any, ...], plan: Plan) -> Program:
        known = plan if plan.orders or plan.schedule != "auto" else replace(plan, schedule=STAND_IN)
        return write(self._joints[key], known, representatives(plan, self.cost.cluster))

    def _with_orders(self, plan: Plan, program: Program) -> Plan:
        """The plan with the best orders for its own times and for what memory the rest of it leaves to activations."""
        first = [ranks[0] for ranks in plan.sites]
        saved = {r: sum(x.nbytes for x in program.registers if x.rank == r and x.memory == "saved") for r in first}
        allocated = ledger(program, cluster=self.cluster)
        spare = {}
        for r in first:
            held = sum(x.nbytes * x.credits for x in program.registers if x.rank == r and x.memory == "saved")
            free = self.memory_fraction * self.cluster.devices[r].usable_bytes - (allocated.total(r) - held)
            spare[r] = free / saved[r] if saved[r] else math.inf
        return replace(plan, orders=rows_of(auto_orders(plan, program, self.cost, spare)))

    def plan(self, c: Candidate, price: float = 0.0, exposed: float = 1.0) -> Plan:
        """The candidate with the cheapest placement at this price of memory, in steps per filling of the device, and this share of communication exposed."""
        bounds, model = self.bounds, self.bounds.model
        graph = bounds.graph(c.mbs * c.dp)
        mesh = Mesh(*c.mesh, tuple(range(c.dp * c.tp)))
        recompute = block_layers(graph) if c.recompute == "full" else ()
        pricing = MeshPricing(self.cost, mesh)
        if mesh.shape not in self._tables:
            self._tables[mesh.shape] = new_tables(mesh.axes, mesh.shape, pricing)
        pieces = balanced(bounds.graph(1), c.pieces) if c.pieces else ()
        num_pieces = max(1, len(pieces))
        # What is boxed and added up is so for each piece: of these, one of middling length stands for all.
        piece = model.graph(c.mbs * c.dp, sorted(pieces)[num_pieces // 2], bounds.dtype) if pieces else graph
        placed = search(
            piece, mesh.axes, mesh.shape, pricing, tables=self._tables[mesh.shape], num_microbatches=c.num_microbatches * num_pieces,
            memory_price=price * bounds.lower_bound_s(c) / self.cluster.devices[0].usable_bytes,
            in_flight=math.ceil(kept(c.schedule, c.pp, c.num_microbatches, c.vpp, c.pieces) * num_pieces), recompute=recompute,
            optimizer=self.optimizer, space=self._space(piece, mesh), exposed=exposed,
        )  # fmt: skip
        rows = self.fix.get("orders", ())
        chosen = schedule_of(STAND_IN if c.schedule == "auto" else c.schedule, rows)
        stages = tuple(
            Stage(a, b, tuple(range(site * mesh.size, (site + 1) * mesh.size)))
            for site, (a, b) in ((chosen.rank_of(i, c.pp), cut) for i, cut in enumerate(bounds.stages(c.pp * c.vpp) * chosen.copies))
        )
        plan = Plan(
            model.reference or model.name, model.fingerprint, self.cluster.name, self.cluster.fingerprint, self.batch, bounds.seq, bounds.dtype,
            dict(self.optimizer), mesh.axes, mesh.shape, stages, c.schedule, c.num_microbatches, recompute, placed.rules, placed.hubs, placed.params,
            placed.reboxed, links=placed.links, orders=rows, pieces=pieces,
        )  # fmt: skip
        return replace(plan, layout=layout(graph, plan))

    def _space(self, graph: Graph, mesh: Mesh) -> Space:
        """What the fixed keys leave to choose on this mesh; PlanError where a fixed placement is not legal there."""
        space = layout_space(graph, mesh.axes, zero=self.fix.get("zero"), sp=self.fix.get("sp")) & no_batch(graph, "tp")
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
        """Its plan with what two simulated steps say of it; where another share of exposed communication places it otherwise, the faster of the two."""
        mine = self._simulated(e)
        plan = self.plan(e.candidate, e.price, EXPOSED)
        if (plan.rules, plan.params) == (e.plan.rules, e.plan.params):
            return mine
        other = self._evaluated(e.candidate, plan, e.price)
        if other.estimate_s >= mine.predicted["step_s"] or (e.fits(self.memory_fraction) and not other.fits(self.memory_fraction)):
            return mine
        return min(mine, self._simulated(other), key=lambda plan: plan.predicted["step_s"])

    def _simulated(self, e: Evaluated) -> Plan:
        timeline = simulate(e.program, self.cost, steps=2)
        return replace(
            e.plan, predicted=metrics(self.bounds.model, self.cluster, e.plan, e.program, timeline, ledger(e.program, timeline, cluster=self.cluster))
        )

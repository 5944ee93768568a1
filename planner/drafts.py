"""Drafts: the stages of a candidate placed, lowered and priced by few of its equal layers, kept from one candidate to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ir.cluster import Cluster
from ir.graph import Graph
from ir.mesh import Mesh
from ir.plan import Plan, Stage
from ir.program import Program
from planner.bounds import Bounds
from planner.candidates import Candidate, block_layers
from planner.context import AXIS, over_nodes
from planner.folding import Layers
from planner.lower import joint_graph, write
from planner.orders import STAND_IN, kept, schedule_of
from planner.pipeline_costs import Pipeline
from planner.placement import Placed, new_tables, search
from planner.pricing import MeshPricing
from planner.schedules import Orders, Slot
from planner.space import Space
from planner.stage_costs import Folded, StageCost, fold_stages, lengthened, stage_costs
from planner.tables import Tables

MICROBATCHES = 2
"""That a draft is lowered with: what a transfer fills while it is still read needs a second one to show."""

EXPOSED = 0.25
"""The share of the communication of parameters and gradients that counts where they are placed: most of it hides behind the backward."""


@dataclass(frozen=True)
class Drafts:
    """For one global batch of samples on one cluster; tables, graphs and stages are kept."""

    bounds: Bounds
    cluster: Cluster
    batch: int
    optimizer: Mapping[str, Any]
    space: Callable[[Graph, Mesh, str], Space]
    _tables: dict[tuple[tuple[str, ...], tuple[int, ...]], Tables] = field(default_factory=dict)
    _layers: dict[tuple[int, ...], Layers] = field(default_factory=dict)
    _graphs: dict[tuple[tuple[int, ...], tuple[int, ...]], Graph] = field(default_factory=dict)
    _placed: list[Placed] = field(default_factory=list)
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _costs: dict[tuple[Any, ...], tuple[StageCost, ...]] = field(default_factory=dict)

    # ---- placements --------------------------------------------------------------------------------------------------------------------------------

    def place(self, c: Candidate, price: float, graph: Graph, exposed: float) -> Placed:
        """The cheapest placement of a graph of the candidate's microbatch at this price of memory, in steps per filling of the device."""
        mesh = self.mesh(c)
        return search(
            graph, mesh.axes, mesh.shape, self.pricing(mesh), tables=self.tables(mesh), num_microbatches=c.num_microbatches,
            memory_price=price * self.bounds.lower_bound_s(c) / self.cluster.devices[0].usable_bytes, in_flight=self.in_flight(c) if price else 1,
            recompute=block_layers(graph) if c.recompute == "full" else (), selective=decides_reruns(c, price), optimizer=self.optimizer,
            space=self.space(graph, mesh, c.context), exposed=exposed,
        )  # fmt: skip

    def context(self, c: Candidate) -> str:
        """How attention goes over the candidate's ranks as the plan says it: a ring over nodes is one of rings."""
        if c.cp == 1:
            return c.context
        return over_nodes(c.context, [tuple(self.cluster.devices[r].node for r in group) for group in self.mesh(c).groups(AXIS)])

    def mesh(self, c: Candidate) -> Mesh:
        return Mesh(*c.mesh, tuple(range(c.stage_ranks)))

    def pricing(self, mesh: Mesh) -> MeshPricing:
        return MeshPricing(self.bounds.cost, mesh)

    def tables(self, mesh: Mesh) -> Tables:
        if (mesh.axes, mesh.shape) not in self._tables:
            self._tables[mesh.axes, mesh.shape] = new_tables(mesh.axes, mesh.shape, self.pricing(mesh))
        return self._tables[mesh.axes, mesh.shape]

    def in_flight(self, c: Candidate) -> int:
        """Microbatches whose activations the price counts. One placement serves all schedules of a layout that keep about as many as 1F1B."""
        keeps_all = c.schedule in ("gpipe", "looped-bfs")
        return math.ceil(kept(c.schedule, c.pp, c.num_microbatches, c.vpp)) if keeps_all else min(c.pp, c.num_microbatches)

    def _ranks(self, c: Candidate, site: int) -> tuple[int, ...]:
        size = c.stage_ranks
        return tuple(range(site * size, (site + 1) * size))

    def _plan(self, c: Candidate, placed: Placed, stages: tuple[Stage, ...], num_microbatches: int, recompute: tuple[int | str, ...]) -> Plan:
        model, mesh = self.bounds.model, self.mesh(c)
        return Plan(
            model.reference or model.name, model.fingerprint, self.cluster.name, self.cluster.fingerprint, c.mbs * c.dp * num_microbatches, self.bounds.seq,
            self.bounds.dtype, dict(self.optimizer), mesh.axes, mesh.shape, stages, "1f1b", num_microbatches, recompute, placed.rules, placed.hubs,
            placed.params, placed.reboxed, links=placed.links, context=self.context(c), loss_chunks=c.loss_chunks,
        )  # fmt: skip

    # ---- stages ------------------------------------------------------------------------------------------------------------------------------------

    def pipeline(self, c: Candidate, price: float, splits: bool, exposed: float = EXPOSED) -> Pipeline:
        """The candidate's stages, priced. `splits`: whether its weight gradients are held back; `exposed`: see `planner.placement`."""
        cuts = self.bounds.stages(c.pp, c.vpp, c.schedule)
        chosen = schedule_of(STAND_IN if c.schedule == "auto" else c.schedule, self.bounds.rows)
        rank = tuple(chosen.rank_of(i, c.pp) for i in range(len(cuts)))
        folded = fold_stages(self._chain(c).classes, cuts)
        costs = self._kinds(c, (price, exposed), splits, folded)
        shorter = costs if folded.is_whole else self._kinds(c, (price, exposed), splits, folded, shorter=True)
        stages = tuple(lengthened(costs[k], shorter[k], extra) for k, extra in zip(folded.kind, folded.extra, strict=True))
        first = tuple(self._ranks(c, site)[0] for site in range(c.pp))
        hops = tuple(self.bounds.cost.p2p_s(s["sent"], first[a], first[b]) if a != b else 0.0 for s, a, b in zip(stages, rank, rank[1:], strict=False))
        return Pipeline(stages, rank, hops, first, c.num_microbatches, self.optimizer.get("max_norm", 0.0) > 0 and self.cluster.num_devices > 1, self.cluster)

    def _chain(self, c: Candidate) -> Layers:
        key = _graph_of(c)
        if key not in self._layers:
            self._layers[key] = Layers(self.bounds.graph_of(c))
        return self._layers[key]

    def _graph(self, c: Candidate, kept: tuple[int, ...]) -> Graph:
        key = (_graph_of(c), kept)
        if key not in self._graphs:
            self._graphs[key] = self._chain(c).shortened(kept)
        return self._graphs[key]

    def _kinds(self, c: Candidate, weights: tuple[float, float], splits: bool, folded: Folded, shorter: bool = False) -> tuple[StageCost, ...]:
        """The cost of one stage of each kind. `weights`: the price of memory and the exposed share."""
        recompute = c.recompute if weights[0] or c.recompute == "full" else "none"
        where = (c.dp, c.tp, c.pp, c.ep, c.cp, c.context, c.mbs, c.loss_chunks, recompute, folded.kinds)
        placed = self._placement(c, weights, self._graph(c, folded.layers()), where)
        key = (*where, placed, shorter, splits)
        if key not in self._costs:
            graph = self._graph(c, folded.layers(shorter))
            stages = tuple(Stage(a, b, self._ranks(c, i % c.pp)) for i, (a, b) in enumerate(folded.stages(shorter)))
            program = self._lowered(c, self._placed[placed], graph, stages, splits)
            self._costs[key] = stage_costs(program, self.bounds.cost, graph, [(s.ranks[0], (s.first, s.last)) for s in stages])
        return self._costs[key]

    def _placement(self, c: Candidate, weights: tuple[float, float], graph: Graph, where: tuple[Any, ...]) -> int:
        """The number of the draft's placement: two weights that lead to the same decisions share all that follows from them."""
        key = (*where, *weights, self.in_flight(c) if weights[0] else 1)
        if key not in self._numbers:
            placed = self.place(c, weights[0], graph, weights[1])
            same = (n for k, n in self._numbers.items() if k[: len(where)] == where and _decides(self._placed[n]) == _decides(placed))
            self._numbers[key] = next(same, len(self._placed))
            if self._numbers[key] == len(self._placed):
                self._placed.append(placed)
        return self._numbers[key]

    def _lowered(self, c: Candidate, placed: Placed, graph: Graph, stages: tuple[Stage, ...], splits: bool) -> Program:
        """One rank of each stage, its microbatches one after another."""
        num_microbatches = min(MICROBATCHES, c.num_microbatches)
        rows = _serial([s.ranks for s in stages], num_microbatches, splits)
        # layers by number in a graph that may be shorter than the one that was placed
        recompute = block_layers(graph) if c.recompute == "full" else placed.recompute
        plan = self._plan(c, placed, stages, num_microbatches, recompute)
        return write(joint_graph(graph, plan), plan, [ranks[0] for ranks in plan.sites], rows)


def _graph_of(c: Candidate) -> tuple[int, ...]:
    """What the graph of a candidate's microbatch depends on."""
    return (c.mbs * c.dp, c.loss_chunks, c.tp) if c.loss_chunks > 1 else (c.mbs * c.dp,)


def decides_reruns(c: Candidate, price: float) -> bool:
    """Whether the search is to decide which operators run again: where memory has no price none is worth it."""
    return c.recompute == "selective" and price > 0


def _decides(placed: Placed) -> tuple[Any, ...]:
    return placed.rules, placed.hubs, placed.params, placed.reboxed, placed.recompute


def _serial(sites: list[tuple[int, ...]], num_microbatches: int, splits: bool) -> Orders:
    """What each rank runs where every microbatch goes all the way down and up before the next one starts."""
    rows = []
    for site in dict.fromkeys(sites):
        mine = [i for i, ranks in enumerate(sites) if ranks == site]
        passes = [*((s, "F") for s in mine), *((s, kind) for s in reversed(mine) for kind in ("IW" if splits else "B"))]
        rows.append(tuple(Slot(s, kind, m) for m in range(num_microbatches) for s, kind in passes))
    return tuple(rows)

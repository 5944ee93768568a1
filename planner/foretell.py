"""What a simulation says of a plan, with as few microbatches and layers as tell it.

The frozen order of a schedule repeats: from some rounds on, as many microbatches more as there are ranks add to every figure what the last ones did. So does a
layer more in every stage: it makes all passes longer by the same, and whichever stage bound them binds them still. A large plan is therefore simulated at two
numbers of microbatches and with two numbers of layers, and its figures lie on the plane through these (law: folded = unfolded).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ir.graph import Node
from ir.plan import Plan, Stage
from ir.program import Program
from planner.chunks import planned_chunks
from planner.folding import Layers, runs
from planner.frontends.model import Model
from planner.lower import joint_graph, representatives, write
from planner.orders import OWN
from planner.pipeline_costs import repeats, sizes
from planner.summary import documented
from simulator.cost import CostModel
from simulator.figures import figures
from simulator.memory import Ledger

SHARED = "shared"

SMALL = 40_000
"""Firings of nodes of the forward graph up to which a plan is simulated as it is."""

LONG = 1_000
"""Nodes of the forward graph from which on layers are left out, however few microbatches there are: writing a program takes as long as its graph is."""

SUMMED = ("count", "nbytes", "time_s", "exposed_s")
"""Of a row of communication, what more microbatches and layers add to."""

SHORTEST = 4
"""Layers of a run below which none is left out: a parameter is gathered two layers ahead, and the first and the last are not like the others."""


@dataclass(frozen=True)
class Figures:
    """Those of one simulation, or of a sum of some."""

    step_s: float
    parts: Mapping[str, float]
    comm: tuple[Mapping[str, Any], ...]
    memory: Mapping[int, Mapping[str, float]]

    def plus(self, other: Figures, times: float) -> Figures:
        """These and `times` those, figure by figure; memory that passes share is full with few layers and grows no more."""
        known = {(row["axis"], row["kind"]): row for row in other.comm}
        rows = tuple({k: v + times * known.get((row["axis"], row["kind"]), {}).get(k, 0.0) if k in SUMMED else v for k, v in row.items()} for row in self.comm)
        memory = {rank: {c: v + times * (c != SHARED) * other.memory[rank].get(c, 0.0) for c, v in held.items()} for rank, held in self.memory.items()}
        return Figures(self.step_s + times * other.step_s, {k: v + times * other.parts[k] for k, v in self.parts.items()}, rows, memory)


def foretell(model: Model, cost: CostModel, plan: Plan, small: int = SMALL) -> dict[str, Any]:
    """Under the keys of the command's documents."""
    cluster = cost.cluster
    found = _Folding(model, cost, plan, small).run()
    memory = Ledger(found.memory, {}, {rank: cluster.devices[rank].usable_bytes for rank in found.memory})
    return documented(model, cluster, plan, found.step_s, found.parts, found.comm, memory)


@dataclass(frozen=True)
class _Folding:
    model: Model
    cost: CostModel
    plan: Plan
    small: int

    @cached_property
    def layers(self) -> Layers:
        return Layers(planned_chunks(self.model.graph(self.plan.microbatch, self.plan.seq, self.plan.dtype), self.plan))

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """By layer: equal where layers are alike and are placed alike."""
        numbers: dict[Hashable, int] = {}
        return tuple(numbers.setdefault((k, self._decided(nodes)), len(numbers)) for k, nodes in zip(self.layers.classes, self.layers.nodes, strict=True))

    def _decided(self, nodes: Sequence[Node]) -> Hashable:
        plan = self.plan
        reboxed, again = frozenset(plan.reboxed), frozenset(plan.recompute)
        return tuple(
            (
                plan.rules.get(n.name), tuple(plan.hubs.get(t) for t in n.outputs), tuple(plan.params.get(t) for t in n.inputs),
                tuple((t, n.name) in reboxed for t in n.inputs), n.name in again or n.layer in again,
            )
            for n in nodes
        )  # fmt: skip

    def run(self) -> Figures:
        plan, layers = self.plan, self.layers
        is_small = plan.num_microbatches * len(layers.graph.nodes) <= self.small and len(layers.graph.nodes) <= LONG
        if is_small or "num_cores" in self.cost.cluster.profile or plan.pieces or plan.copies > 1:
            return self._simulated(layers, plan, 0, plan.num_microbatches)
        removable = min(_longest(self.classes, s)[1] for s in plan.stages) - SHORTEST
        if removable < 2:
            return self._over_microbatches(layers, plan, 0)
        few, more = (self._over_microbatches(layers, plan, num) for num in (removable, removable - 1))
        return few.plus(more, removable).plus(few, -removable)

    def _over_microbatches(self, layers: Layers, plan: Plan, removed: int) -> Figures:
        """With so many layers less in every stage."""
        p, m = len(plan.sites), plan.num_microbatches
        first, more = sizes(p, m)
        if not more or plan.schedule in OWN or not repeats(plan.schedule, p, m) or m * len(layers.graph.nodes) <= self.small:
            return self._simulated(layers, plan, removed, m)
        few, many = (self._simulated(layers, plan, removed, n) for n in (first, first + more))
        times = (m - first) / more
        return few.plus(many, times).plus(few, -times)

    def _simulated(self, layers: Layers, plan: Plan, removed: int, num_microbatches: int) -> Figures:
        kept = [layer for s in plan.stages for layer in _without(self.classes, s, removed)]
        graph = layers.shortened(kept) if removed else layers.graph
        again = set(plan.recompute)
        short = replace(
            plan, batch=plan.microbatch * num_microbatches, num_microbatches=num_microbatches, stages=_shorter(plan.stages, removed),
            recompute=(*(i for i, layer in enumerate(kept) if layer in again), *(n.name for n in graph.nodes if n.name in again)),
        )  # fmt: skip
        program = write(joint_graph(graph, short), short, representatives(plan, self.cost.cluster))
        told = figures(program, self.cost)
        return Figures(told.step_s, told.parts, tuple(row.to_json() for row in told.comm), _held(program))


def _held(program: Program) -> Mapping[int, Mapping[str, float]]:
    """Bytes by rank and class, what passes share as a class of its own: whichever class fills most of it may change with the number of layers. A stack holds
    what passes keep, and counts as such.
    """
    out: dict[int, dict[str, float]] = {rank: {SHARED: 0.0} for rank in program.ranks}
    stacks = dict.fromkeys(program.ranks, 0.0)
    for r in program.registers:
        mine = out[r.rank]
        end = float(max(r.places) + r.nbytes) if r.arena else 0.0
        if r.offsets:
            stacks[r.rank] = max(stacks[r.rank], end)
        elif r.arena:
            mine[SHARED] = max(mine[SHARED], end)
        elif not r.inside:
            mine[r.memory] = mine.get(r.memory, 0.0) + r.nbytes * r.credits
    for rank, nbytes in stacks.items():
        out[rank]["saved"] = out[rank].get("saved", 0.0) + nbytes
    return out


def _longest(classes: Sequence[int], stage: Stage) -> tuple[int, int]:
    """(first layer, number of layers) of the longest run of equal layers in a stage."""
    return max(((stage.first + a, b - a) for a, b in runs(classes[stage.first : stage.last])), key=lambda run: (run[1], -run[0]))


def _without(classes: Sequence[int], stage: Stage, removed: int) -> list[int]:
    """The layers of a stage but the last ones of its longest run."""
    first, num = _longest(classes, stage)
    return [i for i in range(stage.first, stage.last) if not first + num - removed <= i < first + num]


def _shorter(stages: Sequence[Stage], removed: int) -> tuple[Stage, ...]:
    return tuple(replace(s, first=s.first - i * removed, last=s.last - (i + 1) * removed) for i, s in enumerate(stages))

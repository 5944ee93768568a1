"""The answer of a placement search in the words of a Plan: the states of the solver read as rules, hubs and placements of parameters, and what they keep."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ir.boxing import Link, axis_sets
from ir.errors import PlanError
from ir.graph import Node
from ir.op import Rule
from ir.plan import Hub, ParamPlacement
from ir.sbp import B, NdSbp, Sbp
from planner.costs import Cost
from planner.pricing import axis_links
from planner.problem import Problem
from planner.runs import nodes_by_layer
from planner.solver.factors import Solution
from planner.tables import AGAIN, HubClass, NodeClass, ParamClass


@dataclass(frozen=True)
class Placed:
    """The decisions in the words of a Plan, and what they cost.

    `cost_s` is the stated cost, the price of memory included; nothing in the space costs less than `bound`; `exact` where the two are equal. `time_s` is the
    cost without the price. `links`: what a collective costs on each axis, by which every re-shard chooses its chain. `nbytes`: per device, by class: params,
    grads, optimizer, activations (in flight). `log10_space`: decimal digits of the number of assignments. `method` as in `planner.solver.elimination.Solution`.
    `recompute`: layers as given, and nodes that run again in the backward. `seconds`: how long the search took.
    """

    rules: Mapping[str, tuple[Rule, ...]]
    hubs: Mapping[str, Hub]
    params: Mapping[str, ParamPlacement]
    reboxed: tuple[tuple[str, str], ...]
    recompute: tuple[int | str, ...]
    links: tuple[Link, ...]
    cost_s: float
    bound: float
    exact: bool
    time_s: float
    nbytes: Mapping[str, float]
    num_variables: int
    log10_space: float
    method: str
    seconds: float = field(compare=False)


CLASSES = ("params", "grads", "optimizer", "activations")
"""Of what a device keeps."""


@dataclass
class _Part:
    """What some variables say, and what they keep: bytes by class, seconds charged for them, uses that are boxed and nodes that run again in the backward."""

    rules: dict[str, tuple[Rule, ...]] = field(default_factory=dict)
    hubs: dict[str, Hub] = field(default_factory=dict)
    params: dict[str, ParamPlacement] = field(default_factory=dict)
    nbytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    priced: float = 0.0
    reboxed: dict[tuple[str, str], None] = field(default_factory=dict)
    again: dict[str, None] = field(default_factory=dict)

    def count(self, other: _Part) -> None:
        """Adds what another part keeps."""
        self.priced += other.priced
        for what, nbytes in other.nbytes.items():
            self.nbytes[what] += nbytes


def read(problem: Problem, solution: Solution, start: float, ways: Sequence[Sequence[int]] = ()) -> Placed:
    """The decisions behind a solution of the problem's factor graph. Raises PlanError where there is none.

    `ways`: of every table of the problem's trade which option is taken, for all that is outside of the repeated block, and then for each of its copies; absent:
    the cheapest at the problem's price of memory.
    """
    if not solution.states:
        mesh = dict(zip(problem.axes, problem.mesh_shape, strict=True))
        raise PlanError(f"no placement of `{problem.graph.name}` on mesh {mesh} satisfies all limits of the space at once; loosen one of them")
    return _Reader(problem, solution, ways).placed(start)


@dataclass
class _Reader:
    problem: Problem
    solution: Solution
    ways: Sequence[Sequence[int]]

    def placed(self, start: float) -> Placed:
        problem, solution, whole = self.problem, self.solution, self.problem.short.whole
        many = {problem.group[r.copies[0][0]] for r in problem.short.repeats}
        outside = [k for k, v in problem.number.items() if problem.group[problem.layers[v]] not in many]
        total = self._part(outside, solution.states, self.ways[0] if self.ways else ())
        for i in range(len(problem.short.repeats)):
            self._copies(i, total)
        num_variables = len(problem.choices)
        digits = sum(math.log10(len(c)) for c in problem.choices)
        for r in problem.short.repeats:
            mine = [len(c) for c, layer in zip(problem.choices, problem.layers, strict=True) if layer in r.copies[0]]
            num_variables += (len(r.copies) - 1) * len(mine)
            digits += (len(r.copies) - 1) * sum(map(math.log10, mine))
        layers = (layer for layer in problem.terms.recompute if isinstance(layer, int))
        return Placed(
            {n.name: total.rules[n.name] for n in whole.nodes}, {t: total.hubs[t] for n in whole.nodes for t in n.outputs if t in total.hubs}, total.params,
            tuple(total.reboxed), (*layers, *(n.name for n in whole.nodes if n.name in total.again)), self._links(),
            solution.cost, solution.bound, solution.exact, solution.cost - total.priced, total.nbytes, num_variables,
            digits, solution.method, time.perf_counter() - start,
        )  # fmt: skip

    def _copies(self, i: int, total: _Part) -> None:
        """Adds what the copies of a block say, each in its own names."""
        problem, repeat, repeated = self.problem, self.problem.short.repeats[i], self.problem.repeated()[i]
        inside = problem.blocks[repeat.copies[0][0]]
        keys = [k for k, v in problem.number.items() if problem.layers[v] in repeat.copies[0]]
        nodes = nodes_by_layer(problem.short.whole)
        first = [n for layer in repeat.copies[0] for n in nodes[layer]]
        known: dict[Hashable, _Part] = {}
        all_ways = self.ways[1:] or [()] * len(repeat.copies)
        for layers, found, ways in zip(repeat.copies, self.solution.repeated[i], all_ways, strict=True):
            if (found, ways) not in known:
                states = list(self.solution.states)
                for v, s in zip((*inside, repeated.before, repeated.after), found, strict=True):
                    states[v] = s
                known[found, ways] = self._part(keys, states, ways)
            _rename(known[found, ways], first, [n for layer in layers for n in nodes[layer]], total)

    def _part(self, keys: Iterable[tuple[str, str]], states: Sequence[int], ways: Sequence[int]) -> _Part:
        problem = self.problem
        out = _Part()
        for kind, name in keys:
            choice = problem.choices[problem.number[kind, name]]
            cls, row = choice.cls, choice.row(states[problem.number[kind, name]])
            if isinstance(cls, NodeClass):
                if choice.way(states[problem.number[kind, name]]) == AGAIN:
                    out.again[name] = None
                out.rules[name] = self._on_all_axes(cls.states[row], Rule("B"))
                for j, t in enumerate(problem.graph.node[name].outputs):
                    if ("hub", t) not in problem.number:
                        value = cls.out_boxes[j].places[cls.outs[j][row]]
                        out.hubs[t] = Hub(self._on_all_axes(value, B), self._on_all_axes(tuple(s if s.is_split else B for s in value), B))
                self._node_memory(problem.graph.node[name], states, ways, out)
            elif isinstance(cls, HubClass):
                out.hubs[name] = Hub(*(self._on_all_axes(nd, B) for nd in _columns(cls.states[row], 2)))
                self._hub_memory(name, states, ways, out)
            else:
                out.params[name] = ParamPlacement(*(self._on_all_axes(nd, B) for nd in _columns(cls.states[row], 3)))
                self._param_memory(name, cls, row, out)
        return out

    # ---- memory ------------------------------------------------------------------------------------------------------------------------------------

    def _keep(self, cost: Cost, at: tuple[int, ...], way: int, layer: int, out: _Part) -> None:
        nbytes, terms = float(cost.ways[way][1][cost.place(*at)]), self.problem.terms
        out.nbytes["activations"] += nbytes
        out.priced += nbytes / terms.copies(layer) * terms.charge(layer)

    def _param_memory(self, name: str, cls: ParamClass, row: int, out: _Part) -> None:
        for what, table in (("params", cls.params), ("grads", cls.grads(self.problem.num_gradients(name))), ("optimizer", cls.optimizer)):
            out.nbytes[what] += float(table[row])
            out.priced += self.problem.terms.state_charge(self.problem.layers[self.problem.number["param", name]]) * float(table[row])

    def _hub_memory(self, name: str, states: Sequence[int], ways: Sequence[int], out: _Part) -> None:
        problem = self.problem
        self._keep(problem.hub_alone(name), (states[problem.number["hub", name]],), self._hub_way(name, states, ways), problem.kept_by(name), out)

    def _node_memory(self, n: Node, states: Sequence[int], ways: Sequence[int], out: _Part) -> None:
        problem = self.problem
        v, made = problem.number["node", n.name], problem.node_tables(n)
        ins, outs = problem.inputs(n.name), problem.outputs(n.name)
        self._keep(made.alone, (states[v],), 0, n.layer, out)
        edge_number = itertools.count(len(problem.choices) + problem.first_edge[n.name])
        for t, u, edge in zip((*n.inputs, *n.outputs), (*ins, *outs), (*made.ins, *made.outs), strict=True):
            if edge is None:
                continue
            at, number = (states[u], states[v]), next(edge_number)
            way = ways[number] if ways else edge.way(at)
            self._keep(edge, at, way, n.layer, out)
            if way or (edge.common is not None and edge.common[edge.place(*at)] and self._hub_way(t, states, ways)):
                out.reboxed[t, n.name] = None

    def _hub_way(self, tensor: str, states: Sequence[int], ways: Sequence[int]) -> int:
        """1 where the readers that share a tensor box it again in the backward."""
        v = self.problem.number["hub", tensor]
        return ways[v] if ways else self.problem.hub_alone(tensor).way((states[v],))

    # ---- all axes ----------------------------------------------------------------------------------------------------------------------------------

    def _links(self) -> tuple[Link, ...]:
        """What a collective costs on every axis and on every two, nothing where one has one rank."""
        tables, axes = self.problem.tables, self.problem.axes
        found = zip(axis_sets(len(tables.axes)), axis_links(tables.pricing, tables.axes, tables.mesh_shape), strict=True)
        known = {tuple(tables.axes[axis] for axis in joined): link for joined, link in found}
        return tuple(known.get(tuple(axes[axis] for axis in joined), (0.0, 0.0)) for joined in axis_sets(len(axes)))

    def _on_all_axes(self, state: Sequence[Any], otherwise: Any) -> tuple[Any, ...]:
        given = iter(state)
        return tuple(next(given) if n > 1 else otherwise for n in self.problem.mesh_shape)


def _rename(part: _Part, theirs: Sequence[Node], mine: Sequence[Node], total: _Part) -> None:
    """Adds what a block says to the total, in the names of its copy whose nodes are `mine`."""
    tensor: dict[str, str] = {}
    node: dict[str, str] = {}
    for n, m in zip(theirs, mine, strict=True):
        node[n.name] = m.name
        total.rules[m.name] = part.rules[n.name]
        if n.name in part.again:
            total.again[m.name] = None
        for t, u in zip((*n.inputs, *n.outputs), (*m.inputs, *m.outputs), strict=True):
            tensor[t] = u
            if t in part.params:
                total.params[u] = part.params[t]
        for t, u in zip(n.outputs, m.outputs, strict=True):
            if t in part.hubs:
                total.hubs[u] = part.hubs[t]
    for t, name in part.reboxed:
        total.reboxed[tensor[t], node[name]] = None
    total.count(part)


def _columns(state: Sequence[tuple[Sbp, ...]], width: int) -> list[NdSbp]:
    """The nd placements of a state that has one tuple for each axis."""
    return [tuple(axis[i] for axis in state) for i in range(width)]

"""The placement problem of one graph on one mesh as a factor graph, and its answer in the words of a Plan."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.boxing import Link
from ir.errors import PlanError
from ir.graph import Graph, Node, Tensor
from ir.op import Rule
from ir.plan import Hub, ParamPlacement
from ir.sbp import B, NdSbp, Sbp
from planner.elimination import FactorGraph, Solution
from planner.facts import Facts, uneven_labels
from planner.optimizers import is_hidden, update_of
from planner.pricing import axis_links
from planner.space import Limit, Space
from planner.tables import Choice, HubClass, Index, NodeClass, ParamClass, Table, Tables


@dataclass(frozen=True)
class Placed:
    """The decisions in the words of a Plan, and what they cost.

    `cost_s` is the stated cost, the price of memory included; nothing in the space costs less than `bound`; `exact` where the two are equal. `time_s` is the
    cost without the price. `links`: what a collective costs on each axis, by which every re-shard chooses its chain. `nbytes`: per device, by class: params,
    grads, optimizer, activations (in flight). `log10_space`: decimal digits of the number of assignments. `method` as in `planner.elimination.Solution`.
    `seconds`: how long the search took.
    """

    rules: Mapping[str, tuple[Rule, ...]]
    hubs: Mapping[str, Hub]
    params: Mapping[str, ParamPlacement]
    reboxed: tuple[tuple[str, str], ...]
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


@dataclass(frozen=True, slots=True)
class Terms:
    """The numbers of one search."""

    num_microbatches: int
    memory_price: float
    state_price: float
    in_flight: float | Mapping[int, float]
    recompute: tuple[int, ...]
    optimizer: Mapping[str, Any]

    def copies(self, layer: int) -> float:
        """Microbatches whose saved values of this layer live at once."""
        return self.in_flight.get(layer, 1) if isinstance(self.in_flight, Mapping) else self.in_flight

    def charge(self, layer: int) -> float:
        """Seconds per byte of a saved value of this layer."""
        return self.memory_price * self.copies(layer)


Given = tuple[Mapping[str, tuple[Rule, ...]], Mapping[str, Hub], Mapping[str, ParamPlacement]]


@dataclass
class Problem:
    """Variables and tables of one search. Variables are ("node" | "hub" | "param", name), numbered in graph order."""

    graph: Graph
    axes: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    tables: Tables
    terms: Terms
    space: Space
    facts: Facts
    given: Given
    number: dict[tuple[str, str], int] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    made: dict[Any, Any] = field(default_factory=dict)

    # ---- variables -------------------------------------------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        labels, uneven = self._uneven()
        maxima = frozenset(t for n in self.graph.nodes for t in n.outputs if self.facts.node[n.name].op.maxes)
        for n in self.graph.nodes:
            for t in n.inputs:
                tensor = self.graph.tensors[t]
                if tensor.role == "param" and ("param", t) not in self.number:
                    update = None if tensor.frozen else update_of(self.terms.optimizer, tensor, is_hidden(self.graph, t))
                    made = self.tables.param(tensor, uneven.get(t, frozenset()), update)
                    self._variable("param", tensor, made, n.layer, self.space.params, self.given[2].get(t))
            made_node = self.tables.node(n, self.facts.node[n.name], self.graph.tensors, maxima, labels.get(n.name, frozenset()))
            self._variable("node", n, made_node, n.layer, self.space.rules, self.given[0].get(n.name))
            for t in n.outputs:
                if self.graph.consumers(t) or t in self.graph.outputs:
                    hub = self.tables.hub(
                        self.graph.tensors[t], uneven.get(t, frozenset()), t in self.facts.differentiable, t in maxima, t in self.graph.outputs,
                        self._has_equal_readers(t),
                    )  # fmt: skip
                    self._variable("hub", self.graph.tensors[t], hub, n.layer, self.space.hubs, self.given[1].get(t))

    def _has_equal_readers(self, tensor: str) -> bool:
        """Whether several equal nodes read the tensor as the same operand, and its own producer does not read it again."""
        readers = [(n.op, i) for n, i in self.graph.consumers(tensor)]
        return len(set(readers)) < len(readers) and all(name for name, _ in self.facts.saved[tensor])

    def _uneven(self) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[int]]]:
        """Labels of nodes and dims of tensors that may split unevenly."""
        key = ("uneven", id(self.facts), self.space.uneven)
        if key not in self.tables.memo:
            self.tables.memo[key] = (self.facts, uneven_labels(self.graph, self.facts, self.space.uneven))
        found: tuple[dict[str, frozenset[str]], dict[str, frozenset[int]]] = self.tables.memo[key][1]
        return found

    def _variable(self, kind: str, thing: Node | Tensor, cls: Any, layer: int, limits: tuple[Limit, ...], given: Any) -> None:
        self.number[kind, thing.name] = len(self.choices)
        self.layers.append(layer)
        mine = tuple(limit for limit in limits if limit.axis in self.tables.axes and limit.matches(thing))
        wanted = None if given is None else self._active_state(kind, given)
        key = (id(cls), tuple(map(id, mine)), wanted)
        if key not in self.made:
            self.made[key] = Choice(cls, self._rows(cls, mine, wanted))
        choice: Choice = self.made[key]
        if not len(choice):
            asked = f"{wanted} was asked for" if wanted is not None else "its size and the limits of the space leave nothing"
            mesh = dict(zip(self.axes, self.mesh_shape, strict=True))
            raise PlanError(f"{kind} `{thing.name}` has no legal placement on mesh {mesh}: {asked}; {_near(cls, self.tables.axes)}")
        self.choices.append(choice)

    def _active_state(self, kind: str, given: Any) -> tuple[Any, ...]:
        """A decision of a Plan as a state: one entry for each axis of more than one rank."""
        active = [k for k, n in enumerate(self.mesh_shape) if n > 1]
        if kind == "node":
            return tuple(given[k] for k in active)
        return tuple(tuple(nd[k] for nd in given) for k in active)

    def _rows(self, cls: Any, limits: tuple[Limit, ...], wanted: tuple[Any, ...] | None) -> Index:
        if wanted is not None:
            return np.array([i for i, state in enumerate(cls.states) if state == wanted], dtype=np.intp)
        tests = [(self.tables.axes.index(limit.axis), limit.allow, limit.otherwise) for limit in limits]
        strict = [i for i, state in enumerate(cls.states) if all(allow(state[k]) for k, allow, _ in tests)]
        if not strict:
            strict = [i for i, state in enumerate(cls.states) if all((otherwise or allow)(state[k]) for k, allow, otherwise in tests)]
        return np.array(strict, dtype=np.intp)

    # ---- tables ----------------------------------------------------------------------------------------------------------------------------------

    def factor_graph(self) -> FactorGraph:
        unary: list[Table] = [np.zeros(len(c)) for c in self.choices]
        edges: list[tuple[int, int]] = []
        tables: list[Table] = []
        for (kind, name), v in self.number.items():
            if kind == "node":
                made = self.node_tables(self.graph.node[name])
                unary[v] = made.alone.table
                for u, edge in zip((*self._inputs(name), *self._outputs(name)), (*made.ins, *made.outs), strict=True):
                    if edge is not None:
                        edges.append((u, v))
                        tables.append(edge.table)
            else:
                unary[v] = (self.hub_alone(name) if kind == "hub" else self.param_alone(name)).table
        return FactorGraph(tuple(len(c) for c in self.choices), tuple(unary), tuple(edges), tuple(tables))

    def _inputs(self, node: str) -> list[int]:
        """Variable of every input, -1 for inputs of the graph and constants."""
        tensors = self.graph.tensors
        return [self.number.get(("param" if tensors[t].role == "param" else "hub", t), -1) for t in self.graph.node[node].inputs]

    def _outputs(self, node: str) -> list[int]:
        """Variable of every output, -1 for those that only the node's own gradients read."""
        return [self.number.get(("hub", t), -1) for t in self.graph.node[node].outputs]

    def paid(self, tensor: str) -> bool:
        """Whether the tensor is kept at its hub in any case: several uses read it, or it enters a recomputed layer."""
        uses = self.facts.saved[tensor]
        return len(uses) > 1 or any(name and self.graph.node[name].layer in self.terms.recompute for name, _ in uses)

    def _input_mode(self, n: Node, i: int) -> str:
        """How a use is kept for the backward: "" not at all, "only" by itself, "shared" beside the hub, "input" where there is no hub."""
        t = n.inputs[i]
        role, again, recomputed = self.graph.tensors[t].role, (n.name, i) in self.facts.again, n.layer in self.terms.recompute
        read = i in self.facts.node[n.name].reads_inputs
        if role in ("input", "const"):
            return "input" if read or again else ""
        if recomputed or not read or role == "param":
            return ""
        return "shared" if self.paid(t) else "only"

    def _boxed_twice(self, n: Node, i: int) -> bool:
        """Whether the forward's boxing of an input runs again in the backward whatever is kept."""
        is_param = self.graph.tensors[n.inputs[i]].role == "param"
        return (n.name, i) in self.facts.again or (is_param and i in self.facts.node[n.name].reads_inputs)

    def _output_mode(self, n: Node, j: int) -> str:
        if j not in self.facts.node[n.name].reads_outputs or n.layer in self.terms.recompute:
            return ""
        return "shared" if self.paid(n.outputs[j]) else "only"

    def node_tables(self, n: Node) -> _NodeTables:
        """The tables of a node; nodes that are alike in all that matters share them."""
        modes = tuple(self._input_mode(n, i) for i in range(len(n.inputs))), tuple(self._output_mode(n, j) for j in range(len(n.outputs)))
        again = tuple(self._boxed_twice(n, i) for i in range(len(n.inputs)))
        repeated = tuple(n.name in self.facts.rerun and any((u.name, i) in self.facts.again for u, i in self.graph.consumers(t)) for t in n.outputs)
        around = tuple(id(self.choices[u]) if u >= 0 else -1 for u in (*self._inputs(n.name), *self._outputs(n.name)))
        choice = self.choices[self.number["node", n.name]]
        key = (id(choice), around, modes, again, repeated, n.name in self.facts.rerun, self.terms.charge(n.layer))
        if key not in self.made:
            self.made[key] = self._node_tables(n, choice, modes, again, repeated)
        found: _NodeTables = self.made[key]
        return found

    def _node_tables(
        self, n: Node, choice: Choice, modes: tuple[tuple[str, ...], tuple[str, ...]], again: tuple[bool, ...], repeated: tuple[bool, ...]
    ) -> _NodeTables:  # fmt: skip
        cls, rows, m, charge = choice.cls, choice.rows, self.terms.num_microbatches, self.terms.charge(n.layer)
        assert isinstance(cls, NodeClass)
        seconds = m * (cls.forward_s * (2 if n.name in self.facts.rerun else 1) + cls.backward_s)[rows]
        kept = np.zeros(len(rows))
        ins: list[_Cost | None] = []
        outs: list[_Cost | None] = []
        for i, u in enumerate(self._inputs(n.name)):
            places, boxes = cls.ins[i][rows], cls.in_boxes[i]
            if u < 0:
                seconds = seconds + m * boxes.local_s[places]
                kept = kept + boxes.nbytes[places] * (modes[0][i] == "input")
                ins.append(None)
            else:
                source, target, common = _ends(self.choices[u])
                once = m * boxes.cost[np.ix_(source, places)]
                backward: Table | float = 0.0
                if self.facts.node[n.name].carries[i]:
                    backward = m * (boxes.cost[np.ix_(cls.cots[i][rows], target)].T + _accumulating(self.choices[u], cls.cots[i][rows]))
                ins.append(_consumer(boxes.nbytes, (source, common, places), modes[0][i], once, 2 if again[i] else 1, backward, charge))
        for j, u in enumerate(self._outputs(n.name)):
            places, boxes = cls.outs[j][rows], cls.out_boxes[j]
            if u < 0:
                kept = kept + boxes.nbytes[places] * (modes[1][j] != "")
                outs.append(None)
            else:
                source, target, _ = _ends(self.choices[u])
                cost = m * boxes.cost[np.ix_(places, source)].T * (2 if repeated[j] else 1)
                if n.outputs[j] in self.facts.differentiable:
                    cost = cost + m * boxes.cost[np.ix_(target, cls.needs[j][rows])]
                apart = (source[:, None] != places[None, :]) if modes[1][j] == "shared" else np.ones(cost.shape, dtype=bool)
                bytes_out = np.where(apart, boxes.nbytes[places][None, :], 0.0) * (modes[1][j] != "")
                outs.append(_Cost(cost + charge * bytes_out, bytes_out))
        return _NodeTables(_Cost(seconds + charge * kept, kept), tuple(ins), tuple(outs))

    def hub_alone(self, tensor: str) -> _Cost:
        """Of a hub: what is kept there in any case, boxing for readers that share, and adding the cotangents of several uses."""
        choice = self.choices[self.number["hub", tensor]]
        uses = self.facts.saved[tensor]
        layers = [self.graph.node[name].layer if name else self.layers[self.number["hub", tensor]] for name, _ in uses]
        charge = max(map(self.terms.charge, layers), default=0.0)
        paid = self.paid(tensor)
        num_adds = max(0, self._num_gradients(tensor) - 1)
        again = any((n.name, i) in self.facts.again for n, i in self.graph.consumers(tensor))
        enters = any(name and self.graph.node[name].layer in self.terms.recompute for name, _ in uses)
        key = ("hub", id(choice), charge, paid, num_adds, again, enters)
        if key not in self.made:
            cls, m = choice.cls, self.terms.num_microbatches
            assert isinstance(cls, HubClass)
            value, cotangent, common = (table[choice.rows] for table in (cls.value, cls.cotangent, cls.common))
            once = m * cls.boxes.cost[value, common]
            here, copy = cls.boxes.nbytes[value], cls.boxes.nbytes[common]
            reboxed = (common != value) & (once + charge * here < charge * copy) & (paid and not enters)
            kept = np.where(reboxed | enters, here, copy) * paid
            adding = 1.5 * m * num_adds * cls.boxes.local_s[cotangent]
            self.made[key] = _Cost(adding + once * (2 if again else 1) + np.where(reboxed, once, 0.0) + charge * kept, kept, reboxed)
        found: _Cost = self.made[key]
        return found

    def param_alone(self, tensor: str) -> _Cost:
        """Of a parameter: once a step, adding the gradients of several uses, and the price of what stays."""
        choice = self.choices[self.number["param", tensor]]
        num_uses = self._num_gradients(tensor)
        key = ("param", id(choice), num_uses)
        if key not in self.made:
            cls, rows = choice.cls, choice.rows
            assert isinstance(cls, ParamClass)
            adding = 1.5 * cls.wide.local_s[cls.state[rows]] * max(0, num_uses - 1)
            kept = (cls.params + cls.grads(num_uses) + cls.optimizer)[rows]
            self.made[key] = _Cost(cls.step_s[rows] + adding + self.terms.state_price * kept, kept)
        found: _Cost = self.made[key]
        return found

    def _num_gradients(self, tensor: str) -> int:
        """Uses of a tensor through which a cotangent comes back."""
        return sum(self.facts.node[n.name].carries[i] for n, i in self.graph.consumers(tensor))

    # ---- folding ---------------------------------------------------------------------------------------------------------------------------------

    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """For each layer the variables that only variables of the same layer touch."""
        crossing: set[int] = set()
        for n in self.graph.nodes:
            for u in (*self._inputs(n.name), *self._outputs(n.name)):
                if u >= 0 and self.layers[u] != n.layer:
                    crossing.add(u)
        inside: dict[int, list[int]] = {}
        for v, layer in enumerate(self.layers):
            if v not in crossing:
                inside.setdefault(layer, []).append(v)
        return tuple(map(tuple, inside.values()))

    # ---- the answer ------------------------------------------------------------------------------------------------------------------------------

    def placed(self, solution: Solution, start: float) -> Placed:
        """The states in the words of a Plan."""
        if not solution.states:
            mesh = dict(zip(self.axes, self.mesh_shape, strict=True))
            raise PlanError(f"no placement of `{self.graph.name}` on mesh {mesh} satisfies all limits of the space at once; loosen one of them")
        at = {key: int(self.choices[v].rows[solution.states[v]]) for key, v in self.number.items()}
        rules, hubs, params = {}, {}, {}
        for (kind, name), row in at.items():
            cls = self.choices[self.number[kind, name]].cls
            if isinstance(cls, NodeClass):
                rules[name] = self._on_all_axes(cls.states[row], Rule("B"))
                for j, t in enumerate(self.graph.node[name].outputs):
                    if ("hub", t) not in self.number:
                        value = cls.out_boxes[j].places[cls.outs[j][row]]
                        hubs[t] = Hub(self._on_all_axes(value, B), self._on_all_axes(tuple(s if s.is_split else B for s in value), B))
            elif isinstance(cls, HubClass):
                hubs[name] = Hub(*(self._on_all_axes(nd, B) for nd in _columns(cls.states[row], 2)))
            else:
                params[name] = ParamPlacement(*(self._on_all_axes(nd, B) for nd in _columns(cls.states[row], 3)))
        nbytes, priced, reboxed = self._memory(solution.states, at)
        space = sum(math.log10(len(c)) for c in self.choices)
        return Placed(
            rules, hubs, params, reboxed, self._links(), solution.cost, solution.bound, solution.exact, solution.cost - priced, nbytes,
            len(self.choices), space, solution.method, time.perf_counter() - start,
        )  # fmt: skip

    def _links(self) -> tuple[Link, ...]:
        """What a collective costs on every axis, nothing where there is one rank."""
        active = axis_links(self.tables.pricing, self.tables.axes, self.tables.mesh_shape)
        return self._on_all_axes(active, (0.0, 0.0))

    def _on_all_axes(self, state: Sequence[Any], otherwise: Any) -> tuple[Any, ...]:
        given = iter(state)
        return tuple(next(given) if n > 1 else otherwise for n in self.mesh_shape)

    def _memory(self, states: Sequence[int], at: Mapping[tuple[str, str], int]) -> tuple[dict[str, float], float, tuple[tuple[str, str], ...]]:
        """Bytes by class, seconds charged for them, and the uses that are boxed again in the backward."""
        out = {"params": 0.0, "grads": 0.0, "optimizer": 0.0, "activations": 0.0}
        priced = 0.0
        reboxed = []

        def keep(nbytes: float, layer: int) -> None:
            nonlocal priced
            out["activations"] += nbytes * self.terms.copies(layer)
            priced += nbytes * self.terms.charge(layer)

        for (kind, name), v in self.number.items():
            if kind == "param":
                cls = self.choices[v].cls
                assert isinstance(cls, ParamClass)
                grads = cls.grads(self._num_gradients(name))
                for what, table in (("params", cls.params), ("grads", grads), ("optimizer", cls.optimizer)):
                    out[what] += float(table[at[kind, name]])
                    priced += self.terms.state_price * float(table[at[kind, name]])
            elif kind == "hub":
                uses = [self.graph.node[n].layer if n else self.layers[v] for n, _ in self.facts.saved[name]]
                keep(float(self.hub_alone(name).kept[states[v]]), max(uses, key=self.terms.charge, default=0))
            else:
                n = self.graph.node[name]
                made = self.node_tables(n)
                keep(float(made.alone.kept[states[v]]), n.layer)
                for u, edge in zip((*self._inputs(name), *self._outputs(name)), (*made.ins, *made.outs), strict=True):
                    if edge is not None:
                        keep(float(edge.kept[states[u], states[v]]), n.layer)
                for t, u, edge in zip(n.inputs, self._inputs(name), made.ins, strict=True):
                    if edge is not None and edge.reboxed is not None and (
                        edge.reboxed[states[u], states[v]]
                        or (edge.common is not None and edge.common[states[u], states[v]] and self._is_reboxed(t, states[u]))
                    ):  # fmt: skip
                        reboxed.append((t, name))
        return out, priced, tuple(dict.fromkeys(reboxed))

    def _is_reboxed(self, tensor: str, state: int) -> bool:
        """Whether the readers that share a tensor box it again in the backward."""
        reboxed = self.hub_alone(tensor).reboxed
        return reboxed is not None and bool(reboxed[state])


@dataclass(frozen=True, slots=True)
class _Cost:
    """A table in seconds with the price of memory in it, the bytes kept of one microbatch, where the kept value is boxed again, where it is the common copy."""

    table: Table
    kept: Table
    reboxed: NDArray[np.bool_] | None = None
    common: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class _NodeTables:
    """Of one node: alone, and with every input and output, the other variable's states in rows; None where an operand is no variable."""

    alone: _Cost
    ins: tuple[_Cost | None, ...]
    outs: tuple[_Cost | None, ...]


def _ends(choice: Choice) -> tuple[Index, Index, Index]:
    """Where the value lies, where its cotangent is summed, where equal readers find it: of a hub, or of a parameter."""
    cls, rows = choice.cls, choice.rows
    if isinstance(cls, HubClass):
        return cls.value[rows], cls.cotangent[rows], cls.common[rows]
    assert isinstance(cls, ParamClass)
    return cls.held[rows], cls.grad[rows], cls.held[rows]


def _accumulating(choice: Choice, cotangents: Index) -> Table | float:
    """[param state, node state]: seconds to add a boxed gradient into its accumulator; the kernel does it where its output lies as the accumulator does."""
    cls = choice.cls
    if not isinstance(cls, ParamClass):
        return 0.0
    grad = cls.grad[choice.rows]
    return np.where(grad[:, None] == cotangents[None, :], 0.0, cls.wide.local_s[grad][:, None])


def _consumer(
    nbytes: Table, where: tuple[Index, Index, Index], mode: str, once: Table, times: int, backward: Table | float, charge: float
) -> _Cost:  # fmt: skip
    """The edge from a hub to a use, `where` = placements of (value, common copy, use); `once` boxes value to use once, the forward does it `times`.

    A kept value that is not the hub's own is kept as it was read, or boxed again where that is cheaper; the common copy is the hub's affair where the hub pays.
    """
    source, common, places = where
    is_source = source[:, None] == places[None, :]
    is_common = (common[:, None] == places[None, :]) & ~is_source
    time_s = np.where(is_common, 0.0, once) * times + backward
    if mode == "":
        return _Cost(time_s, np.zeros(once.shape))
    here = np.broadcast_to((nbytes[source] * ((common != source) | (mode == "only")))[:, None], once.shape)
    copy = np.broadcast_to(nbytes[places][None, :], once.shape)
    reboxed = ~is_source & (once + charge * here < charge * copy)
    kept = np.where(is_source | reboxed, here, copy)
    if mode == "shared":
        reboxed, kept = reboxed & ~is_common, np.where(is_common, 0.0, kept)
    return _Cost(time_s + charge * kept + np.where(reboxed, once, 0.0), kept, reboxed, is_common)


def _columns(state: Sequence[tuple[Sbp, ...]], width: int) -> list[NdSbp]:
    """The nd placements of a state that has one tuple for each axis."""
    return [tuple(axis[i] for axis in state) for i in range(width)]


def _near(cls: Any, axes: Sequence[str]) -> str:
    """What would be legal, for a message."""
    options = [list(dict.fromkeys(map(repr, (state[k] for state in cls.states)))) for k in range(len(axes))]
    return "legal by size: " + ("; ".join(f"{axis}: {', '.join(found)}" for axis, found in zip(axes, options, strict=True)) or "nothing")

"""The placement problem of one graph on one mesh as a factor graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ir.errors import PlanError
from ir.graph import Graph, Node, Tensor
from ir.op import Rule
from ir.plan import Hub, ParamPlacement
from planner.costs import Cost, Rate, Terms
from planner.facts import Facts, uneven_labels
from planner.optimizers import is_hidden, update_of
from planner.runs import Short
from planner.solver.blocks import CannotFold, Repeated
from planner.solver.factors import FactorGraph
from planner.solver.gathered import distinct
from planner.space import Limit, Space
from planner.tables import AGAIN, APART, KEPT, ONCE, Choice, HubClass, Index, NodeClass, ParamClass, Table, Tables
from planner.trade import Trade

Given = tuple[Mapping[str, tuple[Rule, ...]], Mapping[str, Hub], Mapping[str, ParamPlacement]]


@dataclass
class Problem:
    """Variables and tables of one search on the short graph. Variables are ("node" | "hub" | "param", name), numbered in graph order."""

    short: Short
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

    @property
    def graph(self) -> Graph:
        return self.short.graph

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
                    self._variable("param", tensor, made, n.layer, self.space.params, self.given[2].get(t), ("",))
            made_node = self.tables.node(n, self.facts.node[n.name], self.graph.tensors, maxima, labels.get(n.name, frozenset()))
            self._variable("node", n, made_node, n.layer, self.space.rules, self.given[0].get(n.name), self._node_ways(n))
            for t in n.outputs:
                if self.graph.consumers(t) or t in self.graph.outputs:
                    hub = self.tables.hub(
                        self.graph.tensors[t], uneven.get(t, frozenset()), t in self.facts.differentiable, t in maxima, t in self.graph.outputs,
                        self._has_equal_readers(t),
                    )  # fmt: skip
                    self._variable("hub", self.graph.tensors[t], hub, n.layer, self.space.hubs, self.given[1].get(t), self._hub_ways(n, t))

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

    def _node_ways(self, n: Node) -> tuple[str, ...]:
        if n.name in self.facts.open:
            return (ONCE, AGAIN)
        return (AGAIN,) if n.name in self.terms.recompute and n.name in self.facts.rerun else (ONCE,)

    def _hub_ways(self, n: Node, tensor: str) -> tuple[str, ...]:
        """How a hub may hold what `n` gives. Apart only where re-runs decide whether several uses read it: these may turn out to be one."""
        uses = self.facts.saved[tensor]
        by_gradients = sum(not name or i in self.facts.node[name].reads_inputs for name, i in uses)
        names = self.terms.selective or any(isinstance(name, str) for name in self.terms.recompute)
        kept = (KEPT, APART) if names and len(uses) > 1 and by_gradients <= 1 else (KEPT,)
        return tuple(way for mine in self._node_ways(n) for way in ((AGAIN,) if mine == AGAIN else kept))

    def _variable(self, kind: str, thing: Node | Tensor, cls: Any, layer: int, limits: tuple[Limit, ...], given: Any, ways: tuple[str, ...]) -> None:
        self.number[kind, thing.name] = len(self.choices)
        self.layers.append(layer)
        mine = tuple(limit for limit in limits if limit.axis in self.tables.axes and limit.matches(thing))
        wanted = None if given is None else self._active_state(kind, given)
        key = (id(cls), tuple(map(id, mine)), wanted, ways)
        if key not in self.made:
            self.made[key] = Choice(cls, self._rows(cls, mine, wanted), ways)
        choice: Choice = self.made[key]
        if not len(choice):
            raise self._nothing_left(kind, thing.name, cls, mine, wanted)
        self.choices.append(choice)

    def _nothing_left(self, kind: str, name: str, cls: Any, limits: tuple[Limit, ...], wanted: tuple[Any, ...] | None) -> PlanError:
        """Says what was asked, and what would be legal without what the user said."""
        mesh = dict(zip(self.axes, self.mesh_shape, strict=True))
        asked = f"{wanted} was asked for" if wanted is not None else "its size and the limits of the space leave nothing"
        said = dict.fromkeys(limit.said for limit in limits if limit.said)
        if wanted is None and said:
            asked = f"{' and '.join(said)} {'leaves' if len(said) == 1 else 'leave'} nothing beside the rest"
            rest = self._rows(cls, tuple(limit for limit in limits if not limit.said), None)
            if len(rest):
                return PlanError(f"{kind} `{name}` has no legal placement on mesh {mesh}: {asked}; {_near(cls, self.tables.axes, rest, 'legal without it')}")
        return PlanError(f"{kind} `{name}` has no legal placement on mesh {mesh}: {asked}; {_near(cls, self.tables.axes, range(len(cls.states)))}")

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
        """Seconds, the price of memory in them."""
        unary, edges, pairwise = self._costs()
        return FactorGraph(tuple(len(c) for c in self.choices), tuple(c.gathered.dense() for c in unary), edges, tuple(c.gathered for c in pairwise))

    def trade(self) -> Trade:
        """Seconds and bytes apart, with every choice between them; equal tables are one."""
        unary, edges, pairwise = self._costs()
        options = {id(c): c.options for c in (*unary, *pairwise)}
        return Trade(tuple(len(c) for c in self.choices), tuple(options[id(c)] for c in unary), edges, tuple(options[id(c)] for c in pairwise))

    def _costs(self) -> tuple[list[Cost], tuple[tuple[int, int], ...], list[Cost]]:
        unary: dict[int, Cost] = {}
        edges: list[tuple[int, int]] = []
        pairwise: list[Cost] = []
        for (kind, name), v in self.number.items():
            if kind == "node":
                made = self.node_tables(self.graph.node[name])
                unary[v] = made.alone
                for u, edge in zip((*self.inputs(name), *self.outputs(name)), (*made.ins, *made.outs), strict=True):
                    if edge is not None:
                        edges.append((u, v))
                        pairwise.append(edge)
            else:
                unary[v] = self.hub_alone(name) if kind == "hub" else self.param_alone(name)
        return [unary[v] for v in range(len(self.choices))], tuple(edges), pairwise

    @cached_property
    def first_edge(self) -> Mapping[str, int]:
        """Of each node the number of its first table with an operand, among those of all nodes in order."""
        made = [self.node_tables(n) for n in self.graph.nodes]
        numbers = itertools.accumulate((sum(edge is not None for edge in (*m.ins, *m.outs)) for m in made), initial=0)
        return dict(zip((n.name for n in self.graph.nodes), numbers, strict=False))

    def inputs(self, node: str) -> list[int]:
        """Variable of every input, -1 for inputs of the graph and constants."""
        tensors = self.graph.tensors
        return [self.number.get(("param" if tensors[t].role == "param" else "hub", t), -1) for t in self.graph.node[node].inputs]

    def outputs(self, node: str) -> list[int]:
        """Variable of every output, -1 for those that only the node's own gradients read."""
        return [self.number.get(("hub", t), -1) for t in self.graph.node[node].outputs]

    def paid(self, tensor: str) -> bool:
        """Whether the tensor is kept at its hub in any case: several uses read it, or it enters a recomputed layer."""
        uses = self.facts.saved[tensor]
        return len(uses) > 1 or any(name and self.graph.node[name].layer in self.terms.recompute for name, _ in uses)

    def _use(self, n: Node, i: int, hub: str, node: str) -> tuple[str, int]:
        """How a use is kept for the backward where its hub and the node go these ways, and how often the forward's boxing of it runs.

        Kept "" not at all, "only" by itself, "shared" beside the hub, "input" where there is no hub.
        """
        t = n.inputs[i]
        role, again = self.graph.tensors[t].role, (n.name, i) in self.facts.again
        read = node == AGAIN or i in self.facts.node[n.name].reads_inputs
        if role in ("input", "const"):
            return ("input" if read or again else ""), 1
        if n.layer in self.terms.recompute or not read:
            return "", 1 + again
        if role == "param" or (hub == AGAIN and self._within(n, t)):
            return "", 2
        return ("shared" if self.paid(t) and hub == KEPT else "only"), 1

    def _within(self, n: Node, tensor: str) -> bool:
        """Whether a tensor is made in the layer of a node that reads it: there it may be made again."""
        producer = self.graph.producer(tensor)
        return producer is not None and producer.layer == n.layer

    def _output(self, n: Node, j: int, hub: str, node: str) -> tuple[str, int] | None:
        """The same of what a node gives, for its own gradients; None where the hub and the node cannot go these ways together."""
        if (hub == AGAIN) != (node == AGAIN):
            return None
        if node == AGAIN:
            return "", 1 + self._serves(n.outputs[j])
        again = n.name in self.facts.rerun and any((u.name, i) in self.facts.again for u, i in self.graph.consumers(n.outputs[j]))
        if j not in self.facts.node[n.name].reads_outputs or n.layer in self.terms.recompute:
            return "", 1 + again
        return ("shared" if self.paid(n.outputs[j]) and hub == KEPT else "only"), 1 + again

    def _serves(self, tensor: str) -> bool:
        """Whether a backward may read the tensor, made again, at the hub: that of a node of its own layer."""
        facts, users = self.facts, self.graph.consumers(tensor)
        runs = self.facts.rerun | self.facts.open
        return any(self._within(u, tensor) and (u.name in runs or i in facts.node[u.name].reads_inputs) for u, i in users)

    def node_tables(self, n: Node) -> _NodeTables:
        """The tables of a node; nodes that are alike in all that matters share them."""
        choice = self.choices[self.number["node", n.name]]
        ins = tuple(tuple(self._use(n, i, hub, node) for hub in self._ways(u) for node in choice.ways) for i, u in enumerate(self.inputs(n.name)))
        outs = tuple(tuple(self._output(n, j, hub, node) for hub in self._ways(u) for node in choice.ways) for j, u in enumerate(self.outputs(n.name)))
        around = tuple(id(self.choices[u]) if u >= 0 else -1 for u in (*self.inputs(n.name), *self.outputs(n.name)))
        key = (id(choice), around, ins, outs, n.name in self.facts.rerun, self.terms.rate(n.layer))
        if key not in self.made:
            self.made[key] = self._node_tables(n, choice)
        found: _NodeTables = self.made[key]
        return found

    def _ways(self, variable: int) -> tuple[str, ...]:
        """Of an operand's variable; of an operand that has none, no way in particular."""
        return self.choices[variable].ways if variable >= 0 else ("",)

    def _node_tables(self, n: Node, choice: Choice) -> _NodeTables:
        ins = tuple(self._input_table(n, i, u, choice) for i, u in enumerate(self.inputs(n.name)))
        outs = tuple(self._output_table(n, j, u, choice) for j, u in enumerate(self.outputs(n.name)))
        alone = Cost.stacked([[self._node_alone(n, choice, way) for way in choice.ways]])
        return _NodeTables(alone, ins, outs)

    def _node_alone(self, n: Node, choice: Choice, way: str) -> Cost:
        """Kernels, and operands that have no variable: what is loaded, and what only the node's own gradients read."""
        cls, rows, m = choice.cls, choice.rows, self.terms.num_microbatches
        assert isinstance(cls, NodeClass)
        times = 2 if way == AGAIN or n.name in self.facts.rerun else 1
        seconds = m * (cls.forward_s * times + cls.backward_s)[rows]
        kept = np.zeros(len(rows))
        for i, u in enumerate(self.inputs(n.name)):
            if u < 0:
                seconds = seconds + m * cls.in_boxes[i].local_s[cls.ins[i][rows]]
                kept = kept + cls.in_boxes[i].nbytes[cls.ins[i][rows]] * (self._use(n, i, "", way)[0] == "input")
        for j, u in enumerate(self.outputs(n.name)):
            if u < 0 and way != AGAIN:
                found = self._output(n, j, "", way)
                kept = kept + cls.out_boxes[j].nbytes[cls.outs[j][rows]] * (found is not None and found[0] != "")
        return Cost.of(self.terms.rate(n.layer), seconds, kept)

    def _input_table(self, n: Node, i: int, u: int, choice: Choice) -> Cost | None:
        if u < 0:
            return None
        cls, rows, m, other = choice.cls, choice.rows, self.terms.num_microbatches, self.choices[u]
        assert isinstance(cls, NodeClass)
        boxes, (source, target, common) = cls.in_boxes[i], _ends(other)
        ends, of_ends = distinct(source, target, common)
        uses, of_uses = distinct(cls.ins[i][rows], cls.cots[i][rows])
        source, target, common = source[ends], target[ends], common[ends]
        places, cotangents = cls.ins[i][rows[uses]], cls.cots[i][rows[uses]]
        shown = self.terms.exposed if isinstance(other.cls, ParamClass) else 1.0
        once = m * shown * boxes.cost[np.ix_(source, places)]
        backward: Table | float = 0.0
        if self.facts.node[n.name].carries[i]:
            backward = m * shown * boxes.cost[np.ix_(cotangents, target)].T + _accumulating(other, target, cotangents, m)
        made: dict[tuple[str, int], Cost] = {}
        for use in (self._use(n, i, hub, node) for hub in other.ways for node in choice.ways):
            if use not in made:
                made[use] = _consumer(boxes.nbytes, (source, common, places), use[0], once, use[1], backward, self.terms.rate(n.layer))
        return Cost.stacked([[made[self._use(n, i, hub, node)] for node in choice.ways] for hub in other.ways]).spread(of_ends, of_uses)

    def _output_table(self, n: Node, j: int, u: int, choice: Choice) -> Cost | None:
        if u < 0:
            return None
        cls, rows, m, rate, other = choice.cls, choice.rows, self.terms.num_microbatches, self.terms.rate(n.layer), self.choices[u]
        assert isinstance(cls, NodeClass)
        boxes, (source, target, _) = cls.out_boxes[j], _ends(other)
        ends, of_ends = distinct(source, target)
        makes, of_makes = distinct(cls.outs[j][rows], cls.needs[j][rows])
        source, target, places = source[ends], target[ends], cls.outs[j][rows[makes]]
        once = m * boxes.cost[np.ix_(places, source)].T
        backward = m * boxes.cost[np.ix_(target, cls.needs[j][rows[makes]])] if n.outputs[j] in self.facts.differentiable else 0.0

        def cost(hub: str, node: str) -> Cost:
            found = self._output(n, j, hub, node)
            if found is None:
                return Cost.of(rate, np.full(once.shape, np.inf), np.zeros(once.shape))
            mode, times = found
            apart = (source[:, None] != places[None, :]) if mode == "shared" else np.ones(once.shape, dtype=bool)
            return Cost.of(rate, once * times + backward, np.where(apart, boxes.nbytes[places][None, :], 0.0) * (mode != ""))

        return Cost.stacked([[cost(hub, node) for node in choice.ways] for hub in other.ways]).spread(of_ends, of_makes)

    def hub_alone(self, tensor: str) -> Cost:
        """Of a hub: what is kept there in any case, boxing for readers that share, and adding the cotangents of several uses."""
        choice = self.choices[self.number["hub", tensor]]
        uses = self.facts.saved[tensor]
        rate = self.terms.rate(self.kept_by(tensor))
        paid = self.paid(tensor)
        num_adds = max(0, self.num_gradients(tensor) - 1)
        again = any((n.name, i) in self.facts.again for n, i in self.graph.consumers(tensor))
        enters = any(name and self.graph.node[name].layer in self.terms.recompute for name, _ in uses)
        serves = AGAIN in choice.ways and self._serves(tensor)
        key = ("hub", id(choice), rate, paid, num_adds, again, enters, serves)
        if key not in self.made:
            cls, m = choice.cls, self.terms.num_microbatches
            assert isinstance(cls, HubClass)
            value, cotangent, common = (table[choice.rows] for table in (cls.value, cls.cotangent, cls.common))
            once = m * cls.boxes.cost[value, common]
            adding = m * num_adds * cls.boxes.added_s[cotangent]

            def cost(way: str) -> Cost:
                pays = enters or (paid and way in ("", KEPT))
                here, copy = cls.boxes.nbytes[value] * pays, cls.boxes.nbytes[common] * pays
                times = 2 if again or (way == AGAIN and serves) else 1
                return Cost.of(rate, adding + once * times, here if enters else copy, (common != value) & (pays and not enters), once, here)

            self.made[key] = Cost.stacked([[cost(way) for way in choice.ways]])
        found: Cost = self.made[key]
        return found

    def param_alone(self, tensor: str) -> Cost:
        """Of a parameter: once a step, reducing the gradient of each use and adding them, and the price of what stays."""
        choice = self.choices[self.number["param", tensor]]
        num_uses = self.num_gradients(tensor)
        charge = self.terms.state_charge(self.layers[self.number["param", tensor]])
        key = ("param", id(choice), num_uses, charge)
        if key not in self.made:
            cls, rows = choice.cls, choice.rows
            assert isinstance(cls, ParamClass)
            adding = cls.wide.added_s[cls.state[rows]] * max(0, num_uses - 1)
            kept = (cls.params + cls.grads(num_uses) + cls.optimizer)[rows]
            boxing = num_uses * cls.reduce_s[rows] + cls.gather_s[rows]
            self.made[key] = Cost.of((charge, 1.0), self.terms.exposed * boxing + cls.update_s[rows] + adding, kept)
        found: Cost = self.made[key]
        return found

    def kept_by(self, tensor: str) -> int:
        """The layer for which a tensor is kept longest at its hub."""
        layers = [self.graph.node[name].layer if name else self.layers[self.number["hub", tensor]] for name, _ in self.facts.saved[tensor]]
        return max(layers, key=self.terms.copies, default=self.layers[self.number["hub", tensor]])

    def num_gradients(self, tensor: str) -> int:
        """Uses of a tensor through which a cotangent comes back."""
        return sum(self.facts.node[n.name].carries[i] for n, i in self.graph.consumers(tensor))

    # ---- folding ---------------------------------------------------------------------------------------------------------------------------------

    @cached_property
    def group(self) -> Mapping[int, int]:
        """For each layer the first layer of the block that it is folded with."""
        found = {layer: layer for layer in self.layers}
        return found | {layer: r.copies[0][0] for r in self.short.repeats for layer in r.copies[0]}

    @cached_property
    def blocks(self) -> Mapping[int, tuple[int, ...]]:
        """For each block the variables that only variables of the same block touch."""
        crossing = self._crossing()
        inside: dict[int, list[int]] = {}
        for v, layer in enumerate(self.layers):
            if v not in crossing:
                inside.setdefault(self.group[layer], []).append(v)
        return {block: tuple(found) for block, found in inside.items()}

    def _crossing(self) -> dict[int, None]:
        """Variables that nodes of several blocks touch."""
        around = ((u, n.layer) for n in self.graph.nodes for u in (*self.inputs(n.name), *self.outputs(n.name)) if u >= 0)
        return {u: None for u, layer in around if self.group[self.layers[u]] != self.group[layer]}

    def repeated(self) -> tuple[Repeated, ...]:
        """The blocks that stand for several. Raises CannotFold where the two ends of one are not one hub each, with equal states and costs."""
        crossing, order = self._crossing(), list(self.blocks)
        out = []
        for r in self.short.repeats:
            block = r.copies[0][0]
            touched = {u for n in self.graph.nodes if self.group[n.layer] == block for u in (*self.inputs(n.name), *self.outputs(n.name)) if u in crossing}
            after = [u for u in touched if self.group[self.layers[u]] == block]
            before = [u for u in touched if self.group[self.layers[u]] != block]
            if len(before) != 1 or len(after) != 1 or not self._alike(before[0], after[0]):
                raise CannotFold
            out.append(Repeated(order.index(block), len(r.copies), before[0], after[0]))
        return tuple(out)

    def _alike(self, a: int, b: int) -> bool:
        """Whether two variables are hubs with the same states and the same costs."""
        names = list(self.number)
        if names[a][0] != "hub" or names[b][0] != "hub" or self.choices[a] is not self.choices[b]:
            return False
        return self.hub_alone(names[a][1]) is self.hub_alone(names[b][1])


@dataclass(frozen=True, slots=True)
class _NodeTables:
    """Of one node: alone, and with every input and output, the other variable's states in rows; None where an operand is no variable."""

    alone: Cost
    ins: tuple[Cost | None, ...]
    outs: tuple[Cost | None, ...]


def _ends(choice: Choice) -> tuple[Index, Index, Index]:
    """Where the value lies, where its cotangent is summed, where equal readers find it: of a hub, or of a parameter."""
    cls, rows = choice.cls, choice.rows
    if isinstance(cls, HubClass):
        return cls.value[rows], cls.cotangent[rows], cls.common[rows]
    assert isinstance(cls, ParamClass)
    return cls.held[rows], cls.grad[rows], cls.held[rows]


def _accumulating(choice: Choice, grad: Index, cotangents: Index, num_microbatches: int) -> Table | float:
    """[accumulator, cotangent]: seconds of a step to add gradients to those of earlier microbatches, and to bring there what no kernel writes there."""
    cls = choice.cls
    if not isinstance(cls, ParamClass):
        return 0.0
    is_there = grad[:, None] == cotangents[None, :]
    return np.where(is_there, 0.0, num_microbatches * cls.wide.local_s[grad][:, None]) + (num_microbatches - 1) * cls.wide.added_s[grad][:, None]


def _consumer(
    nbytes: Table, where: tuple[Index, Index, Index], mode: str, once: Table, times: int, backward: Table | float, rate: Rate
) -> Cost:  # fmt: skip
    """The edge from a hub to a use, `where` = placements of (value, common copy, use); `once` boxes value to use once, the forward does it `times`.

    A kept value that is not the hub's own is kept as it was read, or boxed again where that is cheaper; the common copy is the hub's affair where the hub pays.
    """
    source, common, places = where
    is_source = source[:, None] == places[None, :]
    is_common = (common[:, None] == places[None, :]) & ~is_source
    time_s = np.where(is_common, 0.0, once) * times + backward
    if mode == "":
        return Cost.of(rate, time_s, np.zeros(once.shape))
    here = np.broadcast_to((nbytes[source] * ((common != source) | (mode == "only")))[:, None], once.shape)
    kept = np.where(is_source, here, nbytes[places][None, :])
    may_box = ~is_source
    if mode == "shared":
        kept, may_box = np.where(is_common, 0.0, kept), may_box & ~is_common
    return Cost.of(rate, time_s, kept, may_box, once, here, is_common)


def _near(cls: Any, axes: Sequence[str], rows: Iterable[int], told: str = "legal by size") -> str:
    """What would be legal, for a message."""
    states = [cls.states[i] for i in rows]
    options = [list(dict.fromkeys(map(repr, (state[k] for state in states)))) for k in range(len(axes))]
    return f"{told}: " + ("; ".join(f"{axis}: {', '.join(found)}" for axis, found in zip(axes, options, strict=True)) or "nothing")

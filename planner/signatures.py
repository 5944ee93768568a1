"""Why an operator or a tensor is not placed otherwise: every signature of it on every axis, illegal or how much dearer."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ir.cluster import Cluster
from ir.errors import InputError, PlanError
from ir.graph import Graph, Node, Tensor
from ir.plan import Plan
from ir.sbp import Sbp
from ir.units import seconds
from planner.chunks import planned_chunks
from planner.context import AXIS, context_space, form_of
from planner.facts import analyse, uneven_labels
from planner.frontends.model import Model
from planner.hints import legal_on
from planner.orders import kept
from planner.placement import Placed, new_tables, search
from planner.pricing import MeshPricing
from planner.space import Limit, Space, layout_space, no_batch
from planner.words import active, pattern, rule_in_words
from simulator.cost import CostModel


@dataclass(frozen=True, slots=True)
class Signature:
    """What is asked of `name` on `axis`: the stated cost of the best placement that has it, above the best of all; `illegal` says why there is none."""

    name: str
    axis: str
    signature: str
    words: str
    chosen: bool
    dearer_s: float
    dearer: float
    illegal: str = ""

    def to_json(self) -> dict[str, Any]:
        return {k: (None if v == math.inf else v) for k, v in asdict(self).items()}


def signatures(model: Model, cluster: Cluster, plan: Plan, names: str) -> tuple[Signature, ...]:
    """Of all operators and parameters that match `names`: on each axis every signature, as the plan's layers of that name all together would take it.

    The stated cost is that of one microbatch's search with memory free of charge; it ignores overlap. Raises InputError where nothing matches.
    """
    asker = _Asker.of(model, cluster, plan)
    found = [s for thing in asker.matching(names) for s in asker.about(thing)]
    return tuple(found)


@dataclass
class _Asker:
    graph: Graph
    plan: Plan
    best: Placed
    search: Callable[[Space], Placed]

    @classmethod
    def of(cls, model: Model, cluster: Cluster, plan: Plan) -> _Asker:
        graph = planned_chunks(model.graph(plan.microbatch, plan.seq, plan.dtype), plan)
        pricing = MeshPricing(CostModel(cluster), plan.mesh(0))
        tables = new_tables(plan.axes, plan.mesh_shape, pricing)
        base = layout_space(graph, plan.axes) & no_batch(graph, "tp")
        if plan.context:
            base &= context_space(graph, AXIS, plan.mesh(0).axis_size(AXIS), form_of(plan.context), plan.axes)
        in_flight = math.ceil(kept(plan.schedule, len(plan.sites), plan.num_microbatches, len(plan.stages) // len(plan.sites)))

        def ask(space: Space) -> Placed:
            return search(
                graph, plan.axes, plan.mesh_shape, pricing, num_microbatches=plan.num_microbatches, in_flight=in_flight, recompute=plan.recompute,
                optimizer=plan.optimizer, space=base & space, tables=tables,
            )  # fmt: skip

        return cls(graph, plan, ask(Space()), ask)

    def matching(self, names: str) -> list[Node | Tensor]:
        """One node or parameter for each pattern of numbered layers."""
        things: list[Node | Tensor] = [*self.graph.nodes, *self.graph.params]
        found: dict[str, Node | Tensor] = {}
        for thing in things:
            if fnmatch.fnmatchcase(thing.name, names) or thing.name == names:
                found.setdefault(thing.name if thing.name == names else pattern(thing.name), thing)
        if not found:
            known = list(dict.fromkeys(pattern(thing.name) for thing in things))
            close = difflib.get_close_matches(names, known, 3, 0.5) or [n for n in known if n.rpartition(".")[2] == names.rpartition(".")[2]][:3] or known[1:4]
            raise InputError(f"`{self.graph.name}` has no operator or parameter `{names}`; write a name or a pattern such as {', '.join(close)}")
        return list(found.values())

    def about(self, thing: Node | Tensor) -> Iterator[Signature]:
        where = thing.name if isinstance(thing, Node) and thing.name.count("*") else pattern(thing.name)
        for k, axis in active(self.plan):
            yield from self._rules(thing, where, k, axis) if isinstance(thing, Node) else self._places(thing, where, k, axis)

    def _rules(self, node: Node, where: str, k: int, axis: str) -> Iterator[Signature]:
        vocabulary = uneven_labels(self.graph, analyse(self.graph), frozenset({"v"}))[0].get(node.name, frozenset())
        sizes, parts = self.graph.sizes(node), self.plan.mesh_shape[k]
        for rule in self.graph.op(node).rules():
            words = rule_in_words(self.graph, node, rule, rule.on in vocabulary)
            why = ""
            if rule.kind == "split" and sizes[rule.on] % parts and (rule.on not in vocabulary or sizes[rule.on] < parts):
                why = f"{rule.on} = {sizes[rule.on]} does not divide by {axis} = {parts}"
            limit = Limit(where, axis, rule.__eq__)
            yield self._judge(node.name, axis, repr(rule), words, self.plan.rules[node.name][k] == rule, Space(rules=(limit,)), why)

    def _places(self, tensor: Tensor, where: str, k: int, axis: str) -> Iterator[Signature]:
        uneven = uneven_labels(self.graph, analyse(self.graph), frozenset({"v"}))[1].get(tensor.name, frozenset())
        legal = legal_on(tensor, self.plan.mesh_shape[k], "held", uneven)
        for sbp in dict.fromkeys((*legal, *(Sbp("S", d) for d in range(len(tensor.shape))))):
            why = "" if sbp in legal else f"dim {sbp.dim} = {tensor.shape[sbp.dim]} does not divide by {axis} = {self.plan.mesh_shape[k]}"
            limit = Limit(where, axis, _held(sbp))
            yield self._judge(tensor.name, axis, repr(sbp), f"copy held {sbp!r}", self.plan.params[tensor.name].held[k] == sbp, Space(params=(limit,)), why)

    def _judge(self, name: str, axis: str, signature: str, words: str, chosen: bool, space: Space, why: str) -> Signature:
        dearer_s = math.inf
        if not why:
            try:
                dearer_s = max(0.0, self.search(space).cost_s - self.best.cost_s)
            except PlanError:
                why = f"the layout leaves it no room: axis dp splits the batch{', and tp does not' if axis == 'tp' else ''}"
        return Signature(pattern(name), axis, signature, words, chosen, dearer_s, dearer_s / self.best.cost_s, why)


def _held(sbp: Sbp) -> Callable[[Any], bool]:
    return lambda state: state[1] == sbp


def as_lines(rows: Sequence[Signature]) -> list[str]:
    """For people: chosen, illegal, or how much dearer."""
    lines = []
    for head in dict.fromkeys((r.name, r.axis) for r in rows):
        lines += ["", f"{head[0]} on axis {head[1]}:"]
        for r in sorted((r for r in rows if (r.name, r.axis) == head), key=lambda r: (r.dearer_s, r.signature)):
            if r.illegal:
                told = f"illegal: {r.illegal}"
            elif r.dearer_s <= 1e-9:
                told = "costs least" if r.dearer_s == 0.0 else "costs the same"
            else:
                told = f"dominated: {seconds(r.dearer_s)} dearer, {r.dearer:.2%} of the stated cost"
            lines.append(f"  {'*' if r.chosen else ' '} {r.signature:<16} {told} ({r.words})")
    return lines

"""The cheapest placement of a whole model within a number of bytes a device, mixed from two where no single price of memory meets it.

Equal layers all move together when the price of memory rises, so that what a price finds jumps over most limits. Of the two placements on either side of the
jump, the first layers take the one that keeps too much and the rest the other, by a price a little lower and a little higher; the layer between has a price
of its own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ir.errors import PlanError
from ir.graph import Graph, Node
from ir.op import Rule
from ir.plan import Hub, ParamPlacement
from planner.costs import ByLayer
from planner.placed import Placed
from planner.placement import new_tables, price
from planner.pricing import Pricing
from planner.problem import Given
from planner.runs import layer_keys
from planner.space import Limit, Space
from planner.tables import Tables
from planner.trade import Line, dual

NEARLY = 1e-6
"""By how much a price must differ from one at which two placements cost the same for one of them to win."""

GOOD_GAP = 1e-4
"""The search for something better ends where this share of the time at most could be saved."""

MOST_BRANCHES = 12


@dataclass(frozen=True)
class Within:
    """`placed` keeps at most the limit; nothing in the space that does takes less than `bound_s`. `price`: seconds that a byte is worth there.

    `cheap` and `over`: the two placements at that price, of which one fits and one does not (None: no price was needed).
    """

    placed: Placed
    bound_s: float
    price: float
    cheap: Placed
    over: Placed | None

    @property
    def nbytes(self) -> float:
        return sum(self.placed.nbytes.values())

    @property
    def gap(self) -> float:
        """The share of its time that a placement within the limit could save at most."""
        return max(0.0, 1.0 - self.bound_s / self.placed.time_s)


def search_within(
    graph: Graph, axes: Sequence[str], mesh_shape: Sequence[int], pricing: Pricing, limit_bytes: float, *, num_microbatches: int,
    in_flight: ByLayer = 1, recompute: Sequence[int | str] = (), optimizer: str | Mapping[str, Any] = "adamw", space: Space | None = None,
    tables: Tables | None = None,
) -> Within:  # fmt: skip
    """The least stated time that keeps at most `limit_bytes` a device: parameters, gradients, optimizer states, and what is saved, `in_flight` times.

    Arguments as of `planner.placement.search`. Raises PlanError where nothing fits.
    """
    tables = new_tables(axes, mesh_shape, pricing) if tables is None else tables

    def ask(worth: ByLayer, limits: Space, given: Given = ({}, {}, {})) -> Line:
        rules, hubs, params = given
        placed = price(
            graph, axes, mesh_shape, pricing, rules=rules, hubs=hubs, params=params, num_microbatches=num_microbatches, memory_price=worth,
            in_flight=in_flight, recompute=recompute,
            optimizer=optimizer, space=(space or Space()) & limits, tables=tables,
        )  # fmt: skip
        return Line(placed.time_s, sum(placed.nbytes.values()), placed)

    return _Branches(graph, tuple(axes), limit_bytes, ask).best()


@dataclass
class _Branches:
    """Branch and bound over parameters outside of the equal layers, which no mixing divides: each as the placement that is too large has it, or not."""

    graph: Graph
    axes: tuple[str, ...]
    limit: float
    ask: Callable[..., Line]

    def best(self) -> Within:
        counter = itertools.count()
        found = [self._solve(Space())]
        open_nodes = [(found[0].bound_s, next(counter), found[0], Space())]
        for _ in range(MOST_BRANCHES):
            best = min(found, key=lambda w: w.placed.time_s)
            bound_s, _, node, limits = open_nodes[0]
            split = self._split(node)
            if bound_s >= best.placed.time_s * (1 - GOOD_GAP) or split is None:
                break
            heapq.heappop(open_nodes)
            for side in split:
                try:
                    child = self._solve(limits & side)
                except PlanError:
                    continue  # nothing fits on this side: it bounds nothing
                found.append(child)
                heapq.heappush(open_nodes, (max(bound_s, child.bound_s), next(counter), child, limits & side))
            if not open_nodes:
                break
        best = min(found, key=lambda w: w.placed.time_s)
        bound_s = min((node[0] for node in open_nodes), default=best.placed.time_s)
        return replace(best, bound_s=min(bound_s, best.placed.time_s))

    def _split(self, node: Within) -> tuple[Space, Space] | None:
        """Two spaces that together are the whole: the largest parameter outside of numbered layers that the two sides of the jump hold otherwise."""
        if node.over is None:
            return None
        outside = [t for t in sorted(self.graph.params, key=lambda t: (-t.nbytes, t.name)) if not any(part.isdigit() for part in t.name.split("."))]
        for t in outside:
            mine, theirs = node.over.params[t.name], node.cheap.params[t.name]
            for k, axis in enumerate(self.axes):
                state = tuple(nd[k] for nd in mine)
                if state != tuple(nd[k] for nd in theirs):
                    return Space(params=(Limit(t.name, axis, state.__eq__),)), Space(params=(Limit(t.name, axis, state.__ne__),))
        return None

    def _solve(self, limits: Space) -> Within:
        """The price, the two sides of the jump, and the best mixture of them."""
        free = self.ask(0.0, limits)
        within, over, worth = dual(lambda p: self.ask(p, limits), self.limit, free.time_s / max(free.nbytes, 1.0))
        if over is None:
            return Within(_placed(within), _placed(within).bound, 0.0, _placed(within), None)
        best = within
        for line in self._mixtures(_placed(over), _placed(within), worth, limits):
            if line.nbytes <= self.limit and line.time_s < best.time_s:
                best = line
        return Within(_placed(best), over.time_s + worth * (over.nbytes - self.limit), worth, _placed(within), _placed(over))

    def _mixtures(self, over: Placed, within: Placed, worth: float, limits: Space) -> Iterator[Line]:
        """The first layers as in one placement, the rest as in the other; and the layer between, or two, at whichever price meets the limit.

        Bytes are a little cheaper in the first layers and a little dearer in the rest. With a price alone a mixture is found where going from one placement to
        the other costs nothing; with the decisions given, elsewhere as well.
        """
        order = self._order()

        def ask(first: int, last: int, between: float, given: bool) -> Line:
            prices = {layer: worth * (1 - NEARLY) if i < first else worth * (1 + NEARLY) if i >= last else between for i, layer in enumerate(order)}
            sides = {layer: over if i < first else within for i, layer in enumerate(order) if i < first or i >= last}
            return self.ask(prices, limits, _given(self.graph, lambda n: sides.get(n.layer)) if given else ({}, {}, {}))

        for given in (False, True):
            first = _last(lambda i, given=given: ask(i, i, worth, given).nbytes <= self.limit, len(order))  # type: ignore[misc]
            yield ask(first, first, worth, given)
            for last in (first + 1, first + 2):
                try:
                    yield dual(partial(lambda *a: ask(a[0], a[1], a[3], a[2]), first, last, given), self.limit, worth)[0]
                except PlanError:
                    continue  # even at its smallest this layer has no room
        yield from self._cut_layer(over, within, order[:first], order[first], worth, limits)

    def _cut_layer(self, over: Placed, within: Placed, before: Sequence[int], layer: int, worth: float, limits: Space) -> Iterator[Line]:
        """The layer in which the limit falls cut between two of its operators: what has the same price would otherwise jump together."""
        inside = [n.name for n in self.graph.nodes if n.layer == layer]
        ahead = frozenset(before)
        prices = {i: worth * (1 - NEARLY if i in ahead else 1 + NEARLY) for i in range(self.graph.num_layers)}

        def ask(num: int) -> Line:
            first = frozenset(inside[:num])
            return self.ask(prices, limits, _given(self.graph, lambda n: over if n.layer in ahead or n.name in first else within))

        yield ask(_last(lambda num: ask(num).nbytes <= self.limit, len(inside) + 1))

    def _order(self) -> list[int]:
        """Layers, those with most like them first: what is one of its kind jumps alone, and mixes with nothing."""
        keys = layer_keys(self.graph)
        number: dict[Hashable, int] = {}
        kinds = [number.setdefault(key, len(number)) for key in keys]
        return sorted(range(len(kinds)), key=lambda layer: (-kinds.count(kinds[layer]), layer))


def _placed(line: Line) -> Placed:
    assert isinstance(line.found, Placed)
    return line.found


def _given(graph: Graph, side_of: Callable[[Node], Placed | None]) -> Given:
    """The decisions of nodes as one placement or the other has them; tensors that nodes of different sides touch, or a node of neither, are left open."""
    around: dict[str, list[Placed | None]] = {}
    rules: dict[str, tuple[Rule, ...]] = {}
    for n in graph.nodes:
        side = side_of(n)
        if side is not None:
            rules[n.name] = side.rules[n.name]
        for t in (*n.inputs, *n.outputs):
            around.setdefault(t, []).append(side)
    hubs: dict[str, Hub] = {}
    params: dict[str, ParamPlacement] = {}
    for t, found in around.items():
        side, role = found[0], graph.tensors[t].role
        if side is None or any(other is not side for other in found):
            continue
        if role == "param":
            params[t] = side.params[t]
        elif role == "value" and (len(found) > 1 or t in graph.outputs):
            hubs[t] = side.hubs[t]
    return rules, hubs, params


def _last(fits: Callable[[int], bool], num: int) -> int:
    """The last of `num` places, by halving, that fits; 0 where none does."""
    low, high = 0, num
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

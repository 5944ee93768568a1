"""The cheapest placement of a whole model within a number of bytes a device.

A price for a byte gives a bound, and equal layers that all move together when it rises; so each layer is placed for itself. All ways near the best at that
price to place a block, and the rest around the blocks (`planner.fronts`), are mixed by how many blocks take each, switches between them included
(`planner.mix`). Where nothing near the best was left out, what the mixture cannot go below is a bound as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ir.errors import PlanError
from ir.graph import Graph
from planner.costs import ByLayer
from planner.fronts import Fronts
from planner.mix import Mix, Ways
from planner.placed import Placed, read
from planner.placement import new_tables, problem
from planner.pricing import TIE_KEPT_S, Pricing
from planner.problem import Problem
from planner.solver.blocks import CannotFold, Repeated, fold
from planner.solver.chain import Chain, least_sum
from planner.solver.elimination import solve
from planner.solver.factors import Solution
from planner.solver.gathered import Table
from planner.solver.marginals import Marginals
from planner.solver.reductions import Factors
from planner.space import Space
from planner.tables import Tables
from planner.trade import Line, Picked, Trade, dual

GOOD_GAP = 5e-4
"""The search for something better ends where this share of the time at most could be saved."""

EFFORTS = ((3e-4, 48), (1e-3, 48), (4e-3, 128), (1.6e-2, 256), (6.4e-2, 1024))
"""(share of the time above the bound up to which ways to place something are looked at, points of a front), one after the other."""

ALONE = ((1e-3, 512), (math.inf, 512))
"""The same for a model without a chain of equal blocks: of its front one point alone has to meet the limit."""


@dataclass(frozen=True)
class Within:
    """`placed` keeps at most the limit; nothing in the space that does takes less than `bound_s`. `price`: seconds that a byte is worth there."""

    placed: Placed
    bound_s: float
    price: float

    @property
    def nbytes(self) -> float:
        return sum(self.placed.nbytes.values())

    @property
    def gap(self) -> float:
        """The share of its time that a placement within the limit could save at most."""
        return max(0.0, 1.0 - self.bound_s / self.placed.time_s)


def search_within(
    graph: Graph, axes: Sequence[str], mesh_shape: Sequence[int], pricing: Pricing, limit_bytes: float, *, num_microbatches: int,
    in_flight: ByLayer = 1, recompute: Sequence[int | str] = (), selective: bool = False, optimizer: str | Mapping[str, Any] = "adamw",
    space: Space | None = None, tables: Tables | None = None, exposed: float = 1.0, good_gap: float = GOOD_GAP,
) -> Within:  # fmt: skip
    """The least stated time that keeps at most `limit_bytes` a device: parameters, gradients, optimizer states, and what is saved, `in_flight` times.

    `good_gap`: the share of the time that may be left to save where the search ends. Other arguments as of `planner.placement.search`. Raises PlanError where
    nothing fits.
    """
    start = time.perf_counter()
    tables = new_tables(axes, mesh_shape, pricing) if tables is None else tables

    def made(folded: bool) -> Problem:
        return problem(
            graph, axes, mesh_shape, pricing, num_microbatches=num_microbatches, in_flight=in_flight, recompute=recompute, selective=selective,
            optimizer=optimizer, space=space, tables=tables, exposed=exposed, folded=folded,
        )  # fmt: skip

    try:
        return _Search(made(True), limit_bytes, start, good_gap).best()
    except CannotFold:
        return _Search(made(False), limit_bytes, start, good_gap).best()


@dataclass(frozen=True)
class _Part:
    """Some variables of a trade, with some of its edges. `ends`: those at which it meets another part, by their place in `names`."""

    trade: Trade
    names: tuple[int, ...]
    edges: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, whole: Trade, names: Sequence[int], edges: Sequence[int], ends: Sequence[int], bare: Sequence[int]) -> _Part:
        """`bare`: an end whose own table belongs to the other part."""
        return cls(whole.part(names, edges, bare), tuple(names), tuple(edges), tuple(names.index(v) for v in ends))

    def marginals(self, price: float, slack: float, outside: Table | None) -> Marginals:
        """`outside`: what the states of the two ends cost elsewhere."""
        graph = self.trade.at(price)
        if outside is not None:
            graph = replace(graph, edges=(*graph.edges, (self.ends[0], self.ends[1])), pairwise=(*graph.pairwise, outside))
        return Marginals.of(graph, self.ends, slack)

    def write(self, picked: Picked, states: list[int], ways: list[int]) -> None:
        """By the numbers of the whole."""
        for v, state in zip(self.names, picked.states, strict=True):
            states[v] = state
        for table, way in zip((*self.names, *(len(states) + e for e in self.edges)), picked.ways, strict=True):
            ways[table] = way


@dataclass(frozen=True, slots=True)
class _Choice:
    """An assignment of the rest, and one of each block, in order."""

    rest: Picked
    blocks: tuple[Picked, ...]


@dataclass(frozen=True)
class _Search:
    problem: Problem
    limit: float
    start_s: float
    good_gap: float

    def best(self) -> Within:
        free = self._ask(TIE_KEPT_S)
        within, over, price = dual(lambda p: self._ask(max(p, TIE_KEPT_S)), self.limit, free.time_s / max(free.nbytes, 1.0))
        if over is None:
            return self._told(within, within.time_s, 0.0)
        best, bound_s = within, over.time_s + price * (over.nbytes - self.limit)
        priced = _Priced(self.rest, self.block, self.repeated, self.block_table(price), price) if self.repeated else None
        least_s = bound_s
        slack = 0.0
        for share, most in EFFORTS if priced else ALONE:
            # where nothing was left out but points of fronts there is less to be found
            if best.time_s * (1 - self.good_gap * (1 if slack < best.time_s - least_s else 2)) <= bound_s:
                break
            slack = min(share * least_s, best.time_s - least_s)
            found, mixed_s = self._mixed(price, slack, most, priced)
            bound_s = max(bound_s, min(mixed_s, least_s + slack))
            best = min(best, found or best, key=lambda line: line.time_s)
        return self._told(best, min(bound_s, best.time_s), price)

    # ---- the parts -------------------------------------------------------------------------------------------------------------------------------

    @cached_property
    def trade(self) -> Trade:
        return self.problem.trade()

    @cached_property
    def repeated(self) -> Repeated | None:
        """The block that stands for several."""
        return next(iter(self.problem.repeated()), None)

    @cached_property
    def inside(self) -> tuple[int, ...]:
        return tuple(self.problem.blocks.values())[self.repeated.block] if self.repeated else ()

    @cached_property
    def rest(self) -> _Part:
        """All but the block, and but for the table of the variable after it, which is the block's."""
        among = frozenset(self.inside)
        names = [v for v in range(len(self.trade.num_states)) if v not in among]
        edges = [e for e, ends in enumerate(self.trade.edges) if among.isdisjoint(ends)]
        ends = (self.repeated.before, self.repeated.after) if self.repeated else ()
        return _Part.of(self.trade, names, edges, ends, ends[1:])

    @cached_property
    def block(self) -> _Part:
        assert self.repeated is not None
        among = frozenset(self.inside)
        ends = (self.repeated.before, self.repeated.after)
        edges = [e for e, touched in enumerate(self.trade.edges) if not among.isdisjoint(touched)]
        return _Part.of(self.trade, (*self.inside, *ends), edges, ends, ends[:1])

    # ---- at a price ------------------------------------------------------------------------------------------------------------------------------

    def _ask(self, price: float) -> Line:
        """The cheapest of all, by what it takes."""
        blocks, repeats = tuple(self.problem.blocks.values()), self.problem.repeated()
        found = solve(self.trade.at(price), blocks, repeats)
        if not found.states:
            mesh = dict(zip(self.problem.axes, self.problem.mesh_shape, strict=True))
            raise PlanError(f"no placement of `{self.problem.graph.name}` on mesh {mesh} satisfies all limits of the space at once; loosen one of them")
        rest = self.rest.trade.picked([found.states[v] for v in self.rest.names], price)
        known = {copy: self.block.trade.picked(copy, price) for copy in dict.fromkeys(found.repeated[0])} if self.repeated else {}
        return self._line(_Choice(rest, tuple(known[copy] for copy in found.repeated[0]) if self.repeated else ()))

    def _line(self, choice: _Choice) -> Line:
        totals = [self.rest.trade.total(choice.rest)]
        known = {picked: self.block.trade.total(picked) for picked in dict.fromkeys(choice.blocks)}
        totals += [known[picked] for picked in choice.blocks]
        return Line(sum(t for t, _ in totals), sum(n for _, n in totals), choice)

    def block_table(self, price: float) -> Table:
        """[state before, state after] the least cost of a block."""
        assert self.repeated is not None
        factors = Factors.of(self.block.trade.at(price))
        inside = range(len(self.inside))
        folded = fold(factors, [tuple(inside)], [Repeated(0, 2, *self.block.ends)])
        own = self.trade.at(price).unary[self.repeated.after]
        assert folded[0].chain is not None
        return folded[0].chain.block + own[None, :]

    def _mixed(self, price: float, slack: float, most: int, priced: _Priced | None) -> tuple[Line | None, float]:
        """The best mixture of ways that are within the slack, and a bound of all such."""
        if priced is None:
            marginals = self.rest.marginals(price, slack, None)
            alone = Fronts(self.rest.trade, (), price, marginals, slack, most)
            fits = np.flatnonzero(alone.nbytes <= self.limit)
            over = alone.nbytes - self.limit
            bound_s = float(np.min(alone.time_s + price * np.maximum(over, -alone.lost), where=over <= alone.lost, initial=np.inf))
            return (self._line(_Choice(alone.picked(int(fits[alone.time_s[fits].argmin()])), ())) if len(fits) else None), bound_s
        rest, block = priced.fronts(slack, most)
        found, bound_s = Mix(_ways(rest), _ways(block), priced.repeated.count, self.limit, price).best()
        if found is None:
            return None, bound_s
        known = {way: block.picked(way) for way in dict.fromkeys(found.blocks)}
        return self._line(_Choice(rest.picked(found.rest), tuple(known[way] for way in found.blocks))), bound_s

    # ---- the answer ------------------------------------------------------------------------------------------------------------------------------

    def _told(self, line: Line, bound_s: float, price: float) -> Within:
        choice = line.found
        assert isinstance(choice, _Choice)
        num, size = len(self.trade.num_states), len(self.trade.num_states) + len(self.trade.edges)
        states, outer = [0] * num, [0] * size
        self.rest.write(choice.rest, states, outer)
        all_ways = [outer]
        for picked in choice.blocks:
            all_ways.append([0] * size)
            self.block.write(picked, states, all_ways[-1])
        if self.repeated:
            before, after = self.repeated.before, self.repeated.after
            # the variable before a block is the one after the block before it
            for k, ways in enumerate(all_ways[1:]):
                ways[before] = all_ways[k][after if k else before]
            outer[after] = all_ways[-1][after]
            self.rest.write(choice.rest, states, [0] * size)
        copies = (tuple(picked.states for picked in choice.blocks),) if choice.blocks else ()
        solution = Solution(tuple(states), line.time_s, bound_s, bound_s >= line.time_s * (1 - 1e-9), "mixture", copies)
        placed = read(self.problem, solution, self.start_s, [tuple(ways) for ways in all_ways])
        return Within(replace(placed, time_s=line.time_s), bound_s, price)


@dataclass(frozen=True)
class _Priced:
    """The rest and a chain of `repeated.count` blocks at a price; `table`: of one block, [state before, state after], with the variable after it."""

    rest: _Part
    block: _Part
    repeated: Repeated
    table: Table
    price: float

    @cached_property
    def chain(self) -> Table:
        """[state before, state after] of all blocks in a row."""
        return Chain(self.table, np.zeros(len(self.table)), self.repeated.count).table

    def fronts(self, slack: float, most: int) -> tuple[Fronts, Fronts]:
        """Of the rest, and of a block wherever in the chain it stands."""
        around = self.rest.marginals(self.price, slack, self.chain)
        rest = Fronts(self.rest.trade, self.rest.ends, self.price, around, slack, most)
        around = self.block.marginals(self.price, slack, self._around(around.table(self.rest.ends)))
        return rest, Fronts(self.block.trade, self.block.ends, self.price, around, slack, most)

    def _around(self, both: Table) -> Table:
        """[state before, state after] the least that all but one block of the chain cost; `both`: what all cost by the states at the two ends of the chain."""
        near = np.isfinite(both)
        beside = np.where(near, both - np.where(near, self.chain, 0.0), np.inf)
        first, last = np.flatnonzero(near.any(axis=1)), np.flatnonzero(near.any(axis=0))
        apart = np.where(np.eye(len(self.table), dtype=bool), 0.0, np.inf)
        ahead, behind = [apart[first]], [apart[:, last]]
        for _ in range(self.repeated.count - 1):
            ahead.append(least_sum(ahead[-1], self.table))
            behind.append(least_sum(self.table, behind[-1]))
        out = np.full(self.table.shape, np.inf)
        for a, b in zip(ahead, reversed(behind), strict=True):
            np.minimum(out, least_sum(least_sum(a.T, beside[np.ix_(first, last)]), b.T), out=out)
        return out


def _ways(fronts: Fronts) -> Ways:
    return Ways(fronts.states[:, 0], fronts.states[:, 1], fronts.time_s, fronts.nbytes, fronts.lost)

"""A factor graph of two costs, seconds and bytes: the least seconds within a number of bytes, exactly.

Lagrange first: with a price for a byte the two are one cost, which elimination minimises, and the best price comes from the lines through two answers, one that
fits and one that does not. Its minimum bounds every answer from below. A state whose own minimum at that price is above the best answer that fits is in no
better one: what is left of the states is small, and the integer program on it finds the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, vstack

from ir.errors import PlanError
from planner.solver.elimination import solve
from planner.solver.factors import FactorGraph
from planner.solver.gathered import Table
from planner.solver.marginals import Marginals

Options = tuple[tuple[Table, Table], ...]
"""(seconds, bytes) of each way to have a table's states; of each entry one way is taken."""

MOST_LINES = 60
"""Prices that are tried at most; each strictly betters the bound."""


@dataclass(frozen=True, slots=True)
class Trade:
    """As `planner.solver.factors.FactorGraph`, with options in place of costs."""

    num_states: tuple[int, ...]
    unary: tuple[Options, ...]
    edges: tuple[tuple[int, int], ...]
    pairwise: tuple[Options, ...]

    def at(self, price: float) -> FactorGraph:
        """One cost: seconds, and `price` seconds for each byte."""
        made = {id(options): _cheapest(options, price) for options in (*self.unary, *self.pairwise)}
        unary, pairwise = (tuple(made[id(options)] for options in tables) for tables in (self.unary, self.pairwise))
        return FactorGraph(self.num_states, unary, self.edges, pairwise)

    def entries(self, states: Sequence[int]) -> list[list[tuple[float, float]]]:
        """Of each table, those of variables first, (seconds, bytes) of each way to have these states."""
        entries = [[(t[states[v]], n[states[v]]) for t, n in options] for v, options in enumerate(self.unary)]
        edges = zip(self.edges, self.pairwise, strict=True)
        return entries + [[(t[states[a], states[b]], n[states[a], states[b]]) for t, n in options] for (a, b), options in edges]

    def picked(self, states: Sequence[int], price: float) -> Picked:
        """These states in the ways that are cheapest at this price; of equally cheap ones the first."""
        every = [[t + price * n for t, n in ways] for ways in self.entries(states)]
        return Picked(tuple(states), tuple(costs.index(min(costs)) for costs in every))

    def total(self, picked: Picked) -> tuple[float, float]:
        """(seconds, bytes)"""
        chosen = [ways[k] for ways, k in zip(self.entries(picked.states), picked.ways, strict=True)]
        return float(sum(t for t, _ in chosen)), float(sum(n for _, n in chosen))

    def read(self, states: Sequence[int], price: float) -> tuple[float, float]:
        """(seconds, bytes) of an assignment in the ways that are cheapest at this price."""
        return self.total(self.picked(states, price))

    def restricted(self, kept: Sequence[NDArray[np.intp]]) -> Trade:
        """With these states alone."""
        unary = tuple(tuple((t[k], n[k]) for t, n in options) for k, options in zip(kept, self.unary, strict=True))
        pairwise = tuple(
            tuple((t[np.ix_(kept[a], kept[b])], n[np.ix_(kept[a], kept[b])]) for t, n in options)
            for (a, b), options in zip(self.edges, self.pairwise, strict=True)
        )
        return Trade(tuple(len(k) for k in kept), unary, self.edges, pairwise)

    def part(self, variables: Sequence[int], edges: Sequence[int], bare: Collection[int] = ()) -> Trade:
        """Of these variables and edges, numbered anew; the tables of `bare` variables are left out, their options are nothing."""
        place = {v: i for i, v in enumerate(variables)}
        nothing = {v: ((np.zeros(self.num_states[v]), np.zeros(self.num_states[v])),) for v in bare}
        unary = tuple(nothing.get(v, self.unary[v]) for v in variables)
        ends = tuple((place[a], place[b]) for a, b in (self.edges[e] for e in edges))
        return Trade(tuple(self.num_states[v] for v in variables), unary, ends, tuple(self.pairwise[e] for e in edges))


@dataclass(frozen=True, slots=True)
class Picked:
    """A state for every variable of a trade, and for every table, those of variables first, the number of the way that is taken."""

    states: tuple[int, ...]
    ways: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """`states` take `time_s` and `nbytes`; within the limit nothing takes less than `bound`. `price`: seconds that one more byte is worth."""

    states: tuple[int, ...]
    time_s: float
    nbytes: float
    bound: float
    price: float

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.bound / self.time_s) if self.time_s else 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """An answer of the relaxed problem: what it takes, what it keeps, and whatever the solver said."""

    time_s: float
    nbytes: float
    found: object


def dual(ask: Callable[[float], Line], limit: float, scale: float) -> tuple[Line, Line | None, float]:
    """(the best that fits, the cheapest that does not, the price at which both cost the same); without a price where all fits.

    `ask(price)` minimises seconds + price x bytes; `scale`: a price at which memory is dear. Raises PlanError where nothing fits, with the least bytes.
    """
    over = ask(0.0)
    if over.nbytes <= limit:
        return over, None, 0.0
    price = scale
    within = ask(price)
    while within.nbytes > limit:
        if price > 1e9 * scale:
            raise PlanError(f"nothing fits within {limit:.0f} bytes; the least is {within.nbytes:.0f}")
        over, price = within, price * 16
        within = ask(price)
    for _ in range(MOST_LINES):
        price = (within.time_s - over.time_s) / (over.nbytes - within.nbytes)
        line = ask(price)
        value, known = line.time_s + price * line.nbytes, over.time_s + price * over.nbytes
        if value >= known - 1e-12 * abs(known):
            break
        if line.nbytes <= limit:
            within = line
        else:
            over = line
    return within, over, price


def solve_within(trade: Trade, limit: float) -> Answer:
    """The least seconds within `limit` bytes, exactly. Raises PlanError where nothing fits."""

    def ask(price: float) -> Line:
        found = solve(trade.at(price))
        if not found.states:
            raise PlanError("nothing satisfies all limits at once")
        return Line(*trade.read(found.states, price), found.states)

    free = ask(0.0)
    within, over, price = dual(ask, limit, free.time_s / max(free.nbytes, 1.0))
    best = Answer(tuple(within.found), within.time_s, within.nbytes, within.time_s, price)  # type: ignore[arg-type]
    if over is None:
        return best
    bound = over.time_s + price * (over.nbytes - limit)
    marginals = Marginals.of(trade.at(price), slack=best.time_s * (1 + 1e-12) - bound)
    kept = [marginals.near((v,)).states[:, 0] for v in range(len(trade.num_states))]
    exact = integer_within(trade.restricted(kept), limit)
    if exact is None or exact.time_s > best.time_s:
        return replace(best, bound=min(best.time_s, max(bound, exact.bound if exact else bound)))
    states = tuple(int(k[s]) for k, s in zip(kept, exact.states, strict=True))
    return Answer(states, exact.time_s, exact.nbytes, max(bound, exact.bound), price)


def integer_within(trade: Trade, limit: float, seconds: float = math.inf) -> Answer | None:
    """All states, entries and ways given to HiGHS's branch and bound with one row for the bytes; None where nothing fits. The slow twin of `solve_within`.

    After so many `seconds` the best that it knows, and its bound; where it knows no answer, one without states that takes for ever.
    """
    columns = _columns(trade)
    second, byte = max(float(np.abs(columns.seconds).max()), 1e-30), max(limit, 1.0)
    where = np.flatnonzero(columns.nbytes)
    memory = coo_array((columns.nbytes[where] / byte, (np.zeros(len(where), dtype=int), where)), shape=(1, len(columns.seconds)))
    rows = vstack([columns.rows, memory]).tocsr()
    low, high = np.append(columns.low, -np.inf), np.append(columns.high, limit / byte)
    found = milp(
        columns.seconds / second,
        constraints=LinearConstraint(rows, low, high),
        integrality=columns.integral,
        bounds=Bounds(0.0, 1.0),
        options={"mip_rel_gap": 0.0, "time_limit": seconds},
    )
    if found.status == 2:
        return None
    if found.x is None and found.status == 1:
        return Answer((), math.inf, 0.0, max(0.0, float(found.mip_dual_bound or 0.0) * second), 0.0)
    if found.x is None:
        raise PlanError(f"HiGHS could not solve the integer program of {len(columns.seconds)} columns: {found.message}")
    x = np.round(found.x)
    time_s = float(columns.seconds @ x)
    bound = time_s if found.status == 0 else float(found.mip_dual_bound) * second
    states = tuple(int(m.argmax()) for m in np.split(x[: sum(trade.num_states)], np.cumsum(trade.num_states)[:-1]))
    return Answer(states, time_s, float(columns.nbytes @ x), min(bound, time_s), 0.0)


@dataclass(frozen=True, slots=True)
class _Program:
    """Minimise `seconds @ x`, `low <= rows @ x <= high`, x in [0, 1], where `integral` is 1 an integer. The first columns are the states of the variables."""

    seconds: Table
    nbytes: Table
    integral: NDArray[np.int64]
    rows: coo_array
    low: Table
    high: Table


@dataclass
class _Builder:
    """Columns and rows, written block by block."""

    seconds: list[Table] = field(default_factory=list)
    nbytes: list[Table] = field(default_factory=list)
    integral: list[NDArray[np.int64]] = field(default_factory=list)
    entries: list[tuple[NDArray[np.intp], NDArray[np.intp], Table]] = field(default_factory=list)
    low: list[Table] = field(default_factory=list)
    high: list[Table] = field(default_factory=list)
    num_columns: int = 0
    num_rows: int = 0

    def columns(self, seconds: Table, nbytes: Table, integral: bool) -> NDArray[np.intp]:
        """New columns; their numbers."""
        self.seconds.append(seconds)
        self.nbytes.append(nbytes)
        self.integral.append(np.full(len(seconds), int(integral), dtype=np.int64))
        self.num_columns += len(seconds)
        return np.arange(self.num_columns - len(seconds), self.num_columns)

    def rows(self, parts: Sequence[tuple[NDArray[np.intp], NDArray[np.intp], float]], num: int, low: float, high: float) -> None:
        """`num` new rows; each part: (row, column, coefficient) of its entries."""
        self.entries += [(self.num_rows + row, column, np.full(len(row), value)) for row, column, value in parts]
        self.low.append(np.full(num, low))
        self.high.append(np.full(num, high))
        self.num_rows += num

    def ways(self, options: Options, at: tuple[NDArray[np.intp], ...], first: NDArray[np.intp]) -> None:
        """The other ways of entries whose first way has the columns `first`: what they cost above it, and that they need it."""
        (time_s, nbytes), *others = options
        for other_s, other_bytes in others:
            may = np.flatnonzero(np.isfinite(other_s[at]))
            more = self.columns((other_s - np.where(np.isfinite(time_s), time_s, 0.0))[at][may], (other_bytes - nbytes)[at][may], True)
            self.rows([(np.arange(len(may)), more, 1.0), (np.arange(len(may)), first[may], -1.0)], len(may), -np.inf, 0.0)

    def done(self) -> _Program:
        row, column, value = (np.concatenate([e[i] for e in self.entries]) for i in range(3))
        rows = coo_array((value, (row, column)), shape=(self.num_rows, self.num_columns))
        costs = np.concatenate(self.seconds), np.concatenate(self.nbytes)
        return _Program(*costs, np.concatenate(self.integral), rows, np.concatenate(self.low), np.concatenate(self.high))


def _columns(trade: Trade) -> _Program:
    build = _Builder()
    states = [build.columns(np.where(np.isfinite(o[0][0]), o[0][0], 0.0), o[0][1], True) for o in trade.unary]
    for v, (mine, options) in enumerate(zip(states, trade.unary, strict=True)):
        possible = np.flatnonzero(np.isfinite(options[0][0]))
        build.rows([(np.zeros(len(possible), dtype=int), mine[possible], 1.0)], 1, 1.0, 1.0)
        never = np.flatnonzero(~np.isfinite(options[0][0]))
        build.rows([(np.arange(len(never)), mine[never], 1.0)], len(never), 0.0, 0.0)
        build.ways(options, (np.arange(trade.num_states[v]),), mine)
    for (a, b), options in zip(trade.edges, trade.pairwise, strict=True):
        at = np.nonzero(np.isfinite(options[0][0]))
        pairs = build.columns(options[0][0][at], options[0][1][at], False)
        for v, i in ((a, at[0]), (b, at[1])):
            n = trade.num_states[v]
            build.rows([(i, pairs, 1.0), (np.arange(n), states[v], -1.0)], n, 0.0, 0.0)
        build.ways(options, at, pairs)
    return build.done()


def _cheapest(options: Options, price: float) -> Table:
    """Seconds and the price of the bytes, of the cheapest way to each entry."""
    out = options[0][0] + price * options[0][1]
    for time_s, nbytes in options[1:]:
        out = np.minimum(out, time_s + price * nbytes)
    return out

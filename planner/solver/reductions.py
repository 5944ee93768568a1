"""Exact reductions of a factor graph, each undone by back-substitution.

* arc consistency: a state that has no finite partner over some edge goes;
* function: over an edge that leaves one partner for every state of `a`, the other variable is a function of `a` (equal variables are the special case);
* elimination: a variable of degree 0, 1 or 2 is minimised out, (min,+), into a table over its neighbours;
* dominance: a state that another one never does worse than goes;
* elimination of higher degree (bucket elimination), where every table on the way stays within `TABLE_LIMIT`, and the work for it within `WORK_LIMIT`.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.solver.factors import FactorGraph, Scope, Table

TABLE_LIMIT = 1 << 23
"""Entries of the largest table that an elimination of degree 3 or more may leave: 64 MiB of float64."""

HEAVY = 1 << 26
"""Sums of an elimination before which it is worth looking for states that its variables can do without."""

WORK_LIMIT = 1 << 28
"""Sums that it may form for that, one for each entry and state of the eliminated variable: half a second."""

MANY = 1 << 22
"""Sums of an elimination from which it is worth looking for states that one of its tables cannot tell apart."""

IMPOSSIBLE = -1e300
"""How much less than any other a state costs that is impossible: finite, so that it can be added up."""

CHUNK = 1 << 22
"""Entries that a test of dominance forms at a time."""

FEW_PAIRS = 1 << 22
"""Entries of a test of dominance from which pairs are ruled out before all columns are looked at."""

MANY_PAIRS = 1 << 28
"""Entries from which it ends where little is found."""

ROUND = 32
"""States that try at a time to beat all others."""

TRIES = 3
"""Of these the likeliest that are judged on all columns, where there are many."""

SAMPLE = 16
"""Columns of each table by which pairs are ruled out."""

NEVER = 1e300
"""What an impossible state costs in a test of dominance: finite, so that it can be taken away; a tenth of it where it is the better one's."""


@dataclass(frozen=True, slots=True)
class Image:
    """`var` is a function of `source`: a substitution undone, or states dropped (a function of itself)."""

    var: int
    source: int
    table: NDArray[np.intp]

    def state(self, states: Sequence[int]) -> int:
        return int(self.table[states[self.source]])


@dataclass(frozen=True, slots=True)
class Best:
    """`var` takes the first state of least cost once its neighbours are known; the last axis of every table is its own."""

    var: int
    scopes: tuple[Scope, ...]
    tables: tuple[Table, ...]

    def state(self, states: Sequence[int]) -> int:
        total = sum(table[tuple(states[v] for v in scope)] for scope, table in zip(self.scopes, self.tables, strict=True))
        return int(np.argmin(total))


Undo = Image | Best


def substitute_back(trail: Iterable[Undo], states: list[int]) -> None:
    for undo in reversed(list(trail)):
        states[undo.var] = undo.state(states)


@dataclass
class Factors:
    """Tables over sorted scopes, being reduced; `trail` is the way back to the states of the variables that are gone or have lost states.

    `constant`: the least cost of parts of the graph that are wholly gone. `changed`: variables whose tables are others than when the reductions last looked at
    them. `tried`: the entries of the last test of dominance of a variable; one of many is made again when it has become half as large.
    """

    size: dict[int, int]
    tables: dict[Scope, Table] = field(default_factory=dict)
    touching: dict[int, dict[Scope, None]] = field(default_factory=dict)
    trail: list[Undo] = field(default_factory=list)
    keep: frozenset[int] = frozenset()
    infeasible: bool = False
    constant: float = 0.0
    changed: dict[int, None] = field(default_factory=dict)
    tried: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: FactorGraph) -> Factors:
        made = cls(dict(enumerate(graph.num_states)))
        made.touching = {v: {} for v in made.size}
        for v, table in enumerate(graph.unary):
            made.add((v,), table)
        for scope, table in zip(graph.edges, graph.pairwise, strict=True):
            made.add(scope, table)
        return made

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(self.size)

    def add(self, scope: Scope, table: Table) -> None:
        key = scope
        if len(scope) > 1 and list(scope) != sorted(scope):
            order = sorted(range(len(scope)), key=scope.__getitem__)
            key, table = tuple(scope[i] for i in order), table.transpose(order)
        known = self.tables.get(key)
        self.tables[key] = table if known is None else known + table
        for v in key:
            self.touching[v][key] = None
            self.changed[v] = None

    def pop(self, scope: Scope) -> Table:
        for v in scope:
            del self.touching[v][scope]
            self.changed[v] = None
        return self.tables.pop(scope)

    def neighbours(self, v: int) -> Scope:
        return tuple(sorted({u for scope in self.touching[v] for u in scope} - {v}))

    def weight(self, v: int) -> int:
        """Entries that eliminating `v` forms."""
        return math.prod((self.size[u] for u in self.neighbours(v)), start=self.size[v])

    # ---- elimination -----------------------------------------------------------------------------------------------------------------------------

    def eliminate(self, v: int) -> None:
        """Minimises `v` out into a table over its neighbours."""
        around = self.neighbours(v)
        scopes, tables = [], []
        for scope in sorted(self.touching[v], key=len):
            axis = scope.index(v)
            tables.append(np.moveaxis(self.pop(scope), axis, -1))
            scopes.append((*scope[:axis], *scope[axis + 1 :]))
        self.trail.append(Best(v, tuple(scopes), tuple(tables)))
        best = _minimum([_spread(t, s, around) for s, t in zip(scopes, tables, strict=True)], tuple(self.size[u] for u in around))
        del self.size[v], self.touching[v]
        if around:
            self.add(around, best)
        else:
            self.constant += float(best)
            self.infeasible |= not math.isfinite(self.constant)

    def eliminate_all(self, degree: int | None = None, among: Iterable[int] | None = None, most: float = math.inf) -> None:
        """Eliminates every variable, those of least weight first, that is not kept; with `degree` only while one of at most that degree is left.

        `among`: where to begin (everywhere). `most`: what weighs more stays.
        """
        queue: list[tuple[int, int]] = []

        def enqueue(some: Iterable[int]) -> None:
            for v in some:
                if v in self.size and v not in self.keep and (degree is None or len(self.neighbours(v)) <= degree) and self.weight(v) <= most:
                    heapq.heappush(queue, (self.weight(v), v))

        enqueue(self.alive if among is None else among)
        while queue:
            weight, v = heapq.heappop(queue)
            if v in self.size and weight == self.weight(v) and (degree is None or len(self.neighbours(v)) <= degree):
                around = self.neighbours(v)
                self.eliminate(v)
                enqueue(around)  # each as its neighbours now are; what stands in the queue of before is passed over

    def treewidth_affordable(self) -> bool:
        """Whether eliminating everything that is not kept, least weight first, stays within `TABLE_LIMIT` and `WORK_LIMIT`."""
        around = {v: set(self.neighbours(v)) for v in self.size}
        left = [v for v in self.size if v not in self.keep]
        while left:
            weights = [(math.prod((self.size[u] for u in around[v]), start=self.size[v]), v) for v in left]
            weight, v = min(weights)
            if len(around[v]) > 2 and (weight > WORK_LIMIT or weight // self.size[v] > TABLE_LIMIT):
                return False
            for u in around[v]:
                around[u] |= around[v] - {u}
                around[u].discard(v)
            del around[v]
            left.remove(v)
        return True

    # ---- the other reductions, on pairwise tables ------------------------------------------------------------------------------------------------

    def reduce(self, most: float = math.inf) -> None:
        """All pairwise reductions until nothing moves; each looks again only where tables have changed. `most` as of `eliminate_all`."""
        self.consistent(self.alive)
        self.functions(self.alive)
        self.changed = dict.fromkeys(self.alive)
        while self.changed and not self.infeasible:
            self.eliminate_all(degree=2, among=tuple(self.changed), most=most)
            look = tuple(v for v in self.changed if v in self.size)
            self.changed = {}
            self.consistent(look)
            self.functions(look)
            self.dominance(look)

    def shrink(self, v: int, kept: NDArray[np.bool_]) -> None:
        """Drops the states of `v` that are not kept."""
        where = np.flatnonzero(kept)
        if len(where) == 0:
            self.infeasible = True
            return
        self.trail.append(Image(v, v, where))
        self.size[v] = len(where)
        for scope in self.touching[v]:
            self.tables[scope] = self.tables[scope].take(where, axis=scope.index(v))
            self.changed.update(dict.fromkeys(scope))

    def consistent(self, which: Iterable[int]) -> None:
        """Drops every state that has an infinite unary cost or no finite partner in some table."""
        queue = dict.fromkeys(v for v in which if v in self.size and v not in self.keep)
        while queue and not self.infeasible:
            v = next(iter(queue))
            del queue[v]
            kept = np.ones(self.size[v], dtype=bool)
            for scope in self.touching[v]:
                axis = scope.index(v)
                others = tuple(i for i in range(len(scope)) if i != axis)
                kept &= np.isfinite(self.tables[scope]).any(axis=others) if others else np.isfinite(self.tables[scope])
            if not kept.all():
                self.shrink(v, kept)
                queue.update(dict.fromkeys(u for u in self.neighbours(v) if u not in self.keep))

    def functions(self, which: Iterable[int]) -> None:
        """Replaces every variable that is a function of a neighbour over a pairwise table."""
        for a in which:
            for b in self.neighbours(a) if a in self.size and not self.infeasible else ():
                if b in self.keep or b not in self.size:
                    continue
                scope = (min(a, b), max(a, b))
                table = self.tables.get(scope)
                if table is None:
                    continue
                finite = np.isfinite(table if scope[0] == a else table.T)
                if (finite.sum(axis=1) == 1).all():
                    self.substitute(b, a, finite.argmax(axis=1))

    def substitute(self, b: int, a: int, image: NDArray[np.intp]) -> None:
        """Writes `b` as the function `image` of `a`."""
        parts = [(s, self.pop(s)) for s in tuple(self.touching[b])]
        del self.size[b], self.touching[b]
        self.trail.append(Image(b, a, image))
        for scope, table in parts:
            axis = scope.index(b)
            taken = table.take(image, axis=axis)
            if a in scope:
                other = scope.index(a)
                taken = np.moveaxis(np.diagonal(taken, axis1=axis, axis2=other), -1, other - (axis < other))
                self.add(tuple(u for u in scope if u != b), taken)
            else:
                self.add(tuple(a if u == b else u for u in scope), taken)

    def dominance(self, which: Iterable[int]) -> None:
        """Drops states that another state of the same variable never does worse than; of equal ones the first stays."""
        for v in which:
            n = self.size.get(v, 1)
            if v in self.keep or n == 1 or any(len(s) > 2 for s in self.touching[v]):
                continue
            pairs = n * n * sum(self.tables[s].size // n for s in self.touching[v])
            if pairs > MANY_PAIRS and 2 * pairs > self.tried.get(v, math.inf):
                continue
            self.tried[v] = pairs
            kept = undominated([self.tables[s].reshape(n, -1) if s[0] == v else self.tables[s].T for s in self.touching[v]])
            if not kept.all():
                self.shrink(v, kept)

    def as_graph(self) -> FactorGraph:
        """What is left, variables renumbered in order."""
        place = {v: i for i, v in enumerate(self.size)}
        unary = [self.tables.get((v,), np.zeros(n)) for v, n in self.size.items()]
        edges = [s for s in self.tables if len(s) == 2]
        return FactorGraph(
            tuple(self.size.values()), tuple(unary), tuple((place[a], place[b]) for a, b in edges), tuple(self.tables[s] for s in edges),
        )  # fmt: skip


def _spread(table: Table, scope: Scope, around: Scope) -> Table:
    """`table`, whose axes are sorted `scope` and one more, with its axes where `around` has them and length 1 elsewhere; the last axis stays last."""
    return table.reshape([table.shape[scope.index(v)] if v in scope else 1 for v in around] + [table.shape[-1]])


def _minimum(parts: Sequence[Table], shape: tuple[int, ...]) -> Table:
    """The minimum over the last axis of the sum of `parts`, broadcast to (*shape, last).

    Over two axes or more it is taken state by state: each sum is formed once, in a table that stays in the cache.
    """
    if len(shape) < 2:
        total = sum(parts[1:], start=parts[0])
        return np.broadcast_to(np.asarray(total.min(axis=-1)), shape)
    parts = _without_twins(parts, shape)
    slices = [np.ascontiguousarray(np.moveaxis(part, -1, 0)) for part in parts]
    best = np.full(shape, np.inf)
    total = np.empty(shape)
    for i in range(parts[0].shape[-1]):
        if len(slices) == 1:
            np.minimum(best, slices[0][i], out=best)
            continue
        np.add(slices[0][i], slices[1][i], out=total)
        for part in slices[2:]:
            np.add(total, part[i], out=total)
        np.minimum(best, total, out=best)
    return best


def _without_twins(parts: Sequence[Table], shape: tuple[int, ...]) -> list[Table]:
    """The same minimum with fewer states in the last axis: of those that the largest part cannot tell apart, the others' least is taken first."""
    large = max(parts, key=lambda part: part.size)
    rest = [part for part in parts if part is not large]
    n = large.shape[-1]
    if math.prod(shape) * n < MANY or not rest or math.prod(np.broadcast_shapes(*(part.shape for part in rest))) * 4 > math.prod(shape) * n:
        return list(parts)
    columns = np.ascontiguousarray(np.moveaxis(large, -1, 0)).reshape(n, -1)
    groups: dict[bytes, list[int]] = {}
    for i, column in enumerate(columns):
        groups.setdefault(hashlib.blake2b(column.tobytes(), digest_size=16).digest(), []).append(i)
    if len(groups) == n:
        return list(parts)
    total = sum(rest[1:], start=rest[0])
    least = np.stack([total[..., group].min(axis=-1) for group in groups.values()], axis=-1)
    return [large[..., [group[0] for group in groups.values()]], least]


def undominated(tables: Sequence[Table]) -> NDArray[np.bool_]:
    """Which states no other one is at least as good as, whatever happens elsewhere; of equal ones the first. A row of each table is a state."""
    n = len(tables[0])
    entries = n * n * sum(table.shape[1] for table in tables)
    if entries > FEW_PAIRS:
        return _undominated_by_rounds(tables, thorough=entries <= MANY_PAIRS)
    worse = np.zeros((n, n))
    for table in tables:
        worse += np.maximum(_excess(table), IMPOSSIBLE)
    beaten = (worse <= 0) & ((worse.T > 0) | (np.arange(n)[None, :] < np.arange(n)[:, None]))
    return np.logical_not(beaten.any(axis=1))


def _undominated_by_rounds(tables: Sequence[Table], thorough: bool) -> NDArray[np.bool_]:
    """The same where all pairs over all columns are many: the cheapest states try first, `ROUND` at a time, to beat whatever is left.

    A few columns rule most pairs out; what they leave is judged on all columns, for each state by its likeliest better ones first. Not `thorough`: by `TRIES`
    of them, and only until a round beats fewer than it has; some dominated states stay.
    """
    pairs = _Pairs(tables)
    alive = np.ones(len(tables[0]), dtype=bool)
    cheap_first = np.argsort(sum(np.minimum(t, t.max(where=t < NEVER, initial=0.0)).mean(axis=1) for t in pairs.samples), kind="stable")
    for first in range(0, len(cheap_first), ROUND):
        better = cheap_first[first : first + ROUND]
        better, rows = better[alive[better]], np.flatnonzero(alive)
        alive[pairs.beaten(rows, better, ROUND if thorough else TRIES)] = False
        if not thorough and alive[rows].sum() > len(rows) - len(better):
            break
    return alive


class _Pairs:
    """Tables whose columns are shuffled, so that any few in a row are a sample of all; what is impossible costs `NEVER`."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = []
        for table in tables:
            m = table.shape[1]
            step = next(s for s in range(max(1, round(0.618 * m)), 2 * m + 1) if math.gcd(s, m) == 1)
            self.tables.append(np.ascontiguousarray(np.minimum(table, NEVER)[:, np.arange(m) * step % m]))
        self.samples = [np.ascontiguousarray(table[:, :SAMPLE]) for table in self.tables]

    def beaten(self, rows: NDArray[np.intp], better: NDArray[np.intp], tries: int) -> NDArray[np.intp]:
        """Those of `rows` that one of `better` is at least as good as; of equal ones all but the first."""
        least = self.least_excess(rows, better)
        least[rows[:, None] == better[None, :]] = np.inf
        left = np.flatnonzero((least <= 0).any(axis=1))
        out = np.zeros(len(rows), dtype=bool)
        for _ in range(tries):
            if not len(left):
                break
            column = least[left].argmin(axis=1)
            i, j = rows[left], better[column]
            found = self.never_worse(j, i)
            late = np.flatnonzero(found & (j > i))
            found[late[self.never_worse(i[late], j[late])]] = False
            out[left[found]] = True
            least[left, column] = np.inf
            left = left[~found]
            left = left[(least[left] <= 0).any(axis=1)]
        return rows[out]

    def least_excess(self, rows: NDArray[np.intp], better: NDArray[np.intp]) -> Table:
        """[row, better]: what the better one costs more at least, judged by the first columns."""
        total = np.zeros((len(rows), len(better)))
        for table in self.samples:
            mine, theirs = table[rows], np.minimum(table[better], NEVER / 10)
            most = np.full(total.shape, -np.inf)
            for c in range(mine.shape[1]):
                np.maximum(most, theirs[None, :, c] - mine[:, c, None], out=most)
            total += most
        return total

    def never_worse(self, better: NDArray[np.intp], rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """For each pair whether the first costs no more than the second over all columns, a wider sample of them each time."""
        out = np.ones(len(rows), dtype=bool)
        widest = max(table.shape[1] for table in self.tables)
        width = SAMPLE
        while True:
            look = np.flatnonzero(out)
            width = min(4 * width, widest)
            step = max(1, CHUNK // (width * len(self.tables)))
            for some in (look[k : k + step] for k in range(0, len(look), step)):
                out[some] = self._excess(better[some], rows[some], width) <= 0
            if width == widest:
                return out

    def _excess(self, better: NDArray[np.intp], rows: NDArray[np.intp], width: int) -> Table:
        return np.asarray(sum((np.minimum(t[better, :width], NEVER / 10) - t[rows, :width]).max(axis=1) for t in self.tables))


def _excess(table: Table) -> Table:
    """[i, j]: the most that state j costs more than state i over the columns in which i is possible."""
    n, columns = table.shape
    out = np.empty((n, n))
    rows = max(1, CHUNK // (n * columns))
    for first in range(0, n, rows):
        mine = table[first : first + rows, None, :]
        impossible = np.isinf(mine)
        difference = np.where(impossible, -np.inf, table[None, :, :] - np.where(impossible, 0.0, mine))
        out[first : first + rows] = difference.max(axis=-1)
    return out

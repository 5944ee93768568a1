"""Exact reductions of a factor graph, each undone by back-substitution.

* arc consistency: a state that has no finite partner over some edge goes;
* function: over an edge that leaves one partner for every state of `a`, the other variable is a function of `a` (equal variables are the special case);
* elimination: a variable of degree 0, 1 or 2 is minimised out, (min,+), into a table over its neighbours;
* dominance: a state that another one never does worse than goes;
* elimination of higher degree (bucket elimination), where every table on the way stays within `TABLE_LIMIT`.
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
"""Entries of the largest table that an elimination of degree 3 or more may form, the eliminated variable counted: 64 MiB of float64."""

MANY = 1 << 22
"""Sums of an elimination from which it is worth looking for states that one of its tables cannot tell apart."""

IMPOSSIBLE = -1e300
"""How much less than any other a state costs that is impossible: finite, so that it can be added up."""

CHUNK = 1 << 22
"""Entries that a test of dominance forms at a time."""


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
    them.
    """

    size: dict[int, int]
    tables: dict[Scope, Table] = field(default_factory=dict)
    touching: dict[int, dict[Scope, None]] = field(default_factory=dict)
    trail: list[Undo] = field(default_factory=list)
    keep: frozenset[int] = frozenset()
    infeasible: bool = False
    constant: float = 0.0
    changed: dict[int, None] = field(default_factory=dict)

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

    def eliminate_all(self, degree: int | None = None, among: Iterable[int] | None = None) -> None:
        """Eliminates every variable, those of least weight first, that is not kept; with `degree` only while one of at most that degree is left.

        `among`: where to begin (everywhere).
        """
        first = self.alive if among is None else [v for v in among if v in self.size]
        queue = [(self.weight(v), v) for v in first if v not in self.keep and (degree is None or len(self.neighbours(v)) <= degree)]
        heapq.heapify(queue)
        while queue:
            weight, v = heapq.heappop(queue)
            if v not in self.size or (degree is not None and len(self.neighbours(v)) > degree):
                continue
            if weight != self.weight(v):
                heapq.heappush(queue, (self.weight(v), v))
                continue
            around = self.neighbours(v)
            self.eliminate(v)
            if degree is not None:
                for u in around:
                    if u not in self.keep and len(self.neighbours(u)) <= degree:
                        heapq.heappush(queue, (self.weight(u), u))

    def treewidth_affordable(self) -> bool:
        """Whether eliminating everything that is not kept, least weight first, stays within `TABLE_LIMIT`."""
        around = {v: set(self.neighbours(v)) for v in self.size}
        left = [v for v in self.size if v not in self.keep]
        while left:
            weights = [(math.prod((self.size[u] for u in around[v]), start=self.size[v]), v) for v in left]
            weight, v = min(weights)
            if weight > TABLE_LIMIT and len(around[v]) > 2:
                return False
            for u in around[v]:
                around[u] |= around[v] - {u}
                around[u].discard(v)
            del around[v]
            left.remove(v)
        return True

    # ---- the other reductions, on pairwise tables ------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """All pairwise reductions until nothing moves; each looks again only where tables have changed."""
        self.consistent(self.alive)
        self.functions(self.alive)
        self.changed = dict.fromkeys(self.alive)
        while self.changed and not self.infeasible:
            self.eliminate_all(degree=2, among=tuple(self.changed))
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
    worse = np.zeros((n, n))
    for table in tables:
        worse += np.maximum(_excess(table), IMPOSSIBLE)
    beaten = (worse <= 0) & ((worse.T > 0) | (np.arange(n)[None, :] < np.arange(n)[:, None]))
    return np.logical_not(beaten.any(axis=1))


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

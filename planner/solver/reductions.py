"""Exact reductions of a factor graph, each undone by back-substitution.

* arc consistency: a state that has no finite partner over some edge goes;
* function: over an edge that leaves one partner for every state of `a`, the other variable is a function of `a` (equal variables are the special case);
* elimination: a variable of degree 0, 1 or 2 is minimised out, (min,+), into a table over its neighbours;
* dominance: a state that another one never does worse than goes;
* elimination of higher degree (bucket elimination), where every table on the way stays within `TABLE_LIMIT`, and the work for it within `WORK_LIMIT`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.solver.dominance import MANY_STATES, undominated
from planner.solver.factors import FactorGraph, Scope
from planner.solver.gathered import Gathered, Index, Table, distinct, least_of_classes

TABLE_LIMIT = 1 << 23
"""Entries of the largest table that an elimination of degree 3 or more may leave: 64 MiB of float64."""

HEAVY = 1 << 26
"""Sums of an elimination before which it is worth looking for states that its variables can do without."""

WORK_LIMIT = 1 << 28
"""Sums that it may form for that, one for each entry and state of the eliminated variable: half a second."""


@dataclass(frozen=True, slots=True)
class Image:
    """`var` is a function of `source`: a substitution undone, or states dropped (a function of itself)."""

    var: int
    source: int
    table: Index

    def undo(self, states: list[int]) -> None:
        states[self.var] = int(self.table[states[self.source]])


@dataclass(frozen=True, slots=True)
class Best:
    """`var` takes the first state of least cost once its neighbours are known; the last axis of every table is its own."""

    var: int
    scopes: tuple[Scope, ...]
    tables: tuple[Gathered, ...]

    def undo(self, states: list[int]) -> None:
        total = sum(table[tuple(states[v] for v in scope)] for scope, table in zip(self.scopes, self.tables, strict=True))
        states[self.var] = int(np.argmin(total))


class Undo(Protocol):
    """A step of a reduction: what gives the variables that it took away their states, once those of all others are known."""

    def undo(self, states: list[int]) -> None: ...


def substitute_back(trail: Iterable[Undo], states: list[int]) -> None:
    for undo in reversed(list(trail)):
        undo.undo(states)


@dataclass
class Factors:
    """Tables over sorted scopes, being reduced; `trail` is the way back to the states of the variables that are gone or have lost states.

    `constant`: the least cost of parts of the graph that are wholly gone. `changed`: variables whose tables are others than when the reductions last looked at
    them. `tried`: the entries of the last test of dominance of a variable; one of many is made again when it has become half as large.
    """

    size: dict[int, int]
    tables: dict[Scope, Gathered] = field(default_factory=dict)
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
        for scope, joint in zip(graph.edges, graph.pairwise, strict=True):
            made.add(scope, joint)
        return made

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(self.size)

    def add(self, scope: Scope, added: Table | Gathered) -> None:
        key, table = scope, Gathered.of(added)
        if len(scope) > 1 and list(scope) != sorted(scope):
            order = sorted(range(len(scope)), key=scope.__getitem__)
            key, table = tuple(scope[i] for i in order), table.transpose(order)
        known = self.tables.get(key)
        self.tables[key] = table if known is None else known + table
        for v in key:
            self.touching[v][key] = None
            self.changed[v] = None

    def pop(self, scope: Scope) -> Gathered:
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
            scopes.append((*scope[:axis], *scope[axis + 1 :]))
            tables.append(self.pop(scope).transpose((*(i for i in range(len(scope)) if i != axis), axis)))
        self.trail.append(Best(v, tuple(scopes), tuple(tables)))
        best = _minimum(scopes, tables, around)
        del self.size[v], self.touching[v]
        if around:
            self.add(around, best)
        else:
            self.constant += float(best.base)
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
        """All pairwise reductions until nothing moves; each looks again only where tables have changed. `most` as of `eliminate_all`.

        Variables of many states wait for the others, which leave them fewer columns to be told apart by.
        """
        self.consistent(self.alive)
        self.functions(self.alive)
        self.changed = dict.fromkeys(self.alive)
        large: dict[int, None] = {}
        while self.changed and not self.infeasible:
            self.eliminate_all(degree=2, among=tuple(self.changed), most=most)
            look = tuple(v for v in self.changed if v in self.size)
            self.changed = {}
            self.consistent(look)
            self.functions(look)
            large |= {v: None for v in look if self.size.get(v, 0) > MANY_STATES}
            self.dominance(v for v in look if v not in large)
            if not self.changed:
                self.dominance(large)
                large = {}

    def shrink(self, v: int, kept: NDArray[np.bool_]) -> None:
        """Drops the states of `v` that are not kept."""
        where = np.flatnonzero(kept)
        if len(where) == 0:
            self.infeasible = True
            return
        self.trail.append(Image(v, v, where))
        self.size[v] = len(where)
        for scope in self.touching[v]:
            self.tables[scope] = self.tables[scope].take(where, scope.index(v))
            self.changed.update(dict.fromkeys(scope))

    def consistent(self, which: Iterable[int]) -> None:
        """Drops every state that has an infinite unary cost or no finite partner in some table."""
        queue = dict.fromkeys(v for v in which if v in self.size and v not in self.keep)
        while queue and not self.infeasible:
            v = next(iter(queue))
            del queue[v]
            kept = np.ones(self.size[v], dtype=bool)
            for scope in self.touching[v]:
                kept &= self.tables[scope].is_possible(scope.index(v))
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
                image = table.image(scope.index(a))
                if image is not None:
                    self.substitute(b, a, image)

    def substitute(self, b: int, a: int, image: Index) -> None:
        """Writes `b` as the function `image` of `a`."""
        parts = [(s, self.pop(s)) for s in tuple(self.touching[b])]
        del self.size[b], self.touching[b]
        self.trail.append(Image(b, a, image))
        for scope, table in parts:
            axis = scope.index(b)
            if a in scope:
                self.add(tuple(u for u in scope if u != b), table.diagonal(axis, image, scope.index(a)))
            else:
                self.add(tuple(a if u == b else u for u in scope), table.take(image, axis))

    def dominance(self, which: Iterable[int]) -> None:
        """Drops states that another state of the same variable never does worse than; of equal ones the first stays."""
        for v in which:
            n = self.size.get(v, 1)
            if v in self.keep or n == 1 or any(len(s) > 2 for s in self.touching[v]):
                continue
            lines = [self.tables[s].lines(s.index(v)) for s in self.touching[v]]
            pairs = n * n * sum(table.shape[1] for table in lines)
            if n > MANY_STATES and 4 * pairs > 3 * self.tried.get(v, math.inf):
                continue
            self.tried[v] = pairs
            kept = undominated(lines)
            if not kept.all():
                self.shrink(v, kept)

    def as_graph(self) -> FactorGraph:
        """What is left, variables renumbered in order."""
        place = {v: i for i, v in enumerate(self.size)}
        unary = [self.tables[(v,)].dense() if (v,) in self.tables else np.zeros(n) for v, n in self.size.items()]
        edges = [s for s in self.tables if len(s) == 2]
        return FactorGraph(
            tuple(self.size.values()), tuple(unary), tuple((place[a], place[b]) for a, b in edges), tuple(self.tables[s].dense() for s in edges),
        )  # fmt: skip


def _minimum(scopes: Sequence[Scope], tables: Sequence[Gathered], around: Scope) -> Gathered:
    """The minimum over the last axis of the sum of tables, whose other axes are sorted scopes, as a table over `around`.

    It is taken once for all states of a neighbour that no table tells apart, and over the cheapest of the states of the last axis that only costs of their own
    tell apart. Over two neighbours or more it is taken state by state: each sum is formed once, in a table that stays in the cache.
    """
    alone = sum((t.dense() for s, t in zip(scopes, tables, strict=True) if not s), start=np.zeros(len(tables[0].classes[-1])))
    joint = [(s, t) for s, t in zip(scopes, tables, strict=True) if s]
    if not joint:
        return Gathered(np.asarray(alone.min()), ())
    first, number = distinct(*(t.classes[-1] for _, t in joint))
    alone = least_of_classes(alone, number)
    of_around = {u: distinct(*(t.classes[s.index(u)] for s, t in joint if u in s)) for u in around}
    shape = tuple(len(of_around[u][0]) for u in around)
    parts = [t.at((*(of_around[u][0] for u in s), first)) for s, t in joint]
    parts = [part.reshape([part.shape[s.index(u)] if u in s else 1 for u in around] + [len(first)]) for (s, _), part in zip(joint, parts, strict=True)]
    classes = tuple(of_around[u][1] for u in around)
    if len(around) == 1:
        return Gathered(np.asarray(sum(parts, start=alone).min(axis=-1)), classes)
    parts = _without_twins([*parts, alone.reshape((1,) * len(around) + alone.shape)], [t.classes[-1][first] for _, t in joint], shape)
    slices = [np.ascontiguousarray(part.transpose(-1, *range(part.ndim - 1))) for part in parts]
    best = np.full(shape, np.inf)
    total = np.empty(shape)
    for i in range(parts[0].shape[-1]):
        np.add(slices[0][i], slices[1][i], out=total)
        for part in slices[2:]:
            np.add(total, part[i], out=total)
        np.minimum(best, total, out=best)
    return Gathered(best, classes)


def _without_twins(parts: Sequence[Table], classes: Sequence[Index], shape: tuple[int, ...]) -> list[Table]:
    """The same minimum with fewer states in the last axis: of those that the largest part cannot tell apart, the others' least is taken first.

    `classes`: of the states of the last axis, for all parts but the last.
    """
    k = max(range(len(classes)), key=lambda i: parts[i].size)
    rest = [part for i, part in enumerate(parts) if i != k]
    n = len(classes[k])
    first, number = distinct(classes[k])
    if len(first) == n or math.prod(np.broadcast_shapes(*(part.shape for part in rest))) * 4 > math.prod(shape) * n:
        return list(parts)
    return [parts[k][..., first], least_of_classes(np.asarray(sum(rest[1:], start=rest[0])), number)]

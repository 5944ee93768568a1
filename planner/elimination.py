"""A pairwise factor graph and its exact minimum: reductions first, an LP over the local polytope for what they leave.

The problem: choose one state for every variable so that the sum of the unary and pairwise costs is least; `inf` forbids. Everything here is exact or says
that it is not. Reductions, each undone by back-substitution:

* arc consistency: a state that has no finite partner over some edge goes;
* function: over an edge that leaves one partner for every state of `a`, the other variable is a function of `a` (equal variables are the special case);
* elimination: a variable of degree 0, 1 or 2 is minimised out, (min,+), into a table over its neighbours;
* dominance: a state that another one never does worse than goes;
* elimination of higher degree (bucket elimination), where every table on the way stays within `TABLE_LIMIT`.

What is left is a linear program over the local polytope (HiGHS, dual simplex). An integral solution is a certificate; else a mixed-integer program on the core
finds the optimum and the linear program its lower bound.

Equal blocks (the layers of a model) are folded: the inside of a block is eliminated to a table over its boundary once for all blocks with equal tables, so that
L layers cost one block and L small (min,+) products, and need not take equal states.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint, linprog, milp
from scipy.sparse import coo_array

from ir.errors import PlanError

Table = NDArray[np.float64]
Scope = tuple[int, ...]

TABLE_LIMIT = 1 << 23
"""Entries of the largest table that an elimination of degree 3 or more may form, the eliminated variable counted: 64 MiB of float64."""

CHUNK = 1 << 22
"""Entries that a test of dominance forms at a time."""


@dataclass(frozen=True, slots=True)
class FactorGraph:
    """Variable `v` has `num_states[v]` states with costs `unary[v]`; `pairwise[e]` has shape (num_states[a], num_states[b]) for `edges[e]` = (a, b).

    Parallel edges add up. Raises PlanError where shapes disagree.
    """

    num_states: tuple[int, ...]
    unary: tuple[Table, ...]
    edges: tuple[tuple[int, int], ...] = ()
    pairwise: tuple[Table, ...] = ()

    def __post_init__(self) -> None:
        if len(self.unary) != len(self.num_states) or len(self.edges) != len(self.pairwise):
            raise PlanError(f"{len(self.num_states)} variables with {len(self.unary)} unary tables, {len(self.edges)} edges with {len(self.pairwise)} tables")
        for v, (n, table) in enumerate(zip(self.num_states, self.unary, strict=True)):
            if n < 1 or table.shape != (n,):
                raise PlanError(f"variable {v} has {n} states and unary costs of shape {table.shape}")
        for (a, b), table in zip(self.edges, self.pairwise, strict=True):
            if a == b or table.shape != (self.num_states[a], self.num_states[b]):
                raise PlanError(f"edge ({a}, {b}) has a table of shape {table.shape}, its variables {self.num_states[a]} and {self.num_states[b]} states")

    def cost(self, states: Sequence[int]) -> float:
        """The cost of one assignment."""
        total = sum(float(table[states[v]]) for v, table in enumerate(self.unary))
        return total + sum(float(t[states[a], states[b]]) for (a, b), t in zip(self.edges, self.pairwise, strict=True))


@dataclass(frozen=True, slots=True)
class Solution:
    """`states` cost `cost`, nothing costs less than `bound`; `exact` where the two are equal but for rounding. `method` is what decided the core.

    An infeasible graph has no states and costs inf.
    """

    states: tuple[int, ...]
    cost: float
    bound: float
    exact: bool
    method: str = "elimination"


def solve(graph: FactorGraph, blocks: Sequence[Sequence[int]] = ()) -> Solution:
    """The cheapest assignment; ties go to the first state.

    `blocks`: disjoint sets of variables to be folded, each in an order that equal blocks share.

    >>> flip = FactorGraph((2, 2), (np.array([0.0, 1.0]), np.array([3.0, 0.0])), ((0, 1),), (np.array([[0.0, 9.0], [9.0, 0.0]]),))
    >>> solve(flip)
    Solution(states=(1, 1), cost=1.0, bound=1.0, exact=True, method='elimination')
    """
    factors = _Factors.of(graph)
    folded = _fold(factors, blocks)
    factors.reduce()
    gap, method = 0.0, "elimination"
    states = [0] * len(graph.num_states)
    if factors.alive and not factors.infeasible:
        if factors.treewidth_affordable():
            factors.eliminate_all()
        else:
            core = factors.as_graph()
            chosen = linear_program(core)
            method = chosen.method
            gap = chosen.cost - chosen.bound if chosen.states else 0.0
            factors.infeasible |= not chosen.states
            for v, s in zip(factors.alive, chosen.states, strict=False):
                states[v] = s
    if factors.infeasible:
        return Solution((), math.inf, math.inf, True, method)
    _substitute(factors.trail, states)
    for trail, names in folded:
        local = [states[v] for v in names]
        _substitute(trail, local)
        for v, s in zip(names, local, strict=True):
            states[v] = s
    cost = graph.cost(states)
    if not math.isfinite(cost):
        return Solution((), math.inf, math.inf, True, method)
    return Solution(tuple(states), cost, cost - gap, gap <= 1e-9 * max(1.0, abs(cost)), method)


# ---- factors ---------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Image:
    """`var` is a function of `source`: a substitution undone, or states dropped (a function of itself)."""

    var: int
    source: int
    table: NDArray[np.intp]

    def state(self, states: Sequence[int]) -> int:
        return int(self.table[states[self.source]])


@dataclass(frozen=True, slots=True)
class _Best:
    """`var` takes the first state of least cost once its neighbours are known; the last axis of every table is its own."""

    var: int
    scopes: tuple[Scope, ...]
    tables: tuple[Table, ...]

    def state(self, states: Sequence[int]) -> int:
        total = sum(table[tuple(states[v] for v in scope)] for scope, table in zip(self.scopes, self.tables, strict=True))
        return int(np.argmin(total))


_Undo = _Image | _Best


def _substitute(trail: Iterable[_Undo], states: list[int]) -> None:
    for undo in reversed(list(trail)):
        states[undo.var] = undo.state(states)


@dataclass
class _Factors:
    """Tables over sorted scopes, being reduced; `trail` is the way back to the states of the variables that are gone or have lost states."""

    size: dict[int, int]
    tables: dict[Scope, Table] = field(default_factory=dict)
    touching: dict[int, dict[Scope, None]] = field(default_factory=dict)
    trail: list[_Undo] = field(default_factory=list)
    keep: frozenset[int] = frozenset()
    infeasible: bool = False

    @classmethod
    def of(cls, graph: FactorGraph) -> _Factors:
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

    def pop(self, scope: Scope) -> Table:
        for v in scope:
            del self.touching[v][scope]
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
        self.trail.append(_Best(v, tuple(scopes), tuple(tables)))
        best = _minimum([_spread(t, s, around) for s, t in zip(scopes, tables, strict=True)], tuple(self.size[u] for u in around))
        del self.size[v], self.touching[v]
        if around:
            self.add(around, best)
        elif not math.isfinite(float(best)):
            self.infeasible = True

    def eliminate_all(self, degree: int | None = None) -> bool:
        """Eliminates every variable, those of least weight first, that is not kept; with `degree` only while one of at most that degree is left."""
        queue = [(self.weight(v), v) for v in self.size if v not in self.keep and (degree is None or len(self.neighbours(v)) <= degree)]
        heapq.heapify(queue)
        moved = False
        while queue:
            weight, v = heapq.heappop(queue)
            if v not in self.size or (degree is not None and len(self.neighbours(v)) > degree):
                continue
            if weight != self.weight(v):
                heapq.heappush(queue, (self.weight(v), v))
                continue
            around = self.neighbours(v)
            self.eliminate(v)
            moved = True
            if degree is not None:
                for u in around:
                    if u not in self.keep and len(self.neighbours(u)) <= degree:
                        heapq.heappush(queue, (self.weight(u), u))
        return moved

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
        """All pairwise reductions until nothing moves; dominance last, since it costs most and only matters for what elimination leaves."""
        self.consistent(self.alive)
        self.functions(self.alive)
        moved = True
        while moved and not self.infeasible:
            self.eliminate_all(degree=2)
            if not self.size or self.infeasible:
                return
            shrunk = self.consistent(self.alive)
            merged = self.functions(self.alive)
            moved = self.dominance() or shrunk or merged

    def shrink(self, v: int, kept: NDArray[np.bool_]) -> None:
        """Drops the states of `v` that are not kept."""
        where = np.flatnonzero(kept)
        if len(where) == 0:
            self.infeasible = True
            return
        self.trail.append(_Image(v, v, where))
        self.size[v] = len(where)
        for scope in self.touching[v]:
            self.tables[scope] = self.tables[scope].take(where, axis=scope.index(v))

    def consistent(self, which: Iterable[int]) -> bool:
        """Drops every state that has an infinite unary cost or no finite partner in some table."""
        queue = dict.fromkeys(which)
        moved = False
        while queue and not self.infeasible:
            v = next(iter(queue))
            del queue[v]
            kept = np.ones(self.size[v], dtype=bool)
            for scope in self.touching[v]:
                axis = scope.index(v)
                others = tuple(i for i in range(len(scope)) if i != axis)
                kept &= np.isfinite(self.tables[scope]).any(axis=others) if others else np.isfinite(self.tables[scope])
            if not kept.all():
                moved = True
                self.shrink(v, kept)
                queue.update(dict.fromkeys(self.neighbours(v)))
        return moved

    def functions(self, which: Iterable[int]) -> bool:
        """Replaces every variable that is a function of a neighbour over a pairwise table."""
        moved = False
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
                    moved = True
        return moved

    def substitute(self, b: int, a: int, image: NDArray[np.intp]) -> None:
        """Writes `b` as the function `image` of `a`."""
        parts = [(s, self.pop(s)) for s in tuple(self.touching[b])]
        del self.size[b], self.touching[b]
        self.trail.append(_Image(b, a, image))
        for scope, table in parts:
            axis = scope.index(b)
            taken = table.take(image, axis=axis)
            if a in scope:
                other = scope.index(a)
                taken = np.moveaxis(np.diagonal(taken, axis1=axis, axis2=other), -1, other - (axis < other))
                self.add(tuple(u for u in scope if u != b), taken)
            else:
                self.add(tuple(a if u == b else u for u in scope), taken)

    def dominance(self) -> bool:
        """Drops states that another state of the same variable never does worse than; of equal ones the first stays."""
        moved = False
        for v in self.alive:
            n = self.size[v]
            if v in self.keep or n == 1 or any(len(s) > 2 for s in self.touching[v]):
                continue
            worse = np.zeros((n, n))
            for scope in self.touching[v]:
                table = self.tables[scope].reshape(n, -1) if scope[0] == v else self.tables[scope].T
                worse += _excess(table)
            beaten = (worse <= 0) & ((worse.T > 0) | (np.arange(n)[None, :] < np.arange(n)[:, None]))
            if beaten.any():
                self.shrink(v, np.logical_not(beaten.any(axis=1)))
                moved = True
        return moved

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


# ---- folding ---------------------------------------------------------------------------------------------------------------------------------------


def _fold(factors: _Factors, blocks: Sequence[Sequence[int]]) -> list[tuple[list[_Undo], tuple[int, ...]]]:
    """Replaces the inside of each block by a table over its boundary. Returns for each block the way back and its variables by local number."""
    done: dict[Any, tuple[list[_Undo], Mapping[Scope, Table]] | None] = {}
    digests: dict[int, tuple[Table, bytes]] = {}
    out = []
    for inside in blocks:
        boundary = tuple(sorted({u for v in inside for u in factors.neighbours(v)} - set(inside)))
        names = (*inside, *boundary)
        place = {v: i for i, v in enumerate(names)}
        scopes = sorted({s for v in inside for s in factors.touching[v]}, key=lambda s: tuple(place[v] for v in s))
        local = [(tuple(place[v] for v in s), factors.tables[s]) for s in scopes]
        key = (tuple(factors.size[v] for v in names), len(inside), tuple((s, _digest(t, digests)) for s, t in local))
        if key not in done:
            done[key] = _eliminate_inside(key[0], len(inside), local)
        found = done[key]
        if found is None:
            continue
        for s in scopes:
            factors.pop(s)
        for v in inside:
            del factors.size[v], factors.touching[v]
        for s, table in found[1].items():
            factors.add(tuple(names[i] for i in s), table)
        out.append((found[0], names))
    return out


def _digest(table: Table, known: dict[int, tuple[Table, bytes]]) -> bytes:
    """Of the contents; `known` keeps each table that it has seen alive, so that its id stays its own."""
    found = known.get(id(table))
    if found is None:
        found = known[id(table)] = (table, hashlib.blake2b(np.ascontiguousarray(table).tobytes(), digest_size=16).digest() + str(table.shape).encode())
    return found[1]


def _eliminate_inside(sizes: Scope, num_inside: int, local: Sequence[tuple[Scope, Table]]) -> tuple[list[_Undo], Mapping[Scope, Table]] | None:
    """Tables over the boundary and the way back; None where the tables would grow beyond the limit."""
    factors = _Factors(dict(enumerate(sizes)), keep=frozenset(range(num_inside, len(sizes))))
    factors.touching = {v: {} for v in factors.size}
    for scope, table in local:
        factors.add(scope, table)
    factors.eliminate_all(degree=2)
    if not factors.treewidth_affordable():
        return None
    factors.eliminate_all()
    if factors.infeasible:
        return None
    return factors.trail, factors.tables


# ---- linear and integer programs -------------------------------------------------------------------------------------------------------------------


def linear_program(graph: FactorGraph) -> Solution:
    """The LP over the local polytope; where its solution is not integral, the integer program with the LP's bound."""
    program = _polytope(graph)
    found = linprog(program.cost, A_eq=program.rows, b_eq=program.rhs, bounds=(0, None), method="highs-ds")
    if found.status == 2:
        return Solution((), math.inf, math.inf, True, "lp")
    if found.status != 0:
        raise PlanError(f"HiGHS could not solve the linear program of {len(program.cost)} columns: {found.message}")
    marginals = program.marginals(np.asarray(found.x))
    if all(m.max() > 1 - 1e-6 for m in marginals):
        states = tuple(int(m.argmax()) for m in marginals)
        return Solution(states, graph.cost(states), graph.cost(states), True, "lp")
    exact = integer_program(graph)
    return Solution(exact.states, exact.cost, min(exact.cost, max(float(found.fun or 0.0), exact.bound)), exact.exact, "milp")


def integer_program(graph: FactorGraph) -> Solution:
    """All rows and columns given to HiGHS's branch and bound: the slow twin of `solve`."""
    program = _polytope(graph)
    integral = np.zeros(len(program.cost), dtype=np.int64)
    integral[: sum(graph.num_states)] = 1
    found = milp(program.cost, constraints=LinearConstraint(program.rows, program.rhs, program.rhs), integrality=integral, options={"mip_rel_gap": 0.0})
    if found.status == 2:
        return Solution((), math.inf, math.inf, True, "milp")
    if found.x is None:
        raise PlanError(f"HiGHS could not solve the integer program of {len(program.cost)} columns: {found.message}")
    states = tuple(int(m.argmax()) for m in program.marginals(found.x))
    cost = graph.cost(states)
    bound = min(cost, float(found.mip_dual_bound)) if found.status != 0 else cost
    return Solution(states, cost, bound, found.status == 0, "milp")


@dataclass(frozen=True, slots=True)
class _Polytope:
    """Minimise `cost @ x` where `rows @ x == rhs`, x >= 0; the first columns are the marginals of the variables in turn."""

    cost: Table
    rows: Any
    rhs: Table
    num_states: tuple[int, ...]

    def marginals(self, x: Table) -> list[Table]:
        return np.split(x[: sum(self.num_states)], np.cumsum(self.num_states)[:-1])


def _polytope(graph: FactorGraph) -> _Polytope:
    """One column for every state and every finite entry of a pairwise table; a forbidden state has its marginal fixed at 0 by a row."""
    start = np.concatenate([[0], np.cumsum(graph.num_states)])
    num_columns = int(start[-1])
    unary = np.concatenate(graph.unary)
    costs = [np.where(np.isfinite(unary), unary, 0.0)]
    ones = np.ones(num_columns)
    row = [np.repeat(np.arange(len(graph.num_states)), graph.num_states)]
    col, val = [np.arange(num_columns)], [ones]
    num_rows = len(graph.num_states)
    forbidden = np.flatnonzero(~np.isfinite(unary))
    row, col, val = [*row, num_rows + np.arange(len(forbidden))], [*col, forbidden], [*val, np.ones(len(forbidden))]
    num_rows += len(forbidden)
    rhs = [np.ones(len(graph.num_states)), np.zeros(len(forbidden))]
    for (a, b), table in zip(graph.edges, graph.pairwise, strict=True):
        i, j = np.nonzero(np.isfinite(table))
        columns = num_columns + np.arange(len(i))
        costs.append(table[i, j])
        for v, at in ((a, i), (b, j)):
            n = graph.num_states[v]
            row += [num_rows + at, num_rows + np.arange(n)]
            col += [columns, start[v] + np.arange(n)]
            val += [np.ones(len(i)), -np.ones(n)]
            rhs.append(np.zeros(n))
            num_rows += n
        num_columns += len(i)
    rows = coo_array((np.concatenate(val), (np.concatenate(row), np.concatenate(col))), shape=(num_rows, num_columns)).tocsr()
    return _Polytope(np.concatenate(costs), rows, np.concatenate(rhs), graph.num_states)

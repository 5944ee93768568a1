"""What a part of a trade may take once its ends are given: of seconds and bytes, every way near the best at one price that no other beats in both.

Variables are eliminated as for the part's min-marginals, but a joint state has a front of points instead of a number. Of joint states, and of points, those
alone are looked at that are within a slack of the least cost at the price, with whatever surrounds the part at its best.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.solver.factors import Scope
from planner.solver.gathered import Table
from planner.solver.marginals import Marginals
from planner.trade import Options, Picked, Trade

Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Points:
    """Points of several fronts, front after front: `of` says of which. `origin[point, table]`: of each table that they are sums of, which of its points."""

    of: Index
    time_s: Table
    nbytes: Table
    origin: Index

    def __len__(self) -> int:
        return len(self.of)

    def taken(self, which: Index) -> Points:
        return Points(self.of[which], self.time_s[which], self.nbytes[which], self.origin[which])

    def near(self, price: float, room: Table) -> Points:
        """Without what costs more than the least of its front by more than the front's room."""
        cost = self.time_s + price * self.nbytes
        first = np.flatnonzero(np.diff(self.of, prepend=-1))
        least = np.repeat(np.minimum.reduceat(cost, first), np.diff(first, append=len(cost)))
        return self.taken(np.flatnonzero(cost <= least * (1 + 1e-12) + room[self.of]))

    def unbeaten(self) -> Points:
        """By rising bytes and falling seconds, without what another point of the same front beats; of equal ones the first."""
        mine = self.taken(np.lexsort((self.time_s, self.nbytes, self.of)))
        rank = np.unique(mine.time_s, return_inverse=True)[1].reshape(-1)
        # each front below the one before it: the least so far is then the least of its own
        level = rank - mine.of * (len(rank) + 1)
        return mine.taken(np.flatnonzero(np.diff(np.minimum.accumulate(level), prepend=len(rank) + 1) < 0))

    def thinned(self, price: float, most: int) -> tuple[Points, float]:
        """Of each front with more than `most` points those that are cheapest in their interval of bytes; and the widest interval."""
        first = np.flatnonzero(np.diff(self.of, prepend=-1))
        num = np.diff(first, append=len(self))
        if num.max(initial=0) <= most:
            return self, 0.0
        width = np.where(num > most, (self.nbytes[first + num - 1] - self.nbytes[first]) / (most - 1), 0.0)
        place = (self.nbytes - np.repeat(self.nbytes[first], num)) / np.repeat(np.where(width > 0, width, 1.0), num)
        interval = np.where(np.repeat(num > most, num), np.minimum(place, most).astype(np.intp), np.arange(len(self)))
        order = np.lexsort((self.time_s + price * self.nbytes, interval, self.of))
        changes = (np.diff(interval[order], prepend=-1) != 0) | (np.diff(self.of[order], prepend=-1) != 0)
        return self.taken(np.sort(order[changes])), float(width.max())


@dataclass(frozen=True, slots=True)
class _Sum:
    """A front for each of some joint states of `scope` (`states[front]`, `number[states]`): of table number `table` of the part, or of the sum of `parts`, over
    all states of `var` where there is one (`state[point]`). `start`: the first point of each front. `lost`: bytes by which a point that was left out may differ
    from one that is here and costs no more.
    """

    scope: Scope
    states: Index
    number: Index
    points: Points
    start: Index
    lost: float = 0.0
    table: int = -1
    var: int = -1
    state: Index = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    parts: tuple[_Sum, ...] = ()

    def read(self, point: int, states: list[int], ways: list[int]) -> None:
        """Writes what a point is."""
        if self.table >= 0:
            ways[self.table] = int(self.points.origin[point, 0])
        if self.var >= 0:
            states[self.var] = int(self.state[point])
        for part, place in zip(self.parts, self.points.origin[point].tolist(), strict=False):
            part.read(place, states, ways)


@dataclass(frozen=True)
class Fronts:
    """Of `part` at `price`. `ends`: variables that stay; `marginals`: of the part and all around it at this price, `ends` last, with this `slack`,
    seconds above the least cost up to which a way is looked at. Fronts have `most` points, about.
    """

    part: Trade
    ends: Scope
    price: float
    marginals: Marginals
    slack: float
    most: int

    @property
    def states(self) -> Index:
        """[way, end]"""
        return self._all.states[self._all.points.of]

    @property
    def time_s(self) -> Table:
        """[way]"""
        return self._all.points.time_s

    @property
    def nbytes(self) -> Table:
        """[way]"""
        return self._all.points.nbytes

    @property
    def lost(self) -> float:
        """Bytes by which a way that was left out may differ from one that is here and costs no more."""
        return self._all.lost

    def picked(self, way: int) -> Picked:
        states, ways = [0] * len(self.part.num_states), [0] * (len(self.part.num_states) + len(self.part.edges))
        for v, s in zip(self.ends, self.states[way].tolist(), strict=True):
            states[v] = s
        self._all.read(way, states, ways)
        return Picked(tuple(states), tuple(ways))

    @cached_property
    def _all(self) -> _Sum:
        unary = [((v,), options) for v, options in enumerate(self.part.unary)]
        given = enumerate([*unary, *zip(self.part.edges, self.part.pairwise, strict=True)])
        left = [self._given(k, scope, options) for k, (scope, options) in given]
        for v, clique in self.marginals.cliques.items():
            if v not in self.ends:
                mine = tuple(f for f in left if v in f.scope)
                left = [f for f in left if v not in f.scope]
                left.append(self._joined(mine, clique.names[:-1], v))
        return self._joined(tuple(left), self.ends)

    def _near(self, scope: Scope) -> tuple[Index, Table]:
        """The joint states that are within the slack, and what each leaves of it."""
        most = self.marginals.least + self.slack
        if not scope:
            return np.zeros((1, 0), dtype=np.intp), np.array([self.slack])
        near = self.marginals.near(scope)
        return near.states, most - near.cost

    def _given(self, table: int, scope: Scope, options: Options) -> _Sum:
        states, _ = self._near(scope)
        time_s, nbytes = (np.stack([np.broadcast_to(o[i], options[0][0].shape)[tuple(states.T)] for o in options], axis=1) for i in (0, 1))
        front, way = np.nonzero(np.isfinite(time_s))
        points = Points(front, time_s[front, way], nbytes[front, way], way[:, None])
        return self._made(scope, states, _Sum(scope, states, states, points.unbeaten() if len(options) > 1 else points, states, table=table))

    def _made(self, scope: Scope, states: Index, what: _Sum) -> _Sum:
        """With its fronts numbered."""
        number = np.full(tuple(self.part.num_states[v] for v in scope), -1, dtype=np.intp)
        number[tuple(states.T)] = np.arange(len(states)) if scope else 0
        return replace(what, number=number, start=np.searchsorted(what.points.of, np.arange(len(states) + 1)))

    def _joined(self, parts: tuple[_Sum, ...], around: Scope, var: int = -1) -> _Sum:
        """The fronts of a sum by the states of `around`, over all states of `var`."""
        names = around if var < 0 else (*around, var)
        states, room = self._near(names)
        none = np.zeros(len(states))
        points = Points(np.arange(len(states)), none, none, np.zeros((len(states), 0), dtype=np.intp))
        for part in parts:
            here = states[:, [names.index(v) for v in part.scope]]
            points = self._plus(points, part, np.broadcast_to(part.number[tuple(here.T)], len(states)), room)
        lost = sum(part.lost for part in parts)
        mine = states[points.of, -1] if names else points.of
        if var >= 0:
            states, front = np.unique(states[:, :-1], axis=0, return_inverse=True) if around else (states[:1, :-1], np.zeros(len(states), dtype=np.intp))
            points = Points(front.reshape(-1)[points.of], points.time_s, points.nbytes, np.column_stack((points.origin, mine))).unbeaten()
        else:
            points = replace(points, origin=np.column_stack((points.origin, mine)))
        points, width = points.thinned(self.price, self.most)
        kept = replace(points, origin=points.origin[:, :-1])
        return self._made(around, states, _Sum(around, states, states, kept, states, lost + width, var=var, state=points.origin[:, -1], parts=parts))

    def _plus(self, points: Points, part: _Sum, front: Index, room: Table) -> Points:
        """Every sum of a point of a joint state and a point of the part's front for it, but for those that are beaten, or not near the best."""
        first, num = part.start[front[points.of]], (part.start[front + 1] - part.start[front])[points.of]
        mine = np.repeat(np.arange(len(points)), num)
        theirs = np.arange(len(mine)) - np.repeat(np.cumsum(num) - num - first, num)
        made = points.taken(mine)
        time_s, nbytes = made.time_s + part.points.time_s[theirs], made.nbytes + part.points.nbytes[theirs]
        made = Points(made.of, time_s, nbytes, np.column_stack((made.origin, theirs)))
        return made if len(made) == len(room) else made.near(self.price, room).unbeaten()

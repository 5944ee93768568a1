"""A chain of equal blocks as a (min,+) matrix power: the least cost from each state before the chain to each state after it, and the way back.

Between two blocks stands one variable with the same costs everywhere. States of it that another one never does worse than are left out first; then the blocks
are doubled, so that L of them cost about 1.5 log2(L) products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.solver.dominance import undominated
from planner.solver.gathered import Gathered, Table


@dataclass(frozen=True, eq=False)
class Span:
    """`count` blocks in a row: `table[a, c]` is the least cost from a before to c after them; `left` and `right` are its halves."""

    table: Table
    count: int
    left: Span | None = None
    right: Span | None = None


@dataclass(frozen=True, eq=False)
class Chain:
    """`count` >= 2 blocks of costs `block[before, after]`, and between each two a variable of costs `between[state]`."""

    block: Table
    between: Table
    count: int

    @cached_property
    def states(self) -> NDArray[np.intp]:
        """The states that the variables between blocks may need."""
        return np.flatnonzero(undominated([Gathered.of(table) for table in (self.between[:, None], self.block, self.block.T)]))

    @cached_property
    def table(self) -> Table:
        """[before, after] of the whole chain; the costs of the variables at its two ends are not in it."""
        return _joined(self.block[:, self.states], self._cost, self._tail)

    @cached_property
    def _cost(self) -> Table:
        return self.between[self.states]

    @cached_property
    def _tail(self) -> Table:
        """From the first variable between to the end: all blocks but the first."""
        last = self.block[self.states]
        return last if self._inner is None else _joined(self._inner.table, self._cost, last)

    @cached_property
    def _inner(self) -> Span | None:
        """The blocks that have a variable between on both sides."""
        one = Span(self.block[np.ix_(self.states, self.states)], 1)
        whole: Span | None = None
        left = self.count - 2
        while left:
            if left & 1:
                whole = one if whole is None else self._join(whole, one)
            left >>= 1
            if left:
                one = self._join(one, one)
        return whole

    def _join(self, left: Span, right: Span) -> Span:
        return Span(_joined(left.table, self._cost, right.table), left.count + right.count, left, right)

    def between_states(self, before: int, after: int) -> tuple[int, ...]:
        """The `count` - 1 states between the blocks on a cheapest way; of equally cheap ones the first."""
        first = int(np.argmin(self.block[before, self.states] + self._cost + self._tail[:, after]))
        found = [first]
        if self._inner is not None:
            last = int(np.argmin(self._inner.table[first] + self._cost + self.block[self.states, after]))
            found = [first, *self._inside(self._inner, first, last), last]
        return tuple(int(self.states[i]) for i in found)

    def _inside(self, span: Span, before: int, after: int) -> list[int]:
        if span.left is None or span.right is None:
            return []
        middle = int(np.argmin(span.left.table[before] + self._cost + span.right.table[:, after]))
        return [*self._inside(span.left, before, middle), middle, *self._inside(span.right, middle, after)]


def _joined(left: Table, between: Table, right: Table) -> Table:
    """The least over b of left[a, b] + between[b] + right[b, c]."""
    return least_sum(left + between, right)


def least_sum(left: Table, right: Table) -> Table:
    """The least over b of left[a, b] + right[b, c]."""
    out = np.full((left.shape[0], right.shape[1]), np.inf)
    for b in range(left.shape[1]):
        np.minimum(out, left[:, b, None] + right[b], out=out)
    return out

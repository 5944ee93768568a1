"""A chain of equal blocks, each placed in its own way, and the rest around it: the least seconds within a number of bytes.

Block by block, for each state between two of them and each interval of bytes, the least seconds so far. The bytes of a way are rounded to intervals; what is
found is added up exactly, and the bound allows for all that rounding may have hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.solver.gathered import Table

FEWEST_INTERVALS = 1 << 13
"""Of the bytes that are left once everything keeps its fewest."""

MOST_STEPS = 1 << 18
"""Intervals times blocks up to which there are more: what few blocks keep is told apart by them."""

MOST_TRIED = 500
"""Mixtures that are added up exactly, the fastest first, until one is within the limit."""

Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Ways:
    """What may be taken, by number: states at its two ends, seconds, bytes. `lost`: bytes by which one that was left out may differ from one that is here and
    costs no more.
    """

    before: Index
    after: Index
    time_s: Table
    nbytes: Table
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """A way for the rest and one for every block, in order."""

    rest: int
    blocks: tuple[int, ...]
    time_s: float
    nbytes: float


@dataclass(frozen=True)
class Mix:
    """`count` blocks in a row, and the rest, whose `before` and `after` are the states at the two ends of the row."""

    rest: Ways
    block: Ways
    count: int
    limit: float
    price: float

    def best(self) -> tuple[Mixture | None, float]:
        """The fastest mixture, None where none that was tried is within the limit; and what no choice of these ways within the limit goes below.

        `price`: the seconds that a byte is worth by which ways were left out.
        """
        met = np.unique(np.concatenate((self.rest.before, self.rest.after, self.block.before, self.block.after)))
        rest, block = (replace(w, before=np.searchsorted(met, w.before), after=np.searchsorted(met, w.after)) for w in (self.rest, self.block))
        numbered = replace(self, rest=rest, block=block)
        rows = [_Row(numbered, end, len(met)) for end in np.unique(rest.after).tolist()]
        times = np.concatenate([row.time_s for row in rows])
        # What was left out has a stand-in that costs no more at the price and differs by `lost` bytes at most, rounded ones included.
        over = np.tile((np.arange(self.room) - (self.count + 1) / 2) * self.interval - (self.limit - self.least), len(rows))
        bound_s = float((times + self.price * np.maximum(over, -self.lost)).min())
        beyond = np.tile(np.arange(self.room) > self.room - self.lost / self.interval, len(rows))
        order = np.argsort(np.where(beyond, np.inf, times), kind="stable")
        for k in order[: min(MOST_TRIED, int(np.isfinite(times).sum()))].tolist():
            found = rows[k // self.room].mixture(k % self.room)
            if found.nbytes <= self.limit:
                return found, bound_s
        return None, bound_s

    @property
    def intervals(self) -> int:
        return max(FEWEST_INTERVALS, MOST_STEPS // self.count)

    @property
    def lost(self) -> float:
        """Bytes."""
        return self.rest.lost + self.count * self.block.lost

    @property
    def least(self) -> float:
        """Bytes."""
        return float(self.rest.nbytes.min() + self.count * self.block.nbytes.min())

    @property
    def interval(self) -> float:
        """Bytes."""
        return max((self.limit + self.lost - self.least) / self.intervals, 1.0)

    @property
    def room(self) -> int:
        """Intervals in which a choice within the limit may come to lie."""
        return self.intervals + self.count // 2 + 2


class _Row:
    """All that ends in one state: seconds by intervals of bytes, and the way back. `num_states`: of those between blocks."""

    def __init__(self, mix: Mix, end: int, num_states: int) -> None:
        self.mix, self.end = mix, end
        self.steps: Index = np.rint((mix.block.nbytes - mix.block.nbytes.min()) / mix.interval).astype(np.intp)
        self.first: Index = np.rint((mix.rest.nbytes - mix.rest.nbytes.min()) / mix.interval).astype(np.intp)
        time_s = np.full((num_states, mix.room), math.inf)
        self.begun = np.zeros((num_states, mix.room), dtype=np.int32)
        for k in np.flatnonzero((mix.rest.after == end) & (self.first < mix.room)).tolist():
            at = int(mix.rest.before[k]), int(self.first[k])
            if mix.rest.time_s[k] < time_s[at]:
                time_s[at], self.begun[at] = mix.rest.time_s[k], k
        self.taken = []
        for _ in range(mix.count):
            time_s, taken = self._longer(time_s)
            self.taken.append(taken)
        self.time_s = time_s[end]

    def _longer(self, time_s: Table) -> tuple[Table, NDArray[np.int32]]:
        """By one block; and by which way."""
        block, room = self.mix.block, self.mix.room
        out, taken = np.full(time_s.shape, math.inf), np.zeros(time_s.shape, dtype=np.int32)
        possible = [bool(np.isfinite(row).any()) for row in time_s]
        for k, (a, b, step, seconds) in enumerate(zip(block.before.tolist(), block.after.tolist(), self.steps.tolist(), block.time_s.tolist(), strict=True)):
            if possible[a] and step < room:
                made, there = time_s[a, : room - step] + seconds, out[b, step:]
                np.copyto(taken[b, step:], k, where=made < there)
                np.minimum(there, made, out=there)
        return out, taken

    def mixture(self, place: int) -> Mixture:
        """What leads to an interval, its bytes added up exactly."""
        block, rest = self.mix.block, self.mix.rest
        state, ways = self.end, list(self._back(place))
        at = place - int(self.steps[ways].sum()) if ways else place
        first = int(self.begun[block.before[ways[-1]] if ways else state, at])
        ways.reverse()
        totals = [float(w[first] + b[ways].sum()) for w, b in ((rest.time_s, block.time_s), (rest.nbytes, block.nbytes))]
        return Mixture(first, tuple(ways), *totals)

    def _back(self, place: int) -> Iterator[int]:
        state = self.end
        for taken in reversed(self.taken):
            way = int(taken[state, place])
            yield way
            state, place = int(self.mix.block.before[way]), place - int(self.steps[way])

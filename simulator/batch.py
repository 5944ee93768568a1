"""Many timings at once: a step of a Program in blocks of places, over rows that hold one number for each timing.

Only rows that a later block waits for are kept, so that a long Program's fit the cache; a run's other rows are a scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


class Block(NamedTuple):
    """Places `first .. last`, which are timed together. `before[j]`: rows of the j-th predecessors, of the first so many of them; of a run only its first
    place has others than the place before it. `low .. high`: the rows that are kept of it, `inner` their places from `first` on."""

    first: int
    last: int
    before: tuple[Ints, ...]
    low: int
    high: int
    inner: Ints


@dataclass(frozen=True, eq=False)
class Batch:
    """A step in blocks: levels, in which no place waits for another, or runs, in which each after the first waits for the one before it alone.

    `rows` by places, those of the steps before negative: rows are kept of them, in this order, and after a step the first `len(carried)` are what `carried`
    were. `ends`: rows of the firings with which the queues end a step. `longest`: places of the longest block.
    """

    by_level: bool
    blocks: tuple[Block, ...]
    rows: Ints
    carried: Ints
    ends: Ints
    longest: int

    def complete(self, table: Floats, taken: Ints, out: Floats) -> None:
        """Writes when each step is complete, of shape (steps, timings). `table`: durations, a row of timings each; `taken`: by place its row there."""
        ends, scratch = np.zeros((len(self.rows), table.shape[1])), np.empty((self.longest, table.shape[1]))
        for k in range(len(out)):
            if k:
                ends[: len(self.carried)] = ends[self.carried]
            if self.by_level:
                self._levels(ends, table, taken)
            else:
                self._runs(ends, table, taken, scratch)
            ends[self.ends].max(axis=0, out=out[k], initial=0.0)

    def _levels(self, ends: Floats, table: Floats, taken: Ints) -> None:
        for first, last, before, low, high, _ in self.blocks:
            here = ends[low:high]
            latest(ends, before, here)
            here += table[taken[first:last]]

    def _runs(self, ends: Floats, table: Floats, taken: Ints, scratch: Floats) -> None:
        """One call a row: an accumulated sum over rows goes down the columns and takes four times as long."""
        lines = list(scratch)
        for first, last, before, low, high, inner in self.blocks:
            here = scratch[: last - first]
            np.take(table, taken[first:last], axis=0, out=here, mode="clip")
            here[0] += ends[before[0][0]] if len(before) == 1 else ends[np.concatenate(before)].max(axis=0)
            for i in range(1, last - first):
                np.add(lines[i - 1], lines[i], lines[i])
            np.take(here, inner, axis=0, out=ends[low:high], mode="clip")


def latest(ends: Floats, before: Sequence[Ints], out: Floats) -> None:
    """Row by row the latest end of the predecessors; `before` as in a Block."""
    np.take(ends, before[0], axis=0, out=out, mode="clip")
    for rows in before[1:]:
        some = out[: len(rows)]
        np.maximum(some, ends[rows], out=some)


def predecessors(begin: Ints, distance: Ints) -> Ints:
    """The places of the predecessors, those of the steps before negative: of place i in `begin[i] .. begin[i + 1]`."""
    return np.repeat(np.arange(len(begin) - 1), np.diff(begin)) - distance


def by_degree(begin: Ints, values: Ints) -> tuple[Ints, ...]:
    """The j-th of the values of each place, for every j; places stand with most values first."""
    degree = np.diff(begin)
    return tuple(values[begin[:-1][degree > j] + j] for j in range(degree[0]))


def compile_batch(begin: Ints, distance: Ints, bounds: Ints, by_level: bool, ends: Ints) -> Batch:
    """The Batch of a Sweep's arrays (see there)."""
    num, before = len(begin) - 1, predecessors(begin, distance)
    cuts = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    if not by_level:
        before = before[np.concatenate([np.arange(begin[first], begin[first + 1]) for first, _ in cuts])]
    rows = _kept(np.arange(num) if by_level else ends, before, num)
    found = np.searchsorted(rows, before)
    spans = np.searchsorted(rows, bounds).tolist()
    blocks, used = [], 0
    for (first, last), low, high in zip(cuts, spans[:-1], spans[1:], strict=True):
        at = begin[first : (last if by_level else first + 1) + 1] - begin[first]
        here = found[used : used + at[-1]]
        used += int(at[-1])
        blocks.append(Block(first, last, by_degree(at, here), low, high, rows[low:high] - first))
    carried = np.searchsorted(rows, rows[rows < 0] + num)
    return Batch(by_level, tuple(blocks), rows, carried, np.searchsorted(rows, ends), int(np.diff(bounds).max(initial=0)))


def _kept(places: Ints, before: Ints, num: int) -> Ints:
    """Places whose rows are kept: these, all that are waited for, and whose rows those of the steps before were a step ago."""
    found, new = np.unique(places), np.unique(before)
    while len(new):
        found = np.union1d(found, new)
        new = np.setdiff1d(new[new < 0] + num, found)
    return found

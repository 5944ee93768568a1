"""Dominance: states that another state of the same variable never does worse than, whatever happens elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.solver.gathered import Gathered, Index, Table

MANY_STATES = 1 << 10
"""States of which all pairs are judged."""

CHUNK = 1 << 22
"""Entries that a test of dominance forms at a time."""

ROUND = 32
"""States that try at a time to beat all others."""

TRIES = 3
"""Of these the likeliest that are judged on all columns."""

SAMPLE = 16
"""Columns of a table by which pairs are ruled out."""

NEVER = 1e300
"""What an impossible state costs in a test of dominance: finite, so that it can be taken away; a tenth of it where it is the better one's."""


def undominated(tables: Sequence[Gathered]) -> NDArray[np.bool_]:
    """Which states no other one is at least as good as, whatever happens elsewhere; of equal ones the first.

    The states are the rows of every table. Up to `MANY_STATES` all pairs are judged. Of more states the cheapest try first, `ROUND` at a time, to beat whatever
    is left, until a round beats fewer than it has: some dominated states stay.
    """
    lines = [_Lines(table) for table in tables]
    num = len(lines[0].classes)
    better_first = _better_first(lines, None if num <= MANY_STATES else SAMPLE)
    rank = np.empty(num, dtype=np.intp)
    rank[better_first] = np.arange(num)
    alive = np.ones(num, dtype=bool)
    if num <= MANY_STATES:
        alive[_beaten(lines, np.arange(num), better_first, rank, num)] = False
        return alive
    for first in range(0, num, ROUND):
        better = better_first[first : first + ROUND]
        better, rows = better[alive[better]], np.flatnonzero(alive)
        alive[_beaten(lines, rows, better, rank, TRIES)] = False
        if alive[rows].sum() > len(rows) - len(better):
            break
    return alive


class _Lines:
    """The rows of a table, its columns shuffled, so that any few in a row are a sample of all; what is impossible costs `NEVER`."""

    def __init__(self, table: Gathered) -> None:
        self.classes = table.classes[0]
        num = table.base.shape[1]
        step = next(s for s in range(max(1, round(0.618 * num)), 2 * num + 1) if math.gcd(s, num) == 1)
        self.rows = np.ascontiguousarray(np.minimum(table.base, NEVER)[:, np.arange(num) * step % num])

    @property
    def num_columns(self) -> int:
        return int(self.rows.shape[1])

    def excess(self, rows: Index, better: Index, width: int) -> Table:
        """[i]: the most that `better[i]` costs more than `rows[i]`, both of them classes, over the first columns."""
        out = np.empty(len(rows))
        step = max(1, CHUNK // width)
        for k in range(0, len(rows), step):
            theirs = np.minimum(self.rows[better[k : k + step], :width], NEVER / 10)
            out[k : k + step] = (theirs - self.rows[rows[k : k + step], :width]).max(axis=1)
        return out

    def all_excess(self, rows: Index, better: Index) -> Table:
        """[i, j]: the same of every pair, over the first `SAMPLE` columns."""
        mine, theirs = self.rows[rows, :SAMPLE], np.minimum(self.rows[better, :SAMPLE], NEVER / 10)
        most = np.full((len(rows), len(better)), -np.inf)
        for c in range(mine.shape[1]):
            np.maximum(most, theirs[None, :, c] - mine[:, c, None], out=most)
        return most


def _better_first(tables: Sequence[_Lines], width: int | None) -> Index:
    """The states in an order in which one that another is at least as good as comes later: by impossible entries, then by costs, in the first columns."""
    num, costs = np.zeros((2, len(tables[0].classes)))  # inf: impossible whatever happens elsewhere
    for t in tables:
        sample = t.rows[:, :width]
        never = sample >= NEVER
        num += np.where(never.all(axis=1), np.inf, never.sum(axis=1))[t.classes]
        costs += np.where(never, 0.0, sample).mean(axis=1)[t.classes]
    return np.lexsort((costs, num))


def _beaten(tables: Sequence[_Lines], rows: Index, better: Index, rank: Index, tries: int) -> Index:
    """Those of `rows` that one of `better` of lower rank is at least as good as; of a state its `tries` likeliest better ones are judged on all columns."""
    least = sum((t.all_excess(t.classes[rows], t.classes[better]) for t in tables), start=np.zeros((len(rows), len(better))))
    least[rank[rows][:, None] <= rank[better][None, :]] = np.inf
    left = np.flatnonzero((least <= 0).any(axis=1))
    out = []
    for _ in range(tries):
        if not len(left):
            break
        column = least[left].argmin(axis=1)
        found = _never_worse(tables, better[column], rows[left])
        out.append(rows[left[found]])
        least[left, column] = np.inf
        left = left[~found]
        left = left[(least[left] <= 0).any(axis=1)]
    return np.concatenate(out) if out else rows[:0]


def _never_worse(tables: Sequence[_Lines], better: Index, rows: Index) -> NDArray[np.bool_]:
    """For each pair whether the first costs no more than the second over all columns, a wider sample of them each time."""
    out = np.ones(len(rows), dtype=bool)
    widest = max(table.num_columns for table in tables)
    width = SAMPLE
    while True:
        look = np.flatnonzero(out)
        width = min(4 * width, widest)
        out[look] = sum(t.excess(t.classes[rows[look]], t.classes[better[look]], min(width, t.num_columns)) for t in tables) <= 0
        if width == widest or not out.any():
            return out

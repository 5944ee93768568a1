"""Dominance: states that another state of the same variable never does worse than, whatever happens elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.solver.gathered import Gathered, Index, Table, distinct

MANY_STATES = 1 << 10
"""States of which all pairs are judged."""

FEW = 1 << 18
"""Entries of all pairs up to which all columns are looked at at once."""

CHUNK = 1 << 22
"""Entries that a test of dominance forms at a time."""

ROUND = 32
"""States that try at a time to beat all others."""

TRIES = 3
"""Of these the likeliest that are judged on all columns."""

SAMPLE = 16
"""Columns of a table by which pairs are ruled out."""

WIDE = 64
"""The same where all pairs are judged."""

NEVER = 1e300
"""What an impossible state costs in a test of dominance: finite, so that it can be taken away; a tenth of it where it is the better one's."""


def undominated(tables: Sequence[Gathered]) -> NDArray[np.bool_]:
    """Which states no other one is at least as good as, whatever happens elsewhere; of equal ones the first.

    The states are the rows of every table. Up to `MANY_STATES` all pairs are judged. Of more states the cheapest try first, `ROUND` at a time, to beat whatever
    is left, until a round beats fewer than it has: some dominated states stay.
    """
    num = len(tables[0].classes[0])
    if num * num * sum(table.base.shape[1] for table in tables) <= FEW:
        return _undominated_of_few(tables)
    lines = [_Lines(table) for table in tables]
    better_first = _better_first(lines, None if num <= MANY_STATES else SAMPLE)
    rank = np.empty(num, dtype=np.intp)
    rank[better_first] = np.arange(num)
    alive = np.ones(num, dtype=bool)
    if num <= MANY_STATES:
        alive[_beaten(lines, np.arange(num), better_first, rank, WIDE, num)] = False
        return alive
    for first in range(0, num, ROUND):
        better = better_first[first : first + ROUND]
        better, rows = better[alive[better]], np.flatnonzero(alive)
        alive[_beaten(lines, rows, better, rank, SAMPLE, TRIES)] = False
        if alive[rows].sum() > len(rows) - len(better):
            break
    return alive


def _undominated_of_few(tables: Sequence[Gathered]) -> NDArray[np.bool_]:
    """All pairs over all columns at once."""
    states = np.arange(len(tables[0].classes[0]))
    worse = np.zeros((len(states), len(states)))
    for table in tables:
        mine = np.minimum(table.base, NEVER)[table.classes[0]]
        worse += (np.minimum(mine, NEVER / 10)[None] - mine[:, None]).max(axis=-1)
    beaten = (worse <= 0) & ((worse.T > 0) | (states[None, :] < states[:, None]))
    return np.logical_not(beaten.any(axis=1))


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

    def all_excess(self, rows: Index, better: Index, width: int) -> Table:
        """[i, j]: the same of every pair of states."""
        (first, mine_of), (second, theirs_of) = distinct(self.classes[rows]), distinct(self.classes[better])
        mine = self.rows[self.classes[rows[first]], :width]
        theirs = np.minimum(self.rows[self.classes[better[second]], :width], NEVER / 10)
        most = np.full((len(first), len(second)), -np.inf)
        for c in range(mine.shape[1]):
            np.maximum(most, theirs[None, :, c] - mine[:, c, None], out=most)
        return most[mine_of][:, theirs_of]


def _better_first(tables: Sequence[_Lines], width: int | None) -> Index:
    """The states in an order in which one that another is at least as good as comes later: by impossible entries, then by costs, in the first columns."""
    num, costs = np.zeros((2, len(tables[0].classes)))  # inf: impossible whatever happens elsewhere
    for t in tables:
        sample = t.rows[:, :width]
        never = sample >= NEVER
        num += np.where(never.all(axis=1), np.inf, never.sum(axis=1))[t.classes]
        costs += np.where(never, 0.0, sample).mean(axis=1)[t.classes]
    return np.lexsort((costs, num))


def _beaten(tables: Sequence[_Lines], rows: Index, better: Index, rank: Index, width: int, tries: int) -> Index:
    """Those of `rows` that one of `better` of lower rank is at least as good as.

    The first `width` columns rule most pairs out; of what is left, the `tries` likeliest better ones of a state are judged on all columns.
    """
    least = sum((t.all_excess(rows, better, width) for t in tables), start=np.zeros((len(rows), len(better))))
    least[rank[rows][:, None] <= rank[better][None, :]] = np.inf
    left = np.flatnonzero((least <= 0).any(axis=1))
    out, at_a_time = [rows[:0]], 1
    while len(left) and tries > 0:
        likeliest = np.argpartition(least[left], at_a_time - 1, axis=1)[:, :at_a_time]
        i, k = np.nonzero(least[left[:, None], likeliest] <= 0)
        found = np.zeros(len(left), dtype=bool)
        found[i[_never_worse(tables, better[likeliest[i, k]], rows[left[i]])]] = True
        out.append(rows[left[found]])
        least[left[:, None], likeliest] = np.inf
        left = left[~found]
        left = left[(least[left] <= 0).any(axis=1)]
        tries -= at_a_time
        at_a_time = min(2 * at_a_time, len(better)) if len(out) > TRIES else 1
    return np.concatenate(out)


def _never_worse(tables: Sequence[_Lines], better: Index, rows: Index) -> NDArray[np.bool_]:
    """For each pair whether the first costs no more than the second over all columns, a wider sample of them each time."""
    look = np.arange(len(rows))
    widest = max(table.num_columns for table in tables)
    width = SAMPLE
    while width < widest and len(look):
        width = min(4 * width, widest)
        look = look[_excess(tables, rows[look], better[look], width) <= 0]
    out = np.zeros(len(rows), dtype=bool)
    out[look] = True
    return out


def _excess(tables: Sequence[_Lines], rows: Index, better: Index, width: int) -> Table:
    """[i]: the most that `better[i]` costs more than `rows[i]` in all tables together, judged by their first columns."""
    return np.asarray(sum(t.excess(t.classes[rows], t.classes[better], min(width, t.num_columns)) for t in tables))

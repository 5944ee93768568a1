"""1F1B: after p - r - 1 forwards, rank r alternates one forward and one backward (PipeDream-Flush, Narayanan et al., 2021, arXiv:2006.09503).

With equal stages the step takes (m + p - 1)(F + B), as GPipe, but rank r keeps only min(p - r, m) microbatches.

>>> print(show(SCHEDULE.orders(2, 3)))
0F0 0F1 0B0 0F2 0B1 0B2
1F0 1B0 1F1 1B1 1F2 1B2
"""

from __future__ import annotations

from planner.schedules.schedule import Schedule, Times
from planner.schedules.slot import Orders, show, spell, weave

__all__ = ["SCHEDULE", "show"]


def orders(p: int, m: int, v: int) -> Orders:
    return tuple(spell(weave([r] * m, [r] * m, min(p - 1 - r, m)), m) for r in range(p))


def time(p: int, m: int, v: int, t: Times) -> float:
    return (m + p - 1) * t.total


def memory(rank: int, p: int, m: int, v: int) -> float:
    return min(p - rank, m)


SCHEDULE = Schedule("1f1b", "arXiv:2006.09503", orders, time, memory)

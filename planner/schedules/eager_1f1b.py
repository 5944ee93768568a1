"""Eager 1F1B: 1F1B with 2(p - r - 1) forwards ahead, so that a hop has a whole forward and backward to hide behind (Zhuang et al., 2022, arXiv:2211.05322).

With equal stages and free hops it takes as long as 1F1B; rank r keeps min(2(p - r) - 1, m) microbatches.

>>> print(show(SCHEDULE.orders(2, 4)))
0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""

from __future__ import annotations

from planner.schedules.schedule import Schedule, Times
from planner.schedules.slot import Orders, show, spell, weave

__all__ = ["SCHEDULE", "show"]


def orders(p: int, m: int, v: int) -> Orders:
    return tuple(spell(weave([r] * m, [r] * m, min(2 * (p - 1 - r), m)), m) for r in range(p))


def time(p: int, m: int, v: int, t: Times) -> float:
    return (m + p - 1) * t.total


def memory(rank: int, p: int, m: int, v: int) -> float:
    return min(2 * (p - rank) - 1, m)


SCHEDULE = Schedule("eager-1f1b", "arXiv:2211.05322", orders, time, memory)

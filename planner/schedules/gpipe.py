"""GPipe: all forwards, then all backwards in the same order of microbatches (Huang et al., 2019, arXiv:1811.06965).

With equal stages the step takes (m + p - 1)(F + B): the bubble is (p - 1) / (m + p - 1). Every rank keeps all m microbatches.

>>> print(show(SCHEDULE.orders(2, 2)))
0F0 0F1 0B0 0B1
1F0 1F1 1B0 1B1
"""

from __future__ import annotations

from planner.schedules.schedule import Schedule, Times
from planner.schedules.slot import Orders, show, spell, weave

__all__ = ["SCHEDULE", "show"]


def orders(p: int, m: int, v: int) -> Orders:
    return tuple(spell(weave([r] * m, [r] * m, m), m) for r in range(p))


def time(p: int, m: int, v: int, t: Times) -> float:
    return (m + p - 1) * t.total


def memory(rank: int, p: int, m: int, v: int) -> float:
    return m


SCHEDULE = Schedule("gpipe", "arXiv:1811.06965", orders, time, memory)

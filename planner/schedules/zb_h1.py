"""ZB-H1: 1F1B with the weight gradients held back, to fill the drain; no more memory than 1F1B's first rank (Qi et al., 2023, arXiv:2401.10241).

With equal stages the step takes m(F + I + W) + (p - 1)(F + I - W). Every rank keeps min(p, m) microbatches until W, and min(p - r, m) until I.

>>> print(show(SCHEDULE.orders(2, 3)))
0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""

from __future__ import annotations

from planner.schedules.schedule import Schedule, Times
from planner.schedules.slot import Orders, show, spell, weave

__all__ = ["SCHEDULE", "show"]


def orders(p: int, m: int, v: int) -> Orders:
    return tuple(spell(weave([r] * m, [r] * m, min(p - 1 - r, m), lag=r), m) for r in range(p))


def time(p: int, m: int, v: int, t: Times) -> float:
    return m * t.total + (p - 1) * (t.f + t.i - t.w)


def memory(rank: int, p: int, m: int, v: int) -> float:
    return min(p, m)


SCHEDULE = Schedule("zb-h1", "arXiv:2401.10241", orders, time, memory, splits=True)

"""ZB-H2: twice the forwards ahead of ZB-H1, so that no rank ever waits between its first and its last pass (Qi et al., 2023, arXiv:2401.10241).

With equal stages and F = I = W the step takes m(F + I + W) + (p - 1)F: each rank is busy without a break from its first forward on, and a next step can start
while others end this one. Every rank keeps min(2p, m) microbatches until W, and min(2(p - r) - 1, m) until I.

>>> print(show(SCHEDULE.orders(2, 4)))
0F0 0F1 0F2 0I0 0F3 0W0 0I1 0W1 0I2 0W2 0I3 0W3
1F0 1I0 1F1 1I1 1F2 1I2 1F3 1W0 1I3 1W1 1W2 1W3
"""

from __future__ import annotations

from planner.schedules.schedule import Schedule, Times
from planner.schedules.slot import Orders, Token, show, spell

__all__ = ["SCHEDULE", "show"]


def word(rank: int, p: int, m: int) -> list[Token]:
    ahead = min(2 * (p - rank) - 1, m)
    out: list[Token] = [("F", rank)] * ahead
    for k in range(m):
        out.append(("I", rank))
        out += [("F", rank)] if ahead + k < m else []
        out += [("W", rank)] if k >= 2 * rank else []
    return [*out, *([("W", rank)] * min(2 * rank, m))]


def orders(p: int, m: int, v: int) -> Orders:
    return tuple(spell(word(r, p, m), m) for r in range(p))


def time(p: int, m: int, v: int, t: Times) -> float:
    return m * t.total + (p - 1) * t.f


def memory(rank: int, p: int, m: int, v: int) -> float:
    return min(2 * p, m)


SCHEDULE = Schedule("zb-h2", "arXiv:2401.10241", orders, time, memory, splits=True)

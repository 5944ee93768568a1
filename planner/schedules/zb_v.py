"""ZB-V: two stages a rank, down and up again; no wait between a rank's first and last pass, memory of 1F1B (Qi et al., 2023, arXiv:2401.10241, 6).

With F = I = W, equal stages and m >= 2p - 1 the step takes m(F + I + W) + (p - 1)F / 2. Every rank keeps p microbatches until W and until I.

>>> print(show(SCHEDULE.orders(2, 3)))
0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
"""

from __future__ import annotations

from planner.schedules.schedule import Schedule, Times, vee
from planner.schedules.slot import Orders, Token, show, spell

__all__ = ["SCHEDULE", "show"]


def word(rank: int, p: int, m: int) -> list[Token]:
    """The order for max(m, 2p - 1) microbatches; with fewer, the passes of those that are not there drop out."""
    down, up = rank, 2 * p - 1 - rank
    full = max(m, 2 * p - 1)
    turn: list[Token] = [("F", up), ("I", up), ("W", up)]
    out: list[Token] = [("F", down)] * (2 * (p - rank) - 1)
    out += [("F", up), ("F", down)] * rank
    out += turn * (p - rank)
    out += [("F", down), ("I", down), ("W", down), *turn] * (full - 2 * p + 1 + rank)
    out += [("I", down), ("W", down), *turn] * (p - rank - 1)
    out += [("I", down), ("I", up)] * rank
    out += [("I", down), ("W", down)] * (p - rank)
    return [*out, *([("W", up)] * rank), *([("W", down)] * rank)]


def orders(p: int, m: int, v: int) -> Orders:
    return tuple(spell(word(r, p, m), m) for r in range(p))


def time(p: int, m: int, v: int, t: Times) -> float:
    return m * t.total + (p - 1) * t.f / 2


def memory(rank: int, p: int, m: int, v: int) -> float:
    return p


SCHEDULE = Schedule("zb-v", "arXiv:2401.10241; torch 2.13 ScheduleZBVZeroBubble", orders, time, memory, vee, chunks=2, splits=True)

"""Interleaved zero-bubble: ZB-H1 over v stages a rank, in PyTorch's groups (torch 2.13 ScheduleInterleavedZeroBubble, after arXiv:2401.10241).

With equal stages the step takes m(F + I + W) + (p - 1)(F + I - W) / v. Rank r keeps ((v - 1) g + p) / v microbatches until W, g the size of a group, at most m,
and r / v fewer until I.

>>> print(show(SCHEDULE.orders(2, 2, 2)))
0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
"""

from __future__ import annotations

from planner.schedules.interleaved import group_size, stages_in_turn, unequal_groups
from planner.schedules.schedule import Schedule, Times
from planner.schedules.slot import Orders, Token, show, spell, weave

__all__ = ["SCHEDULE", "show"]


def word(rank: int, p: int, m: int, v: int) -> list[Token]:
    turns = stages_in_turn(rank, p, m, v)
    back = [(v - 1 - s // p) * p + rank for s in turns]
    return weave(turns, back, min((v - 1) * group_size(p, m) + p - 1 - rank, m * v), lag=rank)


def orders(p: int, m: int, v: int) -> Orders:
    return tuple(spell(word(r, p, m, v), m) for r in range(p))


def time(p: int, m: int, v: int, t: Times) -> float:
    return m * t.total + (p - 1) * (t.f + t.i - t.w) / v


def memory(rank: int, p: int, m: int, v: int) -> float:
    return min((v - 1) * group_size(p, m) + p, m * v) / v


SCHEDULE = Schedule(
    "interleaved-zb", "torch 2.13 ScheduleInterleavedZeroBubble; arXiv:2401.10241", orders, time, memory, chunks=None, refuse=unequal_groups, splits=True
)

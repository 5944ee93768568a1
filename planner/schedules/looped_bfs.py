"""Looped breadth-first: all microbatches through a rank's first stage, then its next; backwards in reverse (Lamy-Poirier, 2022, arXiv:2211.05953).

With equal stages the step takes m(F + B) + (p - 1)(F + B) / v; every rank keeps all m microbatches. Parameters of a stage are needed twice only, which suits
fully sharded ones.

>>> print(show(SCHEDULE.orders(2, 2, 2)))
0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
"""

from __future__ import annotations

from planner.schedules.schedule import Schedule, Times
from planner.schedules.slot import Orders, Slot, show

__all__ = ["SCHEDULE", "show"]


def orders(p: int, m: int, v: int) -> Orders:
    passes = [[(stage, i) for stage in range(r, p * v, p) for i in range(m)] for r in range(p)]
    return tuple((*(Slot(s, "F", i) for s, i in there), *(Slot(s, "B", i) for s, i in reversed(there))) for there in passes)


def time(p: int, m: int, v: int, t: Times) -> float:
    return (m + (p - 1) / v) * t.total


def memory(rank: int, p: int, m: int, v: int) -> float:
    return m


SCHEDULE = Schedule("looped-bfs", "arXiv:2211.05953; torch 2.13 ScheduleLoopedBFS", orders, time, memory, chunks=None)

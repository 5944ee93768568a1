"""1F1B-V: a V with whole backwards: two thirds of the activations of 1F1B, and nothing to split (Qi et al., 2024, arXiv:2405.15362).

Its bubble has no closed form: it waits in every period unless B = 2F. A rank keeps what its block keeps: 3 and 6 microbatches of p = 4 and 8.

>>> print(show(SCHEDULE.orders(2, 2)))
0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
"""

from __future__ import annotations

from functools import cache

from planner.schedules.building_block import Block, block, drawn_together, most_kept
from planner.schedules.schedule import Schedule, vee
from planner.schedules.slot import Orders, show

__all__ = ["SCHEDULE", "show"]


def rows(p: int) -> Block:
    return block(p, (1, 1, 2, 2), backward=2)


@cache
def orders(p: int, m: int, v: int) -> Orders:
    return drawn_together(rows(p), m, "B")


@cache
def memory(rank: int, p: int, m: int, v: int) -> float:
    return min(most_kept(rows(p), "B") / 2, m)


SCHEDULE = Schedule("1f1b-v", "arXiv:2405.15362", orders, None, memory, vee, chunks=2, splits=False)

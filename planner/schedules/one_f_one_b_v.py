"""1F1B-V: a V with whole backwards: two thirds of the activations of 1F1B, and nothing to split (Qi et al., 2024, arXiv:2405.15362).

Its bubble has no closed form: it waits in every period unless B = 2F. A rank keeps what its block keeps: 3 and 6 microbatches of p = 4 and 8.

>>> print(show(SCHEDULE.orders(2, 2)))
0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
"""

from __future__ import annotations

from planner.schedules.building_block import Block, block, repeating
from planner.schedules.slot import show

__all__ = ["SCHEDULE", "show"]


def rows(p: int) -> Block:
    return block(p, (1, 1, 2, 2), backward=2)


SCHEDULE = repeating("1f1b-v", rows, "B")

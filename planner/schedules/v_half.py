"""V-Half: a V whose ways down take twice as long as its ways up: half the activations of 1F1B, and a smaller bubble (Qi et al., 2024, arXiv:2405.15362).

Its bubble has no closed form for unequal times. A rank keeps what its block keeps: p / 2 + 1 microbatches where p is even.

>>> print(show(SCHEDULE.orders(2, 2)))
0F0 0F1 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0I1 0W0 0W1
1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 1W0 2W1 1W1
"""

from __future__ import annotations

from planner.schedules.building_block import Block, repeating
from planner.schedules.slot import show

__all__ = ["SCHEDULE", "show"]


def rows(p: int) -> Block:
    pause = 3 if p % 2 == 0 else 0
    return [
        [2 * r for r in range(p)], [3 * p - 2 - r for r in range(p)], [3 * p + pause - 1 + 2 * r for r in range(p)],
        [6 * p + pause - 2 - r for r in range(p)],
    ]  # fmt: skip


SCHEDULE = repeating("v-half", rows)

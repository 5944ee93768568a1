"""V-Min: a V in which every way is the shortest there is: about a third of the activations of 1F1B (Qi et al., 2024, arXiv:2405.15362).

Its bubble has no closed form: it waits in every period unless F = I = W. A rank keeps what its block keeps: 2, 4 and 6 microbatches of p = 4, 8 and 16.

>>> print(show(SCHEDULE.orders(2, 2)))
0F0 0F1 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1
1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1
"""

from __future__ import annotations

from planner.schedules.building_block import Block, repeating
from planner.schedules.slot import show

__all__ = ["SCHEDULE", "show"]


def rows(p: int) -> Block:
    pause = 2 if p % 3 == 0 else 0
    return [list(range(p)), [2 * p - 1 - r for r in range(p)], [2 * p + pause + r for r in range(p)], [4 * p + pause - 1 - r for r in range(p)]]


SCHEDULE = repeating("v-min", rows)

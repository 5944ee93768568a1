"""V-ZB: the V whose ranks have no time to wait at the activations of 1F1B, as a building block (Qi et al., 2024, arXiv:2405.15362).

With F = I = W and m >= 2p - 1 it is as short as ZB-V, m(F + I + W) + (p - 1)F / 2, and with fewer microbatches shorter. It has no closed form for unequal
times. A rank keeps p microbatches.

>>> print(show(SCHEDULE.orders(2, 2)))
0F0 0F1 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0I1 0W0 0W1
1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 1W0 2W1 1W1
"""

from __future__ import annotations

from planner.schedules.building_block import Block, repeating
from planner.schedules.slot import show

__all__ = ["SCHEDULE", "show"]


def rows(p: int) -> Block:
    down, up = [4 * r for r in range(p)], [2 * (p - 1 - r) for r in range(p)]
    return [down, [4 * p - 1 + t for t in up], [6 * p - 2 + t for t in down], [10 * p - 3 + t for t in up]]


SCHEDULE = repeating("v-zb", rows)

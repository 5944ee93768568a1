"""DualPipe: two copies of the pipeline in opposite directions, half the microbatches through each (DeepSeek-AI, 2024, arXiv:2412.19437).

Stage s < p lies on rank s and runs the first half of the microbatches; stage p + s is the copy of stage s on rank p - 1 - s and runs the second half. p must be
even, m even and 2p or more. With equal stages, each pair of a forward and a whole backward one block that takes F + B, the step takes
m(F + B) + (p / 2 - 1)(F + 2I - W); listed one by one the forward's result leaves at once, and the idle time is (p / 2 - 1)F where F = I = W. Every rank keeps
p + 1 microbatches and the parameters of two stages, whose gradients are summed over the two ranks that hold them.

>>> print(show(SCHEDULE.orders(2, 4)))
0F0 3F2 0F1 3B2 3F3 0B0 3B3 0I1 0W1
2F2 1F0 2F3 1B0 1F1 2B2 1B1 2I3 2W3
"""

from __future__ import annotations

from planner.schedules.dualpipe_v import word
from planner.schedules.schedule import Schedule, Times
from planner.schedules.slot import Orders, Slot, show, spell

__all__ = ["SCHEDULE", "show"]


def place(stage: int, p: int) -> int:
    """The rank of a stage, those of the second copy counted on from p."""
    return stage if stage < p else 2 * p - 1 - stage


def order(rank: int, p: int, m: int) -> tuple[Slot, ...]:
    """Half a V: the outermost ranks of both directions meet at the ends, the fold of the V is the middle of the pipeline."""
    first, second = rank, 2 * p - 1 - rank
    half = min(rank, p - 1 - rank)
    here, there = (first, second) if rank < p // 2 else (second, first)
    slots = spell(word(half, p // 2, m // 2, here, there), m // 2)
    return tuple(Slot(s.stage, s.kind, s.microbatch + (m // 2 if s.stage >= p else 0)) for s in slots)


def orders(p: int, m: int, v: int) -> Orders:
    return tuple(order(r, p, m) for r in range(p))


def wrong_sizes(p: int, m: int, v: int) -> str:
    if p % 2:
        return "pp must be even, half the stages of each direction lie on either side"
    return f"m must be even and 2 pp = {2 * p} or more" if m % 2 or m < 2 * p else ""


def time(p: int, m: int, v: int, t: Times) -> float:
    return m * t.total + (p / 2 - 1) * (t.f + 2 * t.i - t.w)


def memory(rank: int, p: int, m: int, v: int) -> float:
    return p + 1


SCHEDULE = Schedule("dualpipe", "deepseek-ai/DualPipe; arXiv:2412.19437", orders, time, memory, place, refuse=wrong_sizes, splits=True, copies=2)

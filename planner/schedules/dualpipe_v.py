"""DualPipeV: DualPipe folded at the middle, two stages a rank down and up again, one copy of the parameters (github.com/deepseek-ai/DualPipe, "cut-in-half").

A forward of one stage and a full backward of the other run side by side where the device can; here they are listed one after the other. With equal stages, each
such pair one block that takes F + B and hands both results on at its end, the step takes m(F + B) + (p - 1)(F + 2I - W) / 2. Listed one by one the forward's
result leaves at once, and the idle time is less: (p - 1)F / 2 where F = I = W. Every rank keeps p + 1/2 microbatches; m must be 2p or more.

>>> print(show(SCHEDULE.orders(2, 4)))
0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
"""

from __future__ import annotations

from planner.schedules.schedule import Schedule, Times, vee
from planner.schedules.slot import Orders, Token, show, spell

__all__ = ["SCHEDULE", "show", "word"]


def word(rank: int, p: int, m: int, here: int, there: int) -> list[Token]:
    """The word of a rank `p - 1 - rank` hops before the fold; `here` is its stage on the way to the fold, `there` the one on the way back."""
    before = p - rank - 1
    half, odd = (rank + 1) // 2, rank % 2
    split = {(k, s) for k in range(rank + 1) for s in (0, 1) if 2 * k + s >= 2 * half + 1 - odd}
    out: list[Token] = [("F", here)] * (2 * before)
    out += [("F", here), ("F", there)] * (rank + 1)
    out += [("I", there), ("W", there), ("F", there)] * before
    out += [("F", here), ("B", there), ("F", there), ("B", here)] * (m - 2 * p + rank + 1)
    out += [("B", there), ("F", there), ("B", here)] * before
    late: list[int] = []
    for k in range(rank + 1):
        for s, stage in enumerate((there, here)):
            out.append(("I" if (k, s) in split else "B", stage))
            late += [stage] if (k, s) in split else []
    for _ in range(before):
        out += [("W", late.pop(0)), ("I", here)]
        late.append(here)
    return [*out, *(("W", stage) for stage in late)]


def orders(p: int, m: int, v: int) -> Orders:
    return tuple(spell(word(r, p, m, r, 2 * p - 1 - r), m) for r in range(p))


def too_few(p: int, m: int, v: int) -> str:
    return f"m must be 2 pp = {2 * p} or more" if m < 2 * p else ""


def time(p: int, m: int, v: int, t: Times) -> float:
    return m * t.total + (p - 1) * (t.f + 2 * t.i - t.w) / 2


def memory(rank: int, p: int, m: int, v: int) -> float:
    return p + 0.5


SCHEDULE = Schedule("dualpipe-v", "deepseek-ai/DualPipe; torch 2.13 ScheduleDualPipeV", orders, time, memory, vee, chunks=2, refuse=too_few, splits=True)

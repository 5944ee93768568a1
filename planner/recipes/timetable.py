"""A run's pipeline timed order by order: every pass of every stage and microbatch, where `step` has a closed form of the whole.

Stages are unequal (embedding, head, a layer fewer), hops take their time, and a step begins when the first rank does and ends when the last has done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ir.errors import InputError
from planner.recipes.bill import Bill
from planner.recipes.run import Run
from planner.recipes.shares import Shares
from planner.recipes.step import passes, step
from planner.schedules import schedule
from planner.schedules.pipe import Pipe, StageTimes
from planner.schedules.retime import retime
from planner.schedules.slot import Orders

ORDERS = {"1f1b": ("1f1b", False), "gpipe": ("gpipe", False), "interleaved": ("interleaved", False), "zb-1p": ("zb-h1", True), "zb-2p": ("zb-h2", True),
          "zb-v": ("zb-v", True)}  # fmt: skip
"""The orders that a run's schedule stands for, and whether the stage before may go on once input gradients are there."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """Seconds: when each rank starts and ends its microbatches, and the whole step."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    step_s: float


def timetable(run: Run, bill: Bill, shares: Shares) -> Timetable:
    """The exact times of a run's orders; InputError where it has no pipeline."""
    if run.pp < 2 or run.schedule not in ORDERS:
        raise InputError(f"run `{run.id}` with pp {run.pp} and schedule `{run.schedule}` has no orders to be timed; these have: {', '.join(ORDERS)}")
    name, splits = ORDERS["1f1b" if run.schedule == "interleaved" and run.vpp == 1 else run.schedule]
    pipe = Pipe(_stages(run, bill, shares, name, splits), run.num_microbatches)
    word = pipe.word(_orders(name, run.pp, run.num_microbatches, run.vpp))
    start = retime(pipe, word[None])[1][0]
    end = start[:, -1] + pipe.seconds[np.arange(run.pp), word[:, -1]]
    found = step(bill, shares)
    lasts = float((end - start[:, 0]).max() if splits else end.max())
    return Timetable(tuple(map(float, start[:, 0])), tuple(map(float, end)), lasts + float(found.reduce[0] + found.update[0]))


@lru_cache(maxsize=64)
def _orders(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Orders:
    return schedule(name).orders(num_ranks, num_microbatches, num_chunks)


def _stages(run: Run, bill: Bill, shares: Shares, name: str, splits: bool) -> StageTimes:
    """Each stage's passes: the layers of its rank in equal parts, the embedding on the first and the head on the last, the short ends a layer fewer."""
    n = run.num_stages
    part = passes(bill, shares)[0]
    short = 1.0 if run.short_ends else 0.0
    layers = np.full(n, (run.shape.layers + 2 * short) / n)
    layers[[0, -1]] -= short
    seconds = layers[:, None] * part[0]
    seconds[0] += part[1]
    seconds[-1] += part[2]
    f, i, w = seconds.T
    if not splits:
        i, w = i + w, np.zeros(n)
    rank = tuple(schedule(name).rank_of(s, run.pp) for s in range(n))
    hop = tuple(float(shares.hop * bill.hop[0]) * (a != b) for a, b in pairwise(rank))
    return StageTimes(tuple(map(float, f)), tuple(map(float, i)), tuple(map(float, w)), hop, rank)

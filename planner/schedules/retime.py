"""Exact times of many words at once: the longest path over slots, a round of all ranks of all candidates a numpy step.

>>> from planner.schedules.pipe import Pipe, StageTimes
>>> from planner.schedules import schedule
>>> pipe = Pipe(StageTimes.equal(2, f=1.0, i=1.0, w=1.0), 4)
>>> words = np.stack([pipe.word(schedule(name).orders(2, 4)) for name in ("1f1b", "zb-h1", "zb-h2")])
>>> [float(x) for x in retime(pipe, words)[0]]
[14.0, 13.0, 13.0]
"""

from __future__ import annotations

import numpy as np

from planner.schedules.pipe import Pipe


def retime(pipe: Pipe, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a step [candidate], inf where the word waits for itself, and start [candidate, rank, place], inf where it never runs. Words must be `legal`.

    Within a rank what a pass waits for is earlier in the word; so only the arrival from the neighbour stage counts. A round starts the next token of every rank
    whose arrival is known: as many rounds as the longest chain has tokens.
    """
    n, p, length = words.shape
    ranks = np.arange(p)[:, None]
    micro, width = pipe.microbatches(words), pipe.zero + 3
    row = (np.arange(n) * width)[:, None, None]
    needs, makes = pipe.needs[ranks, words], pipe.makes[ranks, words]
    # one more place a rank: a token that waits for ever
    take = np.full((n, p, length + 1), pipe.zero + 2)
    take[:, :, :length] = np.where(needs < 0, pipe.zero, needs + micro)
    take += row
    give = np.full((n, p, length + 1), pipe.zero + 1)
    give[:, :, :length] = np.where(makes < 0, pipe.zero + 1, makes + micro)
    give += row
    lag, seconds = np.zeros((2, n, p, length + 1))
    lag[:, :, :length], seconds[:, :, :length] = pipe.lag[ranks, words], pipe.seconds[ranks, words]
    ends = np.full((n, width), np.inf)
    ends[:, pipe.zero] = 0.0
    start = np.full((n, p, length + 1), np.inf)
    free = _rounds(take.ravel(), give.ravel(), lag.ravel(), seconds.ravel(), ends.ravel(), start.ravel(), n * p, length)
    runs = np.asarray(np.isfinite(start[:, :, length - 1]).all(axis=1, keepdims=True))
    taken = pipe.taken(np.where(runs, start[:, :, 0], 0.0), free.reshape(n, p)).max(axis=1)
    return np.where(runs[:, 0], taken, np.inf), start[:, :, :length]


def _rounds(
    take: np.ndarray, give: np.ndarray, lag: np.ndarray, seconds: np.ndarray, ends: np.ndarray, start: np.ndarray, lines: int, length: int
) -> np.ndarray:
    """When each line, a rank of a candidate, is free at the end; fills `ends` and `start`. All arrays are flat."""
    at, free = np.arange(lines) * (length + 1), np.zeros(lines)
    unread = int(ends.size) - 2
    while True:
        begin = ends[take[at]]
        begin += lag[at]
        ready = begin < np.inf
        if not ready.any():
            return free
        np.maximum(begin, free, out=begin)
        start[at] = begin
        begin += seconds[at]
        np.copyto(free, begin, where=ready)
        ends[np.where(ready, give[at], unread)] = begin
        at += ready

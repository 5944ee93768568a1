"""Lower bounds on the seconds of any order of a Pipe: each rank's work, what it must wait for at both ends, and what its memory lets it do meanwhile."""

from __future__ import annotations

import numpy as np

from planner.schedules.pipe import TOLERANCE, F, Pipe


def lower_bound(pipe: Pipe) -> float:
    """Seconds that no order beats.

    >>> from planner.schedules.pipe import Limits, StageTimes
    >>> times = StageTimes.equal(4, f=1.0, i=1.0, w=1.0)
    >>> lower_bound(Pipe(times, 8)), lower_bound(Pipe(times, 8, Limits.units(times, 2)))
    (27.0, 37.0)
    """
    if pipe.rolling:
        return pipe.m * float(pipe.seconds.sum(axis=1).max())
    per_stage = max(max(_stage(pipe, s), _turns(pipe, s)) for s in range(pipe.num_stages))
    return max(per_stage, *(_rank(pipe, r) for r in range(pipe.p)))


def arrivals(pipe: Pipe) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per stage: earliest start of a forward, earliest start of an input gradient, least seconds from the end of the last input gradient to the end of all."""
    t = pipe.times
    f, i, w, hop = map(np.array, (t.f, t.i, t.w, t.hop))
    head = np.concatenate([[0.0], np.cumsum(f[:-1] + hop)])
    back = np.concatenate([np.cumsum((i[1:] + hop)[::-1])[::-1], [0.0]])
    tail = np.zeros(len(f))
    for s in range(len(f)):
        tail[s] = max(w[s], hop[s - 1] + i[s - 1] + tail[s - 1] if s else 0.0)
    return head, head[-1] + f[-1] + back, tail


def _rank(pipe: Pipe, r: int) -> float:
    """A rank's work: before its first input gradient can start there are forwards only, as many as its memory takes; behind its last one hangs the tail."""
    head, back, tail = arrivals(pipe)
    low, high = int(pipe.stage[r, 0]), int(pipe.stage[r, -1])
    f, i, w = (pipe.seconds[r, k::3] for k in range(3))
    before = min(back[high] - head[low], _forwards(pipe, r))
    timed = pipe.m * float((f + i).sum())
    return float(back[high] - before + max(timed + pipe.m * float(w.sum()), timed + _forced(pipe, r) + tail[low]))


def _forwards(pipe: Pipe, r: int) -> float:
    """Most seconds of forwards that a rank's memory takes at once: the knapsack's relaxation, and whole forwards where there is one stage."""
    acts, f, left, out = pipe.delta[r, F::3], pipe.seconds[r, F::3], float(pipe.limit[r]) + TOLERANCE, 0.0
    for k in sorted(range(pipe.v), key=lambda k: -f[k] / acts[k] if acts[k] else -np.inf):
        n = min(pipe.m, left / acts[k]) if acts[k] else pipe.m
        n = np.floor(n) if pipe.v == 1 else n
        out, left = out + n * f[k], left - n * acts[k]
    return float(out)


def _forced(pipe: Pipe, r: int) -> float:
    """Least seconds of weight gradients before the last forward, where a rank holds one stage: else the others' activations would not fit."""
    kept = -float(pipe.delta[r, 2])
    if pipe.v > 1 or kept <= 0:
        return 0.0
    owed = (float(pipe.limit[r]) - float(pipe.delta[r, F])) / kept + TOLERANCE
    return max(0.0, np.ceil(pipe.m - 1 - owed) if np.isfinite(owed) else 0.0) * float(pipe.seconds[r, 2])


def _stage(pipe: Pipe, s: int) -> float:
    """The last microbatch of a stage: all forwards before its own, what memory forces before it, then its way down and back."""
    head, back, tail = arrivals(pipe)
    f, i, w = pipe.times.f[s], pipe.times.i[s], pipe.times.w[s]
    forced = _freed_before_last(pipe, s) if pipe.v == 1 else 0.0
    return float(head[s] + (pipe.m - 1) * f + forced + (back[s] - head[s]) + i + max(w, tail[s]))


def _turns(pipe: Pipe, s: int) -> float:
    """A stage that holds n microbatches until W takes one more only then: whole turns of the way there and back."""
    head, back, tail = arrivals(pipe)
    act, f, i, w = float(pipe.limits.activation[s]), pipe.times.f[s], pipe.times.i[s], pipe.times.w[s]
    room = (float(pipe.limit[pipe.times.rank[s]]) + TOLERANCE) / act if act else np.inf
    n = int(min(room, pipe.m))
    turns, rest = divmod(pipe.m - 1, n)
    # the first of n need not have run W where what n leave after I still lets one more in
    until = back[s] - head[s] + i + (w if n * (1.0 - pipe.limits.freed_at_i) + 1.0 > room + 1e-6 else 0.0)
    return float(head[s] + turns * until + rest * f + (back[s] - head[s]) + i + max(w, tail[s]))


def _freed_before_last(pipe: Pipe, s: int) -> float:
    """Least seconds of input and weight gradients before the last forward of a rank with one stage: the minimum of a linear program at one of two corners."""
    act, m, share = float(pipe.limits.activation[s]), pipe.m, pipe.limits.freed_at_i
    i, w = pipe.times.i[s], pipe.times.w[s]
    room = float(pipe.limit[pipe.times.rank[s]]) / act + TOLERANCE if act else np.inf
    if room >= m:
        return 0.0
    corners = []
    for whole in (room, 1.0):
        half = m - whole if share >= 1.0 else min(m - whole, (room - whole) / (1.0 - share))
        corners.append((m - whole) * i + (m - whole - half) * w)
    return max(0.0, min(corners))

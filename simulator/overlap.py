"""What computing loses while a collective runs beside it: one law, in closed form for a step's parts, and span by span for a simulated program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ir.program import Program
from simulator.sweep import Floats, Sweep

ROUNDS = 2
"""How often kernels are slowed by what then runs beside them: each adds the same seconds to a rank whose collectives all lie beside kernels, and lays them
better."""


def together_s(compute_s: ArrayLike, comm_s: ArrayLike, lost: ArrayLike) -> Floats:
    """Seconds of kernels that take `compute_s` alone and of a collective of `comm_s` that starts with them: a fluid.

    `lost`: the share of its speed, 0 to 1, that a kernel loses while the collective runs. The collective loses nothing, and afterwards kernels run alone, so
    that what takes longer ends last: `max(comm, compute + lost comm)`.

    >>> together_s(1.0, 0.5, 0.4).item(), together_s(1.0, 2.0, 0.4).item()
    (1.2, 2.0)
    """
    return np.maximum(comm_s, np.asarray(compute_s, np.float64) + np.asarray(lost) * comm_s)


def lost(slower: ArrayLike) -> Floats:
    """The share of its speed that a kernel loses which takes `slower` times as long; nothing where that is no more than 1.

    >>> lost([2.0, 0.5]).tolist()
    [0.5, 0.0]
    """
    return 1.0 - 1.0 / np.maximum(slower, 1.0)


def slowed_s(
    sweep: Sweep, program: Program, seconds: Sequence[float], added: ArrayLike | None, lost: Sequence[float], crowding: Sequence[float]
) -> Sequence[float]:  # fmt: skip
    """Seconds of every actor where the kernels of a rank lose `lost` of their speed, by actor, while a collective runs that crowds them as `crowding` says: 1
    as much as where `lost` was measured, 0 not at all.

    A kernel takes longer by what it loses of the seconds in which it is crowded, as in `together_s`: of its firings in the sweep's last step the mean, since an
    actor has one duration.
    """
    weight = np.asarray(crowding, np.float64)[sweep.actor]
    if not weight.any() or not any(lost):
        return seconds
    rank = np.array([a.rank for a in program.actors])[sweep.actor]
    ranks = [(np.flatnonzero((rank == r) & (weight > 0)), np.flatnonzero((rank == r) & (weight == 0))) for r in np.unique(rank[weight > 0])]
    alone, losses = np.asarray(seconds, np.float64), np.asarray(lost, np.float64)
    slowed = alone
    firings = np.bincount(sweep.actor, minlength=len(alone))
    for _ in range(ROUNDS):
        start, end = sweep.times(slowed, added)
        beside = np.zeros(len(rank))
        for comm, rest in ranks:
            moments, crowded_s = _crowded(start[:, comm], end[:, comm], weight[comm])
            beside[rest] = np.interp(end[-1, rest], moments, crowded_s) - np.interp(start[-1, rest], moments, crowded_s)
        slowed = alone + losses * np.bincount(sweep.actor, beside, len(alone)) / firings
    found: list[float] = slowed.tolist()
    return found


def _crowded(start: Floats, end: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """(moments, seconds times weight that have passed up to each) of intervals [step, n] of such weights [n]: a line between moments."""
    at = np.concatenate([start.ravel(), end.ravel()])
    steps = np.tile(weight, len(start))
    order = np.argsort(at, kind="stable")
    moments = at[order]
    slope = np.cumsum(np.concatenate([steps, -steps])[order])
    return moments, np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(moments))])

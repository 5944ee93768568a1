"""What computing loses while a collective runs beside it: one law, in closed form for a step's parts, and span by span for a simulated program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ir.program import Program
from simulator.sweep import Floats, Sweep

ROUNDS = 2
"""How often kernels are slowed by what then runs beside them. One round is exact for kernels that lie all or not at all beside a collective."""


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


def slowed_s(sweep: Sweep, program: Program, seconds: Sequence[float], added: ArrayLike | None, lost: Sequence[float]) -> Sequence[float]:
    """Seconds of every actor where the kernels of a rank lose `lost` of their speed, by actor, while one of its collectives runs.

    A kernel of which the part c lies beside collectives takes `1 / (1 - lost c)` times as long: of all its firings in the sweep's last step the mean, since an
    actor has one duration. Messages between stages slow nothing.
    """
    talks = np.array([a.work.kind == "collective" for a in program.actors])[sweep.actor]
    if not talks.any() or not any(lost):
        return seconds
    rank = np.array([a.rank for a in program.actors])[sweep.actor]
    ranks = [(np.flatnonzero((rank == r) & talks), np.flatnonzero((rank == r) & ~talks)) for r in np.unique(rank[talks])]
    alone, weight, slowed = np.asarray(seconds, np.float64), np.asarray(lost, np.float64), seconds
    for _ in range(ROUNDS):
        start, end = sweep.times(slowed, added)
        beside = np.zeros(len(rank))
        for comm, rest in ranks:
            edges, covered = _covered(start[:, comm].ravel(), end[:, comm].ravel())
            beside[rest] = np.interp(end[-1, rest], edges, covered) - np.interp(start[-1, rest], edges, covered)
        long = np.bincount(sweep.actor, end[-1] - start[-1], len(alone))
        part = np.bincount(sweep.actor, beside, len(alone)) / np.maximum(long, 1e-30)
        slowed = alone / (1.0 - weight * np.minimum(part, 1.0))
    return slowed


def _covered(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """(moments, seconds in any of the intervals up to each): a line between moments."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reached[:-1]])
    last = np.concatenate([first[1:], [True]])
    edges = np.stack([start[first], reached[last]], axis=1)
    covered = np.cumsum(edges[:, 1] - edges[:, 0])
    return edges.ravel(), np.stack([covered - (edges[:, 1] - edges[:, 0]), covered], axis=1).ravel()

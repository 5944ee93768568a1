"""Where a pipeline is cut: contiguous runs of layers whose slowest is as fast as it can be, or whose ranks are, where these hold several."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ir.errors import PlanError


def cut(weights: Sequence[float], num_stages: int) -> tuple[tuple[int, int], ...]:
    """[first, last) of every stage such that the heaviest stage is the lightest possible; among equals the earlier stages are the longer.

    `weights[i]` is the time of layer i of the chain, embedding and head included. Exact, by dynamic programming over (stages, layers).

    >>> cut([0, 1, 1, 1, 1, 2], 2)
    ((0, 4), (4, 6))
    """
    n = len(weights)
    if not 1 <= num_stages <= n:
        raise PlanError(f"{n} layers cannot be cut into {num_stages} stages; legal are 1 to {n}")
    total = [0.0]
    for w in weights:
        total.append(total[-1] + w)
    best = [total[n] - total[i] for i in range(n + 1)]
    choices: list[list[int]] = []
    for stages in range(2, num_stages + 1):
        now, choice = [float("inf")] * (n + 1), [n] * (n + 1)
        for i in range(n - stages + 1):
            for j in range(i + 1, n - stages + 2):
                worst = max(total[j] - total[i], best[j])
                if worst < now[i] - 1e-15 * abs(worst) or (worst <= now[i] and best[j] <= best[choice[i]]):
                    now[i], choice[i] = worst, j
        best = now
        choices.append(choice)
    cuts, at = [0], 0
    for choice in reversed(choices):
        at = choice[at]
        cuts.append(at)
    cuts.append(n)
    return tuple(itertools.pairwise(cuts))


def cut_for_ranks(weights: Sequence[float], rank: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """[first, last) of every stage, one or more layers each, where stage s lies on pipeline rank `rank[s]`: the heaviest rank as light as it can be made, then
    the heaviest stage, then all ranks and all stages as even as they can be.

    From a cut whose heaviest stage is lightest, layers move from one stage to another as long as that helps.

    >>> cut_for_ranks([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2], (0, 1, 0, 1))
    ((0, 5), (5, 9), (9, 12), (12, 14))
    """
    cuts = [a for a, _ in cut(weights, len(rank))] + [len(weights)]
    if len(set(rank)) == len(rank):
        return tuple(itertools.pairwise(cuts))
    total, where = np.concatenate([[0.0], np.cumsum(weights)]), np.array(rank)
    best = _loads(total, where, np.array([cuts]))[0].tolist()
    while True:
        near = _moved(np.array(cuts))
        loads = _loads(total, where, near)
        k = int(np.lexsort(loads.T[::-1])[0]) if len(near) else 0
        if not len(near) or loads[k].tolist() >= best:
            return tuple(itertools.pairwise(cuts))
        best, cuts = loads[k].tolist(), near[k].tolist()


def _loads(total: np.ndarray, rank: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """For each of the cuts [n, stages + 1] the heaviest rank, the heaviest stage, the sums of squares of ranks and of stages; rounded so that sums in another
    order are equal."""
    stages = np.diff(total[cuts], axis=1) / (float(total[-1]) or 1.0)
    ranks = np.zeros((len(cuts), int(rank.max()) + 1))
    np.add.at(ranks.T, rank, stages.T)
    return np.stack([ranks.max(axis=1), stages.max(axis=1), (ranks**2).sum(axis=1), (stages**2).sum(axis=1)], axis=1).round(12)


def _moved(cuts: np.ndarray) -> np.ndarray:
    """[n, stages + 1] the cuts after one layer less in one stage and one more in another, all between moving on by one."""
    n = len(cuts) - 1
    give, take = (x.ravel() for x in np.meshgrid(np.arange(n), np.arange(n), indexing="ij"))
    kept = (give != take) & (np.diff(cuts)[give] > 1)
    give, take, at = give[kept, None], take[kept, None], np.arange(n + 1)[None]
    moved: np.ndarray = cuts[None] + ((take < at) & (at <= give)) - ((give < at) & (at <= take)).astype(int)
    return moved

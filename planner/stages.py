"""Where a pipeline is cut: contiguous runs of layers whose slowest is as fast as it can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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

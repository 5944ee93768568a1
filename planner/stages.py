"""Where a pipeline is cut: contiguous runs of layers whose slowest is as fast as it can be, or whose ranks are, where these hold several."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

from ir.errors import InputError, PlanError


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


def parse_stages(text: str, num_layers: int) -> tuple[tuple[int, int], ...]:
    """[first, last) of the stages that a text gives: blocks a stage, `11,10,11`, the embedding in the first and the head in the last; or Megatron-LM's
    `Et*3|(tt|)*4|L`, where E is the embedding, t a block, L the head, `|` parts stages, and `*n` repeats a letter or a group.

    `num_layers` counts embedding and head. Raises InputError where the text cannot be read, PlanError where it is for another number of blocks.

    >>> parse_stages("3,4,3", 12), parse_stages("Et*3|(tt|)*3tL", 12)
    (((0, 4), (4, 8), (8, 12)), ((0, 4), (4, 6), (6, 8), (8, 10), (10, 12)))
    """
    plain = re.sub(r"\s", "", text)
    if re.fullmatch(r"\d+(,\d+)*", plain):
        words = ["t" * int(n) for n in plain.split(",")]
        words = ["E" + words[0], *words[1:]]
        words[-1] += "L"
    else:
        words = [part for part in _written_out(plain, text).split("|") if part]
    if "".join(words).strip("EL").strip("t") or not "".join(words).startswith("E") or not words[-1].endswith("L"):
        raise InputError(f"--stages {text}: give blocks a stage, as in 11,10,11, or letters E (embedding), t (block), L (head), as in Et*3|(tt|)*4|L")
    found = sum(map(len, words))
    if found != num_layers or not all(words):
        raise PlanError(f"--stages {text} has {found - 2} blocks in {len(words)} stages; the model has {num_layers - 2}, and no stage may be empty")
    cuts = list(itertools.accumulate(map(len, words), initial=0))
    return tuple(itertools.pairwise(cuts))


def _written_out(plain: str, text: str) -> str:
    """A layout with its repetitions written out."""
    while "*" in plain:
        plain, num = re.subn(r"(?:\(([^()]*)\)|([EtL|]))\*(\d{1,4})", lambda m: (m[1] or m[2] or "") * int(m[3]), plain)
        if not num:
            raise InputError(f"--stages {text}: `*` repeats the letter or the group in parentheses before it, as in t*3 or (tt|)*4")
    return plain.replace("(", "").replace(")", "").replace(",", "")


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

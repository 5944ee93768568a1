"""1F1B: after p - s - 1 warm-up forwards, stage s alternates one forward and one backward (PipeDream-Flush, Narayanan et al., 2021, arXiv:2006.09503).

With equal stages the step takes (m + p - 1)(F + B), as GPipe, but stage s keeps only min(p - s, m) microbatches.
"""

from __future__ import annotations


def order(stage: int, num_stages: int, num_microbatches: int) -> tuple[tuple[str, int], ...]:
    """
    >>> order(0, 2, 3)
    (('F', 0), ('F', 1), ('B', 0), ('F', 2), ('B', 1), ('B', 2))
    >>> order(1, 2, 3)
    (('F', 0), ('B', 0), ('F', 1), ('B', 1), ('F', 2), ('B', 2))
    """
    ahead = stash(stage, num_stages, num_microbatches)
    slots: list[tuple[str, int]] = [("F", m) for m in range(ahead)]
    for m in range(num_microbatches):
        slots.append(("B", m))
        if m + ahead < num_microbatches:
            slots.append(("F", m + ahead))
    return tuple(slots)


def stash(stage: int, num_stages: int, num_microbatches: int) -> int:
    return min(num_stages - stage, num_microbatches)

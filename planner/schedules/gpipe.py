"""GPipe: all forwards, then all backwards in the same order of microbatches (Huang et al., 2019, arXiv:1811.06965).

With equal stages, forward F and backward B, the step takes (m + p - 1)(F + B): the bubble is (p - 1) / (m + p - 1). Every stage keeps all m microbatches.
"""

from __future__ import annotations


def order(stage: int, num_stages: int, num_microbatches: int) -> tuple[tuple[str, int], ...]:
    """
    >>> order(0, 2, 2)
    (('F', 0), ('F', 1), ('B', 0), ('B', 1))
    """
    return (*(("F", m) for m in range(num_microbatches)), *(("B", m) for m in range(num_microbatches)))


def stash(stage: int, num_stages: int, num_microbatches: int) -> int:
    return num_microbatches

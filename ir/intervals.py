"""Sets of moments as sorted, disjoint intervals: arrays of shape (n, 2), seconds, [start, end)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]
EMPTY: Intervals = np.zeros((0, 2))


def union(pairs: Iterable[tuple[float, float]]) -> Intervals:
    """The moments in any of the pairs.

    >>> union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)]).tolist()
    [[0.0, 2.0], [3.0, 4.0]]
    """
    listed = np.array([p for p in pairs if p[1] > p[0]], dtype=np.float64).reshape(-1, 2)
    if not len(listed):
        return EMPTY
    listed = listed[np.argsort(listed[:, 0], kind="stable")]
    reach = np.maximum.accumulate(listed[:, 1])
    starts = np.flatnonzero(np.concatenate([[True], listed[1:, 0] > reach[:-1]]))
    return np.stack([listed[starts, 0], reach[np.append(starts[1:] - 1, len(listed) - 1)]], axis=1)


def covers(a: Intervals, moments: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of the moments lie in the intervals."""
    if not len(a):
        return np.zeros(len(moments), dtype=bool)
    at = np.searchsorted(a[:, 0], moments, side="right") - 1
    return np.asarray((at >= 0) & (moments < a[np.maximum(at, 0), 1]))


def _where(a: Intervals, b: Intervals, in_b: bool) -> Intervals:
    edges = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    if len(edges) < 2:
        return EMPTY
    inside = covers(a, edges[:-1]) & (covers(b, edges[:-1]) == in_b)
    return union(zip(edges[:-1][inside].tolist(), edges[1:][inside].tolist(), strict=True))


def minus(a: Intervals, b: Intervals) -> Intervals:
    """The moments of a that are not in b.

    >>> minus(union([(0.0, 4.0)]), union([(1.0, 2.0)])).tolist()
    [[0.0, 1.0], [2.0, 4.0]]
    """
    return _where(a, b, in_b=False)


def common(a: Intervals, b: Intervals) -> Intervals:
    """The moments in both."""
    return _where(a, b, in_b=True)


def length(a: Intervals) -> float:
    return float((a[:, 1] - a[:, 0]).sum())

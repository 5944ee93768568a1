"""What computing loses while a collective runs beside it: one law, in closed form for a step's parts, and span by span for a simulated program."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


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

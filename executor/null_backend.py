"""No arrays at all: the driver's order, threads and rendezvous without the work, for tests and for the cost of a firing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np


class NullStream:
    """Does nothing, in order."""

    __slots__ = ()

    def bind(self) -> None:
        pass

    def perform(self, work: Callable[[int, int], None], step: int, microbatch: int, after: Sequence[Any]) -> tuple[float, float]:
        now_s = perf_counter()
        return now_s, now_s


class NullBackend:
    """Only the order is performed; there are no losses and no tensors."""

    name = "null"
    xp: Any = None
    asynchronous = False
    has_arrays = False

    def allocate(self, nbytes: int) -> None:
        return None

    def view(self, raw: None, offset: int, shape: tuple[int, ...], dtype: str) -> None:
        return None

    def put(self, out: None, host: np.ndarray) -> None:
        pass

    def get(self, array: None) -> np.ndarray:
        return np.full((), np.nan)

    def stream(self, rank: int, queue: str) -> NullStream:
        return NullStream()

    def times(self, mark: tuple[float, float]) -> tuple[float, float]:
        return mark

    def synchronize(self) -> None:
        pass

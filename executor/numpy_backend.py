"""Arrays in host memory; work is done when `perform` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from executor.backend import numpy_dtype

ALIGNMENT = 64
"""Bytes of a cache line: slots of different registers share none, and vector loads are aligned."""


class NumpyStream:
    """The calling thread itself."""

    __slots__ = ()

    def bind(self) -> None:
        pass

    def perform(self, work: Callable[[int, int], None], step: int, microbatch: int, after: Sequence[Any]) -> tuple[float, float]:
        start_s = perf_counter()
        work(step, microbatch)
        return start_s, perf_counter()


class NumpyBackend:
    """numpy on the cores of this machine."""

    name = "numpy"
    xp: Any = np
    asynchronous = False
    has_arrays = True

    def allocate(self, nbytes: int) -> np.ndarray:
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        return raw[skip : skip + nbytes]

    def view(self, raw: np.ndarray, offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.ndarray(shape, numpy_dtype(dtype), raw.data, offset)

    def put(self, out: np.ndarray, host: np.ndarray) -> None:
        np.copyto(out, host)

    def get(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def stream(self, rank: int, queue: str) -> NumpyStream:
        return NumpyStream()

    def times(self, mark: tuple[float, float]) -> tuple[float, float]:
        return mark

    def synchronize(self) -> None:
        pass

"""What a backend is: memory, streams that perform work, marks in time; the driver knows nothing else of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ir.errors import InputError

Array = Any
"""An array of the backend's kind: numpy's, cupy's, or None on the null backend."""

Mark = Any
"""What a stream returns for a piece of work: orders later work after it, and tells its start and end once the work is done.

On an asynchronous backend it has an attribute `stream`, and of one stream a later mark is reached after an earlier one.
"""


class Stream(Protocol):
    """Performs work in the order in which it is given; one for each (rank, queue), used by one thread."""

    def bind(self) -> None:
        """Makes this the stream of the calling thread."""

    def perform(self, work: Callable[[int, int], None], step: int, microbatch: int, after: Sequence[Mark]) -> Mark:
        """Performs `work(step, microbatch)` after the marks `after`; on an asynchronous backend it is only issued when this returns."""


class Backend(Protocol):
    """Arrays and streams of one kind of device.

    `xp`: the module of array functions that kernels use. `asynchronous`: work is issued, not done, when `perform` returns; the driver then passes the marks
    that the work must wait for. `has_arrays`: False where only the order is performed.
    """

    name: str
    xp: Any
    asynchronous: bool
    has_arrays: bool

    def allocate(self, nbytes: int) -> Array:
        """`nbytes` zeroed bytes, aligned for any dtype."""

    def view(self, raw: Array, offset: int, shape: tuple[int, ...], dtype: str) -> Array:
        """The bytes of `raw` from `offset` on as an array, without a copy."""

    def put(self, out: Array, host: np.ndarray) -> None:
        """Copies from the host."""

    def get(self, array: Array) -> np.ndarray:
        """A copy on the host, once all work that was issued on this thread's stream is done."""

    def stream(self, rank: int, queue: str) -> Stream: ...

    def times(self, mark: Mark) -> tuple[float, float]:
        """(start, end) in seconds of the clock `time.perf_counter`; the work must be done."""

    def synchronize(self) -> None:
        """Waits until everything that was issued is done."""


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a dtype name of `ir.units`; InputError for those that numpy lacks."""
    if name in ("bfloat16", "fp8"):
        raise InputError(f"this backend has no {name}; plan with --dtype float32, float64 or float16 to run here")
    return np.dtype(name)

"""Arrays on one GPU: a CUDA stream for each queue, events between queues; several ranks share the GPU by thread transport.

Work is issued, not done, when `perform` returns: the driver passes the marks (events) that the stream must wait for, so the device sees the Machine's edges and
the host runs ahead of it by at most `LOOKAHEAD` actions a queue. Temporaries of kernels come from cupy's memory pool, which hands a block back to the
stream that freed it. cupy is imported when a backend is opened and nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from executor.backend import numpy_dtype
from ir.errors import ExecutionError

LOOKAHEAD = 64
"""Actions that a stream may hold; each has two events alive until its times are read."""


class Events:
    """The mark of one piece of work: the events before and after it, until its times are read and the events given back."""

    __slots__ = ("after", "before", "end_s", "start_s", "stream")

    def __init__(self, stream: CupyStream, before: Any, after: Any) -> None:
        self.stream = stream
        self.before = before
        self.after = after
        self.start_s = self.end_s = 0.0


class CupyStream:
    """A CUDA stream, fed by one thread. `anchor` is the last event whose time is known: CUDA tells the distance of two events with seven digits."""

    def __init__(self, cupy: Any, device: int, anchor: Any, anchor_s: float) -> None:
        self.cupy = cupy
        self.device = device
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.anchor = anchor
        self.anchor_s = anchor_s
        self.issued: deque[Events] = deque()

    def bind(self) -> None:
        self.cupy.cuda.Device(self.device).use()
        self.stream.use()

    def perform(self, work: Callable[[int, int], None], step: int, microbatch: int, after: Sequence[Events]) -> Events:
        for mark in after:
            event = mark.after
            if event is not None and mark.stream is not self:
                self.stream.wait_event(event)
        begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        begin.record(self.stream)
        work(step, microbatch)
        end.record(self.stream)
        mark = Events(self, begin, end)
        self.issued.append(mark)
        if len(self.issued) > LOOKAHEAD:
            self.settle()
        return mark

    def settle(self) -> None:
        """Waits for the oldest work that was issued, reads its times and gives its events back."""
        mark = self.issued.popleft()
        mark.after.synchronize()
        elapsed_ms = self.cupy.cuda.get_elapsed_time
        mark.start_s = self.anchor_s + elapsed_ms(self.anchor, mark.before) / 1e3
        mark.end_s = self.anchor_s + elapsed_ms(self.anchor, mark.after) / 1e3
        self.anchor, self.anchor_s = mark.after, mark.end_s
        mark.before = mark.after = None


class CupyBackend:
    """cupy on one GPU of this machine."""

    name = "cupy"
    asynchronous = True
    has_arrays = True

    def __init__(self, device: int = 0) -> None:
        cupy = _cupy()
        self.xp = cupy
        self.device = device
        cupy.cuda.Device(device).use()
        self.pool = cupy.cuda.MemoryPool()
        cupy.cuda.set_allocator(self.pool.malloc)
        self.zero = cupy.cuda.Event()
        self.zero.record(cupy.cuda.Stream.null)
        self.zero.synchronize()
        self.zero_s = perf_counter()

    def allocate(self, nbytes: int) -> Any:
        return self.xp.zeros(nbytes, self.xp.uint8)

    def view(self, raw: Any, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
        return self.xp.ndarray(shape, numpy_dtype(dtype), memptr=raw.data + offset)

    def put(self, out: Any, host: np.ndarray) -> None:
        out.set(np.ascontiguousarray(host, out.dtype).reshape(out.shape), stream=self.xp.cuda.get_current_stream())

    def get(self, array: Any) -> np.ndarray:
        return np.asarray(array.get(stream=self.xp.cuda.get_current_stream()))

    def stream(self, rank: int, queue: str) -> CupyStream:
        return CupyStream(self.xp, self.device, self.zero, self.zero_s)

    def times(self, mark: Events) -> tuple[float, float]:
        while mark.after is not None:
            mark.stream.settle()
        return mark.start_s, mark.end_s

    def synchronize(self) -> None:
        self.xp.cuda.Device(self.device).synchronize()


def _cupy() -> Any:
    """The cupy module; ExecutionError where it is not installed or sees no GPU."""
    try:
        import cupy
    except ImportError as error:
        raise ExecutionError(f"the backend cupy needs cupy ({error}); `pip install headrace[gpu]`, or run with --backend numpy") from error
    try:
        num_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ExecutionError(
            f"the backend cupy found no GPU here ({error}); run with --backend numpy, or on a machine with an NVIDIA GPU and driver"
        ) from error
    if not num_devices:
        raise ExecutionError("the backend cupy found no GPU here; run with --backend numpy, or on a machine with an NVIDIA GPU and driver")
    return cupy

"""A backend that does its work late, on worker threads that wait for marks alone: what a GPU's streams and events do, with numpy's arrays."""

from __future__ import annotations

import random
import threading
from queue import SimpleQueue
from time import perf_counter, sleep

from executor.numpy_backend import NumpyBackend


class LateMark:
    """Done when the worker says so."""

    def __init__(self, stream) -> None:
        self.stream = stream
        self.done = threading.Event()
        self.start_s = self.end_s = 0.0


class LateStream:
    """A queue of work and a thread that does it, after the marks that each piece waits for and a random while."""

    def __init__(self, seed: int, heed: bool) -> None:
        self.work = SimpleQueue()
        self.random = random.Random(seed)
        self.heed = heed
        self.errors: list[BaseException] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def bind(self) -> None:
        pass

    def perform(self, work, step, microbatch, after):
        mark = LateMark(self)
        self.work.put((work, step, microbatch, tuple(after), mark))
        return mark

    def _serve(self) -> None:
        while True:
            work, step, microbatch, after, mark = self.work.get()
            for other in after if self.heed else ():
                assert other.done.wait(20)
            sleep(self.random.random() * 5e-4)
            mark.start_s = perf_counter()
            try:
                work(step, microbatch)
            except Exception as error:
                self.errors.append(error)
            mark.end_s = perf_counter()
            mark.done.set()


class LateBackend(NumpyBackend):
    """numpy, asynchronous. `heed=False` ignores the marks."""

    asynchronous = True

    def __init__(self, heed: bool = True) -> None:
        self.heed = heed
        self.streams: list[LateStream] = []

    def stream(self, rank: int, queue: str) -> LateStream:
        self.streams.append(LateStream(len(self.streams), self.heed))
        return self.streams[-1]

    def times(self, mark: LateMark) -> tuple[float, float]:
        mark.done.wait(20)
        return mark.start_s, mark.end_s

    def synchronize(self) -> None:
        for stream in self.streams:
            last = stream.perform(lambda step, microbatch: None, 0, 0, ())
            last.done.wait(20)

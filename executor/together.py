"""Timing a piece of work while every device does the same, since cores share memory, caches and clock."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time

MIN_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """`seconds` of one call: processor time, the mean over calls and threads, which another program's turn on the core does not lengthen. `wall_s`: the median
    by the clock. `cpu_share`: how much of the time the cores gave to the threads, below 1 where others use them too."""

    seconds: float
    wall_s: float
    cpu_share: float


def together(works: Sequence[Callable[[], object]], budget_s: float) -> Timing:
    """Calls each of `works` over and over on a thread of its own, all at once, for `budget_s` after one call to warm up; at least three times."""
    barrier = threading.Barrier(len(works))
    times: list[list[float]] = [[] for _ in works]
    cpu_s, wall_s = [0.0] * len(works), [1e-9] * len(works)
    errors: list[BaseException] = []

    def body(i: int) -> None:
        try:
            works[i]()
            barrier.wait()
            cpu, begin = thread_time(), perf_counter()
            now = begin
            while now < begin + budget_s or len(times[i]) < MIN_REPEATS:
                before = now
                works[i]()
                now = perf_counter()
                times[i].append(now - before)
            cpu_s[i], wall_s[i] = thread_time() - cpu, now - begin
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    calls = [t for mine in times for t in mine]
    return Timing(sum(cpu_s) / len(calls), statistics.median(calls), sum(cpu_s) / sum(wall_s))

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
    """`seconds` of one call: the median over calls and threads. `spread`: between the quartiles of all calls, relative to the median. `cpu_share`: how much of
    the time the cores gave to the threads, below 1 where others use them too."""

    seconds: float
    spread: float
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
    calls = sorted(t for mine in times for t in mine)
    middle = statistics.median(calls)
    quartiles = calls[(3 * len(calls)) // 4] - calls[len(calls) // 4]
    return Timing(middle, quartiles / middle, sum(cpu_s) / sum(wall_s))

"""Timing a piece of work while every device does the same, since cores share memory, caches and clock."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time

MIN_BATCHES = 3
BATCH_S = 1e-4
"""Calls shorter than this are timed several at a time, so that reading the clocks costs little."""


@dataclass(frozen=True, slots=True)
class Timing:
    """`seconds` of one call: processor time, the median over threads and batches of calls; another program's turn on the core does not lengthen it. `wall_s`:
    the same by the clock. `cpu_share`: how much of the time the cores gave to the threads, below 1 where others use them too."""

    seconds: float
    wall_s: float
    cpu_share: float


def together(works: Sequence[Callable[[], object]], budget_s: float) -> Timing:
    """Calls each of `works` over and over on a thread of its own, all at once, for `budget_s` after two calls to warm up; at least three times."""
    barrier = threading.Barrier(len(works))
    batches: list[list[tuple[float, float]]] = [[] for _ in works]
    totals = [(0.0, 1e-9)] * len(works)
    errors: list[BaseException] = []

    def body(i: int) -> None:
        try:
            calls = _calls_a_batch(works[i])
            barrier.wait()
            begin = before = (thread_time(), perf_counter())
            while before[1] < begin[1] + budget_s or len(batches[i]) < MIN_BATCHES:
                for _ in range(calls):
                    works[i]()
                now = (thread_time(), perf_counter())
                batches[i].append(((now[0] - before[0]) / calls, (now[1] - before[1]) / calls))
                before = now
            totals[i] = (before[0] - begin[0], before[1] - begin[1])
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
    found = [batch for mine in batches for batch in mine]
    cpu_s, wall_s = (statistics.median(batch[k] for batch in found) for k in (0, 1))
    return Timing(cpu_s, wall_s, sum(cpu for cpu, _ in totals) / sum(wall for _, wall in totals))


def _calls_a_batch(work: Callable[[], object]) -> int:
    """How many calls take about `BATCH_S`, found by calling twice: the first call also warms up."""
    work()
    start_s = thread_time()
    work()
    return max(1, round(BATCH_S / max(thread_time() - start_s, 1e-6)))

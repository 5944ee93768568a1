"""How long the search for an order takes and what it gains over the best built-in schedule, for pipelines of several sizes; writes a dated result.

Usage: python benchmarks/schedule_auto.py [RESULT.json]
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np

from planner.schedules.auto import Limits, StageTimes, search_orders, seeds
from planner.schedules.pipe import Pipe
from planner.schedules.retime import retime

SIZES = ((4, 8, False), (8, 24, False), (16, 64, False), (4, 8, True), (16, 64, True))
"""(ranks, microbatches, two stages a rank down and up again)"""
LEVELS = (1.0, 1.5, 2.0)
"""Memory in activations of a rank's whole share, over the number of ranks: 1 is that of 1F1B's first rank."""


def measure(p: int, m: int, vee: bool, level: float, seed: int) -> dict[str, object]:
    """One row: stages that differ by up to a fifth from each other, hops of up to a third of a forward."""
    rng = np.random.default_rng(seed)
    rank = (*range(p), *reversed(range(p))) if vee else tuple(range(p))
    n = len(rank)
    f, i, w = rng.uniform(0.9, 1.1, n), rng.uniform(0.9, 1.1, n), rng.uniform(0.7, 0.9, n)
    hop = [float(h) * (a != b) for h, a, b in zip(rng.uniform(0.0, 0.3, n - 1), rank, rank[1:], strict=False)]
    times = StageTimes(tuple(f), tuple(i), tuple(w), tuple(hop), rank)
    limits = Limits.units(times, level * n)
    pipe = Pipe(times, m, limits)
    known = {name: float(retime(pipe, word[None])[0][0]) for name, word in seeds(pipe).items()}
    best = min(known, key=lambda name: known[name])
    wall, cpu = time.perf_counter(), time.process_time()
    found = search_orders(times, m, limits)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "ranks": p, "microbatches": m, "stages_a_rank": pipe.v, "memory_units": limits.memory[0], "best_built_in": best, "built_in_s": known[best],
        "makespan_s": found.makespan_s, "bound_s": found.bound_s, "optimal": found.optimal, "method": found.method, "wall_s": wall, "cpu_s": cpu,
    }  # fmt: skip


def main(result: str | None = None) -> int:
    rows = [measure(p, m, vee, level, seed=p + m) for p, m, vee in SIZES for level in LEVELS]
    for row in rows:
        gain, gap = row["built_in_s"] / row["makespan_s"] - 1, row["makespan_s"] / row["bound_s"] - 1  # type: ignore[operator]
        print(
            f"p={row['ranks']} m={row['microbatches']} v={row['stages_a_rank']} memory {row['memory_units']}: {gain:.2%} below {row['best_built_in']}, "
            f"{gap:.2%} above the bound, by {row['method']}, {row['wall_s']:.2f} s ({row['cpu_s']:.2f} s of CPU)"
        )
    if result:
        Path(result).write_text(
            json.dumps({"measured_on": date.today().isoformat(), "load_average": os.getloadavg(), "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""How quickly a Program is timed: frozen order in one sweep, in batches, and event by event with contention; all in one run, on one core.

A GPT of 16 layers on 8 stages of one device each, 32 microbatches, 1F1B, lowered, two steps of it. An action is one firing; an evaluation is one action under
one timing. Writes `benchmarks/results/DATE-engine.json` and exits with 1 where a claim does not hold: 1,000,000 actions/s in one sweep, 40,000,000
evaluations/s over 256 timings, 100,000 actions/s event by event with contention, the sweep equal to the Machine-driven engine bit for bit.
Usage: OPENBLAS_NUM_THREADS=1 python benchmarks/engine.py
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import headrace as hr
from ir.program import Program
from planner.lower import lower
from simulator.cost import CostModel
from simulator.engine import Prices, performed, price, swept
from simulator.sweep import compile_sweep

RESULTS = Path(__file__).parent / "results"
LAYOUT = {"dp": 1, "tp": 1, "pp": 8, "mbs": 1, "schedule": "1f1b", "recompute": "none"}
STEPS, TIMINGS, ROUNDS = 2, 256, 7
NUM_CORES, FIRING_S, WAKE_S = 4.0, 5e-6, 2e-6
"""Fewer cores than devices, so that they are shared all the time; a driver that takes as long as one in Python does."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Something timed in `ROUNDS` rounds: `num` actions each, the median of the seconds, what it must reach a second (0: no claim)."""

    name: str
    num: int
    seconds: float
    least_per_s: float = 0.0

    @property
    def per_s(self) -> float:
        return self.num / self.seconds

    @property
    def holds(self) -> bool:
        return self.per_s >= self.least_per_s

    def __str__(self) -> str:
        claim = f"  (at least {self.least_per_s:,.0f}{'' if self.holds else ': FALLS SHORT'})" if self.least_per_s else ""
        return f"{self.name:56} {self.num:12,} in {self.seconds * 1e3:8.2f} ms = {self.per_s:14,.0f} / s{claim}"


def program_of_8_stages(cluster: Any) -> Program:
    model = hr.load("gpt2", num_layers=16)
    return lower(model, hr.plan(model, cluster, batch=32, seq=1024, dtype="bfloat16", top=1, fix=LAYOUT).plans[0])


def in_rounds(subjects: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median CPU seconds of each: one thread, so others on the machine do not count. All have their turn in every round, so that its speed is alike for all."""
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(ROUNDS):
        for name, subject in subjects.items():
            begin = time.process_time()
            subject()
            taken[name].append(time.process_time() - begin)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def rates(program: Program, fixed: Prices, links: Prices) -> list[Rate]:
    cores = replace(fixed, num_cores=NUM_CORES, cores=[float(a.work.kind != "send") for a in program.actors], firing_s=FIRING_S, wake_s=WAKE_S)
    sweep = compile_sweep(program, STEPS)
    timings = np.random.default_rng(0).uniform(0.9, 1.1, (TIMINGS, len(program.actors))) * np.array(fixed.seconds)
    actions = STEPS * sweep.num_firings
    sweep.makespan(timings, fixed.added)
    seconds = in_rounds({
        "sweep": lambda: sweep.times(fixed.seconds, fixed.added),
        "batch": lambda: sweep.makespan(timings, fixed.added),
        "fixed": lambda: performed(program, fixed, STEPS),
        "links": lambda: performed(program, links, STEPS),
        "cores": lambda: performed(program, cores, STEPS),
        "compile": lambda: compile_sweep(program, STEPS),
    })  # fmt: skip
    return [
        Rate("one timing in one sweep", actions, seconds["sweep"], 1e6),
        Rate(f"{TIMINGS} timings in a batch", actions * TIMINGS, seconds["batch"], 40e6),
        Rate("event by event, transfers share links", actions, seconds["links"], 1e5),
        Rate(f"event by event, {NUM_CORES:.0f} cores are shared", actions, seconds["cores"], 1e5),
        Rate("event by event, nothing is shared", actions, seconds["fixed"]),
        Rate("compiling the sweep, once a Program", actions, seconds["compile"]),
    ]


def main() -> int:
    cluster = hr.load_cluster("1x8xH100-SXM")
    program, cost = program_of_8_stages(cluster), CostModel(cluster)
    fixed, links = price(program, cost), price(program, cost, share_links=True)
    equal = swept(program, fixed, STEPS) == performed(program, fixed, STEPS)
    found = rates(program, fixed, links)
    sweep, batch, *_, events, _ = found
    ratios = {"sweep_over_events": sweep.per_s / events.per_s, "batch_over_sweep": batch.per_s / sweep.per_s}
    print(*found, sep="\n")
    print(", ".join(f"{name} {ratio:.1f}" for name, ratio in ratios.items()), f"; bit for bit equal: {equal}", sep="")
    write(program, found, ratios, equal)
    return 0 if equal and all(rate.holds for rate in found) else 1


def write(program: Program, found: list[Rate], ratios: dict[str, float], equal: bool) -> None:
    RESULTS.mkdir(exist_ok=True)
    day = datetime.date.today().isoformat()
    document = {
        "measured_on": day, "machine": platform.machine(), "python": platform.python_version(), "numpy": np.__version__,
        "clock": "CPU seconds of one thread", "load": os.getloadavg()[0],
        "num_ranks": len(program.ranks), "num_actors": len(program.actors), "steps": STEPS, "rounds": ROUNDS, "bit_for_bit_equal": equal, **ratios,
        "rates": [{"name": r.name, "num": r.num, "seconds": r.seconds, "per_s": r.per_s, "least_per_s": r.least_per_s} for r in found],
    }  # fmt: skip
    (RESULTS / f"{day}-engine.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())

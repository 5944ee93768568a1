"""How quickly a run is foretold: GPT-3 175B on 1,024 A100, tp 8 pp 16 dp 8, by the closed form and order by order; one core, CPU seconds.

Layouts not seen before (another microbatch, another recomputation) are told apart from the same one again: their products are priced anew.
Writes `benchmarks/results/DATE-simulate.json` and exits with 1 where a claim does not hold: an estimate in 2 ms, a simulation in 50 ms, both after loading.
Usage: OPENBLAS_NUM_THREADS=1 python benchmarks/simulate.py
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.recipes.estimate import Estimator
from planner.recipes.run import Run, Shape
from planner.recipes.study import fitted
from planner.recipes.timetable import timetable

RESULTS = Path(__file__).parent / "results"
ROUNDS = 15
SHAPE = Shape("gpt", layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152, vocab=51200)
RUN = Run(
    "gpt3-175b", "", "gpt3-175b", SHAPE, seq=2048, gpu="A100-SXM-80GB", num_gpus=1024, tp=8, pp=16, dp=8, mbs=1, gbs=1536, schedule="1f1b",
    recompute="full", precision="fp16", nic="ib200x8", release="Megatron-LM 2021", machine="a100-8xHDR (Megatron 2021)",
)  # fmt: skip
FRESH = tuple(
    replace(RUN, mbs=mbs, recompute=recompute, sp=sp) for mbs in (2, 3, 4, 6, 8) for recompute in ("full", "selective", "none") for sp in (False, True)
)


def cpu_s(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> int:
    estimator = Estimator()
    loading_s = cpu_s(lambda: estimator.estimate(RUN))
    bill, shares = estimator.pricer.bill(RUN), fitted(RUN).shares
    timetable(RUN, bill, shares)
    again = statistics.median(cpu_s(lambda: estimator.estimate(RUN)) for _ in range(ROUNDS))
    fresh = statistics.median(cpu_s(lambda run=run: estimator.estimate(run)) for run in FRESH)  # type: ignore[misc]
    simulated = statistics.median(cpu_s(lambda: timetable(RUN, bill, shares)) for _ in range(ROUNDS))
    document = {
        "date": datetime.date.today().isoformat(), "python": platform.python_version(), "machine": platform.processor() or platform.machine(), "run": RUN.id,
        "loading_cpu_s": loading_s, "estimate_cpu_s": again, "estimate_of_a_new_layout_cpu_s": fresh, "simulation_cpu_s": simulated,
        "step_s": estimator.estimate(RUN).step_s, "simulated_step_s": timetable(RUN, bill, shares).step_s,
    }  # fmt: skip
    (RESULTS / f"{document['date']}-simulate.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(json.dumps(document, indent=1))
    return 0 if max(again, fresh) <= 2e-3 and simulated <= 50e-3 else 1


if __name__ == "__main__":
    sys.exit(main())

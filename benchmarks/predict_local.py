"""Predicted against measured step time on this machine: ten plans of three sizes with at most two compute queues, in one run.

Measures the machine, plans, foretells, runs; writes `benchmarks/results/DATE-predict-local.json` and exits with 1 where the claim does not hold: the median
error at most 15 %, the rank correlation at least 0.9. Usage: python benchmarks/predict_local.py [--patient]
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

import headrace as hr
from executor.measure import measure, num_cores
from ir.cluster import Cluster
from ir.plan import Plan
from planner.optimizers import OPTIMIZERS
from planner.single import single_device
from simulator.cost import CostModel
from simulator.engine import simulate

RESULTS = Path(__file__).parent / "results"
STEPS = 6
MAX_MEDIAN_ERROR, MIN_RANK_CORRELATION = 0.15, 0.9


@dataclass(frozen=True, slots=True)
class Case:
    """A model, cut down where `overrides` say so, and a layout on one or two devices."""

    model: str
    overrides: tuple[tuple[str, int], ...]
    batch: int
    seq: int
    layout: tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: its prediction and its measurement."""

    case: Case
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0


SIZES = (("gpt2-tiny", (), 16, 256), ("gpt2", (("num_layers", 2), ("vocab", 8192)), 4, 256), ("gpt2", (("num_layers", 4), ("vocab", 16384)), 4, 256))
ONE, DP, TP, PP = (("dp", 1),), (("dp", 2),), (("tp", 2),), (("pp", 2), ("mbs", 1), ("schedule", "1f1b"))
CASES = (*(Case(*size, layout) for size in SIZES for layout in (ONE, DP, TP)), Case(*SIZES[1], PP))


def plan_of(case: Case, cluster: Cluster, model: Any) -> Plan:
    if case.layout == ONE:
        return single_device(model, cluster, batch=case.batch, seq=case.seq, dtype="float32", optimizer=OPTIMIZERS["adamw"])
    fix = {"dp": 1, "tp": 1, "pp": 1, "recompute": "none"} | dict(case.layout)
    return hr.plan(model, cluster, batch=case.batch, seq=case.seq, dtype="float32", top=1, fix=fix).plans[0]


def row_of(case: Case, cluster: Cluster) -> Row:
    model = hr.load(case.model, **dict(case.overrides))
    program = hr.lower(plan_of(case, cluster, model), model)
    predicted_s = simulate(program, CostModel(cluster), steps=4).step_s
    return Row(case, predicted_s, hr.run(program, steps=STEPS).run.step_s)


def main(patient: bool) -> int:
    cluster = measure(min(2, num_cores()), patient=patient)
    rows = []
    for case in CASES:
        rows.append(row_of(case, cluster))
        row = rows[-1]
        print(
            f"{case.model:10} {dict(case.overrides)!s:36} {dict(case.layout)!s:48} {row.predicted_s:8.4f} s {row.measured_s:8.4f} s {row.error:+7.1%}",
            flush=True,
        )
    median = statistics.median(abs(row.error) for row in rows)
    correlation = float(spearmanr([r.predicted_s for r in rows], [r.measured_s for r in rows]).statistic)
    print(f"median error {median:.1%} (at most {MAX_MEDIAN_ERROR:.0%}), rank correlation {correlation:.3f} (at least {MIN_RANK_CORRELATION})")
    write(rows, cluster, median, correlation)
    return 0 if median <= MAX_MEDIAN_ERROR and correlation >= MIN_RANK_CORRELATION else 1


def write(rows: list[Row], cluster: Cluster, median: float, correlation: float) -> None:
    RESULTS.mkdir(exist_ok=True)
    day = datetime.date.today().isoformat()
    document = {
        "measured_on": day, "device": cluster.devices[0].name, "num_devices": cluster.num_devices, "assumed": list(cluster.assumed),
        "witness": cluster.profile.get("witness"), "median_error": median, "rank_correlation": correlation,
        "rows": [{**asdict(r.case), "predicted_s": r.predicted_s, "measured_s": r.measured_s, "error": r.error} for r in rows],
    }  # fmt: skip
    (RESULTS / f"{day}-predict-local.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main("--patient" in sys.argv[1:]))

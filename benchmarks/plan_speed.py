"""How long planning takes, in CPU seconds, for models from GPT-2 to 405 billion parameters, and what the plans are worth beside published layouts; writes a
dated result.

Usage: python benchmarks/plan_speed.py [RESULT.json] [MODEL ...]
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import headrace as hr
from ir.errors import HeadraceError

WALL_S = 3600.0
"""Budget by the clock: CPU seconds are what is measured here, whatever else the machine does."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned, the CPU seconds it may take, and layouts that were published for it, priced by the same simulation."""

    model: str
    cluster: str
    batch: int
    seq: int
    goal_s: float
    published: Mapping[str, Mapping[str, str | int]] = field(default_factory=dict)


NEMO = "docs.nvidia.com/nemo-framework/user-guide/25.02/performance/performance_summary.html"

QUESTIONS = (
    Question("gpt2", "4x8xH100-SXM", 512, 1024, 4.0, {"data parallel": {"dp": 32, "mbs": 16, "schedule": "1f1b"}}),
    Question(
        "llama-3-8b", "1x8xH100-SXM", 128, 8192, 30.0,
        {"FSDP, selective, arXiv:2410.06511 table 1": {"dp": 8, "mbs": 1, "zero": 3, "recompute": "selective"}},
    ),
    Question(
        "llama-3-70b", "8x8xH100-SXM", 1024, 8192, 30.0,
        {
            f"tp4 pp4 cp2 vpp5, {NEMO}": {"tp": 4, "pp": 4, "cp": 2, "dp": 2, "mbs": 1, "schedule": "interleaved", "vpp": 5, "recompute": "selective"},
            "FSDP, all layers again, as in arXiv:2410.06511": {"dp": 64, "mbs": 2, "zero": 3, "recompute": "full"},
        },
    ),
    Question(
        "mixtral-8x7b", "8x8xH100-SXM", 512, 4096, 30.0,
        {f"pp4 ep8 vpp8, {NEMO}": {"tp": 1, "pp": 4, "ep": 8, "mbs": 1, "schedule": "interleaved", "vpp": 8, "recompute": "selective"}},
    ),
    Question(
        "gpt3-175b", "128xdgx-a100", 1536, 2048, 60.0,
        {
            "tp8 pp16, arXiv:2104.04473 table 1": {"tp": 8, "pp": 16, "dp": 8, "mbs": 1, "recompute": "full", "schedule": "1f1b"},
            "tp8 pp16 interleaved, arXiv:2205.05198": {"tp": 8, "pp": 16, "dp": 8, "mbs": 1, "sp": "true", "schedule": "interleaved", "vpp": 3},
        },
    ),
    Question(
        "llama-3-405b", "64x8xH100-SXM", 512, 8192, 60.0,
        {"tp8 pp16 interleaved, as in arXiv:2407.21783 table 4": {"tp": 8, "pp": 16, "dp": 4, "mbs": 1, "schedule": "interleaved", "vpp": 4}},
    ),
    Question(
        "deepseek-v3", "128x8xH100-SXM", 4096, 4096, 60.0,
        {"tp2 pp16 ep64, docs.nvidia.com/nemo/megatron-bridge": {"tp": 2, "pp": 16, "ep": 64, "mbs": 1, "recompute": "selective", "schedule": "1f1b"}},
    ),
)  # fmt: skip


def measure(q: Question) -> dict[str, Any]:
    """One row: CPU seconds of the search and of its simulations, the best plans, the published layouts."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = hr.plan(q.model, q.cluster, batch=q.batch, seq=q.seq, budget_s=WALL_S)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    priced = {}
    for name, fix in q.published.items():
        try:
            plan = hr.plan(q.model, q.cluster, batch=q.batch, seq=q.seq, fix=dict(fix), top=1, budget_s=WALL_S).plans[0]
            priced[name] = {"layout": dict(plan.layout), "step_s": plan.predicted["step_s"], "peak_gib": plan.predicted["peak_gib"]}
        except HeadraceError as error:
            priced[name] = {"error": str(error)}
    return {
        "model": q.model, "cluster": q.cluster, "batch": q.batch, "seq": q.seq, "cpu_s": cpu, "wall_s": wall, "goal_s": q.goal_s, "searched": found.searched,
        "evaluated": found.evaluated, "pruned": found.pruned, "gap": found.gap,
        "plans": [{"layout": dict(p.layout), **{k: p.predicted[k] for k in ("step_s", "mfu", "bubble", "peak_gib", "fits")}} for p in found.plans],
        "published": priced,
    }  # fmt: skip


def main(result: str | None = None, *models: str) -> int:
    rows = []
    for q in QUESTIONS:
        if models and q.model not in models:
            continue
        row = measure(q)
        rows.append(row)
        best = row["plans"][0]
        print(f"{q.model} on {q.cluster}: {row['cpu_s']:.1f} s of CPU (goal {q.goal_s:g}), {best['step_s']:.4g} s a step, {best['layout']}", flush=True)
        for name, priced in row["published"].items():
            told = f"{priced['step_s'] / best['step_s'] - 1:+.1%}, {priced['peak_gib']:.1f} GiB" if "step_s" in priced else priced["error"]
            print(f"  {name}: {told}", flush=True)
    if result:
        Path(result).write_text(
            json.dumps({"measured_on": date.today().isoformat(), "load_average": os.getloadavg(), "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

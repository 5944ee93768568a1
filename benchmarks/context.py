"""From which sequence length on context parallelism pays: one sequence a step, tensor against context parallelism over all GPUs.

On one node of 8 H100 Llama 3 8B's blocks, on two nodes those of Llama 2 7B, whose 32 key heads 16 ways of tensor parallelism divide. Each layout is the
planner's best with these degrees: recomputation, ZeRO, sequence parallelism and the form of attention are its own choice. Eight blocks, so that memory binds
nobody. Prints a table with the crossover and writes `benchmarks/results/DATE-context.json`. Usage: python benchmarks/context.py
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ir.errors import DoesNotFit
from planner.frontends import load
from planner.search import plan
from simulator.clusters import load_cluster

ROOT = Path(__file__).parent.parent
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
FORMS = ("cp_form=ring", "cp_form=gather", "cp_form=exchange", "cp_form=ring,cp_order=contiguous")
CASES: Mapping[str, tuple[str, tuple[tuple[int, int], ...]]] = {
    "1x8xH100-SXM": ("llama-3-8b", ((8, 1), (4, 2), (2, 4), (1, 8))), "2x8xH100-SXM": ("llama-2-7b", ((16, 1), (8, 2), (4, 4), (1, 16))),
}  # fmt: skip
"""By cluster the model and (tp, cp)."""


def step(cluster: str, name: str, seq: int, fix: Mapping[str, Any]) -> tuple[float, str]:
    """(seconds of a step, form of attention) of the best plan that keeps `fix`; infinite where none fits."""
    model = load(name, num_layers=8, max_positions=seq)
    try:
        found = plan(model, load_cluster(cluster), batch=1, seq=seq, fix={"pp": 1, "dp": 1, **fix}, top=1, budget_s=20.0).plans[0]
    except DoesNotFit:
        return float("inf"), ""
    return float(found.predicted["step_s"]), str(found.layout.get("cp_form", ""))


def table(cluster: str, lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    """One row a length: milliseconds of a step by layout, of the widest context parallelism also by form."""
    rows, (name, layouts) = [], CASES[cluster]
    for seq in lengths:
        row: dict[str, Any] = {"seq": seq}
        for tp, cp in layouts:
            seconds, form = step(cluster, name, seq, {"tp": tp, "cp": cp})
            row[f"tp{tp} cp{cp}"] = round(seconds * 1e3, 2)
            if cp > 1:
                row[f"tp{tp} cp{cp} form"] = form
        for how in FORMS:
            fix = {"tp": 1, "cp": layouts[-1][1], **dict(part.split("=") for part in how.split(","))}
            row[f"cp{fix['cp']} {how}"] = round(step(cluster, name, seq, fix)[0] * 1e3, 2)
        rows.append(row)
        print(f"{cluster} {seq:7d}", *(f"{k} {v:.1f}" if isinstance(v, float) else f"({v})" for k, v in row.items() if k != "seq"), sep="  ", flush=True)
    return rows


def crossover(rows: list[dict[str, Any]]) -> int | None:
    """The shortest of the lengths from which on the best layout is always one with context parallelism."""
    best = None
    for row in reversed(rows):
        times = {k: v for k, v in row.items() if isinstance(v, float)}
        if min(times, key=lambda k: times[k]).endswith("cp1"):
            return best
        best = row["seq"]
    return best


def main() -> None:
    began = time.process_time()
    found = {cluster: table(cluster) for cluster in CASES}
    for cluster, rows in found.items():
        print(f"{cluster}: context parallelism is best from {crossover(rows)} tokens on")
    document = {
        "benchmark": "context", "date": datetime.date.today().isoformat(), "crossover": {k: crossover(v) for k, v in found.items()}, "rows": found,
        "processor_s": round(time.process_time() - began, 1),
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / f"{document['date']}-context.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}; {document['processor_s']} s of processor time")


if __name__ == "__main__":
    main()

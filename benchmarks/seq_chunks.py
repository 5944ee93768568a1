"""From which context length on cutting sequences pays: simulated steps of Llama 3 8B's blocks on four and eight stages, whole and in 2, 4 and 8 pieces.

Two blocks a stage on one H100 each, as many microbatches as 2 p; no optimizer state is looked at, only time. Prints a table and writes
`benchmarks/results/DATE-seq-chunks.json`. Usage: python benchmarks/seq_chunks.py
"""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the tests are not installed

from ir.plan import Stage  # noqa: E402
from planner.frontends import load  # noqa: E402
from planner.lower import lower  # noqa: E402
from planner.pieces import balanced  # noqa: E402
from planner.schedules import schedule  # noqa: E402
from simulator.clusters import load_cluster  # noqa: E402
from simulator.cost import CostModel  # noqa: E402
from simulator.engine import simulate  # noqa: E402
from simulator.memory import ledger  # noqa: E402
from tests.plans import Layout, plan_for  # noqa: E402

LENGTHS = (1024, 4096, 8192, 16384, 32768, 131072)
PIECES = (2, 4, 8)
COST = CostModel(load_cluster("1x8xH100-SXM"))


def step(p: int, seq: int, k: int) -> tuple[float, float]:
    """(seconds of a step, bytes that the first stage keeps from forward to backward) with k pieces; 1: whole sequences under 1F1B."""
    m, model = 2 * p, load("llama-3-8b", num_layers=2 * p, max_positions=seq, vocab=512)
    cut = balanced(model.graph(1, seq), k) if k > 1 else ()
    plan = plan_for(model, Layout(pp=p, num_microbatches=m, schedule="seq1f1b" if cut else "1f1b", pieces=cut), batch=m, seq=seq, dtype="bfloat16")
    ends = [0, *(2 * r + 3 for r in range(p - 1)), 2 * p + 2]
    program = lower(model, replace(plan, stages=tuple(Stage(a, b, (r,)) for r, (a, b) in enumerate(pairwise(ends)))))
    return simulate(program, COST, steps=2).step_s, ledger(program).ranks[0]["saved"]


def rows(p: int) -> list[dict[str, Any]]:
    out = []
    for seq in LENGTHS:
        whole_s, whole_kept = step(p, seq, 1)
        row: dict[str, Any] = {"p": p, "m": 2 * p, "seq": seq, "step_1f1b_s": whole_s, "kept_1f1b_gib": whole_kept / 2**30}
        for k in PIECES:
            seconds, kept = step(p, seq, k)
            row[f"time_{k}"], row[f"kept_{k}"] = seconds / whole_s, kept / whole_kept
        out.append(row)
        print(f"p {p}  {seq:7d} tokens  1F1B {whole_s * 1e3:9.1f} ms", *(f"  k={k}: {row[f'time_{k}']:.3f}" for k in PIECES), flush=True)
    return out


def crossover(found: list[dict[str, Any]], k: int) -> int | None:
    """The shortest of the lengths from which on k pieces are always faster."""
    slower = [i for i, row in enumerate(found) if row[f"time_{k}"] >= 1]
    after = found[slower[-1] + 1 :] if slower else found
    return int(after[0]["seq"]) if after else None


def main() -> None:
    found = {p: rows(p) for p in (4, 8)}
    theory = {f"p{p}": {k: schedule("seq1f1b", k).time_s(p, 2 * p) / schedule("1f1b").time_s(p, 2 * p) for k in PIECES} for p in found}
    crossovers = {f"p{p}": {k: crossover(table, k) for k in PIECES} for p, table in found.items()}
    print(f"theory {theory}\nfaster from {crossovers}")
    today = datetime.date.today().isoformat()
    document = {"measured_on": today, "model": "llama-3-8b, two blocks a stage", "device": "H100-SXM", "theory": theory, "faster_from": crossovers,
                "rows": [row for table in found.values() for row in table]}  # fmt: skip
    path = ROOT / "benchmarks" / "results" / f"{today}-seq-chunks.json"
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

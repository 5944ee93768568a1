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


NEMO = "NVIDIA/NeMo model_configs_h100.csv"
"""scripts/performance/recommended_model_configs there: its rows of pre-training in bf16. Batches are of 128 (70 B), 256 (Mixtral), 512 (405 B)
and 8,192 (DeepSeek) there; nothing runs again but the latent's projections of DeepSeek.
"""

TITAN = "pytorch/torchtitan docs/performance.md"

QUESTIONS = (
    Question("gpt2", "4x8xH100-SXM", 512, 1024, 4.0, {"data parallel": {"dp": 32, "mbs": 16, "schedule": "1f1b"}}),
    Question(
        "llama-3-8b", "1x8xH100-SXM", 128, 8192, 30.0,
        # arXiv:2410.06511 has the same table; microbatches are of 2 there, on cards of 96 GB
        {f"FSDP, selective, {TITAN} table 1": {"dp": 8, "mbs": 1, "zero": 3, "recompute": "selective"}},
    ),
    Question(
        "llama-3-70b", "8x8xH100-SXM", 1024, 8192, 30.0,
        {
            f"tp4 pp4 cp2 vpp5, {NEMO}": {"tp": 4, "pp": 4, "cp": 2, "dp": 2, "mbs": 1, "schedule": "interleaved", "vpp": 5, "recompute": "selective"},
            # of 2024, 64 A100; microbatches are of 1 there, of 2 it is faster
            f"FSDP, all layers again, as in {TITAN}": {"dp": 64, "mbs": 2, "zero": 3, "recompute": "full"},
        },
    ),
    Question(
        "mixtral-8x7b", "8x8xH100-SXM", 512, 4096, 30.0,
        {f"pp4 ep8 vpp8, {NEMO}": {"tp": 1, "pp": 4, "ep": 8, "mbs": 1, "schedule": "interleaved", "vpp": 8, "recompute": "selective"}},
    ),
    Question(
        "gpt3-175b", "128xdgx-a100", 1536, 2048, 60.0,
        {
            "tp8 pp16, NVIDIA/Megatron-LM examples/pretrain_gpt3_175B.sh":
                {"tp": 8, "pp": 16, "dp": 8, "mbs": 1, "sp": "false", "recompute": "full", "schedule": "1f1b"},
            # both published for 64 GPUs and a batch of 64 (calculon-ai/calculon validation/seqsel)
            "tp8 pp8 vpp3, all layers again, arXiv:2205.05198 table 5":
                {"tp": 8, "pp": 8, "dp": 16, "mbs": 1, "sp": "false", "recompute": "full", "schedule": "interleaved", "vpp": 3},
            "tp8 pp8 vpp3, selective, arXiv:2205.05198 table 5":
                {"tp": 8, "pp": 8, "dp": 16, "mbs": 1, "sp": "true", "recompute": "selective", "schedule": "interleaved", "vpp": 3},
        },
    ),
    Question(
        "llama-3-405b", "64x8xH100-SXM", 512, 8192, 60.0,
        {
            # published for 8,192 and 16,384 GPUs (the table as in glennklockwood.com/garden/llama-3.1); four stages a rank (from memory)
            "tp8 pp16 interleaved, as in arXiv:2407.21783 table 4": {"tp": 8, "pp": 16, "dp": 4, "mbs": 1, "schedule": "interleaved", "vpp": 4},
            # published for 1,024 GPUs
            f"tp8 pp8 cp2 vpp8, {NEMO}": {"tp": 8, "pp": 8, "cp": 2, "dp": 4, "mbs": 1, "schedule": "interleaved", "vpp": 8, "recompute": "selective"},
        },
    ),
    Question(
        # the same layout: docs.nvidia.com/nemo/megatron-bridge, bridge.recipes.deepseek.h100.deepseek_v3
        "deepseek-v3", "128x8xH100-SXM", 4096, 4096, 60.0,
        {f"tp2 pp16 ep64, {NEMO}": {"tp": 2, "pp": 16, "ep": 64, "mbs": 1, "recompute": "selective", "schedule": "1f1b"}},
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

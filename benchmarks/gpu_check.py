"""`make gpu-check`: what must hold on a GPU, in one table and under five minutes; says so and fails where there is none.

Small GPTs are planned and lowered, run on cupy (several ranks share the card, data crosses between threads) and on numpy, and their step is foretold from the
profile of the card that was just measured.
"""

from __future__ import annotations

import sys

from headrace import load, load_cluster, lower, plan, simulate

from executor.backend import open_backend
from executor.gpu_check import main
from ir.cluster import Cluster
from ir.errors import ExecutionError
from ir.program import Program

LAYOUTS = {"one device": (1, {}), "dp2": (2, {"dp": 2}), "tp2": (2, {"tp": 2}), "pp2 x dp2": (4, {"pp": 2, "dp": 2})}
BATCH, SEQ = 8, 64


def programs() -> dict[str, Program]:
    """A GPT of four layers under a few plans."""
    model = load("gpt2", num_layers=4, hidden=256, heads=4, vocab=512)
    found = {}
    for name, (num_ranks, fix) in LAYOUTS.items():
        chosen = plan(model, load_cluster(f"1x{num_ranks}xH100-SXM"), batch=BATCH, seq=SEQ, dtype="float32", fix=fix)
        found[f"GPT, {name}"] = lower(chosen)
    return found


def predicted_s(program: Program, cluster: Cluster) -> float:
    return float(simulate(program, cluster).step_s)


if __name__ == "__main__":
    try:
        open_backend("cupy")
    except ExecutionError as error:
        print(f"nothing ran on a GPU: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(main(programs(), predicted_s))

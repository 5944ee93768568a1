"""`make gpu-check`: what must hold on a GPU, in one table and under five minutes; says so and fails where there is none.

Small GPTs are planned and lowered, run on cupy (several ranks share the card, data crosses between threads) and on numpy, and their step is foretold from the
profile of the card that was just measured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import headrace as hr
from executor.backends import open_backend
from executor.gpu_check import main
from ir.cluster import Cluster
from ir.errors import ExecutionError
from ir.program import Program
from simulator import simulate
from simulator.cost import CostModel

LAYOUTS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "one device": (1, {}), "dp2": (2, {"dp": 2, "tp": 1, "pp": 1}), "tp2": (2, {"tp": 2, "dp": 1, "pp": 1}), "pp2 x dp2": (4, {"pp": 2, "dp": 2, "tp": 1}),
}  # fmt: skip
BATCH, SEQ = 8, 64


def programs() -> dict[str, Program]:
    """A GPT of four layers, lowered under a few plans."""
    model = hr.load("gpt2-tiny", hidden=256, mlp_hidden=1024, vocab=512)
    found = {}
    for name, (num_ranks, fix) in LAYOUTS.items():
        plan = hr.plan(model, f"1x{num_ranks}xH100-SXM", batch=BATCH, seq=SEQ, dtype="float32", fix=fix, top=1).plans[0]
        found[f"GPT, {name}"] = hr.lower(plan, model)
    return found


def predicted_s(program: Program, cluster: Cluster) -> float:
    """The step that the simulator foretells, in seconds."""
    return simulate(program, CostModel(cluster), steps=3).step_s


if __name__ == "__main__":
    try:
        open_backend("cupy")
    except ExecutionError as error:
        print(f"nothing ran on a GPU: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(main(programs(), predicted_s))

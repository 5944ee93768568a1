"""Tables and search of whole models on large meshes; blocks within limits of memory against branch and bound on the unreduced problem. Writes a dated result.

Seconds are CPU seconds of one thread. A run that was cut short goes on where its RESULT ends.
Usage: python benchmarks/placement.py [--blocks N] [--peer-s S] [--no-models] [RESULT.json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from ir.mesh import Mesh
from planner.frontends import load
from planner.placement import new_tables, problem, search
from planner.pricing import MeshPricing
from planner.solver.elimination import solve
from planner.trade import integer_within, solve_within
from planner.within import search_within
from simulator.clusters import load_cluster
from simulator.cost import CostModel

MODELS = (
    ("llama-3-8b", 12, (8, 8), 8), ("llama-3-8b", 32, (8, 8), 8), ("llama-3-8b", 128, (8, 8), 8), ("llama-3-8b", 32, (4, 4, 8), 128),
    ("mixtral-8x7b", 32, (4, 4, 8), 128), ("deepseek-v3", 61, (4, 4, 8), 128),
)  # fmt: skip
"""(model, layers, mesh, samples of a microbatch)"""

ON_FOUR = (
    "gpt2", "gpt3-125m", "gpt3-1.3b", "llama-2-7b", "llama-3-8b", "llama-3.2-1b", "mistral-7b", "qwen2-1.5b", "qwen2.5-0.5b", "qwen3-8b", "gpt-neox-20b",
    "pythia-1.4b", "falcon-7b", "phi-2", "phi-3-mini", "gemma-2-2b", "gemma-3-1b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite",
    "bert-base", "vit-b-16", "t5-small", "gpt2+lora(rank=8,targets=q+v)", "llama-3-8b+lora(rank=16,targets=q+v)", "llama-tiny+freeze(wte*)",
)  # fmt: skip
"""Models of all families, of which one layer (T5: one of each stack) is a block, with embedding and head."""

ON_EIGHT = (
    "gpt2-medium", "gpt3-6.7b", "llama-3-70b", "mistral-7b-v0.3", "qwen2.5-7b", "qwen3-0.6b", "falcon-40b", "phi-1.5", "gemma-2-9b", "mixtral-tiny",
    "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3", "bert-large", "vit-l-16", "gpt3-175b", "llama-3.1-405b", "qwen2-72b", "qwen3-32b", "gemma-3-27b",
    "mixtral-8x22b", "deepseek-v2", "t5-base",
)  # fmt: skip
ON_TWO_AXES = ("gpt2-tiny", "llama-tiny", "qwen2.5-0.5b", "pythia-1.4b", "phi-2", "bert-base", "vit-b-16", "gpt2")

BLOCKS = (
    *((name, (4,), 512) for name in ON_FOUR), *((name, (8,), 2048) for name in ON_EIGHT), *((name, (2, 2), 128) for name in ON_TWO_AXES),
)  # fmt: skip
"""(model, mesh, tokens of a sequence); those on two axes last: the unreduced problem of a layer has 300,000 columns there, and branch and bound may give up"""

SHARES = (0.03, 0.2, 0.4, 0.6, 0.9)
"""Limits, between the least and the most that a placement keeps."""


def pricing_of(axes: tuple[str, ...], mesh: tuple[int, ...]) -> MeshPricing:
    size = math.prod(mesh)
    cluster = load_cluster(f"{max(1, size // 8)}x8xH100-SXM")
    return MeshPricing(CostModel(cluster), Mesh(axes, mesh, tuple(range(size))))


def model_row(name: str, layers: int, mesh: tuple[int, ...], batch: int) -> dict[str, object]:
    """Tables and search, folded; on two axes the whole graph unfolded beside it."""
    graph = load(name, num_layers=layers).graph(batch, 2048, "bfloat16")
    axes = ("pod", "dp", "tp")[-len(mesh) :]
    pricing = pricing_of(axes, mesh)
    start = time.process_time()
    tables = new_tables(axes, mesh, pricing)
    found = search(graph, axes, mesh, pricing, num_microbatches=4, tables=tables)
    row: dict[str, object] = {"model": name, "layers": layers, "mesh": mesh, "cpu_s": time.process_time() - start, "cost_s": found.cost_s}
    row |= {"exact": found.exact, "method": found.method, "variables": found.num_variables, "log10_space": found.log10_space}
    if len(mesh) == 2:
        start = time.process_time()
        flat = search(graph, axes, mesh, pricing, num_microbatches=4, tables=tables, solver=lambda g, _: solve(g))
        row |= {"unfolded_cpu_s": time.process_time() - start, "unfolded_is_equal": math.isclose(flat.cost_s, found.cost_s, rel_tol=1e-12)}
    return row | {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def block_rows(name: str, mesh: tuple[int, ...], seq: int, peer_s: float) -> Iterator[dict[str, object]]:
    """One block within five limits: ours and branch and bound on all rows. What that does not prove within `peer_s` counts as no equality."""
    model = load(name, num_layers=1, **({"dense_layers": 0} if "deepseek" in name else {}))  # a layer with experts, of which there are most
    graph = model.graph(8, min(seq, model.max_seq), "bfloat16")
    axes = ("dp", "tp")[-len(mesh) :]
    trade = problem(graph, axes, mesh, pricing_of(axes, mesh), num_microbatches=2, in_flight=2).trade()
    most, least = (trade.read(solve(trade.at(price)).states, price)[1] for price in (0.0, 1e3))
    for share in SHARES:
        limit = least + share * (most - least)
        start = time.process_time()
        ours = solve_within(trade, limit)
        middle = time.process_time()
        twin = integer_within(trade, limit, peer_s)
        end = time.process_time()
        assert twin is not None
        is_proved = math.isclose(twin.bound, twin.time_s, rel_tol=1e-6)
        yield {
            "model": name, "mesh": mesh, "seq": seq, "share": share, "time_s": ours.time_s, "milp_time_s": twin.time_s, "milp_bound_s": twin.bound,
            "is_proved": is_proved, "is_equal": is_proved and math.isclose(ours.time_s, twin.time_s, rel_tol=1e-6),
            "is_refuted": ours.time_s < twin.bound * (1 - 1e-6) or ours.time_s > twin.time_s * (1 + 1e-6),
            "cpu_s": middle - start, "milp_cpu_s": end - middle,
        }  # fmt: skip


def mixed_rows(name: str, layers: int) -> Iterator[dict[str, object]]:
    """A whole model within five limits, mixed by layers: the gap that is left."""
    graph = load(name, num_layers=layers).graph(8, 1024, "bfloat16")
    axes, mesh = ("dp", "tp"), (2, 4)
    pricing = pricing_of(axes, mesh)
    tables = new_tables(axes, mesh, pricing)
    ends = [search(graph, axes, mesh, pricing, num_microbatches=4, in_flight=2, tables=tables, memory_price=p).nbytes for p in (0.0, 1e-3)]
    most, least = (sum(nbytes.values()) for nbytes in ends)
    for share in SHARES:
        start = time.process_time()
        found = search_within(graph, axes, mesh, pricing, least + share * (most - least), num_microbatches=4, in_flight=2, tables=tables)
        yield {"model": name, "layers": layers, "share": share, "time_s": found.placed.time_s, "gap": found.gap, "cpu_s": time.process_time() - start}


def known(result: str | None) -> dict[str, list[dict[str, object]]]:
    """What an earlier run has left."""
    path = Path(result) if result else None
    found = json.loads(path.read_text()) if path is not None and path.exists() else {}
    return {kind: found.get(kind, []) for kind in ("models", "blocks", "mixed")}


def write(found: dict[str, list[dict[str, object]]], result: str | None) -> None:
    """What there is so far, so that a run that is cut short leaves it."""
    if result:
        about = {"measured_on": date.today().isoformat(), "load_average": os.getloadavg(), "cores": os.cpu_count()}
        Path(result).write_text(json.dumps(about | found, indent=1) + "\n")


def run_blocks(num: int, peer_s: float, found: dict[str, list[dict[str, object]]], result: str | None) -> None:
    """As many blocks as asked that `found` lacks, the result written after each."""
    done = {(r["model"], tuple(r["mesh"]), r["seq"]) for r in found["blocks"]}  # type: ignore[arg-type]
    for of_block in BLOCKS[:num]:
        if of_block in done:
            continue
        mine = list(block_rows(*of_block, peer_s))
        found["blocks"] += mine
        write(found, result)
        equal, proved, refuted = (sum(bool(r[what]) for r in mine) for what in ("is_equal", "is_proved", "is_refuted"))
        print(of_block, f"equal {equal} of {proved} proved, {refuted} refuted; CPU s {sum(float(str(r['milp_cpu_s'])) for r in mine):.1f}", flush=True)


def main(num_blocks: int, peer_s: float, models: bool, result: str | None) -> int:
    """The number of rows that branch and bound refutes."""
    found = known(result)
    for arguments in MODELS if models else ():
        found["models"].append(model_row(*arguments))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in found["models"][-1].items()}, flush=True)
    run_blocks(num_blocks, peer_s, found, result)
    for name in ("gpt2", "llama-3-8b") if models else ():
        found["mixed"] += mixed_rows(name, 32)
        print(name, "gaps", [f"{r['gap']:.3%}" for r in found["mixed"][-len(SHARES) :]], flush=True)
    write(found, result)
    return sum(bool(r["is_refuted"]) for r in found["blocks"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=len(BLOCKS))
    parser.add_argument("--peer-s", type=float, default=300.0, help="seconds that branch and bound has for one limit")
    parser.add_argument("--no-models", action="store_true")
    parser.add_argument("result", nargs="?")
    given = parser.parse_args()
    sys.exit(main(given.blocks, given.peer_s, not given.no_models, given.result))

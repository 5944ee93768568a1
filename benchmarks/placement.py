"""Tables and search of whole models on large meshes; blocks within limits of memory against branch and bound on the unreduced problem. Writes a dated result.

Seconds are CPU seconds of one thread. Usage: python benchmarks/placement.py [--blocks N] [--no-models] [RESULT.json]
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

SMALL = (
    "gpt2-tiny", "gpt2", "gpt3-1.3b", "llama-tiny", "llama-3-8b", "mistral-7b", "qwen2.5-0.5b", "qwen3-8b", "pythia-1.4b", "falcon-7b", "phi-2", "phi-3-mini",
    "gemma-2-2b", "gemma-3-1b", "mixtral-tiny", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-tiny", "deepseek-v2-lite", "bert-base", "vit-b-16", "t5-small",
)  # fmt: skip
"""Models of all families, of which one layer (T5: one of each stack) is a block, with embedding and head."""

BLOCKS = (
    *((name, (4,), 512) for name in SMALL), *((name, (8,), 2048) for name in SMALL),
    *((name, (2, 2), 512) for name in ("gpt2-tiny", "llama-tiny", "bert-base", "vit-b-16", "t5-small", "gpt2")),
)  # fmt: skip
"""(model, mesh, tokens of a sequence)"""

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


def block_rows(name: str, mesh: tuple[int, ...], seq: int) -> Iterator[dict[str, object]]:
    """One block within five limits: ours and branch and bound on all rows."""
    model = load(name, num_layers=1)
    graph = model.graph(8, min(seq, model.max_seq), "bfloat16")
    axes = ("dp", "tp")[-len(mesh) :]
    trade = problem(graph, axes, mesh, pricing_of(axes, mesh), num_microbatches=2, in_flight=2).trade()
    most, least = (trade.read(solve(trade.at(price)).states, price)[1] for price in (0.0, 1e3))
    for share in SHARES:
        limit = least + share * (most - least)
        start = time.process_time()
        ours = solve_within(trade, limit)
        middle = time.process_time()
        twin = integer_within(trade, limit)
        end = time.process_time()
        assert twin is not None
        yield {
            "model": name, "mesh": mesh, "seq": seq, "share": share, "time_s": ours.time_s, "milp_time_s": twin.time_s,
            "is_equal": math.isclose(ours.time_s, twin.time_s, rel_tol=1e-6), "cpu_s": middle - start, "milp_cpu_s": end - middle,
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


def write(found: dict[str, list[dict[str, object]]], result: str | None) -> None:
    """What there is so far, so that a run that is cut short leaves it."""
    if result:
        about = {"measured_on": date.today().isoformat(), "load_average": os.getloadavg(), "cores": os.cpu_count()}
        Path(result).write_text(json.dumps(about | found, indent=1) + "\n")


def main(num_blocks: int, models: bool, result: str | None) -> int:
    found: dict[str, list[dict[str, object]]] = {"models": [], "blocks": [], "mixed": []}
    for arguments in MODELS if models else ():
        found["models"].append(model_row(*arguments))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in found["models"][-1].items()}, flush=True)
    for of_block in BLOCKS[:: max(1, len(BLOCKS) // num_blocks)][:num_blocks] if num_blocks else ():
        found["blocks"] += block_rows(*of_block)
        mine = found["blocks"][-len(SHARES) :]
        write(found, result)
        print(of_block, f"equal {sum(bool(r['is_equal']) for r in mine)} of {len(mine)}", flush=True)
    for name in ("gpt2", "llama-3-8b") if models else ():
        found["mixed"] += mixed_rows(name, 32)
        print(name, "gaps", [f"{r['gap']:.3%}" for r in found["mixed"][-len(SHARES) :]], flush=True)
    write(found, result)
    return sum(not r["is_equal"] for r in found["blocks"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--no-models", action="store_true")
    parser.add_argument("result", nargs="?")
    given = parser.parse_args()
    sys.exit(main(given.blocks, not given.no_models, given.result))

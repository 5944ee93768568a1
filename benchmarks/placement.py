"""Tables and search of whole models on large meshes; blocks within limits of memory against branch and bound on the unreduced problem. Writes a dated result.

Seconds are CPU seconds of one thread. Usage: python benchmarks/placement.py [--blocks N] [--no-models] [RESULT.json]
"""

from __future__ import annotations

import argparse
import itertools
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
)  # fmt: skip
"""(model, layers, mesh, samples of a microbatch)"""

BLOCKS = tuple(itertools.product(("gpt2", "gpt3-1.3b", "llama-3-8b", "llama-2-7b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"), (2, 4, 8), (512, 2048, 8192)))
"""(model, ranks, tokens of a sequence): one layer of each, with embedding and head."""

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


def block_rows(name: str, ranks: int, seq: int) -> Iterator[dict[str, object]]:
    """One block within five limits: ours and branch and bound on all rows."""
    model = load(name, num_layers=1)
    graph = model.graph(8, min(seq, model.max_seq), "bfloat16")
    trade = problem(graph, ("tp",), (ranks,), pricing_of(("tp",), (ranks,)), num_microbatches=2, in_flight=2).trade()
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
            "model": name, "ranks": ranks, "seq": seq, "share": share, "time_s": ours.time_s, "milp_time_s": twin.time_s,
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


def main(num_blocks: int, models: bool, result: str | None) -> int:
    found: dict[str, list[dict[str, object]]] = {"models": [], "blocks": [], "mixed": []}
    for arguments in MODELS if models else ():
        found["models"].append(model_row(*arguments))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in found["models"][-1].items()}, flush=True)
    for arguments in BLOCKS[:: max(1, len(BLOCKS) // num_blocks)][:num_blocks] if num_blocks else ():
        found["blocks"] += block_rows(*arguments)
        mine = found["blocks"][-len(SHARES) :]
        print(arguments, f"equal {sum(bool(r['is_equal']) for r in mine)} of {len(mine)}", flush=True)
    for name in ("gpt2", "llama-3-8b") if models else ():
        found["mixed"] += mixed_rows(name, 32)
        print(name, "gaps", [f"{r['gap']:.3%}" for r in found["mixed"][-len(SHARES) :]], flush=True)
    if result:
        about = {"measured_on": date.today().isoformat(), "load_average": os.getloadavg(), "cores": os.cpu_count()}
        Path(result).write_text(json.dumps(about | found, indent=1) + "\n")
    return sum(not r["is_equal"] for r in found["blocks"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--no-models", action="store_true")
    parser.add_argument("result", nargs="?")
    given = parser.parse_args()
    sys.exit(main(given.blocks, not given.no_models, given.result))

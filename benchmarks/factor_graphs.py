"""Solves factor graphs from a folder of .npz files, and compares with the proved optimum that each carries and with HiGHS on all rows.

Each file: `num_states[v]`, `unary` (concatenated), `edges[e]` = (a, b), `pairwise` (concatenated, row-major num_states[a] x num_states[b], inf = forbidden),
`optimum`. Usage: python benchmarks/factor_graphs.py DIR
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import numpy as np

from planner.solver.elimination import solve
from planner.solver.factors import FactorGraph
from planner.solver.polytope import linear_program


def read(path: Path) -> tuple[FactorGraph, float]:
    """The graph of a file and its proved optimum."""
    with np.load(path) as data:
        sizes = tuple(map(int, data["num_states"]))
        edges = tuple((int(a), int(b)) for a, b in data["edges"])
        unary = tuple(np.split(data["unary"], np.cumsum(sizes)[:-1]))
        lengths = [sizes[a] * sizes[b] for a, b in edges]
        parts = np.split(data["pairwise"], np.cumsum(lengths)[:-1])
        tables = tuple(p.reshape(sizes[a], sizes[b]) for p, (a, b) in zip(parts, edges, strict=True))
        return FactorGraph(sizes, unary, edges, tables), float(data["optimum"])


def main(folder: str) -> int:
    """Prints one line a file; the number of files whose optimum was missed. Ours first, so that the peak of memory is ours."""
    graphs = {path.stem: read(path) for path in sorted(Path(folder).glob("*.npz"))}
    missed = 0
    ours = {}
    for name, (graph, optimum) in graphs.items():
        start = time.process_time()
        found = solve(graph)
        ours[name] = time.process_time() - start
        right = abs(found.cost - optimum) <= 1e-6 * abs(optimum)
        missed += not right
        print(f"{name}: {found.cost:.6f} of {optimum:.6f} {'ok' if right else 'MISSED'}, exact={found.exact} by {found.method}, {ours[name]:.2f} CPU s")
    print(f"peak of memory, the files included: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    for name, (graph, optimum) in graphs.items():
        start = time.process_time()
        found = linear_program(graph)
        whole = time.process_time() - start
        right = abs(found.cost - optimum) <= 1e-6 * abs(optimum)
        print(f"{name}: HiGHS on all rows {whole:.2f} CPU s by {found.method}{'' if right else ', MISSED'}; reduced first {ours[name] / whole:.3f} of it")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

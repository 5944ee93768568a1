"""What a GPU must show: every kernel equals numpy's, a program gives numpy's losses and gradients, and a profile of the card; one table.

Needs cupy and a GPU; without one `main` says so and returns 1. What needs planner and simulator (a GPT to run, a step to predict) is given by the caller:
`benchmarks/gpu_check.py`.
"""

from __future__ import annotations

import datetime
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from executor.backends import open_backend
from executor.measure import GEMM_SHAPES, NOT_TIMED, op_table
from executor.samples import SMALL, Sample, sample
from executor.train import Run, run
from executor.verify import compare, seen
from ir.cluster import Cluster, Device, Link
from ir.errors import ExecutionError
from ir.ops import CATALOGUE
from ir.program import Program
from ir.units import seconds

TOLERANCE: Mapping[str, float] = {"float64": 1e-10, "float32": 2e-5}
"""Largest relative difference (norm of the tensor) between cupy's and numpy's kernel: another order of summation, another exp."""

DTYPES = ("float16", "float32", "float64")
GEMMS = (*GEMM_SHAPES, (1, 2048, 2048, 2048), (1, 4096, 4096, 4096), (1, 8192, 8192, 8192), (1, 8192, 1024, 8192), (96, 1024, 1024, 64))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what was looked at, what was found, whether it holds."""

    what: str
    found: str
    good: bool


def operators(xp: Any, names: Sequence[str] = tuple(CATALOGUE)) -> list[Row]:
    """Every operator on the arrays of `xp` against numpy, both dtypes; one row for all that agree, one for each that does not."""
    worst: dict[str, float] = dict.fromkeys(TOLERANCE, 0.0)
    rows, count = [], 0
    for name in names:
        for dtype, tolerance in TOLERANCE.items():
            for one in variants(name, dtype):
                count += 1
                try:
                    difference = kernel_difference(one, xp)
                except Exception as error:
                    rows.append(Row(f"{name} {dtype}", f"{type(error).__name__}: {error}", False))
                    continue
                worst[dtype] = max(worst[dtype], difference)
                if not difference <= tolerance:
                    rows.append(Row(f"{name} {dtype}", f"differs by {difference:.1e} (at most {tolerance:.0e})", False))
    summary = ", ".join(f"{dtype} {value:.1e}" for dtype, value in worst.items())
    return [Row(f"{count} kernels equal numpy's", f"largest difference {summary}", not rows), *rows]


def variants(name: str, dtype: str) -> list[Sample]:
    """The samples of an operator; attention also with dropout, and gelu in both its forms."""
    more: list[dict[str, Any]] = [{}]
    if name.startswith("attention"):
        more.append({"p": 0.1})
    if name.startswith("gelu"):
        more.append({"approximate": "none"})
    return [sample(CATALOGUE[name], SMALL, dtype, 0, **extra) for extra in more]


def kernel_difference(one: Sample, xp: Any) -> float:
    """The largest relative difference, in the norm of an output, between the kernel on `xp` and on numpy."""
    expected, found = one.work(np)(), one.work(xp)()
    out = 0.0
    for a, b in zip(found, expected, strict=True):
        # in float64: the squares of what stands for minus infinity are too large for float32
        host, right = (np.asarray(x.get() if hasattr(x, "get") else x, np.float64) for x in (a, b))
        size = float(np.linalg.norm(right))
        out = max(out, float(np.linalg.norm(host - right)) / size if size else float(np.linalg.norm(host)))
    return out


def parity(programs: Mapping[str, Program], steps: int = 3) -> tuple[list[Row], dict[str, Run]]:
    """Every program on cupy against numpy: losses and last gradients within 1e-5 in float32, 1e-10 in float64. Also returns the runs on cupy."""
    rows, runs = [], {}
    for name, program in programs.items():
        dtype = next((r.dtype for r in program.registers if r.memory == "parameter"), "float32")
        bound = 1e-10 if dtype == "float64" else 1e-5
        runs[name] = run(program, steps=steps, backend="cupy", watchdog_s=120)
        found = compare(seen(runs[name]), seen(run(program, steps=steps, backend="numpy")))
        text = f"loss {found['loss_max_rel']:.1e}, gradients {found['grad_max_rel']:.1e} (at most {bound:.0e}), {len(program.ranks)} ranks, {dtype}"
        rows.append(Row(f"{name} on cupy = on numpy", text, max(found["loss_max_rel"], found["grad_max_rel"]) <= bound))
    return rows, runs


def profile(backend: Any, num_ranks: int = 1) -> Cluster:
    """The card measured as a cluster: a GEMM curve for each dtype, memory bandwidth, every operator; in the tables of `executor.measure`.

    `num_ranks` devices stand for the ranks that share the card; each is given its whole rate, since one rank measures alone.
    """
    cupy = backend.xp
    stamp = {"source": f"headrace gpu-check, cupy {cupy.__version__}", "measured_on": datetime.date.today().isoformat()}
    rows: dict[str, list[list[float]]] = {dtype: [[*shape, gemm_s(cupy, shape, dtype)] for shape in GEMMS] for dtype in DTYPES}
    size = 1 << 27
    a, out = cupy.ones(size, cupy.float32), cupy.empty(size, cupy.float32)
    bytes_per_s = 2 * 4 * size / event_s(cupy, lambda: cupy.copyto(out, a))
    launch_s = event_s(cupy, lambda: cupy.add(a[:8], a[:8], out=out[:8]))
    ops = {name: op_table(op, lambda one: event_s(cupy, one.work(cupy))) for name, op in CATALOGUE.items() if not op.is_contraction and name not in NOT_TIMED}
    properties = cupy.cuda.runtime.getDeviceProperties(backend.device)
    rates = {dtype: max(2.0 * math.prod(row[:4]) / row[4] for row in table) for dtype, table in rows.items()}
    memory = float(properties["totalGlobalMem"]) / num_ranks
    name = properties["name"].decode()
    device_profile = {"gemm": {dtype: {"rows": table, **stamp} for dtype, table in rows.items()}, "ops": ops, **stamp}
    devices = tuple(Device(i, name, 0, memory, memory, rates, bytes_per_s, launch_s, device_profile) for i in range(num_ranks))
    copied = {"latency_s": 2 * launch_s, "bytes_per_s": bytes_per_s / 2, **stamp}
    return Cluster(f"1x{name}", devices, _links(num_ranks, copied), {"transport": copied, **stamp}).check()


def _links(num_ranks: int, copied: Mapping[str, Any]) -> tuple[Link, ...]:
    return tuple(Link(f"gpu{i}", "card", copied["latency_s"] / 2, copied["bytes_per_s"], "memory") for i in range(num_ranks)) if num_ranks > 1 else ()


def gemm_s(cupy: Any, shape: tuple[int, ...], dtype: str) -> float:
    """Seconds of one product of (batch, m, n, k)."""
    batch, m, n, k = shape
    lead = (batch,) if batch > 1 else ()
    a, b = cupy.ones((*lead, m, k), dtype), cupy.ones((*lead, k, n), dtype)
    out = cupy.empty((*lead, m, n), dtype)
    return event_s(cupy, lambda: cupy.matmul(a, b, out=out))


def event_s(cupy: Any, work: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of one call on the device: the median of some, after two to warm up, each between two events."""
    for _ in range(2):
        work()
    found: list[float] = []
    for _ in range(repeats):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return float(statistics.median(found))


def profile_rows(cluster: Cluster) -> list[Row]:
    device = cluster.devices[0]
    rates = ", ".join(f"{dtype} {rate / 1e12:.1f}" for dtype, rate in device.flops_per_s.items())
    largest = device.profile["gemm"]["float32"]["rows"][-3]
    return [
        Row("GEMM, TFLOP/s", rates, True),
        Row("memory, TB/s", f"{device.bytes_per_s / 1e12:.2f}", True),
        Row(f"product of {largest[1]}, float32", seconds(largest[4]), True),
    ]


def check(programs: Mapping[str, Program], predict: Callable[[Program, Cluster], float] | None = None) -> list[Row]:
    """The whole table; raises ExecutionError where there is no GPU. `predict(program, cluster)`: the step that the simulator foretells, in seconds."""
    start_s = perf_counter()
    backend = open_backend("cupy")
    rows = operators(backend.xp)
    compared, runs = parity(programs)
    rows += compared
    cluster = profile(backend, max([1, *(len(p.ranks) for p in programs.values())]))
    rows += profile_rows(cluster)
    for name, done in runs.items():
        if predict is not None:
            foretold = predict(programs[name], cluster)
            rows.append(Row(f"{name}: step", f"predicted {seconds(foretold)}, measured {seconds(done.step_s)}", True))
    return [*rows, Row("the whole check", seconds(perf_counter() - start_s), True)]


def table(rows: Sequence[Row]) -> str:
    """The rows as text, what fails marked.

    >>> print(table([Row("kernels", "equal", True), Row("a GPT", "differs", False)]))
    ok    kernels  equal
    FAIL  a GPT    differs
    """
    width = max(len(row.what) for row in rows)
    return "\n".join(f"{'ok' if row.good else 'FAIL':<6}{row.what:<{width}}  {row.found}" for row in rows)


def main(programs: Mapping[str, Program] | None = None, predict: Callable[[Program, Cluster], float] | None = None) -> int:
    """Prints the table; 0 when all holds, 1 when something does not or there is no GPU."""
    try:
        rows = check(programs or {}, predict)
    except ExecutionError as error:
        print(f"nothing ran on a GPU: {error}", file=sys.stderr)
        return error.exit_code
    print(table(rows))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

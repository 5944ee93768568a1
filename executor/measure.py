"""What this machine can do, measured with all of its devices (cores) busy: the cluster `local`.

The tables, as the cost model reads them; all are measured with every device doing the same at once, one BLAS thread each:

* `device.profile["gemm"][dtype] = {"rows": [[batch, m, n, k, seconds], ...], "source", "measured_on"}`
* `device.profile["ops"][op] = {"s_per_element": {dtype: x}, "s_per_flop": {dtype: y}, "launch_s": z}` for the operators of the catalogue that are no
  contractions: a firing takes `launch_s + s_per_element * nbytes / itemsize + s_per_flop * flops`, where `nbytes` is what the operator reads and writes.
  `s_per_flop` is 0 but for attention. `"source"` and `"measured_on"` stand beside the operators in `device.profile`.
* `cluster.profile["transport"] = {"latency_s", "bytes_per_s", ...}`: a message between two threads, its end handed on to the next action; the copy.
* `cluster.profile["driver"] = {"firing_s": x, ...}`: what the runtime itself takes of a queue for one firing.
* `device.flops_per_s[dtype]`: the best row of the GEMM table; `device.bytes_per_s`: reading and writing of arrays that no cache holds; `launch_s`: a call of
  numpy.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from executor.blas import one_thread
from executor.exchange import exchange_s, firing_s, hop_s
from executor.together import Timing, together
from ir.cluster import Cluster, Device, Link
from ir.errors import ExecutionError, InputError
from ir.op import Context, Op
from ir.ops import CATALOGUE
from ir.units import DTYPE_BYTES

Progress = Callable[[str], None]

DTYPES = ("float32", "float64")

GEMM_SHAPES = (
    (1, 64, 64, 64), (1, 128, 128, 128), (1, 256, 256, 256), (1, 512, 512, 512), (1, 768, 768, 768),
    (1, 32, 256, 256), (1, 256, 1024, 256), (1, 256, 256, 1024), (1, 1024, 128, 128), (1, 128, 128, 1024), (1, 512, 2048, 256), (1, 2048, 256, 256),
    (1, 128, 4096, 256), (1, 16, 512, 512), (1, 256, 64, 1024), (16, 64, 64, 64), (8, 256, 256, 64),
)  # fmt: skip
"""Square, wide, tall and deep products of the sizes that shards of small models have, and two batches of an attention."""

SMALL = {"b": 1, "s": 32, "t": 64, "u": 1, "h": 64, "n": 64, "m": 32, "k": 64, "v": 256, "p": 32, "z": 32, "g": 2, "r": 1, "d": 32}
LARGE = {"b": 4, "s": 128, "t": 768, "u": 1, "h": 768, "n": 768, "m": 128, "k": 768, "v": 4096, "p": 128, "z": 128, "g": 4, "r": 1, "d": 64}
ATTRS: Mapping[str, Any] = {
    "eps": 1e-5, "salt": 1, "causal": True, "approximate": "tanh", "value": 1.0, "theta": 1e4, "lr": 1e-3, "beta1": 0.9, "beta2": 0.95,
    "weight_decay": 0.1, "max_norm": 1.0, "momentum": 0.9,
}  # fmt: skip
FAMILY_ATTRS: Mapping[str, Mapping[str, Any]] = {"dropout": {"p": 0.1}, "scale": {"factor": 1.0}, "total": {"factor": 1.0}}
INTEGER_OPERANDS = ("ids", "labels")
NOT_TIMED = ("fill",)
"""Operators without an element to divide by."""

MIN_CPU_SHARE = 0.9
MAX_SPREAD = 0.25
LIMIT_S = 28.0
"""A machine is too busy when its cores gave less of their time than this, or when the same product took so much longer in one of the three looks at it."""


@dataclass(slots=True)
class Witness:
    """One product timed at the beginning, in the middle and at the end: whether the machine stayed itself. `patient`: it is told, but not refused."""

    works: Sequence[Callable[[], object]]
    patient: bool
    start_s: float
    looks: list[Timing]

    def look(self) -> None:
        """Times the product; raises ExecutionError with the numbers when they say more of other programs than of the machine."""
        self.looks.append(together(self.works, 0.25))
        if not self.patient and (reason := self.reason):
            raise ExecutionError(reason)

    def check_time(self) -> None:
        """Raises ExecutionError when the measurement has taken so long that the machine cannot be its own."""
        if not self.patient and perf_counter() - self.start_s > LIMIT_S:
            self.look()
            raise ExecutionError(f"this machine is too busy to be measured: {LIMIT_S} s were not enough{self._load}")

    @property
    def cpu_share(self) -> float:
        return min(look.cpu_share for look in self.looks)

    @property
    def spread(self) -> float:
        times = [look.wall_s for look in self.looks]
        return max(times) / min(times) - 1.0

    @property
    def reason(self) -> str:
        """Why the machine is too busy, empty where it is not."""
        if self.cpu_share >= MIN_CPU_SHARE and self.spread <= MAX_SPREAD:
            return ""
        cores = f"its {len(self.works)} cores gave {self.cpu_share:.0%} of their time (at least {MIN_CPU_SHARE:.0%} is needed)"
        same = f"the same product took up to {self.spread:.0%} longer (at most {MAX_SPREAD:.0%})"
        return f"this machine is too busy to be measured: {cores} and {same}{self._load}"

    @property
    def _load(self) -> str:
        return f"; load {', '.join(f'{x:.2f}' for x in os.getloadavg())}. Stop other programs and measure again"

    def to_json(self) -> dict[str, float]:
        return {"cpu_share": self.cpu_share, "spread": self.spread}


def measure(num_devices: int | None = None, progress: Progress | None = None, *, patient: bool = False) -> Cluster:
    """Measures this machine in under 30 seconds: `num_devices` cores (default: those this process may use), one device each.

    Raises ExecutionError when the machine is too busy, with the numbers that say so; with `patient` the cluster is returned all the same, `assumed` says it.
    """
    cores = num_cores()
    n = num_devices if num_devices is not None else cores
    if not 1 <= n <= cores:
        raise InputError(f"{n} devices were asked for; this process may use {cores} cores, give 1 to {cores}")
    say = progress or (lambda _: None)
    with one_thread():
        witness = Witness([_gemm_work((1, 384, 384, 384), "float32", seed) for seed in range(n)], patient, perf_counter(), [])
        witness.look()
        say("matrix products")
        gemm = {dtype: [[*shape, _gemm_s(n, shape, dtype, witness)] for shape in GEMM_SHAPES] for dtype in DTYPES}
        witness.look()
        say("memory")
        bandwidth = _bandwidth(n)
        call_s = together([_call_work() for _ in range(n)], 0.05).seconds
        say("operators")
        ops = {name: _op_table(n, op, witness) for name, op in CATALOGUE.items() if not op.is_contraction and name not in NOT_TIMED}
        say("transport between threads")
        hop, firing = hop_s(), firing_s()
        copied = 1 << 23
        copy_s = max(exchange_s(max(2, n), copied) - exchange_s(max(2, n), 64), 1e-9)
        witness.look()
    stamp = _stamp()
    device_profile = {"gemm": {d: {"rows": rows, **stamp} for d, rows in gemm.items()}, "ops": ops, **stamp}
    memory = _memory_bytes() / n
    rates = {d: max(2.0 * math.prod(row[:4]) / row[4] for row in rows) for d, rows in gemm.items()}
    devices = tuple(Device(i, _cpu_name(), 0, memory, memory, rates, bandwidth, call_s, device_profile) for i in range(n))
    transport = {"latency_s": hop, "bytes_per_s": copied / copy_s, **stamp}
    links = tuple(Link(f"gpu{i}", "host", hop / 2, copied / copy_s, "memory") for i in range(n)) if n > 1 else ()
    profile = {"transport": transport, "driver": {"firing_s": firing, **stamp}, "num_cores": cores, "witness": witness.to_json(), **stamp}
    return Cluster("local", devices, links, profile, (witness.reason,) if witness.reason else ()).check()


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- pieces of work ----------------------------------------------------------------------------------------------------------------------------------


def _gemm_s(n: int, shape: tuple[int, ...], dtype: str, witness: Witness) -> float:
    witness.check_time()
    return together([_gemm_work(shape, dtype, seed) for seed in range(n)], 0.06).seconds


def _gemm_work(shape: tuple[int, ...], dtype: str, seed: int) -> Callable[[], object]:
    batch, m, n, k = shape
    draw = np.random.default_rng(seed)
    lead = (batch,) if batch > 1 else ()
    a, b = draw.standard_normal((*lead, m, k)).astype(dtype), draw.standard_normal((*lead, k, n)).astype(dtype)
    out = np.empty((*lead, m, n), dtype)
    return lambda: np.matmul(a, b, out=out)


def _bandwidth(n: int) -> float:
    """Bytes read and written per second by one of n devices, all adding arrays of 32 MiB."""
    size = 1 << 22

    def work(seed: int) -> Callable[[], object]:
        a, b, out = np.full(size, seed, float), np.ones(size), np.zeros(size)
        return lambda: np.add(a, b, out=out)

    return 3 * 8 * size / together([work(i) for i in range(n)], 0.4).seconds


def _call_work() -> Callable[[], object]:
    a, out = np.ones(8), np.ones(8)
    return lambda: np.add(a, a, out=out)


def _op_table(n: int, op: Op, witness: Witness) -> dict[str, Any]:
    """`launch_s`, `s_per_element` and `s_per_flop` by dtype of one operator."""
    witness.check_time()
    per_element, per_flop, launches = {}, {}, []
    for dtype in DTYPES:
        found = [_op_seconds(n, op, sizes, dtype) for sizes in _op_sizes(op)]
        if op.name.startswith("attention"):
            (_, e1, f1, s1), (launch, e2, f2, s2) = (0.0, *found[1]), (0.0, *found[2])
            per_flop[dtype] = max((s2 * e1 - s1 * e2) / (f2 * e1 - f1 * e2), 0.0)
            per_element[dtype] = max((s2 - per_flop[dtype] * f2) / e2, 0.0)
            launches.append(max(launch, found[0][2] - per_flop[dtype] * found[0][1] - per_element[dtype] * found[0][0], 0.0))
        else:
            (e0, _, s0), (e1, _, s1) = found
            per_element[dtype] = max((s1 - s0) / (e1 - e0), 0.0)
            per_flop[dtype] = 0.0
            launches.append(max(s0 - per_element[dtype] * e0, 0.0))
    return {"s_per_element": per_element, "s_per_flop": per_flop, "launch_s": min(launches)}


def _op_sizes(op: Op) -> list[Mapping[str, int]]:
    """Small and large; of attention also a longer sequence, so that the share of its flops can be told from that of its bytes."""
    if op.name.startswith("attention"):
        return [SMALL, {**LARGE, "s": 64, "z": 64}, {**LARGE, "s": 256, "z": 256, "b": 1}]
    return [SMALL, LARGE]


def _op_seconds(n: int, op: Op, labels: Mapping[str, int], dtype: str) -> tuple[float, float, float]:
    """(elements read and written in units of the dtype, flops, seconds) of one firing."""
    ranks = [len(o.dims) - 1 + (2 if len(o.dims) > 1 else 3 if _alone(op) else 2) if ("...",) in o.dims else len(o.dims) for o in op.inputs]
    this = op.for_ranks(ranks)
    sizes = {label: labels[label] for label in this.labels}
    timing = together([_op_work(this, sizes, dtype, seed) for seed in range(n)], 0.03)
    itemsize = DTYPE_BYTES[dtype]
    nbytes = sum(math.prod(o.shape(sizes)) * (8 if o.name in INTEGER_OPERANDS else itemsize) for o in (*this.inputs, *this.outputs))
    return nbytes / itemsize, this.flops_of(sizes, {**ATTRS, **sizes}), timing.seconds


def _alone(op: Op) -> bool:
    """Whether `...` is all that an operand with it has, so that a third dim must make the tensor large."""
    return all(len(o.dims) == 1 for o in (*op.inputs, *op.outputs) if ("...",) in o.dims)


def _op_work(op: Op, sizes: Mapping[str, int], dtype: str, seed: int) -> Callable[[], object]:
    draw = np.random.default_rng(seed)
    arrays: list[Any] = []
    for operand in op.inputs:
        shape = operand.shape(sizes)
        if operand.name in INTEGER_OPERANDS:
            arrays.append(draw.integers(0, sizes.get("v", 2), shape))
        else:
            arrays.append(np.abs(draw.standard_normal(shape)).astype(dtype) + 0.5)
    arrays += [np.zeros(o.shape(sizes), dtype) for o in op.outputs]
    whole = tuple((0, n) for n in op.inputs[0].shape(sizes)) if op.inputs else ()
    attrs: dict[str, Any] = {**ATTRS, **sizes, "dtype": dtype, "src_region": whole, "dst_region": whole}
    for family, more in FAMILY_ATTRS.items():
        if op.name.startswith(family):
            attrs |= more
    context = Context(np, attrs, sizes, sizes, dict.fromkeys(sizes, 0), 1, 1, 1e-3)
    return lambda: op.kernel(context, *arrays)


# ---- what the machine is -----------------------------------------------------------------------------------------------------------------------------


def _stamp() -> dict[str, str]:
    return {"source": f"headrace measure, numpy {np.__version__}, one BLAS thread a device", "measured_on": datetime.date.today().isoformat()}


def _memory_bytes() -> float:
    """Memory that this process may use: the machine's, or the limit of its control group."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, float(text))
    return total


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


__all__ = ["measure", "num_cores"]

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from executor.blas import one_thread
from executor.exchange import exchange_s, firing_s, hop_s
from executor.samples import LARGE, SMALL, Sample, sample
from executor.together import Timing, together
from ir.cluster import Cluster, Device, Link
from ir.errors import ExecutionError, InputError
from ir.op import Op
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

NOT_TIMED = ("fill", *(name for name, op in CATALOGUE.items() if op.copies or name.startswith(("attention_", "patches", "prepend", "pick"))))
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
        ops = {name: op_table(op, partial(_op_s, n, witness)) for name, op in CATALOGUE.items() if not op.is_contraction and name not in NOT_TIMED}
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


def _op_s(n: int, witness: Witness, one: Sample) -> float:
    """Seconds of one firing of a sample while every device does the same; each on arrays of its own."""
    witness.check_time()
    return together([one.work(np) for _ in range(n)], 0.02).seconds


def op_table(op: Op, timer: Callable[[Sample], float]) -> dict[str, Any]:
    """`launch_s`, `s_per_element` and `s_per_flop` by dtype of one operator; `timer` gives the seconds of one firing of a sample."""
    fits = {dtype: _fit([(made, timer(made)) for made in _op_samples(op, dtype)]) for dtype in DTYPES}
    return {
        "s_per_element": {dtype: fit[1] for dtype, fit in fits.items()},
        "s_per_flop": {dtype: fit[2] for dtype, fit in fits.items()},
        "launch_s": min(fit[0] for fit in fits.values()),
    }


def _op_samples(op: Op, dtype: str) -> list[Sample]:
    """Small and large; of attention also a longer sequence, so that the share of its flops can be told from that of its bytes."""
    labels = [SMALL, LARGE]
    if op.name.startswith("attention"):
        labels = [SMALL, {**LARGE, "s": 64, "z": 64}, {**LARGE, "s": 256, "z": 256, "b": 1}]
    return [sample(op, sizes, dtype, 0) for sizes in labels]


def _fit(timed: Sequence[tuple[Sample, float]]) -> tuple[float, float, float]:
    """(launch_s, s_per_element, s_per_flop), none below 0, with the least relative error over the samples; flops only where there are three of them."""
    rows = np.array([[1.0, one.nbytes / DTYPE_BYTES[one.dtype], one.flops] for one, _ in timed]) / np.array([[s] for _, s in timed])
    used = [0, 1, 2] if len(timed) > 2 else [0, 1]
    while True:
        scale = rows[:, used].max(axis=0)
        found = np.linalg.lstsq(rows[:, used] / scale, np.ones(len(timed)), rcond=None)[0] / scale
        if found.min() >= 0 or len(used) == 1:
            out = [0.0, 0.0, 0.0]
            for column, value in zip(used, found, strict=True):
                out[column] = max(float(value), 0.0)
            return out[0], out[1], out[2]
        # of two samples the larger one tells the rate: where the smaller took as long, it is the launch that is unknown
        used.remove(0 if len(timed) == 2 else used[int(found.argmin())])


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

"""Seconds for Work: one CostModel, used by the closed-form estimate, the event simulation and the search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ir.cluster import Cluster, Device
from ir.errors import ClusterError, InputError
from ir.ops import CATALOGUE
from ir.ops.over import parted
from ir.units import DTYPE_BYTES
from ir.work import Work
from simulator import gemm as gemms
from simulator.collectives import FREE, Group, Line, lines, p2p_line, siblings
from simulator.overlap import lost
from simulator.routes import Edge, Routes
from simulator.runtimes import OWN, facts

PRODUCTS = {"attention": 2, "attention.grad": 5}
"""Matrix products of queries and keys in an operator, each of 2 d flops a pair."""

WITH_PASSES = frozenset(name for name, op in CATALOGUE.items() if op.moves is not None and op.gemm is not None)
"""Operators that pass over what their products give: what they move besides the products' operands takes its time besides."""

MEASURED_HEAD = 64
"""Size of a head in the samples by which `executor.measure` times attention."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""Kinds in which all members give and take; beside them there is `broadcast`, from the first member of a group."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a framework adds: `launch_s` to every compute work; `firing_s` before every action that is no message (a message's latency holds it already), and
    `wake_s` more on a queue that had been waiting. `slower`: how many times as long a kernel (`gemm`, `attention`, `memory`) takes beside a collective
    that brings in `slower_at` of the memory's bandwidth.
    """

    name: str = "headrace"
    launch_s: float = 0.0
    firing_s: float = 0.0
    wake_s: float = 0.0
    slower: Mapping[str, float] = field(default_factory=dict)
    slower_at: float = 1.0


class CostModel:
    """Prices Work on the devices and links of a cluster.

    * Compute: `max(flops / rate, bytes / bandwidth) + launch`, the rate of a GEMM by its shape (`simulator.gemm`), of attention by a measured share of peak,
      of anything else by the float32 vector rate. Where the device was measured operator by operator (`profile["ops"]`), those tables count.
    * Collectives: a measured curve of the same kind and group shape where there is one, else alpha-beta lines on the topology (`simulator.collectives`).
    * Between threads of one machine (`profile["transport"]`): a copy through memory.
    * All of it times the cluster's `profile["levels"]`, where it was calibrated by measured runs: of an operator, or "compute" and "communication".

    `num_cores`: how many threads of the cluster run at once where its devices are threads (`profile["num_cores"]`), 0 where every device is its own.
    `active`: the ranks that take part (default all); their neighbours' traffic is not counted. Everything is cached by its key, so a price costs a look-up.

    >>> from simulator.clusters import shorthand
    >>> cost = CostModel(shorthand("1x8xH100-SXM"))
    >>> round(cost.compute_s("linear", "bfloat16", 2 * 8192**3, 3 * 2 * 8192**2, (1, 8192, 8192, 8192)) * 1e3, 2)
    1.59
    >>> cost.collective_s("all_reduce", 1 << 30, (0,))
    0.0
    """

    def __init__(self, cluster: Cluster, runtime: Runtime | None = None, active: Sequence[int] | None = None) -> None:
        self.cluster = cluster
        self.runtime = runtime or _runtime_of(cluster)
        self.active = None if active is None else frozenset(active)
        self.routes = Routes(cluster)
        self._kinds = _device_kinds(cluster)
        self._gemms: dict[tuple[int, str], gemms.Gemm] = {}
        self._compute: dict[tuple[Any, ...], float] = {}
        self._lines: dict[tuple[Any, ...], tuple[Line, ...]] = {}
        self._levels: Mapping[str, float] = cluster.profile.get("levels", {})
        self._talk = float(self._levels.get("communication", 1.0))
        self._curves = {(c["kind"], c["ranks_per_node"], c["num_nodes"]): c["rows"] for c in cluster.profile.get("collectives", ())}
        self._transport: Mapping[str, float] | None = cluster.profile.get("transport")
        self.num_cores = float(cluster.profile.get("num_cores", 0.0)) if self._transport is not None else 0.0
        self._library: Mapping[str, Any] = cluster.profile.get("collective", {})

    # ---- compute -----------------------------------------------------------------------------------------------------------------------------------

    def compute_s(self, op: str, dtype: str, flops: float, nbytes: float, gemm: tuple[int, ...] = (), rank: int = 0) -> float:
        """Seconds of one kernel on one device."""
        key = (self._kinds[rank], op, dtype, flops, nbytes, gemm)
        found = self._compute.get(key)
        if found is None:
            alone_s = self._kernel_s(self.cluster.devices[rank], op, dtype, flops, nbytes, gemm) + self.runtime.launch_s
            found = self._compute[key] = alone_s * self._level(op)
        return found

    def lost(self, work: Work) -> float:
        """The share of its speed that this work loses while a collective runs on its device: a kernel's; nothing of anything else."""
        if work.kind != "compute":
            return 0.0
        kind = "gemm" if work.gemm else "attention" if work.op.startswith("attention") else "memory"
        return float(lost(self.runtime.slower.get(kind, 1.0)))

    def crowding(self, work: Work, rank: int, seconds: float) -> float:
        """How much of `lost` kernels lose while this work runs for so many seconds on their device, 0 to 1: a collective's, by the bytes that it brings in. A
        message of one rank to one other is the copy engines' work."""
        if work.kind != "collective" or work.op == "shift" or not seconds:
            return 0.0
        passes = 2 if work.op == "all_reduce" else 1
        rate = passes * work.nbytes * (1.0 - 1.0 / len(work.group)) / seconds
        return min(1.0, rate / (self.runtime.slower_at * self.cluster.devices[rank].bytes_per_s))

    def _level(self, op: str) -> float:
        """What measured runs have shown this operator to take over what is priced (`simulator.calibrate`)."""
        return float(self._levels.get(op, self._levels.get("compute", 1.0)))

    def floor_s(self, op: str, dtype: str, flops: float, nbytes: float, gemm: tuple[int, ...] = (), rank: int = 0) -> float:
        """Seconds that this work does not go below however it is cut: a GEMM at the best rate of any shape, anything else as one kernel."""
        if not gemm:
            return self.compute_s(op, dtype, flops, nbytes, gemm, rank)
        device = self.cluster.devices[rank]
        return min(self.compute_s(op, dtype, flops, nbytes, gemm, rank), self._level(op) * flops / self._gemm(device, dtype).best_rate)

    def _kernel_s(self, device: Device, op: str, dtype: str, flops: float, nbytes: float, gemm: tuple[int, ...]) -> float:
        bandwidth = device.bytes_per_s * device.profile.get("hbm_share", 1.0)
        if gemm:
            beside = max(0.0, nbytes - _operand_bytes(gemm, dtype)) if op in WITH_PASSES else 0.0
            return self._gemm(device, dtype).seconds(gemm, nbytes - beside, bandwidth) + float(beside / bandwidth)
        table = device.profile.get("ops", {}).get(measured_as(op))
        if table is not None and dtype in table["s_per_element"]:
            return float(table["launch_s"] + table["s_per_element"][dtype] * nbytes / DTYPE_BYTES[dtype] + flops * table.get("s_per_flop", {}).get(dtype, 0.0))
        busy = flops / self._vector_rate(device, op, dtype) if flops else 0.0
        return float(max(busy, nbytes / bandwidth) + device.launch_s)

    def _gemm(self, device: Device, dtype: str) -> gemms.Gemm:
        key = (self._kinds[device.rank], dtype)
        if key not in self._gemms:
            self._gemms[key] = gemms.of_device(device, dtype, peak(device, dtype))
        return self._gemms[key]

    def _vector_rate(self, device: Device, op: str, dtype: str) -> float:
        if op.startswith("attention") and "attention_share" in device.profile:
            return peak(device, dtype) * float(device.profile["attention_share"])
        return device.flops_per_s.get("float32") or max(device.flops_per_s.values())

    def _attention_s(self, work: Work, rank: int) -> float:
        """What attention on a measured device takes beyond its table, whose samples have heads of `MEASURED_HEAD` and no dropout.

        Beside its products it does, for every pair of a query and a key, work that does not grow with the size of a head: what of the table's seconds a flop
        the GEMM table does not explain. Dropout draws a number for every pair, as the operator `dropout` does for every element that it reads and writes.
        """
        device = self.cluster.devices[rank]
        ops = device.profile.get("ops", {})
        name, d = measured_as(work.op), work.sizes.get("d")
        table = ops.get(name)
        if table is None or not d or work.dtype not in table.get("s_per_flop", {}):
            return 0.0
        pairs = work.flops / (2 * PRODUCTS[name] * d)
        shape = (1, 64, sum(n for label, n in work.sizes.items() if label.startswith("z")) or work.sizes.get("s", 64), MEASURED_HEAD)
        product_s = self._gemm(device, work.dtype).seconds((64, *shape[1:]), 0.0, device.bytes_per_s) / (64 * 2.0 * math.prod(shape))
        beside_s = max(0.0, table["s_per_flop"][work.dtype] - product_s)
        drawn_s = ops["dropout"]["s_per_element"].get(work.dtype, 0.0) if work.attrs.get("p", 0.0) > 0 and "dropout" in ops else 0.0
        return float(work.flops * beside_s * (MEASURED_HEAD / d - 1) + pairs * 2 * drawn_s)

    def accumulate_s(self, nbytes: float, dtype: str, rank: int) -> float:
        """Seconds to add a tensor of `nbytes` to another: two reads and a write."""
        return self.compute_s("add", dtype, nbytes / DTYPE_BYTES[dtype], 3.0 * nbytes, (), rank)

    # ---- communication -----------------------------------------------------------------------------------------------------------------------------

    def collective_s(self, kind: str, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a collective among `ranks`, its neighbours of the same mesh axis doing theirs; `nbytes` as in `ir.work`. A group of one is free."""
        group = tuple(ranks)
        if len(group) <= 1:
            return 0.0
        if self._transport is not None:
            return self._copy_s(kind, nbytes, len(group))
        curve = self._curve(kind, group)
        return self._talk * curve_s(curve, nbytes) if curve is not None else self.line(kind, nbytes, group).at(nbytes)

    def p2p_s(self, nbytes: float, src: int, dst: int) -> float:
        """Seconds of one message, its neighbours sending theirs."""
        if src == dst:
            return 0.0
        return self._copy_s("p2p", nbytes, 2) if self._transport is not None else self.line("p2p", nbytes, (src, dst)).at(nbytes)

    def line(self, kind: str, nbytes: float, group: Group, alone: bool = False) -> Line:
        """The cheapest alpha-beta line for these bytes; `alone`: without the neighbours' traffic."""
        return min(self.lines(kind, group, alone), key=lambda line: line.at(nbytes))

    def lines(self, kind: str, group: Group, alone: bool = False) -> tuple[Line, ...]:
        """Every algorithm's line; seconds are the least of them at the bytes in question."""
        key = (kind, group, alone)
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = tuple(line.slowed(self._talk) for line in self._new_lines(kind, group, alone))
        return found

    def _new_lines(self, kind: str, group: Group, alone: bool) -> tuple[Line, ...]:
        missing = [r for r in group if not 0 <= r < self.cluster.num_devices]
        if missing:
            raise ClusterError(f"cluster `{self.cluster.name}` has ranks 0 to {self.cluster.num_devices - 1}, {kind} of {group} needs {missing}")
        if len(group) <= 1:
            return (FREE,)
        together = (group,) if alone else siblings(self.cluster, group, self.active)
        if kind == "p2p":
            return (p2p_line(self.routes, group, together, float(self._library.get("launch_s", 0.0))),)
        if kind not in (*COLLECTIVES, "broadcast", "shift"):
            raise InputError(f"no collective is called `{kind}`; known are {', '.join(COLLECTIVES)}, broadcast, shift")
        return lines(self.routes, kind, group, together, self._library)

    def _curve(self, kind: str, group: Group) -> Sequence[Sequence[float]] | None:
        if not self._curves:
            return None
        per_node: dict[int, int] = {}
        for rank in group:
            per_node[self.routes.node(rank)] = per_node.get(self.routes.node(rank), 0) + 1
        shape = set(per_node.values())
        return self._curves.get((kind, shape.pop(), len(per_node))) if len(shape) == 1 else None

    def _copy_s(self, kind: str, nbytes: float, n: int) -> float:
        """Threads copy: each member assembles all it needs, reduces its own part, or for an all-reduce reduces one n-th and hands it to all."""
        transport = self._transport or {}
        copied = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n}.get(kind, 1.0) * nbytes
        return self._talk * (transport["latency_s"] + copied / transport["bytes_per_s"])

    def transfer(self, work: Work, rank: int) -> tuple[float, Mapping[Edge, float]] | None:
        """(seconds while nothing else is on the links, share of each link that it uses), for an engine that lets transfers meet; None where it crosses none."""
        if work.kind not in ("collective", "send", "recv") or len(work.group) <= 1 or self._transport is not None:
            return None
        line = self.line(work.op if work.kind == "collective" else "p2p", work.nbytes, work.group, alone=True)
        seconds = line.at(work.nbytes)
        return seconds, {e: load * work.nbytes / self.routes.bytes_per_s(e) / seconds for e, load in line.loads.items()} if seconds else {}

    # ---- work --------------------------------------------------------------------------------------------------------------------------------------

    def work_s(self, work: Work, rank: int) -> float:
        """Seconds of one firing on `rank`, once it runs."""
        if work.kind == "compute":
            seconds = self.compute_s(work.op, work.dtype, work.flops, work.nbytes, work.gemm, rank)
            return seconds + self._level(work.op) * self._attention_s(work, rank) if measured_as(work.op) in PRODUCTS else seconds
        if work.kind == "collective":
            return self.collective_s(work.op, work.nbytes, work.group)
        if work.kind in ("send", "recv"):
            return self.p2p_s(work.nbytes, *work.group)
        return work.nbytes / self.cluster.devices[rank].bytes_per_s


def measured_as(op: str) -> str:
    """The operator whose measured figures stand for this one: attention with sinks, a mask or relative positions does the products of plain attention.

    Over the pieces of a sequence (`ir.ops.over`) an operator does what it does over the whole.

    >>> measured_as("attention_relative.grad"), measured_as("linear")
    ('attention.grad', 'linear')
    """
    op, _ = parted(op)
    name, dot, grad = op.partition(".")
    return "attention" + dot + grad if name.startswith("attention_") else op


PEAK_DTYPE = {"fp8_block": "fp8"}
"""Ways to compute that have the peak of a dtype: `fp8_block` scales by blocks."""


def peak(device: Device, dtype: str) -> float:
    """Peak GEMM flops per second; ClusterError where the device has none for this dtype."""
    rate = device.flops_per_s.get(PEAK_DTYPE.get(dtype, dtype))
    if rate is None:
        raise ClusterError(f"{device.name} computes no {dtype}; it has {', '.join(device.flops_per_s)}: choose one of these with --dtype")
    return rate


def _operand_bytes(gemm: tuple[int, ...], dtype: str) -> float:
    batch, m, n, k = gemm
    return float(DTYPE_BYTES[dtype] * batch * (m * k + k * n + m * n))


def curve_s(rows: Sequence[Sequence[float]], nbytes: float) -> float:
    """Seconds on a measured curve of (nbytes, seconds), straight between two points in log-log, flat before the first, at the last bandwidth after the last.

    >>> curve_s([(100, 1.0), (10_000, 10.0)], 1000), curve_s([(100, 1.0), (10_000, 10.0)], 20_000)
    (3.162..., 20.0)
    """
    if nbytes <= rows[0][0]:
        return float(rows[0][1])
    if nbytes >= rows[-1][0]:
        return float(rows[-1][1] * nbytes / rows[-1][0])
    i = next(i for i, row in enumerate(rows) if row[0] >= nbytes)
    (x0, y0), (x1, y1) = rows[i - 1], rows[i]
    share = math.log(nbytes / x0) / math.log(x1 / x0)
    return float(y0 * (y1 / y0) ** share)


def _runtime_of(cluster: Cluster) -> Runtime:
    """This project's own; where devices are threads, what they take from each other is told by the cores they share."""
    driver = cluster.profile.get("driver", {})
    own = facts(OWN)
    slower = {} if "transport" in cluster.profile else own["slower"]
    return Runtime(OWN, firing_s=float(driver.get("firing_s", 0.0)), wake_s=float(driver.get("wake_s", 0.0)), slower=slower, slower_at=own["slower_at"])


def _device_kinds(cluster: Cluster) -> tuple[int, ...]:
    """A number for each device; equal where two devices differ in rank and node alone."""
    found: list[Device] = []
    out: list[int] = []
    for d in cluster.devices:
        match = next((i for i, f in enumerate(found) if _alike(d, f)), None)
        if match is None:
            match = len(found)
            found.append(d)
        out.append(match)
    return tuple(out)


def _alike(a: Device, b: Device) -> bool:
    return all(getattr(a, f) == getattr(b, f) for f in ("name", "flops_per_s", "bytes_per_s", "launch_s", "profile"))

"""What the placement search asks about time: seconds of a kernel, a collective on a mesh axis, a local copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ir.boxing import LOCAL, Link, axis_sets
from ir.cluster import Cluster
from ir.mesh import JOINED, Mesh
from ir.op import Attrs, Op, Sizes


class Pricing(Protocol):
    """Seconds on one mesh; `axis` may be two, `dp+tp`.

    `nbytes` of a collective is the larger of what a rank reads and writes, of everything else the memory traffic of a rank.
    """

    def compute_s(self, op: str, dtype: str, flops: float, nbytes: float, gemm: tuple[int, ...]) -> float: ...

    def collective_s(self, kind: str, nbytes: float, axis: str) -> float: ...

    def local_s(self, nbytes: float) -> float: ...


class Costs(Protocol):
    """The part of `simulator.CostModel` that a mesh is priced with."""

    @property
    def cluster(self) -> Cluster: ...

    def compute_s(self, op: str, dtype: str, flops: float, nbytes: float, gemm: tuple[int, ...], rank: int) -> float: ...

    def collective_s(self, kind: str, nbytes: float, ranks: Sequence[int]) -> float: ...


@dataclass(frozen=True)
class MeshPricing:
    """A cost model seen from one mesh: the slowest device computes, the slowest group of an axis communicates.

    Groups that lie alike on the nodes are priced once.
    """

    costs: Costs
    mesh: Mesh
    _groups: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict, repr=False, compare=False)

    def compute_s(self, op: str, dtype: str, flops: float, nbytes: float, gemm: tuple[int, ...]) -> float:
        return max(self.costs.compute_s(op, dtype, flops, nbytes, gemm, rank) for rank in self._devices())

    def collective_s(self, kind: str, nbytes: float, axis: str) -> float:
        return max(self.costs.collective_s(kind, nbytes, ranks) for ranks in self.groups(axis))

    def local_s(self, nbytes: float) -> float:
        """Seconds of a local re-sharding kernel."""
        return self.compute_s("box.slice", "float32", 0.0, nbytes, ())

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """One group of the axis for each way that its groups lie on nodes and devices."""
        if axis not in self._groups:
            found: dict[Any, tuple[int, ...]] = {}
            for ranks in self.mesh.groups(axis):
                nodes: dict[int, int] = {}
                devices = [self.costs.cluster.devices[r] for r in ranks]
                lie = tuple((nodes.setdefault(d.node, len(nodes)), d.name) for d in devices)
                found.setdefault(lie, ranks)
            self._groups[axis] = tuple(found.values())
        return self._groups[axis]

    def _devices(self) -> tuple[int, ...]:
        if "" not in self._groups:
            first: dict[str, int] = {}
            for rank in self.mesh.ranks:
                first.setdefault(self.costs.cluster.devices[rank].name, rank)
            self._groups[""] = (tuple(first.values()),)
        return self._groups[""][0]


TIE_BYTE_S = 1e-23
TIE_COLLECTIVE_S = 1e-17
TIE_KEPT_S = 1e-27
"""What decides between placements of equal cost: bytes moved, then collectives, then bytes kept, then the order of states. A millionth of a millionth of what a
byte on a link, a launch or a byte of memory costs, so that no two costs change places by it."""


def step_price(pricing: Pricing, axis: str, kind: str, read: float, written: float) -> float:
    """Seconds of a step of a kind in which the rank that has most reads and writes so many bytes."""
    if kind in LOCAL:
        return pricing.local_s(2 * written if kind != "pad" else read + written)
    nbytes = max(read, written)
    return pricing.collective_s(kind, nbytes, axis) + TIE_BYTE_S * nbytes + TIE_COLLECTIVE_S


def axis_links(pricing: Pricing, axes: Sequence[str], mesh_shape: Sequence[int]) -> tuple[Link, ...]:
    """For each of `ir.boxing.axis_sets` a line through two gathers, small and large: enough to choose the chain of a re-shard without a cost model."""
    small, large = 1 << 10, 1 << 24
    out = []
    for joined in axis_sets(len(axes)):
        n = math.prod(mesh_shape[axis] for axis in joined)
        latency_s, long_s = (pricing.collective_s("all_gather", float(nbytes), JOINED.join(axes[axis] for axis in joined)) for nbytes in (small, large))
        out.append((latency_s, max(0.0, long_s - latency_s) / ((large - small) * (n - 1) / n)))
    return tuple(out)


def work_of(op: Op, sizes: Sizes, attrs: Attrs, width: int, widths: Mapping[str, int] | None = None) -> tuple[float, float, tuple[int, ...]]:
    """(flops, bytes of memory traffic, gemm) of one firing on local sizes, elements being `width` bytes wide: what `planner.lower` writes into its Work.

    `widths`: of operands of another width, by name; what is changed in place is written as wide as it was read.
    """
    ins, outs = op.elements_of(sizes)
    if not widths:
        num_moved = op.moves(sizes, attrs) if op.moves else sum(ins) + sum(outs)
        return op.flops_of(sizes, attrs), float(num_moved * width), op.gemm_of(sizes, attrs)
    every = zip((*op.inputs, *op.outputs), (*ins, *outs), strict=True)
    traffic = sum(n * widths.get(o.name, widths.get(o.name.removesuffix("2"), width)) for o, n in every)
    return op.flops_of(sizes, attrs), float(traffic), op.gemm_of(sizes, attrs)

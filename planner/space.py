"""What a placement search may choose from: which labels may split unevenly, and limits on rules, hubs and parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ir.errors import PlanError
from ir.graph import Graph, Node, Tensor
from ir.op import Rule
from ir.sbp import S, Sbp
from planner.dims import EXPERT_PRODUCTS, Dims, dims_of

Where = str | Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Limit:
    """On `axis`, what matches `where` (a pattern of names, or a predicate of the node or tensor) takes only states that `allow` says yes to.

    A state on one axis is a Rule for a node, (value, cotangent) for a hub, (state, held, grad) for a parameter. Where nothing legal is left, `otherwise` takes
    the place of `allow`. `said`: who asked for it, in the user's words.
    """

    where: Where
    axis: str
    allow: Callable[[Any], bool]
    otherwise: Callable[[Any], bool] | None = None
    said: str = ""

    def matches(self, thing: Node | Tensor) -> bool:
        return fnmatch.fnmatchcase(thing.name, self.where) if isinstance(self.where, str) else self.where(thing)


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen: labels that may split unevenly (others must divide), and limits on rules, hubs and parameters."""

    uneven: frozenset[str] = frozenset({"v"})
    rules: tuple[Limit, ...] = ()
    hubs: tuple[Limit, ...] = ()
    params: tuple[Limit, ...] = ()

    def __and__(self, other: Space) -> Space:
        """What both allow."""
        return Space(self.uneven & other.uneven, self.rules + other.rules, self.hubs + other.hubs, self.params + other.params)


def zero_space(axis: str, zero: int | None, but: frozenset[str] = frozenset()) -> Space:
    """Parameters not in `but` follow the ZeRO level on an axis along which their use is repeated, where one of their dims divides; None: free."""
    if zero is None:
        return Space()
    return Space(params=(
        Limit(lambda t: t.name not in but and not t.frozen, axis, lambda triple: _is_zero(zero, triple), lambda triple: _is_zero(0, triple)),
        Limit(lambda t: t.name not in but and t.frozen, axis, lambda triple: triple[1].is_split == (zero >= 3), lambda triple: not triple[1].is_split),
    ))  # fmt: skip


RESIDUAL_OPS = frozenset({"layer_norm", "rms_norm", "add", "add_positions", "dropout"})
"""Operators on the residual stream: where sequence parallelism splits the sequence and plain tensor parallelism repeats the work."""


def layout_space(
    graph: Graph, axes: Sequence[str], *, zero: int | None = None, sp: bool | None = None, dp_axis: str = "dp", tp_axis: str = "tp", ep_axis: str = "ep",
    uneven: frozenset[str] = frozenset({"v"}),
) -> Space:  # fmt: skip
    """What `--fix dp=..,tp=..,ep=..,zero=..,sp=..` leaves to choose.

    On `dp_axis` every operator that has a batch splits it, and parameters follow the ZeRO level where one of their dims divides (absent: free). On `ep_axis`
    the products of experts split the experts, what else has experts splits them or the batch, and all the rest is as on `dp_axis`. On `tp_axis` the search is
    free, but for `sp`: True splits the sequence on the residual stream and no batch, False repeats the residual stream.
    """
    if zero not in (None, 0, 1, 2, 3):
        raise PlanError(f"zero={zero} is no level of ZeRO; legal are 0, 1, 2, 3")
    layout = _Layout.of(graph)
    space = Space(uneven)
    if dp_axis in axes:
        space &= layout.batch_parallel(dp_axis, zero)
    if ep_axis in axes:
        space &= layout.expert_parallel(ep_axis, zero)
    if tp_axis in axes and sp is not None:
        space &= layout.sequence_parallel(tp_axis) if sp else layout.repeated_stream(tp_axis)
        space &= no_batch(graph, tp_axis)
    return space


def no_batch(graph: Graph, axis: str) -> Space:
    """A batch split over this axis would be data parallelism under another name."""
    return Space(rules=_grouped(_Layout.of(graph).batch, axis, lambda label: lambda rule: label is None or rule != Rule("split", label)))


def split_experts(graph: Graph, axis: str, wanted: bool) -> Space:
    """On this axis the products of experts split the experts, or, where that is not wanted, anything else."""
    return Space(rules=(Limit(lambda n: n.op in EXPERT_PRODUCTS, axis, lambda rule: (rule == Rule("split", "e")) == wanted),))


def _grouped(values: Mapping[str, Any], axis: str, allow: Callable[[Any], Callable[[Any], bool]]) -> tuple[Limit, ...]:
    """One limit for all nodes, or all tensors, that have the same value: equal layers stay equal to the search."""

    def limit(value: Any) -> Limit:
        return Limit(lambda thing: thing.name in values and values[thing.name] == value, axis, allow(value))

    return tuple(limit(value) for value in dict.fromkeys(values.values()))


@dataclass(frozen=True, slots=True)
class _Layout:
    """By node the labels that are batch, sequence and experts, by tensor the dims."""

    graph: Graph
    dims: Dims
    batch: Mapping[str, str | None]
    experts: Mapping[str, str | None]

    @classmethod
    def of(cls, graph: Graph) -> _Layout:
        dims = dims_of(graph)
        return cls(graph, dims, *({n.name: dims.label(n, what) for n in graph.nodes} for what in ("batch", "experts")))

    def _dims(self, what: str) -> dict[str, int | None]:
        return {t: self.dims.dim(t, what) for t in self.graph.tensors}

    def batch_parallel(self, axis: str, zero: int | None, but: frozenset[str] = frozenset()) -> Space:
        """Data parallelism: whoever has a batch splits it, parameters follow the ZeRO level. Names in `but` are left alone."""
        nodes = {name: label for name, label in self.batch.items() if name not in but}
        hubs = {t: dim for t, dim in self._dims("batch").items() if dim is not None and t not in but}
        return Space(
            rules=_grouped(nodes, axis, lambda label: Rule("split", label).__eq__ if label else lambda rule: rule.kind in ("B", "B~P")),
            hubs=_grouped(hubs, axis, lambda dim: lambda pair: pair[0] == S(dim)),
        ) & zero_space(axis, zero, but)  # fmt: skip

    def expert_parallel(self, axis: str, zero: int | None) -> Space:
        """Products of experts split the experts, what else has experts splits them or the batch; all the rest is data-parallel."""
        parts = self._dims("experts")
        having = frozenset(name for name, label in self.experts.items() if label) | {t for t, dim in parts.items() if dim is not None}
        products = {n.name for n in self.graph.nodes if n.op in EXPERT_PRODUCTS}
        nodes = {name: (label, None if name in products else self.batch[name]) for name, label in self.experts.items() if label}
        batches = self._dims("batch")
        tensors = {t: (dim, batches[t]) for t, dim in parts.items() if dim is not None}
        mine = Space(
            rules=_grouped(nodes, axis, lambda labels: {Rule("split", label) for label in labels if label}.__contains__),
            hubs=_grouped(tensors, axis, lambda dims: lambda pair: pair[0] in {S(dim) for dim in dims if dim is not None}),
            params=_grouped(tensors, axis, lambda dims: lambda triple: all(sbp == S(dims[0]) for sbp in triple)),
        )  # fmt: skip
        return mine & self.batch_parallel(axis, zero, having)

    def sequence_parallel(self, axis: str) -> Space:
        """The residual stream is split along the sequence."""
        stream = {n.name: n.op in RESIDUAL_OPS for n in self.graph.nodes if self.dims.label(n, "sequence") == "s"}
        return Space(rules=_grouped(stream, axis, lambda is_stream: lambda rule: not is_stream or rule == Rule("split", "s")))

    def repeated_stream(self, axis: str) -> Space:
        """Every rank does the whole work on the residual stream."""
        kinds = {n.name: (n.op in RESIDUAL_OPS, self.dims.label(n, "sequence")) for n in self.graph.nodes}
        stream = {t for n in self.graph.nodes if n.op in RESIDUAL_OPS for t in (n.outputs[0], n.inputs[0])}
        batches, sequences = self._dims("batch"), self._dims("sequence")
        tensors = {t: (t in stream, batches[t], sequences[t]) for t in self.graph.tensors}
        return Space(
            rules=_grouped(kinds, axis, lambda kind: lambda rule: rule.kind != "split" or (not kind[0] and rule.on != kind[1])),
            hubs=_grouped(tensors, axis, lambda kind: lambda pair: not pair[0].is_split or (not kind[0] and pair[0].dim not in kind[1:])),
        )  # fmt: skip


def _is_zero(level: int, triple: tuple[Sbp, Sbp, Sbp]) -> bool:
    """Whether (state, held, grad) on the data-parallel axis is this level of ZeRO."""
    state, held, grad = triple
    return (state.is_split, held.is_split, grad.is_split) == (level >= 1, level >= 3, level >= 2) and (grad.is_split or grad.is_partial)

"""What a placement search may choose from: which labels may split unevenly, and limits on rules, hubs and parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ir.errors import PlanError
from ir.graph import Graph, Node, Tensor
from ir.op import Rule
from ir.sbp import Sbp

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


RESIDUAL_OPS = frozenset({"layer_norm", "rms_norm", "add", "add_positions", "dropout"})
"""Operators on the residual stream: where sequence parallelism splits the sequence and plain tensor parallelism repeats the work."""


def layout_space(
    graph: Graph, axes: Sequence[str], *, zero: int | None = None, sp: bool | None = None, dp_axis: str = "dp", tp_axis: str = "tp",
    uneven: frozenset[str] = frozenset({"v"}),
) -> Space:  # fmt: skip
    """What `--fix dp=..,tp=..,zero=..,sp=..` leaves to choose.

    On `dp_axis` every operator that has a batch splits it, and parameters follow the ZeRO level where one of their dims divides (absent: free). On `tp_axis`
    the search is free, but for `sp`: True splits the sequence on the residual stream and no batch, False repeats the residual stream.
    """
    if zero not in (None, 0, 1, 2, 3):
        raise PlanError(f"zero={zero} is no level of ZeRO; legal are 0, 1, 2, 3")
    rules: list[Limit] = []
    hubs: list[Limit] = []
    params: list[Limit] = []
    batch_dim = {t: _dims_called(graph, n, ("b",))[j] for n in graph.nodes for j, t in enumerate(n.outputs)}
    if dp_axis in axes:
        has_batch = {n.name: "b" in graph.op(n).labels for n in graph.nodes}
        rules.append(Limit(lambda n: has_batch[n.name], dp_axis, lambda rule: rule == Rule("split", "b")))
        rules.append(Limit(lambda n: not has_batch[n.name], dp_axis, lambda rule: rule.kind in ("B", "B~P")))
        hubs.append(Limit(lambda t: bool(batch_dim[t.name]), dp_axis, lambda pair: pair[0].is_split and pair[0].dim == 0))
        if zero is not None:
            params.append(Limit(_is_trained, dp_axis, lambda triple: _is_zero(zero, triple), lambda triple: _is_zero(0, triple)))
            params.append(Limit(_is_frozen, dp_axis, lambda triple: triple[1].is_split == (zero >= 3), lambda triple: not triple[1].is_split))
    if tp_axis in axes and sp is not None:
        tokens = {t: _dims_called(graph, n, ("b", "s"))[j] for n in graph.nodes for j, t in enumerate(n.outputs)}
        stream = {t for n in graph.nodes if n.op in RESIDUAL_OPS for t in (n.outputs[0], n.inputs[0])}
        if sp:
            rules.append(Limit(lambda n: n.op in RESIDUAL_OPS, tp_axis, lambda rule: rule == Rule("split", "s")))
            rules.append(Limit("*", tp_axis, lambda rule: rule != Rule("split", "b")))
        else:
            rules.append(Limit(lambda n: n.op in RESIDUAL_OPS, tp_axis, lambda rule: rule.kind != "split"))
            rules.append(Limit("*", tp_axis, lambda rule: rule not in (Rule("split", "b"), Rule("split", "s"))))
            hubs.append(Limit(lambda t: bool(tokens[t.name]), tp_axis, lambda pair: not (pair[0].is_split and pair[0].dim < 2)))
            hubs.append(Limit(lambda t: t.name in stream, tp_axis, lambda pair: not pair[0].is_split))
    return Space(uneven, tuple(rules), tuple(hubs), tuple(params))


def _dims_called(graph: Graph, node: Node, labels: tuple[str, ...]) -> list[tuple[int, ...]]:
    """For each output of a node the leading dims with these labels."""
    return [tuple(d for d, dim in enumerate(o.dims) if dim[0] in labels) for o in graph.op(node).outputs]


def _is_trained(tensor: Tensor) -> bool:
    return not tensor.frozen


def _is_frozen(tensor: Tensor) -> bool:
    return tensor.frozen


def _is_zero(level: int, triple: tuple[Sbp, Sbp, Sbp]) -> bool:
    """Whether (state, held, grad) on the data-parallel axis is this level of ZeRO."""
    state, held, grad = triple
    return (state.is_split, held.is_split, grad.is_split) == (level >= 1, level >= 3, level >= 2) and (grad.is_split or grad.is_partial)

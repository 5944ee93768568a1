"""A microbatch cut along its sequence: the forward graph of its pieces one after the other, and the plan in which each piece runs through stages of its own.

Every node is there once for each piece; parameters are shared, so their gradients add up as those of a tied parameter do. Causal attention of a piece reads the
keys and values of the pieces before it (`ir.ops.over`). Piece j of stage s becomes stage s * k + j, its layers likewise, so that all that follows (backward,
placement, credits, arenas) needs to know nothing of pieces but where their tokens start.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ir.errors import PlanError
from ir.graph import Builder, Graph, Node
from ir.op import Op, Rule
from ir.ops import catalogue
from ir.ops.over import over_name, over_rule, parted
from ir.plan import Hub, Plan, Stage
from planner.schedules.slot import Orders, Slot

MARK = "~"
_PIECE = re.compile(MARK + r"\d+")
GRAIN = 128
"""Tokens of which pieces are multiples where sequences are long: what GEMM tiles and splits over ranks divide."""


def piece_name(name: str, piece: int) -> str:
    """What a node or tensor of the whole sequence is called in one of its pieces.

    >>> piece_name("h.0.attn.q", 2), whole_name("d.wte.weight@wte~2.dtable"), whole_name("h.0.attn.q")
    ('h.0.attn.q~2', 'd.wte.weight@wte.dtable', 'h.0.attn.q')
    """
    return f"{name}{MARK}{piece}"


def whole_name(name: str) -> str:
    """The name without its piece."""
    return _PIECE.sub("", name)


def mark_of(name: str) -> str:
    """What tells the name from that of another piece; empty where it is of the whole.

    >>> mark_of("h.0.attn.q~2.dw"), mark_of("h.0.attn.q")
    ('~2', '')
    """
    found = _PIECE.search(name)
    return found[0] if found else ""


def start_of(plan: Plan, stage: int) -> int | None:
    """Where the tokens of a stage of an unrolled plan start in the sequence; None where sequences are whole."""
    return sum(plan.pieces[: stage % len(plan.pieces)]) if plan.pieces else None


# ---- the plan --------------------------------------------------------------------------------------------------------------------------------------


def unrolled_slots(orders: Orders, num_pieces: int) -> Orders:
    """Orders that count pieces as orders of microbatches through a stage for each piece.

    >>> unrolled_slots(((Slot(1, "F", 5),),), 2)
    ((Slot(stage=3, kind='F', microbatch=2),),)
    """
    return tuple(tuple(unrolled_slot(slot, num_pieces) for slot in order) for order in orders)


def unrolled_slot(slot: Slot, num_pieces: int) -> Slot:
    return Slot(slot.stage * num_pieces + slot.microbatch % num_pieces, slot.kind, slot.microbatch // num_pieces)


def unrolled_plan(plan: Plan, graph: Graph) -> Plan:
    """The plan of the unrolled `graph`: a stage for each stage and piece, and what is decided of a node or tensor for each of its pieces."""
    k = len(plan.pieces)
    if not k:
        return plan
    rules = {n.name: _rules(plan.rules[whole_name(n.name)], n) for n in graph.nodes if n.phase == "F" and whole_name(n.name) in plan.rules}
    hubs: dict[str, Hub] = {t: plan.hubs[whole_name(t)] for t in graph.tensors if whole_name(t) in plan.hubs}
    pairs = {(t, n.name) for n in graph.nodes if n.phase == "F" for t in n.inputs if (whole_name(t), whole_name(n.name)) in set(plan.reboxed)}
    return replace(plan, stages=tuple(_stages(plan.stages, k)), rules=rules, hubs=hubs, reboxed=tuple(sorted(pairs)), recompute=unrolled_recompute(plan, graph))


def unrolled_recompute(plan: Plan, graph: Graph) -> tuple[int | str, ...]:
    """The layers and nodes of every piece of the unrolled `graph` that run again in the backward."""
    if not plan.pieces:
        return plan.recompute
    named = {name for name in plan.recompute if isinstance(name, str)}
    layers = _unrolled_layers(plan, (layer for layer in plan.recompute if isinstance(layer, int)))
    return (*layers, *(n.name for n in graph.nodes if n.phase == "F" and whole_name(n.name) in named))


def _unrolled_layers(plan: Plan, layers: Iterable[int]) -> tuple[int, ...]:
    """What the layers of the whole graph are in that of its pieces."""
    return tuple(_layer(plan.stages, len(plan.pieces), layer, j) for layer in layers for j in range(len(plan.pieces)))


def _stages(stages: Sequence[Stage], k: int) -> Iterator[Stage]:
    for s in stages:
        width = s.last - s.first
        for j in range(k):
            first = s.first * k + j * width
            yield Stage(first, first + width, s.ranks)


def _layer(stages: Sequence[Stage], k: int, layer: int, piece: int) -> int:
    """The layers of a stage follow each other within a piece, the pieces within a stage."""
    at = next(s for s in stages if s.first <= layer < s.last)
    return at.first * k + piece * (at.last - at.first) + layer - at.first


def _rules(rules: tuple[Rule, ...], node: Node) -> tuple[Rule, ...]:
    return tuple(over_rule(rule, catalogue(node.op)) for rule in rules) if parted(node.op)[1] > 1 else rules


def whole_layer(plan: Plan, layer: int) -> int:
    """The layer of the whole graph that a layer of an unrolled plan is a piece of."""
    if not plan.pieces:
        return layer
    stage = plan.stage_of(layer)
    at, piece = plan.stages[stage], stage % len(plan.pieces)
    return (at.first - piece * (at.last - at.first)) // len(plan.pieces) + layer - at.first


# ---- the graph -------------------------------------------------------------------------------------------------------------------------------------


def unroll(graph: Graph, plan: Plan) -> Graph:
    """The forward graph of a microbatch of whole sequences as that of their pieces, with an output (a part of the loss) for each.

    Raises PlanError where the lengths are not those of the sequence, or where an operator other than causal attention looks from one token to another.
    """
    if not plan.pieces:
        return graph
    _check_lengths(plan)
    return _Unroller(graph, plan).run()


def _check_lengths(plan: Plan) -> None:
    if sum(plan.pieces) != plan.seq or any(type(n) is not int or n < 1 for n in plan.pieces):
        raise PlanError(f"the pieces {plan.pieces} of a sequence must be 1 token or more each and {plan.seq} together")


class _Unroller:
    """`along`: for every tensor that has one, the dim of its tokens."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan, self.k = graph, plan, len(plan.pieces)
        self.along: dict[str, int] = {}
        for n in graph.nodes:
            self._follow(n, graph.op(n))
        self.build = Builder(graph.name)

    def _follow(self, n: Node, op: Op) -> None:
        """Marks the tokens of what a node reads from outside and of what it gives, or says that it cannot be cut."""
        for operand, t in zip(op.inputs, n.inputs, strict=True):
            dim = next((d for d in (operand.dim_of("s"), operand.dim_of(op.past)) if d is not None), None)
            if self.graph.tensors[t].role == "input" and dim is not None:
                self.along[t] = dim
            label = operand.dims[self.along[t]] if t in self.along else ("s",)
            if label not in (("s",), (op.past,)) or ("s" in label and Rule("split", "s") not in op.rules()):
                raise self._refusal(n, op)
        if op.past and not n.attrs.get("causal", True):
            raise self._refusal(n, op)
        for operand, t in zip(op.outputs, n.outputs, strict=True):
            dim = operand.dim_of("s")
            if dim is not None:
                self.along[t] = dim
            elif t not in self.graph.outputs and any(i in self.along for i in n.inputs):
                raise self._refusal(n, op)

    def _refusal(self, n: Node, op: Op) -> PlanError:
        return PlanError(
            f"sequences of `{self.graph.name}` cannot be cut: node `{n.name}` ({op.sentence}) looks from one token to another; "
            f"seq_chunks is for models whose only such operator is causal attention"
        )

    def run(self) -> Graph:
        for t in self.graph.tensors.values():
            if t.role == "input" and t.name in self.along:
                for j, length in enumerate(self.plan.pieces):
                    shape = tuple(length if d == self.along[t.name] else size for d, size in enumerate(t.shape))
                    self.build.tensor(piece_name(t.name, j), shape, t.dtype, "input")
            elif t.role != "value":
                self.build.tensor(t.name, t.shape, t.dtype, t.role, t.init)
        for j in range(self.k):
            for n in self.graph.nodes:
                self._node(n, self.graph.op(n), j)
        return self.build.graph([piece_name(t, j) for j in range(self.k) for t in self.graph.outputs])

    def _node(self, n: Node, op: Op, j: int) -> None:
        reads = [name for operand, t in zip(op.inputs, n.inputs, strict=True) for name in self._read(op, t, operand.labels, j)]
        attrs: dict[str, Any] = {**n.attrs, **({"s": self.plan.pieces[j]} if "s" in n.attrs else {})}
        self.build.node(
            over_name(n.op, j + 1) if op.past else n.op, reads, name=piece_name(n.name, j), outputs=[piece_name(t, j) for t in n.outputs], attrs=attrs,
            layer=_layer(self.plan.stages, self.k, n.layer, j), phase=n.phase, origin=n.origin,
        )  # fmt: skip

    def _read(self, op: Op, tensor: str, labels: Sequence[str], j: int) -> list[str]:
        if op.past in labels:
            return [piece_name(tensor, i) for i in range(j + 1)]
        is_whole = self.graph.tensors[tensor].role != "value" and tensor not in self.along
        return [tensor if is_whole else piece_name(tensor, j)]


# ---- where to cut ----------------------------------------------------------------------------------------------------------------------------------


def balanced(graph: Graph, num_pieces: int) -> tuple[int, ...]:
    """Lengths of pieces with equal floating point operations, forward and backward, of the blocks: under a causal mask later pieces are shorter.

    The operations of tokens a to b are those of a sequence of b less those of one of a. Lengths are multiples of a power of two, up to `GRAIN`, that is small
    beside them. PlanError where there are fewer tokens than pieces.

    >>> from planner.frontends import load
    >>> balanced(load("gpt2").graph(1, 1024), 4), balanced(load("llama-3-8b").graph(1, 131072), 4)
    ((288, 256, 256, 224), (56576, 30592, 23808, 20096))
    """
    seq = sequence_length(graph)
    if not 1 <= num_pieces <= seq:
        raise PlanError(f"a sequence of {seq} tokens cannot be cut into {num_pieces} pieces; legal are 1 to {seq}")
    grain = min(GRAIN, 1 << max(0, int(math.log2(seq / (8 * num_pieces))) if seq >= 8 * num_pieces else 0))
    kinds = _kinds(graph)
    whole, cuts = _flops(kinds, seq), [0]
    for j in range(1, num_pieces):
        low, high = cuts[-1] // grain + 1, max(cuts[-1] // grain + 1, seq // grain - (num_pieces - j))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _flops(kinds, middle * grain) >= whole * j / num_pieces else (middle + 1, high)
        near = [at for at in (low - 1, low) if at * grain > cuts[-1]]
        cuts.append(grain * min(near, key=lambda at: abs(_flops(kinds, at * grain) - whole * j / num_pieces)))
    return tuple(b - a for a, b in zip(cuts, [*cuts[1:], seq], strict=True))


_Kind = tuple[Op, tuple[tuple[str, int], ...], tuple[tuple[str, Any], ...]]


def sequence_length(graph: Graph) -> int:
    """Tokens of a sequence of the graph."""
    return next(graph.sizes(n)["s"] for n in graph.nodes if "s" in graph.sizes(n))


def _kinds(graph: Graph) -> Mapping[_Kind, int]:
    """Equal kernels of the blocks, with their gradients, and how many there are."""
    last = graph.num_layers - 1
    nodes = [n for n in graph.nodes if 0 < n.layer < last] or list(graph.nodes)
    found: Counter[_Kind] = Counter()
    for n in nodes:
        op, sizes = graph.op(n), tuple(graph.sizes(n).items())
        for this in (op, *map(catalogue, op.grads)):
            found[this, sizes, tuple((k, v) for k, v in n.attrs.items() if isinstance(v, int | float | str | bool))] += 1
    return found


def _flops(kinds: Mapping[_Kind, int], length: int) -> float:
    """Floating point operations of sequences of this many tokens."""
    total = 0.0
    for (op, sizes, attrs), count in kinds.items():
        here = {label: length if label == "s" or (op.past and label == op.past) else n for label, n in sizes}
        total += count * op.flops_of(here, dict(attrs))
    return total


__all__ = [
    "balanced", "mark_of", "piece_name", "sequence_length", "start_of", "unroll", "unrolled_plan", "unrolled_recompute", "unrolled_slot", "unrolled_slots",
    "whole_layer", "whole_name",
]  # fmt: skip

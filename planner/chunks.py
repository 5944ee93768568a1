"""The head and its loss over chunks of tokens (`Plan.loss_chunks`): from the product with the table to each token's loss, the nodes that `ir.ops.head` has.

A tensor of all logits is then never made, nor that of their gradients; the head's product is computed once more in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ir.errors import PlanError
from ir.graph import Graph, Node, Tensor
from ir.plan import Plan

AXIS = "tp"
"""The mesh axis over which the vocabulary may lie."""

_BETWEEN = {"bias", "softcap"}


def num_parts(num_rows: int, num_ranks: int) -> int:
    """Parts of a table of so many rows: one for each rank of the axis, where that divides them."""
    return num_ranks if num_rows % num_ranks == 0 else 1


def usual_chunks(graph: Graph, num_tokens: int) -> int:
    """Chunks of which each has as many tokens as the table has columns: a chunk's logits are then as large as the table's gradient, which is there anyway.

    1 where no loss of the graph follows its head directly.
    """
    try:
        columns = [graph.tensors[_Head.of(graph, n).product.inputs[1]].shape[1] for n in graph.nodes if n.op == "exp_sum"]
    except PlanError:
        return 1
    return math.ceil(num_tokens / min(columns)) if columns else 1


def planned_chunks(graph: Graph, plan: Plan) -> Graph:
    """The forward graph as the plan runs it."""
    return in_chunks(graph, plan.loss_chunks, plan.mesh_shape[plan.axes.index(AXIS)] if AXIS in plan.axes else 1)


def in_chunks(graph: Graph, num_chunks: int, num_ranks: int = 1) -> Graph:
    """The forward graph with every loss over `num_chunks` chunks of the tokens that a rank has; its table may lie on `num_ranks` ranks.

    PlanError where a loss does not follow its head directly, so that its logits must be made.
    """
    if num_chunks == 1:
        return graph
    heads = [_Head.of(graph, n) for n in graph.nodes if n.op == "exp_sum"]
    gone = {n.name for head in heads for n in head.nodes}
    if not gone:
        return graph
    made = {head.last.name: head.written(graph, num_chunks, num_ranks) for head in heads}
    nodes = tuple(x for n in graph.nodes for x in (made[n.name][0] if n.name in made else () if n.name in gone else (n,)))
    lost = {t for head in heads for n in head.nodes for t in n.outputs} - {head.loss for head in heads}
    tensors = {name: t for name, t in graph.tensors.items() if name not in lost}
    return Graph(graph.name, nodes, {**tensors, **{t.name: t for _, added in made.values() for t in added}}, graph.outputs)


@dataclass(frozen=True, slots=True)
class _Head:
    """The nodes of one loss: `product` with the table, what stands between it and the loss by its operator, `sums`, and the `last`, which writes `loss`."""

    product: Node
    between: Mapping[str, Node]
    sums: Node
    nodes: tuple[Node, ...]

    @property
    def last(self) -> Node:
        return self.nodes[-1]

    @property
    def loss(self) -> str:
        return self.last.outputs[0]

    @classmethod
    def of(cls, graph: Graph, sums: Node) -> _Head:
        at, between = graph.producer(sums.inputs[0]), dict[str, Node]()
        while at is not None and at.op in _BETWEEN:
            between[at.op] = at
            at = graph.producer(at.inputs[0])
        peak, join = graph.producer(sums.inputs[2]), graph.consumers(sums.outputs[0])[0][0]
        if at is None or at.op != "linear_t" or peak is None:
            what = f"`{at.name}` ({at.op})" if at is not None else "an input"
            raise PlanError(f"loss_chunks: the logits of `{graph.name}` come from {what}, not from the product of its head alone; leave loss_chunks out")
        return cls(at, between, sums, (at, *between.values(), peak, sums, join))

    def written(self, graph: Graph, num_chunks: int, num_ranks: int) -> tuple[tuple[Node, Node], tuple[Tensor, ...]]:
        """Two nodes in their place, and the tensors between them."""
        (x, w), bias, loss = self.product.inputs, self.between.get("bias"), graph.tensors[self.loss]
        biases = bias.inputs[1:] if bias is not None else ()
        parts = num_parts(graph.tensors[w].shape[0], num_ranks)
        stem = self.loss.removesuffix(".each")
        lse, t, norm = (replace(loss, name=f"{stem}.{what}") for what in ("lse", "t", "norm"))
        lse = replace(lse, shape=(*loss.shape, parts))
        attrs: dict[str, Any] = {"p": parts, "chunks": num_chunks}
        if "softcap" in self.between:
            attrs["cap"] = self.between["softcap"].attrs["cap"]
        op = "head_lse" + "_bias" * bool(biases) + "_frozen" * all(graph.tensors[p].frozen for p in (w, *biases))
        head = Node(self.product.name, op, (x, w, *biases, self.sums.inputs[1]), (lse.name, t.name), attrs, self.product.layer)
        join = replace(self.last, op="lse_loss", inputs=(lse.name, t.name), outputs=(self.loss, norm.name))
        return (head, join), (lse, t, norm)


__all__ = ["in_chunks", "num_parts", "planned_chunks", "usual_chunks"]

"""Which dims of a model's tensors are the batch, the sequence, the experts: told by following labels through the operators.

A label means what its operator says: `b` of an elementwise operator is whatever dim comes first, of [experts, batch, slots, hidden] the experts. So dims are
followed instead: what one operator calls by one label is one dim of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from networkx.utils import UnionFind

from ir.graph import Graph, Node

EXPERT_PRODUCTS = ("grouped_linear",)
"""Operators whose label `e` is the experts."""


@dataclass(frozen=True)
class Dims:
    """`labels`: by node, what its labels are ("batch", "sequence", "experts"); `dims`: the same of the dims of each tensor. What is none of them is absent."""

    labels: Mapping[str, Mapping[str, str]]
    dims: Mapping[str, Mapping[int, str]]

    def label(self, node: Node, what: str) -> str | None:
        """The label that is `what` at this node; of attention's two sequences that of the queries."""
        return next((label for label, found in self.labels.get(node.name, {}).items() if found == what), None)

    def dim(self, tensor: str, what: str) -> int | None:
        return next((dim for dim, found in self.dims.get(tensor, {}).items() if found == what), None)


def dims_of(graph: Graph) -> Dims:
    """The dims of a forward graph: batch and sequence from its inputs on, experts from their products on."""
    classes: UnionFind[tuple[str, ...]] = UnionFind()
    ops = {n.name: graph.op(n) for n in graph.nodes}
    for n in graph.nodes:
        for operand, t in zip((*ops[n.name].inputs, *ops[n.name].outputs), (*n.inputs, *n.outputs), strict=True):
            for d, dim in enumerate(operand.dims):
                if len(dim) == 1:
                    classes.union((n.name, "label", dim[0]), (t, str(d)))
    roots: dict[tuple[str, ...], str] = {}
    for given in graph.inputs:
        roots.setdefault(classes[given.name, "0"], "batch")
        if len(given.shape) == 2:
            roots.setdefault(classes[given.name, "1"], "sequence")
    for n in graph.nodes:
        if n.op in EXPERT_PRODUCTS:
            roots.setdefault(classes[n.name, "label", "e"], "experts")
    labels = {n.name: {label: roots[r] for label in ops[n.name].labels if (r := classes[n.name, "label", label]) in roots} for n in graph.nodes}
    dims = {t.name: {d: roots[r] for d in range(len(t.shape)) if (r := classes[t.name, str(d)]) in roots} for t in graph.tensors.values()}
    return Dims(labels, dims)

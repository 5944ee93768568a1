"""From a forward graph to one microbatch's graph: forward, recomputed forward, input gradients and weight gradients.

Every gradient is an operator of the catalogue, named by its forward operator. `d.x` is the cotangent of tensor `x`; where several nodes use `x`, their
contributions are summed by `add` nodes in the order in which the backward meets them. The contributions to a parameter are not summed here: each one is
accumulated over microbatches on its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ir.errors import GraphError
from ir.graph import Builder, Graph, Node
from ir.op import Op
from ir.ops import catalogue
from ir.ops.over import parted

RECOMPUTED = "@r"
"""Suffix of a tensor that the backward computes once more."""


def cotangent(tensor: str) -> str:
    """The name of the gradient of the loss by this tensor.

    >>> cotangent("wte")
    'd.wte'
    """
    return f"d.{tensor}"


@dataclass(frozen=True, slots=True)
class Joint:
    """One microbatch's graph, there and back.

    `grads`: for each parameter the tensors whose sum is its gradient; `stands_for`: the forward tensor behind a recomputed tensor (same placement) and behind
    a contribution to a cotangent (summed where the cotangent is).
    """

    graph: Graph
    grads: Mapping[str, tuple[str, ...]]
    stands_for: Mapping[str, str]


def scale_loss(graph: Graph, num_microbatches: int) -> Graph:
    """The same graph with its loss divided by the number of microbatches, so that their sum is the mean over the batch."""
    out = set(graph.outputs)
    nodes = tuple(
        replace(n, attrs={**n.attrs, "factor": n.attrs["factor"] / num_microbatches}) if out.intersection(n.outputs) and n.op == "total" else n
        for n in graph.nodes
    )  # fmt: skip
    return replace(graph, nodes=nodes)


def backward(graph: Graph, recompute: Collection[int | str] = ()) -> Joint:
    """Forward and backward of `graph`, whose output is the scalar loss; of several outputs, their sum.

    The forward nodes of the layers in `recompute` run again just before the backward of their layer, from the tensors that enter the layer. A node that is
    named there runs again just before the first in its layer's backward that reads what it gives; other layers read what the forward has kept.
    Raises GraphError when an output that the loss depends on has no gradient operator.
    """
    return _Backward(graph, frozenset(recompute)).run()


class _Backward:
    """The backward under way: `pending` holds the cotangent of a tensor as far as it is summed, `again` the recomputed tensor that stands for a forward one."""

    def __init__(self, graph: Graph, recompute: frozenset[int | str]) -> None:
        self.graph = graph
        self.recompute = recompute
        self.build = Builder("", base=graph)
        self.pending: dict[str, str] = {}
        self.grads: dict[str, list[str]] = {}
        self.stands_for: dict[str, str] = {}
        self.needs = _differentiable(graph)
        self.again: dict[str, str] = {}
        self.done_layers: set[int] = set()

    def run(self) -> Joint:
        for loss in self.graph.outputs:
            self._seed(loss)
        for node in reversed(self.graph.nodes):
            if any(t in self.pending for t in node.outputs):
                self._differentiate(node)
        # The builder keeps its own order; only here is the whole proved.
        joint = Graph(self.graph.name, tuple(self.build.nodes), dict(self.build.tensors), self.graph.outputs)
        return Joint(joint, {p: tuple(g) for p, g in self.grads.items()}, dict(self.stands_for))

    def _seed(self, loss: str) -> None:
        head = self.graph.producer(loss)
        if head is None or self.graph.tensors[loss].shape != ():
            raise GraphError(f"graph `{self.graph.name}`: the backward starts at one scalar output, or their sum, not at `{loss}`")
        if loss not in self.needs:
            raise GraphError(f"graph `{self.graph.name}`: `{loss}` depends on no parameter that is trained; leave one at least unfrozen")
        seed = cotangent(loss)
        self.build.tensor(seed, (), self.graph.tensors[loss].dtype)
        self.build.nodes.append(Node(seed, "fill", (), (seed,), {"value": 1.0}, head.layer, "I", head.name))
        self.pending[loss] = seed

    def _differentiate(self, node: Node) -> None:
        op = self.graph.op(node)
        names = dict(zip([o.name for o in (*op.inputs, *op.outputs)], (*node.inputs, *node.outputs), strict=True))
        if node.layer in self.recompute and node.layer not in self.done_layers:
            self._run_again(node.layer)
        for grad_name in op.grads:
            grad = catalogue(grad_name)
            wanted = [o.name[1:] for o in grad.outputs if self._wanted(op, names, o.name[1:])]
            if wanted:
                self._emit(node, op, grad, names)

    def _wanted(self, op: Op, names: Mapping[str, str], operand: str) -> bool:
        return operand not in op.stop and names[operand] in self.needs

    def _emit(self, node: Node, op: Op, grad: Op, names: Mapping[str, str]) -> None:
        reads = [self._operand(node, op, names, o.name) for o in grad.inputs]
        gives = [names[o.name[1:]] for o in grad.outputs]
        of_params = all(self.graph.tensors[t].role == "param" for t in gives)
        sizes = self.graph.sizes(node)
        given = {label for o in grad.for_ranks([len(self.build.tensors[t].shape) for t in reads]).inputs for label in o.labels}
        attrs = {**node.attrs, **{label: n for label, n in sizes.items() if label in grad.labels and label not in given}}
        outputs = [f"{cotangent(t)}@{node.name}.{o.name}" for o, t in zip(grad.outputs, gives, strict=True)]
        name = f"{node.name}.{parted(grad.name)[0].rpartition('.')[2]}"
        self.build.node(grad.name, reads, name=name, outputs=outputs, attrs=attrs, layer=node.layer, phase="W" if of_params else "I", origin=node.name)
        for tensor, contribution in zip(gives, outputs, strict=True):
            self._contribute(tensor, contribution, node.layer)

    def _operand(self, node: Node, op: Op, names: Mapping[str, str], name: str) -> str:
        """The tensor that a gradient operator reads under this name: a forward operand, kept or recomputed, or a cotangent."""
        if name in names:
            return self._forward(node, names[name])
        tensor = names[name[1:]]
        if tensor not in self.pending:
            raise GraphError(f"node `{node.name}`: the gradient of {op.sentence} needs the cotangent of `{tensor}`, which nothing uses")
        return self.pending[tensor]

    def _contribute(self, tensor: str, contribution: str, layer: int) -> None:
        self.stands_for[contribution] = tensor
        if tensor not in self.needs:
            return
        if self.graph.tensors[tensor].role == "param":
            self.grads.setdefault(tensor, []).append(contribution)
        elif tensor not in self.pending:
            self.pending[tensor] = contribution
        else:
            total = f"{cotangent(tensor)}@sum{sum(t == tensor for t in self.stands_for.values())}"
            self.build.node("add", [self.pending[tensor], contribution], name=total, layer=layer, phase="I", origin=tensor)
            self.stands_for[total] = tensor
            self.pending[tensor] = total

    def _forward(self, reader: Node, tensor: str) -> str:
        """What the backward of a node reads for a forward tensor: the recomputed one where its producer, of the same layer, runs again; else the kept one."""
        producer = self.graph.producer(tensor)
        if producer is None or producer.layer != reader.layer:
            return tensor
        if tensor not in self.again and producer.name in self.recompute:
            self._copy(producer)
        return self.again.get(tensor, tensor)

    def _copy(self, node: Node) -> None:
        """Runs a forward node again, and before it whatever it reads that runs again."""
        reads = [self._forward(node, t) for t in node.inputs]
        outputs = [t + RECOMPUTED for t in node.outputs]
        self.build.node(node.op, reads, name=node.name + RECOMPUTED, outputs=outputs, attrs=node.attrs, layer=node.layer, phase="R", origin=node.name)
        self.again.update(zip(node.outputs, outputs, strict=True))
        self.stands_for.update(zip(outputs, node.outputs, strict=True))

    def _run_again(self, layer: int) -> None:
        """Copies the forward nodes of a layer that its backward reads from, directly or through other copies."""
        self.done_layers.add(layer)
        inside = [n for n in self.graph.nodes if n.layer == layer]
        made = {t: n for n in inside for t in n.outputs}
        needed: set[str] = set()
        for n in reversed(inside):
            op = self.graph.op(n)
            names = dict(zip([o.name for o in (*op.inputs, *op.outputs)], (*n.inputs, *n.outputs), strict=True))
            read = {names[o.name] for g in op.grads for o in catalogue(g).inputs if o.name in names}
            needed |= {t for t in read if t in made}
            if any(t in needed for t in n.outputs):
                needed |= {t for t in n.inputs if t in made}
        for n in inside:
            if any(t in needed for t in n.outputs):
                self._copy(n)


def _differentiable(graph: Graph) -> frozenset[str]:
    """The tensors whose cotangent somebody needs: parameters that are trained, and values that depend on one other than through a `stop`."""
    found = {t.name for t in graph.trained}
    for n in graph.nodes:
        op = graph.op(n)
        flows = any(t in found and o.name not in op.stop for o, t in zip(op.inputs, n.inputs, strict=True))
        if flows and op.grads:
            found |= {t for o, t in zip(op.outputs, n.outputs, strict=True) if o.name not in op.stop}
    return frozenset(found)


__all__ = ["RECOMPUTED", "Joint", "backward", "cotangent", "scale_loss"]

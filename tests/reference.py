"""The slow, obvious twin of everything that trains: a forward graph run node by node on whole arrays, and differentiated by walking back over its nodes.

It knows nothing of placements, plans, autodiff passes or actors: only the catalogue's kernels, and that the cotangent of a tensor is the sum of what its
consumers' gradient operators give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ir.graph import Graph, Node
from ir.op import Context, Op
from ir.ops import catalogue

Arrays = dict[str, np.ndarray]


class Moment(NamedTuple):
    """What random numbers depend on besides their place: the seed, the step, and the place of the graph's first sample in the batch of the whole step."""

    seed: int = 0
    step: int = 0
    first_sample: int = 0


START = Moment()


def step(
    graph: Graph, params: Mapping[str, np.ndarray], ids: np.ndarray, labels: np.ndarray, seed: int = 0, step: int = 0, first_sample: int = 0,
    **others: np.ndarray,
) -> tuple[float, Arrays]:  # fmt: skip
    """(loss, gradient by parameter) of one forward graph; see `Moment` for the last three. `others`: its inputs besides `ids` and `labels`.

    >>> from planner.frontends import load
    >>> model = load("gpt2-tiny", num_layers=1, hidden=8, num_heads=2)
    >>> graph = model.graph(batch=2, seq=4, dtype="float64")
    >>> ids = np.arange(8).reshape(2, 4)
    >>> loss, grads = step(graph, init(graph, seed=0), ids, ids + 1)
    >>> bool(abs(loss - np.log(256)) < 0.1), grads["h.0.attn.q.weight"].shape
    (True, (8, 8))
    """
    moment = Moment(seed, step, first_sample)
    values = forward(graph, {**params, "ids": ids, "labels": labels, **others}, moment)
    (loss,) = graph.outputs
    cotangents = backward(graph, values, {loss: np.ones((), graph.tensors[loss].dtype)}, moment)
    grads = {p.name: cotangents[p.name] if p.name in cotangents else np.zeros(p.shape, p.dtype) for p in graph.params}
    return float(values[loss]), grads


def init(graph: Graph, seed: int) -> Arrays:
    """Parameters as `Tensor.init` says, from a generator of numpy."""
    rng = np.random.default_rng(seed)
    makers = {"normal": lambda p: rng.normal(0.0, p.init["std"], p.shape), "zeros": lambda p: np.zeros(p.shape), "ones": lambda p: np.ones(p.shape)}
    return {p.name: makers[p.init["init"]](p).astype(p.dtype) for p in graph.params}


def forward(graph: Graph, given: Mapping[str, np.ndarray], moment: Moment = START) -> Arrays:
    """Every tensor of the graph, by name."""
    values: Arrays = dict(given)
    for node in graph.nodes:
        op = graph.op(node)
        sizes = graph.sizes(node)
        outputs = [np.empty(graph.tensors[t].shape, graph.tensors[t].dtype) for t in node.outputs]
        op.kernel(_context(node.attrs, sizes, moment), *(values[t] for t in node.inputs), *outputs)
        values.update(zip(node.outputs, outputs, strict=True))
    return values


def backward(graph: Graph, values: Mapping[str, np.ndarray], seeds: Mapping[str, np.ndarray], moment: Moment = START) -> Arrays:
    """The cotangent of every tensor that has one, from those of the outputs."""
    cotangents: Arrays = dict(seeds)
    for node in reversed(graph.nodes):
        op = graph.op(node)
        known = {o.name: values[t] for o, t in zip((*op.inputs, *op.outputs), (*node.inputs, *node.outputs), strict=True)}
        carries = [(o.name, t) for o, t in zip(op.outputs, node.outputs, strict=True) if o.name not in op.stop]
        if not any(t in cotangents for _, t in carries):
            continue
        known |= {"d" + name: cotangents[t] if t in cotangents else np.zeros_like(values[t]) for name, t in carries}
        targets = {"d" + o.name: t for o, t in zip(op.inputs, node.inputs, strict=True) if o.name not in op.stop}
        for name in op.grads:
            for operand, array in _gradients(name, node, graph.sizes(node), known, moment).items():
                t = targets[operand]
                cotangents[t] = cotangents[t] + array if t in cotangents else array
    return cotangents


def _gradients(name: str, node: Node, sizes: Mapping[str, int], known: Mapping[str, np.ndarray], moment: Moment) -> Arrays:
    """What the gradient operator `name` gives, by its operands; labels that its operands do not have take the forward's sizes."""
    inputs = [known[o.name] for o in catalogue(name).inputs]
    grad: Op = catalogue(name).for_ranks([a.ndim for a in inputs])
    attrs = {**{label: n for label, n in sizes.items() if label in grad.labels}, **node.attrs}
    own = grad.bind([a.shape for a in inputs], attrs, f"{node.name} ({name})")
    floats = next(a.dtype for a in inputs if a.dtype.kind == "f")
    outputs = [np.empty(o.shape(own), floats) for o in grad.outputs]
    grad.kernel(_context(attrs, own, moment), *inputs, *outputs)
    return dict(zip((o.name for o in grad.outputs), outputs, strict=True))


def _context(attrs: Mapping[str, Any], sizes: Mapping[str, int], moment: Moment) -> Context:
    return Context(np, attrs, sizes, sizes, {"b": moment.first_sample}, moment.seed, moment.step)


class AdamW:
    """Loshchilov and Hutter 2019 (arXiv:1711.05101, algorithm 2), in the order of PyTorch's: updates whole arrays in place and keeps `m` and `v`."""

    def __init__(
        self, params: Arrays, lr: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, max_norm: float = 0.0,
    ) -> None:  # fmt: skip
        self.params, self.lr, self.betas, self.eps, self.weight_decay, self.max_norm = params, lr, (beta1, beta2), eps, weight_decay, max_norm
        self.m = {name: np.zeros_like(p) for name, p in params.items()}
        self.v = {name: np.zeros_like(p) for name, p in params.items()}
        self.steps = 0

    def update(self, grads: Arrays) -> None:
        """One step, in place; gradients are scaled down together where their common norm is above `max_norm`, as `clip_grad_norm_` does."""
        self.steps += 1
        norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values()))
        clip = min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm else 1.0
        beta1, beta2 = self.betas
        for name, p in self.params.items():
            g = grads[name] * clip
            self.m[name] = beta1 * self.m[name] + (1 - beta1) * g
            self.v[name] = beta2 * self.v[name] + (1 - beta2) * g * g
            m, v = self.m[name] / (1 - beta1**self.steps), self.v[name] / (1 - beta2**self.steps)
            p *= 1 - self.lr * self.weight_decay
            p -= self.lr * m / (np.sqrt(v) + self.eps)

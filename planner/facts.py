"""What the backward of a forward graph will need, told from the forward graph alone: cotangents, saved values, what recompute runs again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from networkx.utils import UnionFind

from ir.graph import Graph, Node
from ir.op import Op
from ir.ops import catalogue


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """`carries[i]`: a cotangent flows to input i. `grads`: gradient operators that run, dims written out; `reads_inputs`, `reads_outputs`: what they read."""

    op: Op
    carries: tuple[bool, ...]
    grads: tuple[Op, ...]
    reads_inputs: tuple[int, ...]
    reads_outputs: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """`differentiable`: values with a cotangent. `rerun`: nodes whose forward runs again. `open`: nodes of which a search may decide that.

    `again`: (node, operand) of recomputed layers whose operand is boxed again for that. `saved`: for each tensor the (node, operand) uses, ("", -1) for its own
    producer, whose gradients or re-runs read it, or may, from what the forward kept.
    """

    node: Mapping[str, NodeFacts]
    differentiable: frozenset[str]
    rerun: frozenset[str]
    open: frozenset[str]
    again: frozenset[tuple[str, int]]
    saved: Mapping[str, tuple[tuple[str, int], ...]]


def analyse(graph: Graph, recompute: Sequence[int | str] = (), selective: bool = False) -> Facts:
    """The facts of a forward graph whose layers in `recompute` keep only what enters them, and whose nodes named there run again for their own layer.

    `selective`: of every other node that could serve its layer so, that is open.
    """
    requires = _requires(graph)
    receives = set(graph.outputs)
    known: dict[tuple[str, tuple[int, ...], tuple[bool, ...]], NodeFacts] = {}
    nodes: dict[str, NodeFacts] = {}
    for n in reversed(graph.nodes):
        op = graph.op(n)
        gets = any(t in receives and o.name not in op.stop for t, o in zip(n.outputs, op.outputs, strict=True))
        wanted = tuple(gets and t in requires for t in n.inputs)
        key = (n.op, tuple(len(o.dims) for o in op.inputs), wanted)
        if key not in known:
            known[key] = _node_facts(op, wanted)
        nodes[n.name] = known[key]
        receives.update(t for t, carried in zip(n.inputs, known[key].carries, strict=True) if carried)
    layers = frozenset(layer for layer in recompute if isinstance(layer, int))
    named = frozenset(name for name in recompute if isinstance(name, str))
    rerun = _rerun(graph, nodes, layers, named)
    possible = _rerun(graph, nodes, frozenset(range(graph.num_layers)), frozenset()) if selective else frozenset()
    free = frozenset(n.name for n in graph.nodes if n.name in possible and n.layer not in layers and n.name not in named)
    again = frozenset((n.name, i) for n in graph.nodes if n.layer in layers for i in range(len(n.inputs)) if n.name in rerun or i in nodes[n.name].reads_inputs)
    values = {t for n in graph.nodes for t in n.outputs}
    return Facts(nodes, frozenset(receives & requires & values), rerun, free, again, _saved(graph, nodes, layers, again, rerun, free))


def uneven_labels(graph: Graph, facts: Facts, labels: frozenset[str]) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[int]]]:
    """(labels of each node, dims of each tensor) that are, somewhere, one of `labels`: a head's `n` is the vocabulary because the loss calls it `v`.

    Dims that one operator calls by one label are one dim of the model; a label that is part of a composite dim is none of them.
    """
    classes: UnionFind[tuple[str, ...]] = UnionFind()
    marked: list[tuple[str, ...]] = []
    for n in graph.nodes:
        op = facts.node[n.name].op
        for operand, t in zip((*op.inputs, *op.outputs), (*n.inputs, *n.outputs), strict=True):
            for d, dim in enumerate(operand.dims):
                if len(dim) == 1:
                    classes.union((n.name, "label", dim[0]), (t, str(d)))
                    if dim[0] in labels:
                        marked.append((t, str(d)))
    roots = {classes[m] for m in marked}
    nodes: dict[str, set[str]] = {}
    dims: dict[str, set[int]] = {}
    for item in classes:
        if classes[item] in roots:
            if len(item) == 3:
                nodes.setdefault(item[0], set()).add(item[2])
            else:
                dims.setdefault(item[0], set()).add(int(item[1]))
    return {n: frozenset(found) for n, found in nodes.items()}, {t: frozenset(found) for t, found in dims.items()}


def _requires(graph: Graph) -> set[str]:
    """Tensors that depend on a trained parameter through operators that have gradients."""
    found = {t.name for t in graph.trained}
    for n in graph.nodes:
        op = graph.op(n)
        if op.grads and any(t in found and o.name not in op.stop for t, o in zip(n.inputs, op.inputs, strict=True)):
            found.update(t for t, o in zip(n.outputs, op.outputs, strict=True) if o.name not in op.stop)
    return found


def _node_facts(op: Op, wanted: tuple[bool, ...]) -> NodeFacts:
    position = {o.name: i for i, o in enumerate(op.inputs)}
    out_position = {o.name: i for i, o in enumerate(op.outputs)}
    cotangents = {"d" + name: name for name in out_position}
    carries = [False] * len(op.inputs)
    run: list[Op] = []
    ins: set[int] = set()
    outs: set[int] = set()
    for name in op.grads if any(wanted) else ():
        grad = catalogue(name)
        targets = [position[o.name[1:]] for o in grad.outputs]
        if not any(wanted[i] for i in targets):
            continue
        ranks = [len(op.operand(cotangents.get(o.name, o.name)).dims) for o in grad.inputs]
        run.append(grad.for_ranks(ranks))
        for i in targets:
            carries[i] = carries[i] or wanted[i]
        ins.update(position[o.name] for o in grad.inputs if o.name in position and o.name not in cotangents)
        outs.update(out_position[o.name] for o in grad.inputs if o.name in out_position and o.name not in cotangents)
    return NodeFacts(op, tuple(carries), tuple(run), tuple(sorted(ins)), tuple(sorted(outs)))


def _rerun(graph: Graph, nodes: Mapping[str, NodeFacts], layers: frozenset[int], named: frozenset[str]) -> frozenset[str]:
    """Nodes of recomputed layers, or named, on whose outputs a gradient operator of the same layer depends; what enters a layer is kept."""
    needed: set[tuple[int, str]] = set()
    found: set[str] = set()
    for n in reversed(graph.nodes):
        facts = nodes[n.name]
        if (n.layer in layers or n.name in named) and (facts.reads_outputs or any((n.layer, t) in needed for t in n.outputs)):
            found.add(n.name)
            needed.update((n.layer, t) for t in n.inputs)
        needed.update((n.layer, n.inputs[i]) for i in facts.reads_inputs)
    return frozenset(found)


def _saved(
    graph: Graph, nodes: Mapping[str, NodeFacts], layers: frozenset[int], again: frozenset[tuple[str, int]], rerun: frozenset[str], free: frozenset[str]
) -> dict[str, tuple[tuple[str, int], ...]]:  # fmt: skip
    found: dict[str, list[tuple[str, int]]] = {t: [] for n in graph.nodes for t in n.outputs}
    for n in graph.nodes:
        facts, runs = nodes[n.name], n.name in rerun or n.name in free
        for i, t in enumerate(n.inputs):
            if t in found and _reads_kept(graph, n, t, layers, rerun, (n.name, i) in again if n.layer in layers else runs or i in facts.reads_inputs):
                found[t].append((n.name, i))
        if n.layer not in layers and n.name not in rerun:
            for j in facts.reads_outputs:
                found[n.outputs[j]].append(("", j))
    return {t: tuple(uses) for t, uses in found.items()}


def _reads_kept(graph: Graph, n: Node, tensor: str, layers: frozenset[int], rerun: frozenset[str], read: bool) -> bool:
    """Whether a use that is read after the forward reads what was kept of the tensor: not what its own layer makes again."""
    producer = graph.producer(tensor)
    if not read or producer is None:
        return False
    return producer.layer != n.layer or not (n.layer in layers or producer.name in rerun)

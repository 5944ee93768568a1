"""Runs of equal layers in a forward graph, and the short graph in which few of their blocks stand for all.

A layer is known by its nodes, in order: operator, attributes, shapes, and where each input comes from, told in places and not in names. A block of one to four
layers that repeats is a run. The short graph keeps its first two blocks and its last; the second, whose neighbours are blocks like itself on both sides, stands
for all between.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from ir.graph import Graph, Node

LONGEST_BLOCK = 4
"""Layers of the longest block that is looked for: models alternate two or three kinds of attention."""

FEWEST = 4
"""Blocks from which a run is shortened: the first, the last, and two that one stands for."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """`copies`: the layers of each block that one stands for, that one first."""

    copies: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Short:
    """`graph` without the copies; names and layer numbers of what is left are those of the whole graph."""

    whole: Graph
    graph: Graph
    repeats: tuple[Repeat, ...] = ()


def layer_keys(graph: Graph) -> tuple[Hashable, ...]:
    """For every layer of the chain a value that equal layers share."""
    where: dict[str, tuple[int, int, int]] = {}
    nodes = nodes_by_layer(graph)
    shared = _shared_params(graph)
    return tuple(_layer_key(graph, layer, nodes.get(layer, ()), where, shared) for layer in range(graph.num_layers))


def nodes_by_layer(graph: Graph) -> dict[int, list[Node]]:
    out: dict[int, list[Node]] = {}
    for n in graph.nodes:
        out.setdefault(n.layer, []).append(n)
    return out


def _shared_params(graph: Graph) -> frozenset[str]:
    """Parameters that several layers read: each of these layers is like no other."""
    first: dict[str, int] = {}
    return frozenset(t for n in graph.nodes for t in n.inputs if graph.tensors[t].role == "param" and first.setdefault(t, n.layer) != n.layer)


def _layer_key(graph: Graph, layer: int, nodes: Sequence[Node], where: dict[str, tuple[int, int, int]], shared: frozenset[str]) -> Hashable:
    """`where`: of every value so far (layer, place of its producer in the layer, output); completed here."""
    out: list[Hashable] = []
    params: dict[str, int] = {}
    for place, n in enumerate(nodes):
        sources: list[Hashable] = []
        for t in n.inputs:
            tensor = graph.tensors[t]
            if t in where:
                above, producer, j = where[t]
                sources.append((layer - above, producer, j))
            elif tensor.role == "param":
                sources.append(((t, layer) if t in shared else params.setdefault(t, len(params)), tensor.shape, tensor.dtype, tensor.frozen))
            else:
                sources.append((tensor.role, tensor.shape, tensor.dtype))
        for j, t in enumerate(n.outputs):
            where[t] = (layer, place, j)
        attrs = tuple((k, repr(v)) for k, v in n.attrs.items() if k != "salt")
        outs = tuple((graph.tensors[t].shape, graph.tensors[t].dtype, t in graph.outputs) for t in n.outputs)
        out.append((n.op, attrs, tuple(sources), outs))
    return tuple(out)


def shorten(graph: Graph, kinds: Sequence[Hashable], once: bool = False) -> Short:
    """The short graph; `kinds`: of every layer, equal where layers may be treated alike. `once`: the longest run alone is shortened."""
    nodes = nodes_by_layer(graph)
    found: list[tuple[tuple[int, ...], ...]] = []
    layer = 0
    while layer < len(kinds):
        period, count = _longest(kinds, layer)
        if count >= FEWEST:
            found.append(tuple(tuple(range(layer + k * period, layer + (k + 1) * period)) for k in range(count)))
        layer += period * count
    short = Short(graph, graph)
    for blocks in [max(found, key=lambda blocks: len(blocks) * len(blocks[0]))] if once and found else found:
        short = _without_copies(short, nodes, blocks)
    return short


def _longest(kinds: Sequence[Hashable], start: int) -> tuple[int, int]:
    """(layers of a block, number of equal blocks in a row) from `start`: what covers most, the shortest of these."""
    best = (1, 1)
    for period in range(1, min(LONGEST_BLOCK, len(kinds) - start) + 1):
        block = kinds[start : start + period]
        count = 1
        while kinds[start + count * period : start + (count + 1) * period] == block:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def _without_copies(short: Short, nodes: Mapping[int, Sequence[Node]], blocks: tuple[tuple[int, ...], ...]) -> Short:
    """Drops all blocks but the first two and the last, which then reads the second; nothing is dropped where anybody else reads one of them."""
    kept, copies = blocks[1], blocks[2:-1]
    gone = {layer for block in copies for layer in block}
    twin = {
        theirs: mine
        for a, b in zip(kept, copies[-1], strict=True)
        for n, m in zip(nodes[a], nodes[b], strict=True)
        for mine, theirs in zip(n.outputs, m.outputs, strict=True)
    }
    left = []
    written_by_gone = {t for layer in gone for n in nodes[layer] for t in n.outputs}
    for n in short.graph.nodes:
        if n.layer in gone:
            continue
        read = [t for t in n.inputs if t in written_by_gone]
        if read and (n.layer not in blocks[-1] or any(t not in twin for t in read)):
            return short
        left.append(replace(n, inputs=tuple(twin.get(t, t) for t in n.inputs)) if read else n)
    used = {t for n in left for t in (*n.inputs, *n.outputs)}
    tensors = {name: t for name, t in short.graph.tensors.items() if name in used}
    graph = Graph(short.graph.name, tuple(left), tensors, short.graph.outputs)
    return Short(short.whole, graph, (*short.repeats, Repeat(blocks[1:-1])))

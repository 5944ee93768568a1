"""Equal layers of a graph told once: which layers are alike, and the graph with some of them left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ir.errors import PlanError
from ir.graph import Graph, Node

INDIFFERENT = frozenset({"salt", "scale"})
"""Attributes that change what a kernel computes, and neither its time nor its memory."""


@dataclass(frozen=True)
class Layers:
    """The chain of a forward graph, layer by layer. Layers of one class hold the same operators on the same shapes, read in the same way.

    >>> from planner.frontends import load
    >>> Layers(load("gpt2-tiny").graph(1, 8)).classes
    (0, 1, 1, 1, 1, 2)
    """

    graph: Graph

    @cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        out: list[list[Node]] = [[] for _ in range(self.graph.num_layers)]
        for n in self.graph.nodes:
            out[n.layer].append(n)
        return tuple(map(tuple, out))

    @cached_property
    def made(self) -> tuple[tuple[str, ...], ...]:
        """By layer what its nodes write, in order."""
        return tuple(tuple(t for n in nodes for t in n.outputs) for nodes in self.nodes)

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """By layer the number of its class."""
        numbers: dict[object, int] = {}
        return tuple(numbers.setdefault(self._looks(i), len(numbers)) for i in range(len(self.nodes)))

    @cached_property
    def _place(self) -> Mapping[str, tuple[int, int]]:
        """(layer, place in it) of what a layer writes, and of the parameters that no layer before it reads, these below 0."""
        own = {t: (i, k) for i, made in enumerate(self.made) for k, t in enumerate(made)}
        for i, nodes in enumerate(self.nodes):
            fresh = dict.fromkeys(t for n in nodes for t in n.inputs if t not in own and self.graph.tensors[t].role == "param")
            own |= {t: (i, -1 - k) for k, t in enumerate(fresh)}
        return own

    def _looks(self, layer: int) -> object:
        """All of a layer but its names. What lies further back than the layer before is told by its name: it is no layer's that can be left out."""

        def seen(name: str) -> object:
            t = self.graph.tensors[name]
            at, place = self._place.get(name, (-1, 0))
            if at == layer:
                return (place, t.shape, t.dtype)
            # counted from its end: the stream is what a layer writes last
            return (place - len(self.made[at]), t.shape, t.dtype, "before") if at == layer - 1 >= 0 <= place else name

        return tuple(
            (n.op, tuple((k, v) for k, v in n.attrs.items() if k not in INDIFFERENT), tuple(map(seen, n.inputs)), tuple(map(seen, n.outputs)))
            for n in self.nodes[layer]
        )  # fmt: skip

    def shortened(self, kept: Sequence[int]) -> Graph:
        """The graph of these layers alone, numbered anew. Where layers are left out, the next one reads of the last kept what it reads of the one before it.

        PlanError where that is of another class.
        """
        other: dict[str, str] = {}
        for a, b in pairwise(kept):
            if b != a + 1:
                self._join(a, b, other)
        nodes = tuple(
            replace(n, layer=number, inputs=tuple(other.get(t, t) if self._place.get(t, (layer, 0))[0] != layer else t for t in n.inputs))
            for number, layer in enumerate(kept) for n in self.nodes[layer]
        )  # fmt: skip
        used = {t for n in nodes for t in (*n.inputs, *n.outputs)}
        return Graph(self.graph.name, nodes, {name: t for name, t in self.graph.tensors.items() if name in used}, self.graph.outputs)

    def _join(self, a: int, b: int, other: dict[str, str]) -> None:
        if self.classes[a] != self.classes[b - 1]:
            raise PlanError(f"layer {b} of `{self.graph.name}` cannot follow layer {a}, which is not like layer {b - 1}")
        other.update(zip(self.made[b - 1], self.made[a], strict=True))


def runs(classes: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of every run of equal classes.

    >>> runs((0, 1, 1, 1, 2))
    [(0, 1), (1, 4), (4, 5)]
    """
    starts = [i for i in range(len(classes)) if not i or classes[i] != classes[i - 1]]
    return list(pairwise((*starts, len(classes))))


__all__ = ["Layers", "runs"]

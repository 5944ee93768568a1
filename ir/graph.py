"""A model as a graph of operators and tensors, for one microbatch; values, never changed in place.

The same type holds a forward graph and a training graph: `Node.phase` says which part of the step a node belongs to. `Graph.nx` is the bipartite networkx
graph of nodes and tensors. The text form prints short and reads back:

>>> g = Graph.parse('''
... graph tiny
... input ids int64 [2 8]
... param wte float32 [16 4] init='normal' std=0.02
... node embed @0: x = embedding(ids, wte)
... output x
... ''')
>>> g.tensors["x"].shape, g.producer("x").op
((2, 8, 4), 'embedding')
>>> Graph.parse(str(g)) == g
True
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import networkx as nx

from ir.errors import GraphError
from ir.op import Op
from ir.ops import catalogue
from ir.units import DTYPE_BYTES

ROLES = ("input", "param", "const", "value")
PHASES = ("F", "R", "I", "W", "U")
"""Forward, recomputed forward, input gradient, weight gradient, update."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor: its whole shape, whatever its placement. `init` says how a parameter starts: {"init": "normal", "std": 0.02}, "zeros" or "ones".

    `frozen`: a parameter that is not trained: it has no gradient and no optimizer state.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str = "value"
    init: Mapping[str, Any] = field(default_factory=dict)
    frozen: bool = False

    @property
    def num_elements(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def nbytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Node:
    """One application of an operator. `layer` is its place in the chain that a pipeline may cut: 0 the embedding, 1..L the blocks, L + 1 the head."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    layer: int = 0
    phase: str = "F"
    origin: str = ""

    def __str__(self) -> str:
        attrs = "".join(f" {k}={v!r}" for k, v in self.attrs.items())
        phase = "" if self.phase == "F" else f" {self.phase}<{self.origin}>"
        return f"node {self.name} @{self.layer}{phase}: {', '.join(self.outputs)} = {self.op}({', '.join(self.inputs)}){attrs}"


@dataclass(frozen=True)
class Graph:
    """Nodes in a topological order, and every tensor by name. `outputs` are the tensors that the step is for: the loss."""

    name: str
    nodes: tuple[Node, ...]
    tensors: Mapping[str, Tensor]
    outputs: tuple[str, ...]

    # ---- looking around --------------------------------------------------------------------------------------------------------------------------

    @cached_property
    def node(self) -> Mapping[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def _producers(self) -> Mapping[str, Node]:
        return {t: n for n in self.nodes for t in n.outputs}

    @cached_property
    def _consumers(self) -> Mapping[str, tuple[tuple[Node, int], ...]]:
        found: dict[str, list[tuple[Node, int]]] = {t: [] for t in self.tensors}
        for n in self.nodes:
            for i, t in enumerate(n.inputs):
                found[t].append((n, i))
        return {t: tuple(uses) for t, uses in found.items()}

    def producer(self, tensor: str) -> Node | None:
        """The node that writes the tensor; None for inputs, parameters and constants."""
        return self._producers.get(tensor)

    def consumers(self, tensor: str) -> tuple[tuple[Node, int], ...]:
        """(node, index of the operand) for every use of the tensor."""
        return self._consumers[tensor]

    def op(self, node: Node) -> Op:
        """The operator of a node, with `...` written out for the operands it has here."""
        return catalogue(node.op).for_ranks([len(self.tensors[t].shape) for t in node.inputs])

    def sizes(self, node: Node) -> Mapping[str, int]:
        """The global size of every label of the node's operator."""
        if node.name not in self._sizes:
            self._sizes[node.name] = self.op(node).bind([self.tensors[t].shape for t in node.inputs], node.attrs, node.name)
        return self._sizes[node.name]

    @cached_property
    def _sizes(self) -> dict[str, Mapping[str, int]]:
        return {}

    @cached_property
    def params(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors.values() if t.role == "param")

    @cached_property
    def trained(self) -> tuple[Tensor, ...]:
        """The parameters that have a gradient."""
        return tuple(t for t in self.params if not t.frozen)

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors.values() if t.role == "input")

    @cached_property
    def num_params(self) -> int:
        return sum(t.num_elements for t in self.params)

    @cached_property
    def num_layers(self) -> int:
        """The length of the chain that a pipeline may cut, embedding and head included."""
        return 1 + max((n.layer for n in self.nodes), default=-1)

    @cached_property
    def nx(self) -> nx.DiGraph[Any]:
        """Bipartite: ("node", name) and ("tensor", name), edges in the direction of the data."""
        out: nx.DiGraph[Any] = nx.DiGraph(name=self.name)
        for t in self.tensors.values():
            out.add_node(("tensor", t.name), shape=t.shape, dtype=t.dtype, role=t.role)
        for n in self.nodes:
            out.add_node(("node", n.name), op=n.op, layer=n.layer, phase=n.phase)
            out.add_edges_from((("tensor", t), ("node", n.name)) for t in n.inputs)
            out.add_edges_from((("node", n.name), ("tensor", t)) for t in n.outputs)
        return out

    @cached_property
    def fingerprint(self) -> str:
        """Changes when anything that a plan depends on changes."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    # ---- proving -----------------------------------------------------------------------------------------------------------------------------------

    def check(self) -> Graph:
        """Returns the graph itself, or raises GraphError naming the first node that is wrong."""
        for t in self.tensors.values():
            if t.role not in ROLES or t.dtype not in DTYPE_BYTES:
                raise GraphError(f"tensor `{t.name}`: role `{t.role}` or dtype `{t.dtype}` is not known")
            if any(size < 1 for size in t.shape):
                raise GraphError(f"tensor `{t.name}` has shape {t.shape}: every size must be 1 or more")
        written = {t.name for t in self.tensors.values() if t.role != "value"}
        names: set[str] = set()
        for n in self.nodes:
            if n.name in names:
                raise GraphError(f"two nodes are called `{n.name}`")
            names.add(n.name)
            if n.phase not in PHASES:
                raise GraphError(f"node `{n.name}`: phase `{n.phase}` is none of {', '.join(PHASES)}")
            for name in n.inputs:
                if name not in written:
                    raise GraphError(f"node `{n.name}` reads `{name}` before anything has written it")
            shapes = self.op(n).outputs
            sizes = self.sizes(n)
            if len(shapes) != len(n.outputs):
                raise GraphError(f"node `{n.name}`: {self.op(n).sentence} gives {len(shapes)} outputs, {len(n.outputs)} are named")
            for operand, name in zip(shapes, n.outputs, strict=True):
                if name in written:
                    raise GraphError(f"node `{n.name}` writes `{name}`, which is written already")
                if self.tensors[name].shape != operand.shape(sizes):
                    raise GraphError(f"node `{n.name}`: `{name}` has shape {self.tensors[name].shape}, {operand!r} says {operand.shape(sizes)}")
                written.add(name)
        for name in self.outputs:
            if name not in written:
                raise GraphError(f"output `{name}` is written by no node")
        return self

    # ---- text --------------------------------------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"graph {self.name}"]
        for t in self.tensors.values():
            if t.role != "value":
                init = "".join(f" {k}={v!r}" for k, v in t.init.items())
                lines.append(f"{'frozen' if t.frozen else t.role} {t.name} {t.dtype} [{' '.join(map(str, t.shape))}]{init}")
        lines += [str(n) for n in self.nodes]
        lines.append(f"output {' '.join(self.outputs)}")
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Graph:
        """Reads what `str(graph)` writes; shapes and dtypes of values follow from the operators."""
        build = Builder("")
        outputs: tuple[str, ...] = ()
        for number, line in enumerate(text.splitlines(), 1):
            word, _, rest = line.strip().partition(" ")
            if word == "graph":
                build.name = rest
            elif word in ("input", "param", "frozen", "const") and (m := _TENSOR.fullmatch(rest)):
                role = "param" if word == "frozen" else word
                build.tensor(m["name"], tuple(map(int, m["shape"].split())), m["dtype"], role, _attrs(m["attrs"]), frozen=word == "frozen")
            elif word == "node" and (m := _NODE.fullmatch(rest)):
                build.node(
                    m["op"], _names(m["ins"]), name=m["name"], outputs=_names(m["outs"]), attrs=_attrs(m["attrs"]), layer=int(m["layer"]),
                    phase=m["phase"] or "F", origin=m["origin"] or "",
                )  # fmt: skip
            elif word == "output":
                outputs = tuple(rest.split())
            elif word:
                raise GraphError(f"line {number}: `{line.strip()}` is no graph, input, param, frozen, const, node or output line")
        return build.graph(outputs)


_TENSOR = re.compile(r"(?P<name>\S+) (?P<dtype>\w+) \[(?P<shape>[\d ]*)\](?P<attrs>.*)")
_NODE = re.compile(r"(?P<name>\S+) @(?P<layer>-?\d+)(?: (?P<phase>\w)<(?P<origin>[^>]*)>)?: (?P<outs>[^=]+) = (?P<op>[\w.]+)\((?P<ins>[^)]*)\)(?P<attrs>.*)")
_ATTR = re.compile(r"(\w+)=('(?:[^'\\]|\\.)*'|\[[^\]]*\]|\([^)]*\)|\S+)")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _attrs(text: str) -> dict[str, Any]:
    return {m.group(1): ast.literal_eval(m.group(2)) for m in _ATTR.finditer(text)}


class Builder:
    """Writes a graph node by node; shapes follow from the operators.

    >>> b = Builder("two")
    >>> x, w = b.tensor("x", (4, 8), "float32", "input"), b.tensor("w", (8, 2), "float32", "param")
    >>> b.node("linear", [x, w], name="up")
    ('up',)
    >>> print(b.graph(("up",)).nodes[0])
    node up @0: up = linear(x, w)
    """

    def __init__(self, name: str, base: Graph | None = None) -> None:
        self.name = name or (base.name if base else "")
        self.nodes: list[Node] = list(base.nodes) if base else []
        self.tensors: dict[str, Tensor] = dict(base.tensors) if base else {}

    def tensor(
        self, name: str, shape: Sequence[int], dtype: str, role: str = "value", init: Mapping[str, Any] | None = None, frozen: bool = False
    ) -> str:  # fmt: skip
        if name in self.tensors:
            raise GraphError(f"two tensors are called `{name}`")
        self.tensors[name] = Tensor(name, tuple(shape), dtype, role, dict(init or {}), frozen)
        return name

    def node(
        self, op: str, inputs: Iterable[str], *, name: str, outputs: Sequence[str] | None = None, attrs: Mapping[str, Any] | None = None, layer: int = 0,
        phase: str = "F", origin: str = "",
    ) -> tuple[str, ...]:  # fmt: skip
        """Adds a node and its output tensors; without `outputs` the first is called like the node, the others `node.operand`. Returns their names.

        The dtype of an output is that of the first floating-point input, int64 where the operator says so.
        """
        ins = tuple(inputs)
        missing = [t for t in ins if t not in self.tensors]
        if missing:
            raise GraphError(f"node `{name}` reads {missing}, which nothing has written")
        this = catalogue(op).for_ranks([len(self.tensors[t].shape) for t in ins])
        sizes = this.bind([self.tensors[t].shape for t in ins], attrs or {}, name)
        names = tuple(outputs) if outputs is not None else (name, *(f"{name}.{o.name}" for o in this.outputs[1:]))
        if len(names) != len(this.outputs):
            raise GraphError(f"node `{name}`: {this.sentence} gives {len(this.outputs)} outputs, {len(names)} are named")
        floats = [self.tensors[t].dtype for t in ins if not self.tensors[t].dtype.startswith("int")]
        for operand, t in zip(this.outputs, names, strict=True):
            dtype = "int64" if operand.name in this.integers else floats[0] if floats else self.tensors[ins[0]].dtype
            self.tensor(t, operand.shape(sizes), dtype)
        self.nodes.append(Node(name, op, ins, names, dict(attrs or {}), layer, phase, origin))
        return names

    def graph(self, outputs: Sequence[str]) -> Graph:
        return Graph(self.name, tuple(self.nodes), dict(self.tensors), tuple(outputs)).check()


__all__ = ["Builder", "Graph", "Node", "Tensor"]

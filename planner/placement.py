"""The placement of one model on one mesh: a rule for every node, a hub for every tensor, three placements for every parameter, at the least stated cost.

Decided on the forward graph, the backward derived from it, so that every cost belongs to a variable or to a pair of them (`planner.solver` minimises the sum
exactly). The stated cost of one step, in seconds: kernels forward and backward, every boxing of values and cotangents times the number of microbatches,
parameters once a step and once a microbatch, and for memory a price in seconds per byte. Of overlap it knows the share that is exposed of what parameters
communicate, which is swept, like the price. Equal readers of one tensor (q, k, v; gate, up) may share one boxed copy; for other readers of one hub a boxing
that they have in common is counted for each.

* producer -> hub: box(out -> value) + box(cotangent -> need(out)); hub -> consumer: box(value -> in) + box(cot -> cotangent).
* Inputs and constants are read by every consumer as it wants them; loading costs a local copy.
* A parameter: once a step grad -> state for each use, update, state -> held; each microbatch held -> in (again in the backward where the gradient reads it: a
  boxed copy is never kept) and cotangent -> grad, brought there by a copy of its own unless the kernel writes where the gradient accumulates, and added to
  those of the microbatches before.
* A value that a gradient operator reads is kept from forward to backward, `in_flight` times: at its hub, or where the placement of the reader differs, as
  the cheaper of the boxed copy and boxing again. A tensor with several readers pays its hub once; one with a single reader pays for what it keeps.
* A recomputed layer keeps what enters it, and runs and boxes again what its gradients depend on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ir.errors import PlanError
from ir.graph import Graph, Node
from ir.op import Rule
from ir.plan import Hub, ParamPlacement
from planner.costs import ByLayer, Terms
from planner.facts import analyse
from planner.optimizers import with_defaults
from planner.placed import Placed, read
from planner.pricing import Pricing
from planner.problem import Given, Problem
from planner.runs import Short, layer_keys, nodes_by_layer, shorten
from planner.solver.blocks import CannotFold
from planner.solver.elimination import solve
from planner.solver.factors import FactorGraph, Solution
from planner.space import Space
from planner.tables import Tables

Solver = Callable[[FactorGraph, Sequence[Sequence[int]]], Solution]


def search(
    graph: Graph, axes: Sequence[str], mesh_shape: Sequence[int], pricing: Pricing, *, num_microbatches: int, memory_price: ByLayer = 0.0,
    state_price: ByLayer | None = None, in_flight: ByLayer = 1, recompute: Sequence[int | str] = (), selective: bool = False,
    optimizer: str | Mapping[str, Any] = "adamw", space: Space | None = None, tables: Tables | None = None, exposed: float = 1.0,
    solver: Solver | None = None,
) -> Placed:  # fmt: skip
    """The cheapest placement of a forward graph of one microbatch.

    `memory_price` in seconds per byte of saved activations, `state_price` of parameters, gradients and optimizer states (absent: the same). `in_flight`:
    microbatches whose saved values live at once. All three for all layers or by layer. `exposed`, in [0, 1]: the share that counts of communication which can
    hide behind kernels: that of parameters, and of their gradients. `recompute`: layers and names of nodes that run again in the backward; `selective`: of all
    other nodes the search decides that. `tables` (see `new_tables`) keeps tables from one search to the next.
    `solver` minimises the factor graph of the whole model, given its layers as blocks; absent: runs of equal layers are one of them and a matrix power.
    Raises PlanError where a node or tensor has no legal placement.
    """
    start = time.perf_counter()
    terms = Terms(
        num_microbatches, memory_price, memory_price if state_price is None else state_price, in_flight, tuple(recompute), with_defaults(optimizer), exposed,
        selective,
    )  # fmt: skip
    if solver is not None:
        this = _problem(Short(graph, graph), axes, mesh_shape, pricing, terms, space, tables)
        return read(this, solver(this.factor_graph(), tuple(this.blocks.values())), start)
    return _solve(graph, axes, mesh_shape, pricing, terms, space, tables, ({}, {}, {}), start)


def price(
    graph: Graph, axes: Sequence[str], mesh_shape: Sequence[int], pricing: Pricing, *, rules: Mapping[str, tuple[Rule, ...]] | None = None,
    hubs: Mapping[str, Hub] | None = None, params: Mapping[str, ParamPlacement] | None = None, num_microbatches: int, memory_price: ByLayer = 0.0,
    state_price: ByLayer | None = None, in_flight: ByLayer = 1, recompute: Sequence[int | str] = (), optimizer: str | Mapping[str, Any] = "adamw",
    space: Space | None = None, tables: Tables | None = None, exposed: float = 1.0,
) -> Placed:  # fmt: skip
    """A given plan, priced in the same problem; what is not given is completed at the least cost.

    Raises PlanError where a given decision is not in the space.
    """
    start = time.perf_counter()
    terms = Terms(
        num_microbatches, memory_price, memory_price if state_price is None else state_price, in_flight, tuple(recompute), with_defaults(optimizer), exposed
    )
    return _solve(graph, axes, mesh_shape, pricing, terms, space, tables, (rules or {}, hubs or {}, params or {}), start)


def problem(
    graph: Graph, axes: Sequence[str], mesh_shape: Sequence[int], pricing: Pricing, *, num_microbatches: int, memory_price: ByLayer = 0.0,
    state_price: ByLayer | None = None, in_flight: ByLayer = 1, recompute: Sequence[int | str] = (), selective: bool = False,
    optimizer: str | Mapping[str, Any] = "adamw", space: Space | None = None, tables: Tables | None = None, exposed: float = 1.0, folded: bool = False,
) -> Problem:  # fmt: skip
    """The problem of the whole graph: its factor graph, and its trade of time for memory. `folded`: in the longest run of equal layers one block stands
    for others.
    """
    terms = Terms(
        num_microbatches, memory_price, memory_price if state_price is None else state_price, in_flight, tuple(recompute), with_defaults(optimizer), exposed,
        selective,
    )  # fmt: skip
    tables = new_tables(axes, mesh_shape, pricing) if tables is None else tables
    short = _short(graph, tables, terms, space or Space(), ({}, {}, {}), once=True) if folded else Short(graph, graph)
    return _problem(short, axes, mesh_shape, pricing, terms, space, tables)


def new_tables(axes: Sequence[str], mesh_shape: Sequence[int], pricing: Pricing) -> Tables:
    """Tables to hand to several searches on one mesh with one pricing, whatever their graphs, prices and limits."""
    active = [k for k, n in enumerate(mesh_shape) if n > 1]
    return Tables(pricing, tuple(axes[k] for k in active), tuple(mesh_shape[k] for k in active))


def _solve(
    graph: Graph, axes: Sequence[str], mesh_shape: Sequence[int], pricing: Pricing, terms: Terms, space: Space | None, tables: Tables | None, given: Given,
    start: float,
) -> Placed:  # fmt: skip
    """The optimum on the short graph; on the whole one where a block that stands for several is no link of a chain."""
    tables = new_tables(axes, mesh_shape, pricing) if tables is None else tables
    this = _problem(_short(graph, tables, terms, space or Space(), given), axes, mesh_shape, pricing, terms, space, tables, given)
    try:
        solution = solve(this.factor_graph(), tuple(this.blocks.values()), this.repeated())
    except CannotFold:
        this = _problem(Short(graph, graph), axes, mesh_shape, pricing, terms, space, tables, given)
        solution = solve(this.factor_graph(), tuple(this.blocks.values()))
    return read(this, solution, start)


def _short(graph: Graph, tables: Tables, terms: Terms, space: Space, given: Given, once: bool = False) -> Short:
    """The graph with runs of layers shortened that are equal and of which the same is asked; `once`: the longest one."""
    key = ("layers", id(graph))
    if key not in tables.memo:
        tables.memo[key] = (graph, layer_keys(graph), nodes_by_layer(graph))
    _, structure, nodes = tables.memo[key]
    asked = (_asked(graph, nodes.get(layer, ()), terms, space, given) for layer in range(graph.num_layers))
    number: dict[Hashable, int] = {}
    kinds = tuple(number.setdefault(kind, len(number)) for kind in zip(structure, asked, strict=True))
    if ("short", id(graph), kinds, once) not in tables.memo:
        tables.memo["short", id(graph), kinds, once] = shorten(graph, kinds, once)
    found: Short = tables.memo["short", id(graph), kinds, once]
    return found


def _asked(graph: Graph, nodes: Sequence[Node], terms: Terms, space: Space, given: Given) -> Hashable:
    """What is asked of the nodes and tensors of a layer: their numbers in flight, limits and decisions."""
    out: list[Hashable] = [(terms.rate(n.layer), terms.state_charge(n.layer), n.layer in terms.recompute) for n in nodes[:1]]
    named = {name for name in terms.recompute if isinstance(name, str)}
    out += [n.name in named for n in nodes if named]
    for n in nodes if any(given) or space.rules or space.hubs or space.params else ():
        out.append((given[0].get(n.name), *(limit.matches(n) for limit in space.rules)))
        out += [(given[1].get(t), *(limit.matches(graph.tensors[t]) for limit in space.hubs)) for t in n.outputs]
        read = [t for t in n.inputs if graph.tensors[t].role == "param"]
        out += [(given[2].get(t), *(limit.matches(graph.tensors[t]) for limit in space.params)) for t in read]
    return tuple(out)


def _problem(
    short: Short, axes: Sequence[str], mesh_shape: Sequence[int], pricing: Pricing, terms: Terms, space: Space | None, tables: Tables | None,
    given: Given = ({}, {}, {}),
) -> Problem:  # fmt: skip
    wanted = new_tables(axes, mesh_shape, pricing)
    if len(axes) != len(mesh_shape) or terms.num_microbatches < 1:
        raise PlanError(f"a mesh of axes {tuple(axes)} and shape {tuple(mesh_shape)} with {terms.num_microbatches} microbatches cannot be searched")
    if tables is not None and (tables.axes, tables.mesh_shape) != (wanted.axes, wanted.mesh_shape):
        raise PlanError(f"tables of mesh {tables.axes} {tables.mesh_shape} were given for mesh {wanted.axes} {wanted.mesh_shape}")
    tables = wanted if tables is None else tables
    key = ("facts", id(short.graph), terms.recompute, terms.selective)
    if key not in tables.memo:
        tables.memo[key] = (short.graph, analyse(short.graph, terms.recompute, terms.selective))
    return Problem(short, tuple(axes), tuple(mesh_shape), tables, terms, space or Space(), tables.memo[key][1], given)


__all__ = ["Placed", "new_tables", "price", "problem", "search"]

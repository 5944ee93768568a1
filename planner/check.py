"""Whether a plan is legal for a graph: the first value that is not is named, with the nearest legal ones."""

from __future__ import annotations

import math
from collections import Counter

from ir.boxing import axis_sets, legal
from ir.errors import PlanError
from ir.graph import Graph, Node
from ir.op import nd_placements
from ir.plan import Plan
from ir.sbp import NdSbp, format_nd
from ir.units import DTYPE_BYTES, is_floating
from planner.optimizers import is_hidden, update_of, with_defaults
from planner.orders import check_schedule
from planner.pieces import unroll, unrolled_plan
from planner.ring import check_context


def check_plan(graph: Graph, plan: Plan) -> Plan:
    """Returns the plan, or raises PlanError. `graph` is the forward graph of one microbatch."""
    _check_sizes(plan)
    _check_mesh(plan)
    _check_stages(graph, plan)
    check_schedule(plan)
    for node in graph.nodes:
        _check_node(graph, plan, node)
    _check_placements(graph, plan)
    check_context(graph, plan)
    if plan.pieces:
        cut = unroll(graph, plan)
        each = unrolled_plan(plan, cut)
        for node in cut.nodes:
            _check_node(cut, each, node)
        _check_placements(cut, each)
    return plan


def _check_sizes(plan: Plan) -> None:
    for what, value in (("batch", plan.batch), ("seq", plan.seq), ("num_microbatches", plan.num_microbatches)):
        if not isinstance(value, int) or value < 1:
            raise PlanError(f"{what} is {value!r}; give a whole number of 1 or more")
    if plan.batch % plan.num_microbatches:
        near = [m for m in range(1, plan.batch + 1) if plan.batch % m == 0]
        near = sorted(sorted(near, key=lambda m: abs(m - plan.num_microbatches))[:4])
        raise PlanError(f"batch {plan.batch} cannot be cut into {plan.num_microbatches} equal microbatches; try {', '.join(map(str, near))}")
    dtypes = list(filter(is_floating, DTYPE_BYTES))
    if plan.dtype not in dtypes:
        raise PlanError(f"dtype `{plan.dtype}` is not known; known are {', '.join(dtypes)}")
    with_defaults(plan.optimizer)


def _check_mesh(plan: Plan) -> None:
    if len(plan.axes) != len(plan.mesh_shape) or len(set(plan.axes)) != len(plan.axes) or any(n < 1 for n in plan.mesh_shape):
        raise PlanError(f"mesh axes {plan.axes} have sizes {plan.mesh_shape}; give each axis a name of its own and one size of 1 or more")
    if plan.links and len(plan.links) != len(axis_sets(len(plan.axes))):
        raise PlanError(f"the plan has {len(plan.links)} links, its mesh of {len(plan.axes)} axes {len(axis_sets(len(plan.axes)))}; plan again")


def _check_stages(graph: Graph, plan: Plan) -> None:
    ranks = Counter(r for site in plan.sites for r in site)
    twice = [r for r, n in ranks.items() if n > 1]
    if twice:
        raise PlanError(f"rank {twice[0]} stands in {ranks[twice[0]]} places; stages have the same ranks or none in common")
    if any(len(s.ranks) != math.prod(plan.mesh_shape) for s in plan.stages):
        raise PlanError(f"every stage needs {math.prod(plan.mesh_shape)} ranks for mesh {dict(zip(plan.axes, plan.mesh_shape, strict=True))}")
    cuts = [0, *(s.last % graph.num_layers for s in plan.stages)]
    if any(s.first != cut or not s.first < s.last <= graph.num_layers for s, cut in zip(plan.stages, cuts, strict=False)) or cuts[-1]:
        spans = [(s.first, s.last) for s in plan.stages]
        raise PlanError(f"stages {spans} must follow one another and cover layers 0 to {graph.num_layers} of `{graph.name}`, one or more each")
    _check_copies(graph, plan)
    layers = tuple(layer for layer in plan.recompute if not isinstance(layer, str))
    if any(not 0 <= layer < graph.num_layers for layer in layers):
        raise PlanError(f"recompute names layers {layers}; `{graph.name}` has layers 0 to {graph.num_layers - 1}")
    unknown = [name for name in plan.recompute if isinstance(name, str) and name not in graph.node]
    if unknown:
        raise PlanError(f"recompute names operators {', '.join(unknown[:3])}, which `{graph.name}` does not have; it was made for another model: plan again")


def _check_copies(graph: Graph, plan: Plan) -> None:
    """Whether copies of the pipeline take equal parts of the batch, and the two of a layer lie on ranks of their own."""
    if plan.num_microbatches % plan.copies:
        raise PlanError(f"{plan.copies} copies of the pipeline cannot share {plan.num_microbatches} microbatches equally; give a multiple of {plan.copies}")
    for layer in range(graph.num_layers):
        where = [plan.stages[plan.stage_of(layer, copy)].ranks for copy in range(plan.copies)]
        if len(set(where)) < len(where):
            raise PlanError(f"layer {layer} lies twice on ranks {where[0]}; copies of a layer belong on different ranks, as dualpipe puts them")


def _check_node(graph: Graph, plan: Plan, node: Node) -> None:
    rules = plan.rules.get(node.name)
    if rules is None or len(rules) != len(plan.axes):
        raise PlanError(f"the plan needs one rule for each of the axes {plan.axes} at node `{node.name}`, it has {rules}")
    op = graph.op(node)
    known = op.rules()
    for rule, axis in zip(rules, plan.axes, strict=True):
        if rule not in known:
            raise PlanError(f"node `{node.name}` ({op.sentence}) cannot follow `{rule}` on axis {axis}; it can follow {', '.join(map(repr, known))}")
    sizes = graph.sizes(node)
    for label in dict.fromkeys(r.on for r in rules if r.kind == "split"):
        parts = math.prod(n for r, n in zip(rules, plan.mesh_shape, strict=True) if r.kind == "split" and r.on == label)
        if sizes[label] < parts or (op.must_divide(label) and sizes[label] % parts):
            near = [n for n in range(1, 2 * parts + 1) if n <= sizes[label] and (sizes[label] % n == 0 or not op.must_divide(label))]
            raise PlanError(f"node `{node.name}`: {label} = {sizes[label]} cannot be split {parts} ways; legal near it are {', '.join(map(str, near[-6:]))}")


def _check_placements(graph: Graph, plan: Plan) -> None:
    for node in graph.nodes:
        ins, outs = nd_placements(plan.rules[node.name], graph.op(node))
        for tensor, nd in zip((*node.inputs, *node.outputs), (*ins, *outs), strict=True):
            _check_legal(graph, plan, tensor, nd)
    for p in graph.params:
        place = plan.params.get(p.name)
        if place is None:
            raise PlanError(f"the plan says nothing about parameter `{p.name}`; it was made for another model: plan again")
        for nd in place:
            _check_legal(graph, plan, p.name, nd)
        for nd, what in ((place.state, "state"), (place.held, "held")):
            if any(s.is_partial for s in nd):
                raise PlanError(f"parameter `{p.name}`: {what} is {format_nd(nd, plan.axes)}; only a gradient can be P")
        if not p.frozen:
            update = update_of(with_defaults(plan.optimizer), p, is_hidden(graph, p.name))
            if not update.is_legal(place.state, plan.mesh_shape):
                sizes = ", ".join(f"{label} = {n}" for label, n in update.sizes.items())
                raise PlanError(f"parameter `{p.name}`: state is {format_nd(place.state, plan.axes)}, where {update.last.sentence} cannot be split: {sizes}")
        elif len(set(place)) > 1:
            raise PlanError(f"parameter `{p.name}` is frozen: it lies where it is held; give state, held and gradient one placement")
    for tensor, hub in plan.hubs.items():
        if tensor not in graph.tensors:
            raise PlanError(f"the plan has a hub for tensor `{tensor}`, which `{graph.name}` has not; it was made for another model: plan again")
        for nd in hub:
            _check_legal(graph, plan, tensor, nd)


def _check_legal(graph: Graph, plan: Plan, tensor: str, nd: NdSbp) -> None:
    shape = graph.tensors[tensor].shape
    if len(nd) != len(plan.axes):
        raise PlanError(f"tensor `{tensor}` has {len(nd)} placements {nd} for the {len(plan.axes)} axes {plan.axes}; give one for each")
    if not legal(shape, nd, plan.mesh_shape):
        mesh = dict(zip(plan.axes, plan.mesh_shape, strict=True))
        raise PlanError(f"tensor `{tensor}` of shape {shape} cannot be {format_nd(nd, plan.axes)} on mesh {mesh}: a rank would hold nothing")

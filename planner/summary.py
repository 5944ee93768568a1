"""A plan in the words that people ask for, and what a simulation says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ir.cluster import Cluster
from ir.graph import Graph
from ir.op import Rule
from ir.plan import ParamPlacement, Plan
from ir.program import Program
from ir.timeline import Timeline
from ir.units import GIB
from planner.candidates import is_attention
from planner.dims import EXPERT_PRODUCTS, dims_of
from planner.facts import analyse
from planner.frontends.model import Model
from simulator.memory import Ledger


def layout(graph: Graph, plan: Plan) -> dict[str, Any]:
    """The `layout` of the command's documents: dp, tp, pp, mbs, schedule, recompute, and ZeRO level and sequence parallelism read off the placements."""
    size = dict(zip(plan.axes, plan.mesh_shape, strict=True))
    dp = size.get("dp", 1) * size.get("ep", 1)
    return {
        "dp": dp, "tp": size.get("tp", 1), "pp": len(plan.sites), "cp": size.get("cp", 1), "ep": expert_parts(graph, plan),
        "vpp": len(plan.stages) // (len(plan.sites) * plan.copies),
        "mbs": plan.microbatch // dp, "num_microbatches": plan.num_microbatches, "schedule": plan.schedule, "seq_chunks": max(1, len(plan.pieces)),
        "recompute": recomputed(plan), "zero": zero_level(graph, plan), "sp": is_sequence_parallel(graph, plan),
        **({"cp_form": plan.context} if plan.context else {}), **({"loss_chunks": plan.loss_chunks} if plan.loss_chunks > 1 else {}),
    }  # fmt: skip


def recomputed(plan: Plan) -> str:
    """none, selective where single operators run again, full where whole layers do."""
    if not plan.recompute:
        return "none"
    return "selective" if any(isinstance(what, str) for what in plan.recompute) else "full"


def expert_parts(graph: Graph, plan: Plan) -> int:
    """Into how many parts the experts are split, over all axes together."""
    products = [plan.rules[n.name] for n in graph.nodes if n.op in EXPERT_PRODUCTS]
    whole = Rule("split", "e")
    return max((math.prod(n for rule, n in zip(rules, plan.mesh_shape, strict=True) if rule == whole) for rules in products), default=1)


def zero_level(graph: Graph, plan: Plan) -> int:
    """The ZeRO level that most bytes of the trained parameters follow on the data-parallel axis."""
    wide = [axis for axis, n in zip(plan.axes, plan.mesh_shape, strict=True) if n > 1 and axis in ("dp", "ep", "cp")]
    if not wide:
        return 0
    axis, dims = plan.axes.index(wide[0]), dims_of(graph)
    weight: dict[int, int] = {0: 0}
    for tensor in graph.trained:
        if wide[0] == "ep" and dims.dim(tensor.name, "experts") is not None:
            continue  # split over its experts, not by ZeRO
        level = _level(plan.params[tensor.name], axis)
        weight[level] = weight.get(level, 0) + tensor.nbytes
    return max(sorted(weight), key=lambda level: weight[level])


def _level(place: ParamPlacement, axis: int) -> int:
    state, held, grad = (nd[axis] for nd in place)
    if not state.is_split:
        return 0
    if held.is_split:
        return 3
    return 2 if grad.is_split else 1


def is_sequence_parallel(graph: Graph, plan: Plan) -> bool:
    """Whether most tensors of the residual stream are split along the sequence on the tensor-parallel axis."""
    if "tp" not in plan.axes or plan.mesh_shape[plan.axes.index("tp")] == 1:
        return False
    axis = plan.axes.index("tp")
    stream = [plan.hubs[t].value[axis] for n in graph.nodes if n.op == "add" for t in n.outputs if t in plan.hubs]
    return sum(s.is_split and s.dim == 1 for s in stream) * 2 > len(stream)


def model_flops(model: Model, plan: Plan) -> float:
    """Floating point operations that one step of the model needs: three times the forward, causal attention counted half, recompute not counted.

    Of an expert's slots as many count as its even share of the tokens fills.
    Where parameters are frozen, a product counts once forward and once for each gradient of it that somebody needs.
    """
    graph = model.graph(1, plan.seq, plan.dtype)
    facts = analyse(graph)
    total = 0.0
    for n in graph.nodes:
        op, here = graph.op(n), facts.node[n.name]
        if op.is_contraction or is_attention(n):
            share = _filled(model, plan.seq) if n.op in EXPERT_PRODUCTS else 1.0
            total += share * op.flops_of(graph.sizes(n), n.attrs) * (1 + (len(here.grads) if op.is_contraction else 2 * any(here.carries)))
    return total * plan.batch


def _filled(model: Model, seq: int) -> float:
    """The share of the experts' slots that tokens fill where nothing is dropped, at most 1."""
    experts = model.config.experts
    return min(1.0, seq * experts.top_k / (experts.num_experts * experts.slots(seq))) if experts else 1.0


def metrics(model: Model, cluster: Cluster, plan: Plan, program: Program, timeline: Timeline, memory: Ledger) -> dict[str, Any]:
    """What the simulation says of a plan, under the keys of the command's documents; `comm` has one entry for each (axis, kind) of `ir.communication`."""
    comm = [row.to_json() for row in timeline.communication(program)]
    return documented(model, cluster, plan, timeline.step_s, timeline.breakdown(program), comm, memory)


def documented(
    model: Model, cluster: Cluster, plan: Plan, step_s: float, parts: Mapping[str, float], comm: Sequence[Mapping[str, Any]], memory: Ledger
) -> dict[str, Any]:  # fmt: skip
    """A step of a plan under the keys of the command's documents."""
    flops = model_flops(model, plan) / plan.num_ranks / step_s
    peak = cluster.devices[0].flops_per_s.get(plan.dtype, 0.0)
    return {
        "step_s": step_s, "tokens_per_s_per_gpu": plan.batch * plan.seq / step_s / plan.num_ranks, "tflops_per_gpu": flops / 1e12,
        "mfu": flops / peak if peak else 0.0, "bubble": parts["bubble_s"] / step_s, "breakdown": dict(parts), "peak_gib": memory.peak_bytes / GIB,
        "fits": memory.fits, "comm": [dict(row) for row in comm],
    }  # fmt: skip

"""Why a plan is what it is: where its time and memory go, what would change it, and why another layout loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ir.cluster import Cluster
from ir.errors import HeadraceError
from ir.graph import Graph, Node
from ir.op import Rule
from ir.plan import Plan
from ir.program import Program
from ir.units import GIB, nbytes, seconds
from planner.frontends.model import Model
from planner.lower import lower, representatives
from planner.reasons import PARTS, binds, largest_difference
from planner.search import evaluate_fixed
from planner.summary import metrics
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.memory import ledger


@dataclass(frozen=True)
class Explanation:
    """`document` for machines; `str()` for people."""

    document: Mapping[str, Any]
    text: str

    def __str__(self) -> str:
        return self.text


def explain(model: Model, cluster: Cluster, plan: Plan, why_not: Mapping[str, Any] | None = None) -> Explanation:
    """What binds the plan, how its operators are cut, what faster links or more memory would give, and with `why_not` how another layout compares.

    Raises PlanError when the plan does not belong to the model.
    """
    cost = CostModel(cluster)
    program = lower(model, plan, ranks=representatives(plan, cluster))
    timeline = simulate(program, cost, steps=2)
    found = metrics(model, cluster, plan, program, timeline, ledger(program, timeline, cluster=cluster))
    graph = model.graph(plan.microbatch, plan.seq, plan.dtype)
    document: dict[str, Any] = {
        "layout": dict(plan.layout), "step_s": found["step_s"], "breakdown": found["breakdown"], "binds": binds(found), "peak_gib": found["peak_gib"],
        "fits": found["fits"], "comm": found["comm"], "placements": placements(graph, plan), "if": _what_if(cluster, program, found["step_s"]),
    }  # fmt: skip
    lines = _lines(document)
    if why_not:
        document["why_not"] = other = _why_not(model, cluster, plan, found, why_not)
        lines += ["", f"Why not {', '.join(f'{k}={v}' for k, v in why_not.items())}? {other['why']}"]
    return Explanation(document, "\n".join(lines))


# ---- placements in words -------------------------------------------------------------------------------------------------------------------------------


def placements(graph: Graph, plan: Plan) -> dict[str, dict[str, list[str]]]:
    """For every axis, the ways in which operators act on it, each with the nodes that do; numbered layers are written once, as `h.*`."""
    out: dict[str, dict[str, list[str]]] = {}
    for k, axis in enumerate(plan.axes):
        if plan.mesh_shape[k] == 1:
            continue
        ways: dict[str, dict[str, None]] = out.setdefault(axis, {})  # type: ignore[assignment]
        for n in graph.nodes:
            ways.setdefault(in_words(graph, n, plan.rules[n.name][k]), {})[_pattern(n.name)] = None
    return {axis: {way: list(names) for way, names in ways.items()} for axis, ways in out.items()}


SPLITS = {
    "b": "split along the batch", "s": "split along the sequence", "v": "split along the vocabulary", "g": "split by heads", "h": "split along the width",
}  # fmt: skip
"""What people call a split of these labels of an operator's sentence."""


def in_words(graph: Graph, node: Node, rule: Rule) -> str:
    """A rule as people say it: data parallel, column split, row split, by heads, ..."""
    if rule.kind == "B":
        return "the same on every rank"
    if rule.kind == "B~P":
        return "the same on every rank, its cotangent passed on as a partial sum"
    if rule.kind == "linear":
        return "applied to partial sums"
    if graph.op(node).is_contraction and rule.on in ("n", "k"):
        return "column split" if rule.on == "n" else "row split"
    return SPLITS.get(rule.on, f"split along {rule.on}")


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


# ---- what would change it --------------------------------------------------------------------------------------------------------------------------------


def _what_if(cluster: Cluster, program: Program, step_s: float) -> list[dict[str, Any]]:
    """The step with every link twice as fast, and with half the latency."""
    faster = replace(cluster, links=tuple(replace(k, bytes_per_s=2 * k.bytes_per_s) for k in cluster.links), profile=_without_curves(cluster))
    sooner = replace(cluster, links=tuple(replace(k, latency_s=k.latency_s / 2) for k in cluster.links), profile=_without_curves(cluster))
    plain = replace(cluster, profile=_without_curves(cluster))
    base = simulate(program, CostModel(plain), steps=2).step_s
    out = []
    for what, changed in (("links twice as fast", faster), ("half the latency", sooner)):
        saved = 1.0 - simulate(program, CostModel(changed), steps=2).step_s / base
        out.append({"what": what, "step_s": step_s * (1.0 - saved), "saved": saved})
    return out


def _without_curves(cluster: Cluster) -> dict[str, Any]:
    """Measured curves are of the links as they are: a change of the links is judged on the topology, before and after."""
    return {k: v for k, v in cluster.profile.items() if k != "collectives"}


def _why_not(model: Model, cluster: Cluster, plan: Plan, mine: Mapping[str, Any], fix: Mapping[str, Any]) -> dict[str, Any]:
    try:
        other = evaluate_fixed(model, cluster, plan, fix)
    except HeadraceError as error:
        return {"legal": False, "why": f"It is not legal: {error}"}
    theirs = other.predicted
    usable = cluster.devices[0].usable_bytes / GIB
    if theirs["fits"] == "no":
        told = f"It needs {theirs['peak_gib']:.1f} GiB of {usable:.1f} GiB."
    elif theirs["step_s"] >= mine["step_s"]:
        told = f"It takes {seconds(theirs['step_s'])}, {theirs['step_s'] / mine['step_s'] - 1:.1%} more: {largest_difference(theirs, mine)}."
    else:
        told = f"It is faster here: {seconds(theirs['step_s'])} against {seconds(mine['step_s'])}, with {theirs['peak_gib']:.1f} GiB of {usable:.1f} GiB."
    return {"legal": True, "layout": dict(other.layout), "predicted": dict(theirs), "why": told}


# ---- for people --------------------------------------------------------------------------------------------------------------------------------------------


def _lines(document: Mapping[str, Any]) -> list[str]:
    shape = document["layout"]
    lines = [
        "  ".join(f"{k}={v}" for k, v in shape.items()),
        f"step {seconds(document['step_s'])}, {document['peak_gib']:.2f} GiB, fits: {document['fits']}",
        f"what binds: {document['binds']}",
        "",
    ]
    lines += [f"  {PARTS[k]:<34} {seconds(v):>10}  {v / document['step_s']:>6.1%}" for k, v in document["breakdown"].items()]
    for axis, ways in document["placements"].items():
        lines += ["", f"on axis {axis}:"]
        lines += [f"  {way}: {', '.join(names)}" for way, names in ways.items()]
    if document["comm"]:
        lines += ["", "communication a step:"]
        lines += [
            f"  {c['axis']:<6} {c['kind']:<15} {c['count']:>5} x, {nbytes(c['nbytes'])}, {seconds(c['time_s'])}, exposed {seconds(c['exposed_s'])}"
            for c in document["comm"]
        ]
    lines += [""] + [f"with {row['what']}: {seconds(row['step_s'])} ({row['saved']:.1%} less)" for row in document["if"]]
    return lines

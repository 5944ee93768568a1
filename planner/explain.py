"""Why a plan is what it is: where its time and memory go, what would change it, and why another layout loses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ir.cluster import Cluster
from ir.errors import HeadraceError
from ir.plan import Plan
from ir.program import Program
from ir.units import GIB, nbytes, seconds
from planner import compare, reshards, signatures
from planner.chunks import planned_chunks
from planner.frontends.model import Model
from planner.lower import lower, representatives
from planner.reasons import PARTS, advice, binds, largest_difference
from planner.search import evaluate_fixed
from planner.summary import metrics
from planner.words import parameters, pattern, placements, ways_as_lines
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


def explain(
    model: Model, cluster: Cluster, plan: Plan, why_not: Mapping[str, Any] | None = None, about: str | None = None, against: Plan | None = None
) -> Explanation:  # fmt: skip
    """What binds the plan, how its operators are cut, what each re-shard costs, and what faster links would give.

    `why_not`: how another layout compares. `about`: names of operators or parameters whose other signatures are judged. `against`: another plan, compared
    tensor by tensor. Raises PlanError when the plan does not belong to the model.
    """
    cost = CostModel(cluster)
    program = lower(model, plan, ranks=representatives(plan, cluster))
    timeline = simulate(program, cost, steps=2)
    found = metrics(model, cluster, plan, program, timeline, ledger(program, timeline, cluster=cluster))
    graph = planned_chunks(model.graph(plan.microbatch, plan.seq, plan.dtype), plan)
    found_reshards = reshards.reshards(program, cost)
    document: dict[str, Any] = {
        "layout": dict(plan.layout), "step_s": found["step_s"], "breakdown": found["breakdown"], "binds": binds(found), "peak_gib": found["peak_gib"],
        "fits": found["fits"], "comm": found["comm"], "placements": placements(graph, plan), "parameters": parameters(plan), "recompute": _reruns(plan),
        "reshards": [r.to_json() for r in found_reshards], "if": _what_if(cluster, program, found["step_s"]),
        "advice": list(advice(replace(plan, predicted=found), cluster)),
    }  # fmt: skip
    lines = _lines(document, found_reshards)
    if about:
        judged = signatures.signatures(model, cluster, plan, about)
        document["about"] = [s.to_json() for s in judged]
        lines += signatures.as_lines(judged)
    if against is not None:
        document["against"] = compare.against(replace(plan, predicted=found), against)
        lines += compare.as_lines(document["against"])
    if why_not:
        document["why_not"] = other = _why_not(model, cluster, plan, found, why_not)
        lines += ["", f"Why not {', '.join(f'{k}={v}' for k, v in why_not.items())}? {other['why']}"]
    return Explanation(document, "\n".join(lines))


def _reruns(plan: Plan) -> list[dict[str, Any]]:
    """What runs again in the backward, alike ones once: operators by the pattern of their names, and how many; whole layers together."""
    found = Counter("whole layers" if isinstance(what, int) else pattern(what) for what in plan.recompute)
    return [{"what": what, "count": count} for what, count in found.items()]


# ---- what would change it --------------------------------------------------------------------------------------------------------------------------------


def _what_if(cluster: Cluster, program: Program, step_s: float) -> list[dict[str, Any]]:
    """The step with every link twice as fast, and with half the latency."""
    faster = replace(cluster, links=tuple(replace(k, bytes_per_s=2 * k.bytes_per_s) for k in cluster.links), profile=_without_curves(cluster))
    sooner = replace(cluster, links=tuple(replace(k, latency_s=k.latency_s / 2) for k in cluster.links), profile=_without_curves(cluster))
    plain = replace(cluster, profile=_without_curves(cluster))
    base = simulate(program, CostModel(plain), steps=2).step_s
    out = []
    for what, changed in (("links twice as fast", faster), ("half the latency", sooner)):
        seconds = simulate(program, CostModel(changed), steps=2).step_s
        saved = max(0.0, 1.0 - seconds / base)  # what comes in faster crowds kernels a hair more where nothing was exposed
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


def _lines(document: Mapping[str, Any], moved: Sequence[reshards.Reshard]) -> list[str]:
    shape = document["layout"]
    lines = [
        "  ".join(f"{k}={v}" for k, v in shape.items()),
        f"step {seconds(document['step_s'])}, {document['peak_gib']:.2f} GiB, fits: {document['fits']}",
        f"what binds: {document['binds']}",
        *document["advice"],
        "",
    ]
    lines += [f"  {PARTS[k]:<34} {seconds(v):>10}  {v / document['step_s']:>6.1%}" for k, v in document["breakdown"].items()]
    lines += ways_as_lines(document["placements"], "")
    lines += ways_as_lines(document["parameters"], ", parameters")
    if document["recompute"]:
        lines += ["", "runs again in the backward: " + ", ".join(f"{row['what']} ({row['count']})" for row in document["recompute"])]
    if document["comm"]:
        lines += ["", "communication a step:"]
        lines += [
            f"  {c['axis']:<6} {c['kind']:<15} {c['count']:>5.6g} x, {nbytes(c['nbytes'])}, {seconds(c['time_s'])}, exposed {seconds(c['exposed_s'])}"
            for c in document["comm"]
        ]
    if moved:
        lines += ["", "re-shards of a step, the dearest first:", *reshards.as_lines(moved)]
    lines += [""] + [f"with {row['what']}: {seconds(row['step_s'])} ({row['saved']:.1%} less)" for row in document["if"]]
    return lines

"""Two plans of one model, tensor by tensor: where they place it otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ir.errors import PlanError
from ir.plan import Plan
from ir.sbp import NdSbp, format_nd
from ir.units import seconds
from planner.orders import orders_of
from planner.words import pattern


@dataclass(frozen=True, slots=True)
class Difference:
    """`what` (a rule, a value, a cotangent, a parameter's state, copy or gradient) of `count` of the `of` things that match `name`: `mine`, `theirs`."""

    what: str
    name: str
    count: int
    of: int
    mine: str
    theirs: str


def decide_alike(mine: Plan, theirs: Plan) -> bool:
    """Whether both do the same, whatever their schedules are called and however they were found."""
    return _bare(mine) == _bare(theirs) and orders_of(mine) == orders_of(theirs)


def _bare(plan: Plan) -> Plan:
    """The plan without what informs only, without the name of its schedule, and with sets in one order."""
    again, reboxed = tuple(sorted(plan.recompute, key=str)), tuple(sorted(plan.reboxed))
    return replace(plan.squeezed(), schedule="", orders=(), layout={}, predicted={}, recompute=again, reboxed=reboxed)


def differences(mine: Plan, theirs: Plan) -> tuple[Difference, ...]:
    """In the order of the model; equal layers are one. Raises PlanError where the plans are of different models."""
    if mine.model_fingerprint != theirs.model_fingerprint:
        raise PlanError(
            f"the plans are of different models: `{mine.model}` with fingerprint {mine.model_fingerprint}, `{theirs.model}` with {theirs.model_fingerprint}"
        )
    named: dict[tuple[str, str], dict[tuple[str, str], int]] = {}
    for what, name, a, b in _all(mine, theirs):
        pairs = named.setdefault((what, pattern(name)), {})
        pairs[a, b] = pairs.get((a, b), 0) + 1
    return tuple(Difference(what, name, count, sum(pairs.values()), a, b) for (what, name), pairs in named.items() for (a, b), count in pairs.items() if a != b)


def _all(mine: Plan, theirs: Plan) -> Iterable[tuple[str, str, str, str]]:
    """(what, name, mine, theirs) of everything that both place."""

    def both(what: str, a: Mapping[str, Any], b: Mapping[str, Any], parts: Sequence[str]) -> Iterable[tuple[str, str, str, str]]:
        for name in a:
            if name in b:
                for i, part in enumerate(parts):
                    yield f"{what}{part}", name, _nd(a[name][i], mine), _nd(b[name][i], theirs)

    yield from both("parameter's ", mine.params, theirs.params, ("state", "copy", "gradient"))
    for name, rules in mine.rules.items():
        if name in theirs.rules:
            yield "rule", name, _rules(rules, mine), _rules(theirs.rules[name], theirs)
    yield from both("", mine.hubs, theirs.hubs, ("value", "cotangent"))


def _nd(nd: NdSbp, plan: Plan) -> str:
    keep = [k for k, n in enumerate(plan.mesh_shape) if n > 1]
    return format_nd([nd[k] for k in keep], [plan.axes[k] for k in keep])


def _rules(rules: Sequence[Any], plan: Plan) -> str:
    return "[" + ", ".join(f"{axis}: {rule!r}" for axis, rule, n in zip(plan.axes, rules, plan.mesh_shape, strict=True) if n > 1) + "]"


def against(mine: Plan, theirs: Plan) -> dict[str, Any]:
    """The document of a comparison: layouts, predictions, differences."""
    rows = differences(mine, theirs)
    keys = [k for k in mine.layout if mine.layout.get(k) != theirs.layout.get(k)]
    out: dict[str, Any] = {
        "layout": {k: [mine.layout.get(k), theirs.layout.get(k)] for k in keys},
        "differences": [{"what": d.what, "name": d.name, "count": d.count, "of": d.of, "mine": d.mine, "theirs": d.theirs} for d in rows],
    }
    for key in ("step_s", "peak_gib", "bubble"):
        if key in mine.predicted and key in theirs.predicted:
            out[key] = [mine.predicted[key], theirs.predicted[key]]
    return out


def as_lines(document: Mapping[str, Any], most: int = 60) -> list[str]:
    """For people: the first differences, parameters and rules before values."""
    lines = ["", "against the other plan:"]
    if "step_s" in document:
        mine, theirs = document["step_s"]
        lines.append(f"  step {seconds(mine)} against {seconds(theirs)}" + (f", {theirs / mine - 1:+.1%} there" if mine else ""))
    if "peak_gib" in document:
        lines.append("  memory {:.2f} GiB against {:.2f} GiB".format(*document["peak_gib"]))
    lines += [f"  {k}: {a} against {b}" for k, (a, b) in document["layout"].items()]
    for d in document["differences"][:most]:
        part = "" if d["count"] == d["of"] else f" ({d['count']} of {d['of']})"
        lines.append(f"  {d['name']}{part}, {d['what']}: {d['mine']} against {d['theirs']}")
    if len(document["differences"]) > most:
        lines.append(f"  and {len(document['differences']) - most} more (--json has them all)")
    if not document["differences"]:
        lines.append("  every tensor and every operator is placed alike")
    return lines

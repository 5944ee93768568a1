"""Placements as people say them: column split, row split, vocabulary split, sequence split, repeated, ..."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ir.graph import Graph, Node
from ir.op import Rule
from ir.plan import ParamPlacement, Plan
from planner.facts import analyse, uneven_labels

SPLITS = {
    "b": "batch split", "s": "sequence split", "v": "vocabulary split", "g": "head split", "h": "width split", "e": "expert split", "t": "width split",
    "n": "width split", "p": "position split",
}  # fmt: skip
"""What people call a split of these labels of an operator's sentence."""

ZERO = {"BBP": "data parallel", "SBP": "ZeRO-1", "SBS": "ZeRO-2", "SSS": "ZeRO-3"}
"""(state, held, grad) on an axis along which the parameter's use is repeated."""


def rule_in_words(graph: Graph, node: Node, rule: Rule, is_vocabulary: bool = False) -> str:
    """A rule: batch split, column split, row split, head split, ... `is_vocabulary`: what it splits is the vocabulary, whatever the sentence calls it."""
    if rule.kind == "B":
        return "the same on every rank"
    if rule.kind == "B~P":
        return "the same on every rank, its cotangent passed on as a partial sum"
    if rule.kind == "linear":
        return "applied to partial sums"
    if is_vocabulary:
        return SPLITS["v"]
    if graph.op(node).is_contraction and rule.on in ("n", "k"):
        return "column split" if rule.on == "n" else "row split"
    return SPLITS.get(rule.on, f"{rule.on} split")


def pattern(name: str) -> str:
    """A name without its numbers, so that equal layers are one.

    >>> pattern("h.11.mlp.up.weight")
    'h.*.mlp.up.weight'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def placements(graph: Graph, plan: Plan) -> dict[str, dict[str, list[str]]]:
    """For every axis, the ways in which operators act on it, each with the nodes that do; numbered layers are written once, as `h.*`."""
    vocabulary = uneven_labels(graph, analyse(graph), frozenset({"v"}))[0]
    out: dict[str, dict[str, list[str]]] = {}
    for k, axis in active(plan):
        ways: dict[str, dict[str, None]] = {}
        for n in graph.nodes:
            rule = plan.rules[n.name][k]
            ways.setdefault(rule_in_words(graph, n, rule, rule.on in vocabulary.get(n.name, ())), {})[pattern(n.name)] = None
        out[axis] = {way: list(names) for way, names in ways.items()}
    return out


def parameters(plan: Plan) -> dict[str, dict[str, list[str]]]:
    """For every axis, where parameters lie, each way with the parameters that do."""
    out: dict[str, dict[str, list[str]]] = {}
    for k, axis in active(plan):
        ways: dict[str, dict[str, None]] = {}
        for name, place in plan.params.items():
            ways.setdefault(param_in_words(place, k, axis), {})[pattern(name)] = None
        out[axis] = {way: list(names) for way, names in ways.items()}
    return out


def param_in_words(place: ParamPlacement, k: int, axis: str) -> str:
    """Where a parameter's state, compute copy and gradient lie on the k-th axis; on `dp` as the level of ZeRO that it is.

    >>> from ir.sbp import B, P, S
    >>> param_in_words(ParamPlacement((S(0),), (B,), (P,)), 0, "dp"), param_in_words(ParamPlacement((S(1),), (S(1),), (S(1),)), 0, "tp")
    ('ZeRO-1: state S(0), copy B, gradient P', 'split: state S(1), copy S(1), gradient S(1)')
    """
    state, held, grad = (nd[k] for nd in place)
    known = ZERO.get(state.kind + held.kind + grad.kind, "") if axis == "dp" else "split" if held.is_split else "repeated"
    return (f"{known}: " if known else "") + f"state {state!r}, copy {held!r}, gradient {grad!r}"


def active(plan: Plan) -> Iterable[tuple[int, str]]:
    """(place, name) of every mesh axis of more than one rank."""
    return [(k, axis) for k, axis in enumerate(plan.axes) if plan.mesh_shape[k] > 1]


def ways_as_lines(told: Mapping[str, Mapping[str, Iterable[str]]], what: str) -> list[str]:
    lines = []
    for axis, ways in told.items():
        lines += ["", f"on axis {axis}{what}:"]
        lines += [f"  {way}: {', '.join(names)}" for way, names in ways.items()]
    return lines

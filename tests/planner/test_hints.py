"""Placements that the user asks for: what they mean, what contradicts them, what would be legal."""

from __future__ import annotations

import pytest

from ir.errors import InputError, PlanError
from ir.sbp import B, P, S
from planner.candidates import parse_fix
from planner.hints import Hint, hinted_space, parse_hint
from planner.placement import Placed
from planner.placement import search as place
from planner.search import plan
from simulator.clusters import load_cluster
from tests.models import SEQ, llama
from tests.planner.blocks import AlphaBeta, Llama, model

GRAPH = model(Llama(batch=4, seq=64, hidden=64, heads=8, groups=4, d=8, inner=128, vocab=100, layers=2))
AXES, MESH = ("dp", "tp"), (2, 4)
PRICES = AlphaBeta({"dp": 2, "tp": 4})


def placed(*hints: Hint) -> Placed:
    return place(GRAPH, AXES, MESH, PRICES, num_microbatches=2, space=hinted_space(GRAPH, AXES, MESH, hints, {}))


@pytest.mark.parametrize("text", ["h.*.up.w=[tp: S(0)]", "head.w@state=[dp: S(1), tp: B]", "d.h.0.norm1=[tp: P]", "h.0.q.w@grad=[dp: P]"])
def test_prints_as_it_is_written(text: str) -> None:
    name, _, value = text.partition("=")
    hint = parse_hint(name, value)
    assert repr(hint) == text
    assert parse_hint(*repr(hint).split("=", 1)) == hint


def test_each_part_is_kept_wherever_the_pattern_matches() -> None:
    free = placed()
    found = placed(
        parse_hint("h.*.up.w", "[tp: S(1)]"), parse_hint("h.0.up", "[tp: B]"), parse_hint("d.h.1.norm1", "[tp: P]"), parse_hint("head.w@state", "[dp: B]")
    )
    assert {found.params[f"h.{i}.up.w"].held[1] for i in (0, 1)} == {S(1)}
    assert found.hubs["h.0.up"].value[1] == B
    assert found.hubs["h.1.norm1"].cotangent[1] == P
    assert found.params["head.w"].state[0] == B
    assert found.cost_s > free.cost_s
    kept = [
        parse_hint(name + part, f"[dp: {nd[0]!r}, tp: {nd[1]!r}]")
        for name, where in free.params.items()
        for part, nd in zip(("@state", "@held", "@grad"), where, strict=True)
    ]
    assert placed(*kept).cost_s == pytest.approx(free.cost_s, rel=1e-12), "what the search chose may be asked for"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("head.w", "[tp: S(0)]", r"`head\.w` of shape \(100, 64\) cannot be S\(0\) on axis tp = 8: 100 = 8 x 12 \+ 4; legal there are B, S\(1\)"),
        ("h.0.up.w", "[tp: S(2)]", r"cannot be S\(2\) on axis tp = 8: it has 2 dims; legal there are B, S\(0\), S\(1\)"),
        ("h.0.up.w", "[tp: P]", r"cannot be P on axis tp = 8: it is no such part; legal there are B, "),
    ],
)
def test_what_its_size_forbids_is_said_with_what_it_allows(name: str, value: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        hinted_space(GRAPH, ("tp",), (8,), [parse_hint(name, value)], {})


def test_a_dim_that_may_be_uneven_and_an_axis_of_one_rank_are_no_contradiction() -> None:
    uneven = {"head.w": frozenset({0})}
    assert hinted_space(GRAPH, ("tp",), (8,), [parse_hint("head.w", "[tp: S(0)]")], uneven).params
    assert hinted_space(GRAPH, ("tp",), (1,), [parse_hint("head.w", "[tp: S(0)]")], {}).params


def test_two_that_contradict_each_other_are_both_named() -> None:
    with pytest.raises(
        PlanError, match=r"`h\.0\.up`.*--fix h\.\*\.up=\[tp: B\] and --fix h\.0\.up=\[tp: S\(2\)\] leave nothing.*legal without it: dp: .*; tp: \(B, B\)"
    ):
        placed(parse_hint("h.*.up", "[tp: B]"), parse_hint("h.0.up", "[tp: S(2)]"))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("h.0.upp", "[tp: B]", "has no parameter or value `h.0.upp`; near are h.0.up"),
        ("h.0.up@grad", "[tp: B]", "has no parameter `h.0.up`; near are h.0.up.w"),
        ("h.0.up.w@half", "[tp: B]", "`@half` is no part of a parameter; write @state, @held or @grad"),
        ("h.0.up", "[tq: B]", "the mesh has no axis `tq`; its axes are dp, "),
        ("h.0.up", "[tp: X]", "X` is no placement"),
        ("h.0.up", "[]", "name each axis once"),
        ("h.0.up", "[tp: B, tp: P]", "name each axis once"),
    ],
)
def test_what_cannot_be_meant_is_named(name: str, value: str, sentence: str) -> None:
    with pytest.raises(InputError) as told:
        parse_fix({name: value}, 8, 16, GRAPH)
    assert sentence in str(told.value)


def test_the_whole_search_keeps_them_and_passes_over_meshes_on_which_they_are_illegal() -> None:
    cluster = load_cluster("1x4xH100-SXM")
    whole = llama(num_layers=2, hidden=512, num_heads=8, num_kv_heads=8, head_dim=64, mlp_hidden=1026)
    asked = {"h.*.mlp.up.weight": "[tp: S(1)]"}
    assert plan(whole, cluster, batch=8, seq=SEQ, top=1, fix=asked).plans[0].layout["tp"] in (1, 2), "1026 does not divide by 4"
    best = plan(whole, cluster, batch=8, seq=SEQ, top=1, fix={**asked, "tp": 2}).plans[0]
    k = best.axes.index("tp")
    assert all(where.held[k] == S(1) for name, where in best.params.items() if name.endswith("mlp.up.weight"))
    with pytest.raises(PlanError, match=r"cannot be S\(1\) on axis tp = 4: 1026 = 4 x 256 \+ 2; legal there are B, S\(0\)"):
        plan(whole, cluster, batch=8, seq=SEQ, top=1, fix={"tp": 4, "h.*.mlp.up.weight": "[tp: S(1)]"})

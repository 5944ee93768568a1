"""Reasons: what binds, how operators are cut, what would change it, why not another layout."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ir.errors import InputError, PlanError
from ir.op import Rule
from ir.plan import Plan
from planner.compare import decide_alike, differences
from planner.explain import Explanation, explain
from planner.lower import lower, representatives
from planner.orders import orders_of, rows_of
from planner.reasons import PARTS, binds, largest_difference, why
from planner.reshards import reshards
from planner.search import plan as search
from planner.signatures import signatures
from planner.words import placements, rule_in_words
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from tests.models import SEQ, gpt, llama

MODEL = llama(num_layers=2, hidden=512, num_heads=8, num_kv_heads=8, head_dim=64, mlp_hidden=2048)
CLUSTER = load_cluster("1x4xH100-SXM")


@pytest.fixture(scope="module")
def best() -> Plan:
    return search(MODEL, CLUSTER, batch=8, seq=SEQ, top=1, fix={"dp": 2, "tp": 2, "sp": "false"}).plans[0]


@pytest.fixture(scope="module")
def told(best: Plan) -> Explanation:
    return explain(MODEL, CLUSTER, best)


def test_the_explanation_is_the_prediction_again(best: Plan, told: Explanation) -> None:
    found = told.document
    assert found["step_s"] == pytest.approx(best.predicted["step_s"])
    assert found["breakdown"] == best.predicted["breakdown"]
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, sort_keys=True))
    keys = {"layout", "step_s", "breakdown", "binds", "peak_gib", "fits", "comm", "placements", "parameters", "recompute", "reshards", "if", "advice"}
    assert set(found) == keys


def test_people_read_the_same(best: Plan, told: Explanation) -> None:
    text = str(told)
    assert f"what binds: {told.document['binds']}" in text
    heads = ("on axis dp:", "batch split", "re-shards of a step", "communication a step:", "with links twice as fast:", "with half the latency:")
    for words in (*PARTS.values(), *heads):
        assert words in text, words


def test_faster_links_never_cost(told: Explanation) -> None:
    assert [row["what"] for row in told.document["if"]] == ["links twice as fast", "half the latency"]
    for row in told.document["if"]:
        assert 0.0 <= row["saved"] < 1.0
        assert row["step_s"] == pytest.approx(told.document["step_s"] * (1 - row["saved"]))


def test_rules_in_words() -> None:
    graph = MODEL.graph(8, 1024, "bfloat16")
    wide = search(MODEL, CLUSTER, batch=8, seq=1024, top=1, fix={"tp": 4, "sp": "false"}).plans[0]
    ways = placements(graph, wide)
    assert list(ways) == ["tp"]
    assert "h.*.mlp.up" in ways["tp"]["column split"]
    assert "h.*.mlp.down" in ways["tp"]["row split"]
    assert "h.*.attn.attend" in ways["tp"]["head split"]
    cut = replace(wide, rules={**wide.rules, "lm_head": (Rule("B"), Rule("split", "n"))})
    assert placements(graph, cut)["tp"]["vocabulary split"] == ["lm_head"], "the loss calls the head's columns the vocabulary"
    assert {n for names in ways["tp"].values() for n in names} >= {"h.*.ln_1", "loss"}
    product = graph.node["h.1.mlp.up"]
    assert rule_in_words(graph, product, wide.rules["h.1.mlp.up"][1]) == "column split"


@pytest.mark.parametrize(
    ("fix", "sentence"),
    [
        ({"dp": 1, "tp": 1, "pp": 2}, "It is not legal: --fix dp=1 x tp=1 x pp=2 asks for 2 devices, the cluster has 4"),
        ({"pp": 4}, "It is not legal: --fix pp=4,vpp=1: .* has 2 blocks, so pp x vpp can be 1 to 2"),
        ({"tp": 4}, r"It (takes|is faster here)"),
    ],
    ids=str,
)
def test_why_not_another_layout(best: Plan, fix: dict[str, Any], sentence: str) -> None:
    found = explain(MODEL, CLUSTER, best, why_not=fix)
    other = found.document["why_not"]
    assert str(found).splitlines()[-1] == f"Why not {', '.join(f'{k}={v}' for k, v in fix.items())}? {other['why']}"
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(other["why"])
    if other["legal"]:
        assert other["layout"]["tp"] == 4
        assert (other["predicted"]["step_s"] >= best.predicted["step_s"]) == other["why"].startswith("It takes")


def test_what_does_not_fit_is_said_in_gib(best: Plan) -> None:
    tiny = replace(CLUSTER, devices=tuple(replace(d, usable_bytes=2**20) for d in CLUSTER.devices))
    assert "GiB of 0.0 GiB" in explain(MODEL, tiny, best, why_not={"tp": 4}).document["why_not"]["why"]


def predicted(step_s: float, **parts: float) -> Plan:
    breakdown = {**dict.fromkeys(PARTS, 0.0), **parts}
    plan = search(gpt(num_layers=1), load_cluster("1x1xH100-SXM"), batch=1, seq=SEQ, top=1).plans[0]
    return replace(plan, predicted={"step_s": step_s, "breakdown": breakdown, "peak_gib": 1.25})


def test_reasons_in_a_ranked_list() -> None:
    first, second = predicted(1.0, compute_s=0.7, bubble_s=0.3), predicted(1.5, compute_s=0.75, exposed_comm_s=0.75)
    assert binds(first.predicted) == "compute: 70% of the step"
    assert largest_difference(second.predicted, first.predicted) == "750 ms more communication that nothing hides"
    assert why(first, [first]) == "compute: 70% of the step; 1.25 GiB"
    assert why(first, [first, second]) == "compute: 70% of the step; 1.25 GiB; the next is 50.0% slower: 750 ms more communication that nothing hides"
    assert why(second, [first, second]).endswith("; 50.0% slower than the first: 750 ms more communication that nothing hides")


def test_plans_decide_alike_whatever_their_schedules_are_called() -> None:
    one = search(MODEL, CLUSTER, batch=8, seq=SEQ, top=1, fix={"pp": 2, "dp": 2, "mbs": 1, "schedule": "1f1b"}).plans[0]
    spelt = replace(one, schedule="table", orders=rows_of(orders_of(one)), layout={}, predicted={})
    assert decide_alike(one, spelt)
    assert not decide_alike(one, replace(one, schedule="gpipe"))
    assert not decide_alike(one, replace(one, recompute=(1,)))
    assert not decide_alike(one, replace(one, params=dict(list(one.params.items())[1:])))


def test_a_plan_of_another_model_is_refused(best: Plan) -> None:
    with pytest.raises(PlanError):
        explain(gpt(), CLUSTER, best)


def test_reshards_are_the_communication_of_the_step_tensor_by_tensor() -> None:
    cost = CostModel(CLUSTER)
    sharded = search(MODEL, CLUSTER, batch=8, seq=SEQ, top=1, fix={"dp": 2, "tp": 2, "zero": 2, "sp": "true"}).plans[0]
    program = lower(MODEL, sharded, ranks=representatives(sharded, CLUSTER))
    rows = reshards(program, cost)
    timeline = simulate(program, cost, steps=2)
    for row in timeline.communication(program):
        mine = [r for r in rows if (r.axis, r.kind) == (row.axis, row.kind)]
        assert sum(r.count for r in mine) == row.count
        assert sum(r.count * r.nbytes for r in mine) == row.nbytes
        assert sum(r.time_s for r in mine) <= row.time_s * (1 + 1e-9), "alone it takes no longer than beside others"
    assert {r.during for r in rows} == {"forward", "backward", "weight gradient", "once a step"}
    assert any(r.tensor.startswith("h.*.") for r in rows)
    assert [r.time_s for r in rows] == sorted((r.time_s for r in rows), reverse=True)


def test_every_signature_is_chosen_illegal_or_dearer(best: Plan) -> None:
    odd = llama(num_layers=2, hidden=512, num_heads=8, num_kv_heads=8, head_dim=64, mlp_hidden=2049)
    plan = search(odd, CLUSTER, batch=8, seq=SEQ, top=1, fix={"dp": 1, "tp": 4, "sp": "false"}).plans[0]
    rows = {s.signature: s for s in signatures(odd, CLUSTER, plan, "h.*.mlp.up")}
    assert "n = 2049 does not divide by tp = 4" in rows["split n"].illegal
    assert "the layout leaves it no room" in rows["split b"].illegal
    legal = [s for s in rows.values() if not s.illegal]
    assert min(s.dearer_s for s in legal) == 0.0
    assert sum(s.chosen for s in rows.values()) == 1
    weight = {s.signature: s for s in signatures(odd, CLUSTER, plan, "h.0.mlp.up.weight")}
    assert "dim 1 = 2049 does not divide by tp = 4" in weight["S(1)"].illegal
    assert weight["S(0)"].name == "h.*.mlp.up.weight"
    with pytest.raises(InputError, match=r"no operator or parameter `h\.9\.nothing`"):
        signatures(odd, CLUSTER, plan, "h.9.nothing")
    text = str(explain(odd, CLUSTER, plan, about="h.*.mlp.up"))
    assert "h.*.mlp.up on axis tp:" in text
    assert "dearer, " in text


def test_two_plans_tensor_by_tensor(best: Plan) -> None:
    assert differences(best, best) == ()
    other = search(MODEL, CLUSTER, batch=8, seq=SEQ, top=1, fix={"dp": 2, "tp": 2, "sp": "false", "h.0.mlp.up": "[tp: B]"}).plans[0]
    found = explain(MODEL, CLUSTER, best, against=other)
    rows = {(d["what"], d["name"]): d for d in found.document["against"]["differences"]}
    assert rows["value", "h.*.mlp.up"]["count"] == 1
    assert rows["value", "h.*.mlp.up"]["of"] == 2
    assert rows["value", "h.*.mlp.up"]["theirs"].endswith("tp: B]")
    assert "against the other plan:" in str(found)
    assert "(1 of 2)" in str(found)
    with pytest.raises(PlanError, match="plans are of different models"):
        explain(MODEL, CLUSTER, best, against=replace(other, model_fingerprint="0"))

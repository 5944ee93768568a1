"""Schedules in the free search: found where they win, as all candidates one by one say, and written into the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from ir.plan import Plan
from planner.candidates import candidates
from planner.check import check_plan
from planner.evaluate import Evaluated, Evaluator
from planner.frontends import load
from planner.lower import lower
from planner.optimizers import OPTIMIZERS
from planner.search import Result, _evaluator, plan
from simulator.clusters import load_cluster
from tests.models import llama

MODEL = llama(num_layers=6, hidden=256, head_dim=32, mlp_hidden=768)
SEQ, BATCH = 256, 8
CLUSTER = load_cluster("4x1xH100-SXM@eth25")
"""One GPU a node on a slow net, so that a pipeline is what pays."""


@cache
def found(top: int = 4, tp: int = 0) -> Result:
    return plan(MODEL, CLUSTER, batch=BATCH, seq=SEQ, dtype="bfloat16", top=top, budget_s=600.0, fix={"tp": tp} if tp else {})


def evaluator() -> Evaluator:
    return _evaluator(MODEL, CLUSTER, BATCH, SEQ, "bfloat16", OPTIMIZERS["adamw"], {}, 0.95)


@cache
def every() -> tuple[tuple[Evaluated, float], ...]:
    """The best drafts of all candidates, simulated: the slow twin of the search."""
    one = evaluator()
    drafts = sorted((one.evaluate(c) for c in candidates({}, 4, BATCH, one.bounds.graph(1))), key=lambda e: e.estimate_s)
    return tuple((e, one.simulate(e).predicted["step_s"]) for e in drafts[:12])


def test_it_finds_what_all_candidates_one_by_one_say() -> None:
    assert found().plans[0].predicted["step_s"] <= min(step_s for _, step_s in every()) * (1 + 1e-9)


def test_drafts_rank_as_simulations_do() -> None:
    for e, step_s in every():
        assert e.floor_s <= step_s * 1.005, e.candidate
        assert e.estimate_s == pytest.approx(step_s, rel=0.06), e.candidate


def test_what_was_left_out_is_no_better_than_the_gap_says() -> None:
    result = found()
    assert result.plans[0].predicted["step_s"] * (1 - result.gap) <= min(step_s for _, step_s in every()) * (1 + 1e-9)
    assert result.searched >= len(list(candidates({}, 4, BATCH, MODEL.graph(1, SEQ, "bfloat16"))))
    assert result.evaluated + result.pruned <= result.searched


def test_schedules_that_hold_weight_gradients_back_win_where_a_pipeline_pays() -> None:
    """With two nodes a stage and few microbatches, what is not 1F1B is faster, and 1F1B is told beside it."""
    plans = found(tp=1).plans
    assert plans[0].schedule != "1f1b"
    times = {p.schedule: p.predicted["step_s"] for p in reversed(plans)}
    assert times[plans[0].schedule] == min(times.values())
    assert all(p.schedule != "1f1b" or p.predicted["step_s"] > plans[0].predicted["step_s"] for p in plans)


def test_an_order_of_its_own_is_in_the_plan() -> None:
    one = evaluator()
    c = next(c for c in candidates({"pp": 4, "dp": 1, "mbs": 1, "schedule": "auto", "recompute": "none"}, 4, BATCH, one.bounds.graph(1)))
    made = one.simulate(one.evaluate(c))
    assert made.schedule == "auto"
    assert len(made.orders) == 4
    check_plan(MODEL.graph(made.microbatch, SEQ, "bfloat16"), made)
    assert lower(MODEL, Plan.from_json(made.to_json())).orders


@pytest.mark.parametrize("stages", ["1,2,2,1", "Et|tt|tt|tL"])
def test_stages_are_as_the_user_lays_them_out(stages: str) -> None:
    result = plan(MODEL, CLUSTER, batch=BATCH, seq=SEQ, dtype="bfloat16", top=2, stages=stages, fix={"recompute": "none"})
    for p in result.plans:
        assert [(s.first, s.last) for s in p.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]
        assert p.layout["pp"] == 4


def test_where_1f1b_keeps_too_much_schedules_that_keep_less_are_tried() -> None:
    """Four ranks with too little memory for what 1F1B keeps at least on the first of them, and enough for a V."""
    model, seq = llama(num_layers=10, hidden=256, head_dim=32, mlp_hidden=768), 2048
    fix = {"pp": 4, "tp": 1, "dp": 1, "mbs": 1, "recompute": "none"}
    one = _evaluator(model, CLUSTER, BATCH, seq, "bfloat16", OPTIMIZERS["adamw"], fix, 0.95)
    plain, *others = candidates(one.fix, 4, BATCH, one.bounds.graph(1))
    least = min(one.evaluate_at(c, 0.0).memory.peak_bytes for c in others if c.schedule in ("v-min", "v-half"))
    assert least < one.footprint.least_bytes(plain)
    size = int(0.5 * (one.footprint.least_bytes(plain) + least) / 0.95)
    cluster = replace(CLUSTER, devices=tuple(replace(d, memory_bytes=size, usable_bytes=size) for d in CLUSTER.devices))
    result = plan(model, cluster, batch=BATCH, seq=seq, dtype="bfloat16", top=1, fix=fix, budget_s=600.0)
    assert result.plans[0].schedule in ("v-min", "v-half")


@pytest.mark.parametrize(("seq", "tried"), [(32768, {"seq1f1b"}), (1024, set[str]())])
def test_long_sequences_are_tried_in_pieces_where_ranks_wait(seq: int, tried: set[str]) -> None:
    """Of 2,048 tokens at least, so that each fills a device."""
    fix = {"pp": 4, "dp": 1, "tp": 1, "cp": 1, "mbs": 1}
    result = plan(load("llama-3-8b", num_layers=8), load_cluster("1x4xH100-SXM"), batch=8, seq=seq, top=3, fix=fix, budget_s=600.0)
    assert {p.schedule for p in result.plans} & {"seq1f1b"} == tried

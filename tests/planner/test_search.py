"""The search: deterministic, honest about what it left out, and the same in whatever order things go wrong."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ir.cluster import Cluster
from ir.errors import DoesNotFit, PlanError
from planner.bounds import Bounds
from planner.candidates import Candidate, candidates
from planner.check import check_plan
from planner.compare import decide_alike
from planner.evaluate import Evaluator
from planner.lower import lower, representatives
from planner.optimizers import OPTIMIZERS
from planner.search import PATIENCE, RISK, STUBBORN, Result, _by_worth, evaluate_fixed, plan
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.memory import ledger
from tests.models import SEQ, gpt, llama

MODEL = llama(num_layers=2)
BATCH = 8


def four() -> Cluster:
    return load_cluster("1x4xH100-SXM")


def small(usable_bytes: float) -> Cluster:
    """Four devices with so much memory."""
    cluster = four()
    return replace(cluster, devices=tuple(replace(d, memory_bytes=int(usable_bytes), usable_bytes=int(usable_bytes)) for d in cluster.devices))


def search(cluster: Cluster | None = None, **more: Any) -> Result:
    return plan(MODEL, cluster or four(), **{"batch": BATCH, "seq": SEQ, "dtype": "float32", **more})


@cache
def found() -> Result:
    return search()


def evaluator(cluster: Cluster) -> Evaluator:
    return Evaluator(Bounds(MODEL, SEQ, "float32", CostModel(cluster)), cluster, BATCH, OPTIMIZERS["adamw"], {}, 0.95)


def test_the_plans_are_legal_and_predicted_as_the_whole_is_simulated() -> None:
    for p in found().plans:
        check_plan(MODEL.graph(p.microbatch, SEQ, "float32"), p)
        whole = lower(MODEL, p)
        assert simulate(whole, CostModel(four()), steps=2).step_s == pytest.approx(p.predicted["step_s"], rel=1e-9)
        assert ledger(whole).peak_bytes == pytest.approx(p.predicted["peak_gib"] * 2**30)


def test_best_first_with_rank_and_reason() -> None:
    plans = found().plans
    assert len(plans) == 5
    assert [p.predicted["rank"] for p in plans] == [1, 2, 3, 4, 5]
    times = [p.predicted["step_s"] for p in plans]
    assert times == sorted(times)
    assert "the next is" in plans[0].predicted["why"]
    assert all("slower than the first" in p.predicted["why"] for p in plans[1:])


def test_every_candidate_is_accounted_for() -> None:
    result = found()
    assert result.searched >= len(list(candidates({}, 4, BATCH, MODEL.graph(1, SEQ, "float32"))))
    assert result.evaluated + result.pruned <= result.searched
    assert result.optimal == (result.gap == 0.0)
    assert 0.0 <= result.gap < 1.0


def test_nothing_that_was_left_out_is_better_than_the_gap_says() -> None:
    """The slow twin: every candidate evaluated and simulated."""
    every = evaluator(four())
    times = [every.simulate(every.evaluate(c)).predicted["step_s"] for c in candidates({}, 4, BATCH, MODEL.graph(1, SEQ, "float32")) if c.recompute == "none"]
    best_s = found().plans[0].predicted["step_s"]
    assert best_s * (1 - found().gap) <= min(times) * (1 + 1e-9)
    assert best_s <= 1.1 * min(times)


def test_no_estimate_is_below_its_bound() -> None:
    for model in (MODEL, gpt(num_layers=2)):
        cluster = four()
        every = replace(evaluator(cluster), bounds=Bounds(model, SEQ, "float32", CostModel(cluster)))
        for c in list(candidates({}, 4, BATCH, every.bounds.graph(1)))[::5]:
            assert every.bounds.lower_bound_s(c) <= every.evaluate(c).estimate_s * (1 + 1e-9), c


SCRIPT = """
import json, sys
from planner.search import plan
from simulator.clusters import load_cluster
from tests.models import SEQ, llama
found = plan(llama(num_layers=2), load_cluster("1x4xH100-SXM"), batch=8, seq=SEQ, dtype="float32", top=2, fix={"pp": 2})
print(json.dumps([p.to_json() for p in found.plans], sort_keys=True))
"""


def test_the_same_bytes_whatever_the_hash_seed() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        for seed in ("1", "2")
    ]
    assert len(runs[0].stdout) > 1000
    assert runs[0].stdout == runs[1].stdout


def test_an_interrupt_keeps_what_was_found() -> None:
    result = search(progress=interrupt_after(3))
    assert result.interrupted
    assert result.evaluated == 3
    assert result.plans[0].predicted["step_s"] > 0
    assert not result.optimal


def interrupt_after(num_done: int) -> Any:
    calls = []

    def progress(what: str, done: int, of: int) -> None:
        calls.append(what)
        if len(calls) > num_done:
            raise KeyboardInterrupt

    return progress


def test_an_interrupt_before_anything_was_found_goes_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        search(progress=interrupt_after(0))


def test_time_that_runs_out_leaves_the_best_so_far() -> None:
    result = search(budget_s=0.0)
    assert (result.evaluated, len(result.plans), result.interrupted) == (1, 1, False)
    assert not result.optimal
    assert result.gap > 0


def test_the_budget_holds_for_the_simulations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that runs out while the best are simulated leaves those that are done."""
    clock = [0.0]
    monkeypatch.setattr("planner.search.time.perf_counter", lambda: clock[0])
    simulate_one = Evaluator.simulate

    def slowly(self: Evaluator, e: Any) -> Any:
        clock[0] += 20.0
        return simulate_one(self, e)

    monkeypatch.setattr(Evaluator, "simulate", slowly)
    result = search(budget_s=30.0)
    assert len(result.plans) == 2
    assert result.evaluated > 2


def test_what_does_not_fit_says_what_is_missing_and_what_would_help() -> None:
    message = r"does not fit on 4 x .*: 9\.28 KiB may be filled .*KiB are missing\. Nearest: dp\d.*KiB; .*; .*\. Ways out: .*such devices at the very least"
    with pytest.raises(DoesNotFit, match=message) as caught:
        search(small(10_000), fix={"pp": 1})
    assert [p.predicted["fits"] for p in caught.value.nearest] == ["no"] * 3


def test_ways_out_are_ways_out() -> None:
    """Each change that is offered makes it fit."""
    peak = min(p.predicted["peak_gib"] for p in search(fix={"dp": 4, "zero": 0, "recompute": "none"}, top=5).plans) * 2**30
    with pytest.raises(DoesNotFit) as caught:
        search(small(1.05 * peak), fix={"dp": 4, "zero": 0, "recompute": "none"}, memory_fraction=0.9)
    ways = caught.value.ways_out
    assert len(ways) == 3
    assert any(w.startswith("leave zero=0 open (dp4") for w in ways)
    assert search(small(1.05 * peak), fix={"dp": 4, "recompute": "none"}, memory_fraction=0.9).plans


def test_a_search_that_finds_no_room_tries_the_smallest_before_all_others() -> None:
    """Where nothing that promises speed fits, something that fits is found without trying all."""
    smallest = min(evaluator(four()).evaluate(c).memory.peak_bytes for c in candidates({}, 4, BATCH, MODEL.graph(1, SEQ, "float32")))
    result = search(small(1.1 * smallest), budget_s=0.0)
    assert result.plans
    assert result.evaluated <= PATIENCE + 3


def test_little_memory_is_kept_to() -> None:
    most = found().plans[0].predicted["peak_gib"] * 2**30
    result = search(small(0.9 * most))
    assert all(p.predicted["peak_gib"] * 2**30 <= 0.95 * 0.9 * most for p in result.plans)
    assert result.plans[0].predicted["step_s"] >= found().plans[0].predicted["step_s"] * (1 - 1e-9)


def test_the_fraction_of_the_memory_is_kept_to() -> None:
    usable = four().devices[0].usable_bytes
    most = found().plans[0].predicted["peak_gib"] * 2**30
    result = search(memory_fraction=0.9 * most / usable)
    assert all(p.predicted["peak_gib"] * 2**30 <= 0.9 * most for p in result.plans)


def test_memory_that_a_price_leaves_over_is_filled_layer_by_layer() -> None:
    model, c = llama(num_layers=8, hidden=256, head_dim=32, mlp_hidden=1024), Candidate(4, 1, 1, 8, 2, "1f1b", "selective")

    def asked(usable_bytes: float) -> Evaluator:
        cluster = small(usable_bytes)
        return Evaluator(Bounds(model, 64, "bfloat16", CostModel(cluster)), cluster, 64, OPTIMIZERS["adamw"], {}, 0.95)

    limit = 0.55 * asked(1e12).evaluate_at(c, 0.0).memory.peak_bytes
    tight = asked(limit / 0.95)
    e = tight.evaluate(c)
    plan = tight.simulate(e)
    filled = tight.filled(e, plan)
    check_plan(model.graph(filled.microbatch, 64, "bfloat16"), filled)
    assert plan.predicted["peak_gib"] * 2**30 < 0.95 * limit
    assert 0.96 * limit < filled.predicted["peak_gib"] * 2**30 <= limit
    assert filled.predicted["step_s"] < 0.97 * plan.predicted["step_s"]
    assert tight.filled(replace(e, price=0.0), plan) is plan


def test_where_no_placement_is_small_enough_to_be_filled_up_the_plan_stays() -> None:
    most = found().plans[0].predicted["peak_gib"] * 2**30
    assert search(small(0.7 * most), fix={"pp": 1, "mbs": 8}).plans


def test_what_decides_the_same_is_told_once() -> None:
    """Nothing run again, and what a price of memory leaves to run again, may come to the same plan."""
    most = found().plans[0].predicted["peak_gib"] * 2**30
    plans = search(small(1.5 * most), fix={"pp": 1, "tp": 2, "mbs": 4}).plans
    assert [p.layout["recompute"] for p in plans] == ["none", "full"]
    assert not any(decide_alike(a, b) for a, b in itertools.combinations(plans, 2))


def test_a_plan_that_fits_is_told_before_one_that_is_tight_and_hardly_faster() -> None:
    most = found().plans[0].predicted["peak_gib"] * 2**30
    first, second = search(small(most), memory_fraction=1.0, fix={"dp": 4, "mbs": 2}, top=2).plans
    assert (first.predicted["fits"], second.predicted["fits"]) == ("yes", "tight")
    assert second.predicted["step_s"] < first.predicted["step_s"] < second.predicted["step_s"] * (1 + RISK)
    assert first.predicted["why"].endswith("faster, but its memory is tight")
    faster = replace(second, predicted={**second.predicted, "step_s": 0.99 * first.predicted["step_s"] / (1 + RISK)})
    assert sorted((first, second, faster), key=_by_worth) == [faster, first, second]


@pytest.mark.parametrize(
    "fix", [{"tp": 2}, {"pp": 2, "schedule": "gpipe"}, {"dp": 4, "zero": 3}, {"tp": 4, "sp": "true"}, {"recompute": "full", "mbs": 2}], ids=str
)
def test_what_is_fixed_stays(fix: dict[str, Any]) -> None:
    for p in search(fix=fix, top=2).plans:
        assert {k: p.layout[k] for k in fix} == {k: True if v == "true" else v for k, v in fix.items()}


def test_patience_ends_the_search() -> None:
    result = search(batch=64, top=1)
    assert result.evaluated < result.searched
    assert result.evaluated >= min(STUBBORN, result.searched - result.pruned)


def test_questions_without_an_answer() -> None:
    with pytest.raises(PlanError, match="optimizer `lion` is not known; known are adamw, sgd"):
        search(optimizer="lion")
    with pytest.raises(PlanError, match="have no rate for float16; they have float32"):
        plan(MODEL, replace(four(), devices=tuple(replace(d, flops_per_s={"float32": 1e12}) for d in four().devices)), batch=8, seq=SEQ, dtype="float16")
    with pytest.raises(PlanError, match=r"no layout of .* uses all 4 devices with batch 1 and --fix tp=1,pp=1"):
        search(batch=1, fix={"tp": 1, "pp": 1})
    with pytest.raises(PlanError, match="top is 0"):
        search(top=0)


def test_another_layout_of_the_same_question() -> None:
    best = found().plans[0]
    other = evaluate_fixed(MODEL, four(), best, {"tp": 2, "pp": 2})
    assert (other.layout["tp"], other.layout["pp"], other.batch, other.dtype) == (2, 2, BATCH, "float32")
    assert other.predicted["step_s"] >= best.predicted["step_s"]
    with pytest.raises(PlanError, match=r"no layout keeps .* on 4 devices with batch 1"):
        evaluate_fixed(MODEL, four(), replace(best, batch=1), {"tp": 1, "pp": 2})


def test_devices_that_share_cores_are_simulated_all(local_document: Any) -> None:
    best = found().plans[0]
    assert representatives(best, four()) == tuple(s.ranks[0] for s in best.stages)
    assert representatives(best, Cluster.from_json(local_document)) == tuple(range(4))

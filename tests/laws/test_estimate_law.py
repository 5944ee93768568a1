"""The estimate is never more than the simulation, and a few ranks simulated for all end when the whole does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from ir.plan import Plan
from ir.program import Program
from planner.frontends.model import Model
from planner.lower import lower, representatives
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.estimate import estimate
from tests.models import BATCH, SEQ, gpt, llama
from tests.plans import Layout, plan_for

COSTS = {name: CostModel(load_cluster(name)) for name in ("1x8xH100-SXM", "2x4xH100-SXM@ib400")}
LAYOUTS = [
    Layout(8), Layout(1, 4), Layout(1, 1, 4, 4), Layout(2, 2, 2, 2), Layout(2, 1, 4, 4, zero=1), Layout(1, 2, 4, 8, schedule="gpipe", recompute=True),
    Layout(4, 2, 1, 2, zero=3), Layout(2, 1, 1, 4, zero=3), Layout(1, 2, 2, 2, sp=True), Layout(1, 1, 2, 8, schedule="gpipe"),
    Layout(2, 2, 2, 4, schedule="dualpipe"),
]  # fmt: skip
FAMILIES = {"gpt": gpt(), "llama": llama(), "wide": llama(vocab=6000, hidden=64, head_dim=8)}
UNCLIPPED = {"max_norm": 0.0}


@cache
def planned(family: str, want: Layout) -> Plan:
    return plan_for(FAMILIES[family], want, batch=BATCH, seq=SEQ)


@cache
def whole(family: str, want: Layout) -> Program:
    return lower(FAMILIES[family], planned(family, want))


CASES = [(family, want) for want in LAYOUTS for family in (("gpt", "llama") if want.pp > 1 or want.zero is None else ("llama", "wide"))]


@pytest.mark.parametrize("machine", COSTS)
@pytest.mark.parametrize(("family", "want"), CASES, ids=str)
def test_the_estimate_is_a_bound_and_a_near_one(family: str, want: Layout, machine: str) -> None:
    told, happens = estimate(whole(family, want), COSTS[machine]), simulate(whole(family, want), COSTS[machine], steps=2).step_s
    assert 0.7 * happens <= told <= happens * (1 + 1e-9)


@pytest.mark.parametrize("cuts", [(1, 6), (5, 6)], ids=str)
@pytest.mark.parametrize("clipped", [True, False])
def test_stages_may_be_as_unequal_as_they_like(cuts: tuple[int, int], clipped: bool) -> None:
    plan = unequal(cuts, clipped)
    cost = COSTS["1x8xH100-SXM"]
    for schedule in ("1f1b", "gpipe"):
        program = lower(FAMILIES["wide"], replace(plan, schedule=schedule))
        told = estimate(program, cost)
        assert all(told <= simulate(program, cost, steps=n).step_s * (1 + 1e-9) for n in (1, 2, 5))


def unequal(cuts: tuple[int, int], clipped: bool) -> Plan:
    plan = planned("wide", Layout(2, 1, 2, 4))
    first, second = plan.stages
    optimizer = dict(plan.optimizer) | ({} if clipped else UNCLIPPED)
    return replace(plan, stages=(replace(first, last=cuts[0]), replace(second, first=cuts[0])), optimizer=optimizer)


def assert_the_few_do_as_in_the_whole(model: Model, plan: Plan, program: Program, cost: CostModel) -> None:
    """Every firing of the representatives starts and ends as it does when all are simulated."""
    few = lower(model, plan, ranks=representatives(plan, cost.cluster))
    every = {(s.actor, s.step, s.microbatch): s for s in simulate(program, cost, steps=2).spans}
    told = simulate(few, cost, steps=2)
    end_s = max(s.end_s for s in told.spans)
    assert max(s.end_s for s in every.values()) == pytest.approx(end_s, rel=1e-9)
    for s in told.spans:
        same = every[s.actor, s.step, s.microbatch]
        assert (s.start_s, s.end_s) == pytest.approx((same.start_s, same.end_s), rel=1e-9, abs=1e-9 * end_s), s.actor
    assert estimate(few, cost) == pytest.approx(estimate(program, cost), rel=0.05)


@pytest.mark.parametrize("machine", COSTS)
@pytest.mark.parametrize(("family", "want"), CASES[::2], ids=str)
def test_one_rank_of_every_stage_stands_for_all(family: str, want: Layout, machine: str) -> None:
    assert_the_few_do_as_in_the_whole(FAMILIES[family], planned(family, want), whole(family, want), COSTS[machine])


def test_representatives_of_unequal_stages_wait_for_one_another() -> None:
    plan = unequal((5, 6), clipped=True)
    assert_the_few_do_as_in_the_whole(FAMILIES["wide"], plan, lower(FAMILIES["wide"], plan), COSTS["1x8xH100-SXM"])

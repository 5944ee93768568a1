"""Whichever operators run again, three steps are those of one device that runs nothing twice: dropout draws the same numbers, gradients are the same sums."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ir.plan import Plan
from planner.facts import analyse
from planner.frontends.model import Model
from planner.lower import lower
from tests.families import of_kind
from tests.laws import test_family_parity as families
from tests.models import BATCH, SEQ
from tests.parity import between, ended, model, on_one_device, planned, same
from tests.planner import test_context as contexts
from tests.plans import Layout, plan_for


def with_reruns(whole: Model, plan: Plan, share: float) -> Plan:
    """The plan with a random share of the operators that may run again."""
    graph = whole.graph(plan.microbatch, plan.seq, plan.dtype)
    free, rng = analyse(graph, selective=True).open, random.Random(f"{plan.schedule} {share}")
    return replace(plan, recompute=tuple(n.name for n in graph.nodes if n.name in free and rng.random() < share))


WANTED = [
    ("gpt", Layout(), 0.5), ("gpt", Layout(2, 2, 2, 2, sp=True), 0.5), ("gpt", Layout(1, 1, 4, 4, schedule="zb-h1"), 0.7),
    ("gpt", Layout(2, 1, 2, 4, zero=3), 0.4),
    ("gpt", Layout(1, 1, 2, 2, schedule="seq1f1b", pieces=(5, 4, 3)), 0.6),
    ("llama", Layout(1, 4, 1, 2), 0.5), ("llama", Layout(2, 2, 2, 2, zero=2, sp=True), 0.7), ("llama", Layout(1, 2, 2, 4, schedule="gpipe"), 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("family", "want", "share"), WANTED, ids=str)
def test_any_operators_that_run_again_give_what_one_device_gives(family: str, want: Layout, share: float) -> None:
    plan = with_reruns(model(family), planned(family, want), share)
    found = between(ended(lower(model(family), plan)), on_one_device(family, "adamw"))
    assert same(found), found


@pytest.mark.parametrize(("want", "share"), [(Layout(2, 2, ep=2), 0.5), (Layout(2, 1, 2, 2, ep=2), 1.0)], ids=str)
def test_experts_that_run_again_give_what_one_device_gives(want: Layout, share: float) -> None:
    whole = of_kind("mixtral")
    plan = with_reruns(whole, plan_for(whole, want, batch=families.BATCH, seq=families.seq_of("mixtral")), share)
    more: dict[str, Any] = {"data": families.data("mixtral")}
    found = between(ended(lower(whole, plan), **more), families.on_one_device("mixtral"))
    assert same(found), found


@pytest.mark.parametrize(("family", "form", "sizes"), [("gpt", "ring zigzag", (1, 3, 1)), ("llama", "exchange", (1, 2, 2))], ids=str)
def test_attention_across_ranks_that_runs_again_gives_what_one_device_gives(family: str, form: str, sizes: tuple[int, int, int]) -> None:
    whole = contexts.MODELS[family]
    plan = with_reruns(whole, contexts.plan_of(whole, sizes, form), 0.8)
    assert any("attend" in str(name) for name in plan.recompute)
    found = between(ended(lower(whole, plan)), contexts.alone(family))
    assert same(found), found


def test_the_search_s_own_choice_gives_what_one_device_gives() -> None:
    whole = model("llama")
    plan = plan_for(whole, Layout(1, 2, 2, 4), batch=BATCH, seq=SEQ, memory_price=1e-8, selective=True)
    assert plan.recompute
    found = between(ended(lower(whole, plan)), on_one_device("llama", "adamw"))
    assert same(found), found

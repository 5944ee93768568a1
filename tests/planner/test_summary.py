"""A plan in the words people ask for, read off its placements, and what a simulation says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.plan import ParamPlacement, Plan
from ir.sbp import B, P, S
from planner.lower import lower
from planner.summary import is_sequence_parallel, layout, metrics, model_flops, zero_level
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.memory import ledger
from tests.models import BATCH, SEQ, gpt, llama
from tests.plans import Layout, cluster, plan_for

MODEL = llama()


def planned(want: Layout) -> Plan:
    return plan_for(MODEL, want, batch=BATCH, seq=SEQ)


@pytest.mark.parametrize(
    "want",
    [
        Layout(2, 2, 2, 2, zero=0, sp=False),
        Layout(4, 2, 1, 1, zero=1, sp=True),
        Layout(4, zero=2, recompute=True),
        Layout(8, zero=3),
        Layout(1, 1, 4, 4, schedule="gpipe"),
    ],
    ids=str,
)
def test_the_layout_reads_back_what_was_asked_for(want: Layout) -> None:
    plan = planned(want)
    graph = MODEL.graph(plan.microbatch, SEQ, "float64")
    assert layout(graph, plan) == {
        "dp": want.dp, "tp": want.tp, "pp": want.pp, "cp": 1, "ep": 1, "vpp": 1, "seq_chunks": 1, "mbs": BATCH // want.dp // want.num_microbatches,
        "num_microbatches": want.num_microbatches, "schedule": want.schedule, "recompute": "full" if want.recompute else "none", "zero": want.zero or 0,
        "sp": bool(want.sp),
    }  # fmt: skip


def test_the_zero_level_is_that_of_most_bytes() -> None:
    plan = planned(Layout(4, zero=0))
    graph = MODEL.graph(plan.microbatch, SEQ, "float64")
    levels = {1: ParamPlacement((S(0), B), (B, B), (P, B)), 2: ParamPlacement((S(0), B), (B, B), (S(0), B)), 3: ParamPlacement(*[(S(0), B)] * 3)}
    heavy = {p.name for p in graph.params if len(p.shape) == 2}
    for level, place in levels.items():
        assert zero_level(graph, replace(plan, params={k: place if k in heavy else v for k, v in plan.params.items()})) == level
        assert zero_level(graph, replace(plan, params={k: v if k in heavy else place for k, v in plan.params.items()})) == 0


def test_one_device_is_neither_sharded_nor_sequence_parallel() -> None:
    plan = planned(Layout())
    graph = MODEL.graph(plan.microbatch, SEQ, "float64")
    for p in (plan, plan.squeezed()):
        assert (zero_level(graph, p), is_sequence_parallel(graph, p)) == (0, False)


def test_the_flops_of_a_step_by_hand() -> None:
    """Six a parameter of a product and token; attention 4 s d h a token, half of it causal, three times."""
    config = MODEL.config
    inner = 32 * (8 + 2 * 4) * 4 + 8 * 4 * 32 + 3 * 32 * 72
    products = 6 * (4 * inner + 32 * 259)
    attention = 3 * 4 * config.num_layers * 8 * 4 * SEQ / 2
    assert model_flops(MODEL, planned(Layout())) == pytest.approx((products + attention) * BATCH * SEQ, rel=0.02)


def test_recompute_adds_no_flops_of_the_model() -> None:
    assert model_flops(MODEL, planned(Layout(recompute=True))) == model_flops(MODEL, planned(Layout()))


def test_metrics_hang_together() -> None:
    plan, devices = planned(Layout(2, 2, 2, 2)), cluster()
    program = lower(MODEL, plan)
    timeline = simulate(program, CostModel(devices), steps=2)
    found = metrics(MODEL, devices, plan, program, timeline, ledger(program, timeline, cluster=devices))
    assert found["tokens_per_s_per_gpu"] * 8 * found["step_s"] == pytest.approx(BATCH * SEQ)
    assert found["tflops_per_gpu"] * 1e12 * 8 * found["step_s"] == pytest.approx(model_flops(MODEL, plan))
    assert sum(found["breakdown"].values()) == pytest.approx(found["step_s"])
    assert found["bubble"] == pytest.approx(found["breakdown"]["bubble_s"] / found["step_s"])
    assert found["fits"] == "yes"
    assert {(c["axis"], c["kind"]) for c in found["comm"]} >= {("dp", "all_reduce"), ("pp", "p2p"), ("world", "all_reduce")}
    assert found["mfu"] == pytest.approx(found["tflops_per_gpu"] * 1e12 / devices.devices[0].flops_per_s["float64"]) or not found["mfu"]


def test_the_zero_level_of_a_tied_model() -> None:
    model = gpt()
    for level in (0, 1, 2, 3):
        plan = plan_for(model, Layout(4, zero=level), batch=BATCH, seq=SEQ)
        assert zero_level(model.graph(plan.microbatch, SEQ, "float64"), plan) == level

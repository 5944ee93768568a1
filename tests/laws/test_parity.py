"""Any plan = one device: losses and all gradients of three steps, float64, 1e-10 relative, dropout on."""

from __future__ import annotations

import pytest

from executor.data import text_data
from headrace.running import compare
from planner.frontends import load
from planner.frontends.model import Model
from planner.lower import lower
from planner.single import single_device
from tests.plans import Layout, cluster, layouts, pairwise, plan_for

BATCH, SEQ = 8, 12
VALUES = {
    "dp": (1, 2, 4), "tp": (1, 2, 4), "pp": (1, 2, 4), "num_microbatches": (1, 2, 4), "zero": (0, 1, 2, 3), "sp": (False, True, None),
    "recompute": (False, True), "schedule": ("1f1b", "gpipe"),
}  # fmt: skip
COVERING = pairwise(list(layouts(VALUES, BATCH)), list(VALUES))


def gpt() -> Model:
    """Four layers, tied embeddings, dropout; a vocabulary that no number of ranks divides."""
    return load("gpt2-tiny", vocab=259, hidden=32, num_heads=4, mlp_hidden=64, max_positions=SEQ)


def llama() -> Model:
    """Four layers, eight query heads on four key and value heads; a vocabulary that no number of ranks divides."""
    return load("llama-tiny", vocab=259, hidden=32, num_heads=8, num_kv_heads=4, head_dim=4, mlp_hidden=72)


def differences(model: Model, want: Layout, **more: object) -> dict[str, object]:
    """How far three steps of a layout are from one device."""
    plan = plan_for(model, want, batch=BATCH, seq=SEQ, **more)  # type: ignore[arg-type]
    single = single_device(model, cluster(), batch=BATCH, seq=SEQ, dtype=plan.dtype, optimizer=plan.optimizer)
    data = text_data(None, SEQ, vocab=259)
    options = {"data": data, "lr": 1e-3, "warmup": 2, "seed": 3, "watchdog_s": 20.0}
    return compare(lower(model, plan), lower(model, single), 3, {"initial": None, "first_step": 0}, options, None)


def within(found: dict[str, object], limit: float) -> bool:
    return max(found["loss_max_rel"], found["grad_max_rel"]) <= limit  # type: ignore[type-var, operator, return-value]


@pytest.mark.parametrize("want", COVERING, ids=str)
@pytest.mark.parametrize("model", [gpt(), llama()], ids=["gpt", "llama"])
def test_any_plan_gives_what_one_device_gives(model: Model, want: Layout) -> None:
    found = differences(model, want)
    assert within(found, 1e-10), found


@pytest.mark.parametrize("memory_price", [1e-9, 1e-6, 1e-3])
@pytest.mark.parametrize("want", [Layout(2, 2, 1, 2), Layout(2, 2, 2, 2), Layout(4, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("model", [gpt(), llama()], ids=["gpt", "llama"])
def test_whatever_the_price_of_memory(model: Model, want: Layout, memory_price: float) -> None:
    found = differences(model, want, memory_price=memory_price)
    assert within(found, 1e-10), found


def test_with_another_optimizer() -> None:
    found = differences(gpt(), Layout(2, 2, 2, 2, zero=1), optimizer="sgd")
    assert within(found, 1e-10), found


def test_the_covering_set_covers_every_pair() -> None:
    names = list(VALUES)
    every, chosen = list(layouts(VALUES, BATCH)), COVERING
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert {(getattr(w, a), getattr(w, b)) for w in chosen} == {(getattr(w, a), getattr(w, b)) for w in every}

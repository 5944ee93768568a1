"""Any plan = one device: losses and all gradients of three steps, float64, 1e-10 relative, dropout on."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from executor.data import text_data
from executor.verify import Seen
from headrace.running import differences, step_by_step
from planner.lower import lower
from planner.single import OPTIMIZERS, single_device
from tests.models import BATCH, SEQ, gpt, llama
from tests.plans import Layout, cluster, layouts, pairwise, plan_for

VALUES = {
    "dp": (1, 2, 4), "tp": (1, 2, 4), "pp": (1, 2, 4), "num_microbatches": (1, 2, 4), "zero": (0, 1, 2, 3), "sp": (False, True, None),
    "recompute": (False, True), "schedule": ("1f1b", "gpipe"),
}  # fmt: skip
COVERING = pairwise(list(layouts(VALUES, BATCH)), list(VALUES))


OPTIONS = {"data": text_data(None, SEQ, vocab=259), "lr": 1e-3, "warmup": 2, "seed": 3, "watchdog_s": 20.0}
START: dict[str, Any] = {"initial": None, "first_step": 0}
STEPS = 3
MODELS = {"gpt": gpt(), "llama": llama()}


@cache
def on_one_device(family: str, optimizer: str) -> tuple[Seen, ...]:
    """The three steps that every plan is compared with."""
    model = MODELS[family]
    single = single_device(model, cluster(), batch=BATCH, seq=SEQ, dtype="float64", optimizer=OPTIMIZERS[optimizer])
    return tuple(step_by_step(lower(model, single), STEPS, START, OPTIONS))


def assert_same(family: str, want: Layout, optimizer: str = "adamw", memory_price: float = 0.0) -> None:
    """Three steps of the layout give the losses and gradients of one device."""
    program = lower(MODELS[family], plan_for(MODELS[family], want, batch=BATCH, seq=SEQ, memory_price=memory_price, optimizer=optimizer))
    found = differences(step_by_step(program, STEPS, START, OPTIONS), on_one_device(family, optimizer), STEPS)
    assert max(found["loss_max_rel"], found["grad_max_rel"]) <= 1e-10, found


@pytest.mark.parametrize("want", COVERING, ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_any_plan_gives_what_one_device_gives(family: str, want: Layout) -> None:
    assert_same(family, want)


@pytest.mark.parametrize("memory_price", [1e-9, 1e-6, 1e-3])
@pytest.mark.parametrize("want", [Layout(2, 2, 1, 2), Layout(2, 2, 2, 2), Layout(4, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_whatever_the_price_of_memory(family: str, want: Layout, memory_price: float) -> None:
    assert_same(family, want, memory_price=memory_price)


def test_with_another_optimizer() -> None:
    assert_same("gpt", Layout(2, 2, 2, 2, zero=1), optimizer="sgd")


def test_the_covering_set_covers_every_pair() -> None:
    names = list(VALUES)
    every, chosen = list(layouts(VALUES, BATCH)), COVERING
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert {(getattr(w, a), getattr(w, b)) for w in chosen} == {(getattr(w, a), getattr(w, b)) for w in every}

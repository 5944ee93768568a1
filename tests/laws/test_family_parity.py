"""Any plan = one device, for models of every kind: losses, gradients and states of three steps, float64, 1e-10 relative."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from executor.data import ArrayData, text_data
from planner.lower import lower
from planner.optimizers import OPTIMIZERS
from planner.single import single_device
from tests.families import of_kind
from tests.parity import STEPS, Ended, between, ended, same
from tests.plans import Layout, cluster, plan_for

BATCH, SEQ = 8, 12


def seq_of(kind: str) -> int:
    return of_kind(kind).max_seq if kind == "vit" else SEQ


@cache
def data(kind: str) -> Any:
    if kind != "vit":
        return text_data(None, SEQ, vocab=259)
    rng = np.random.default_rng(2)
    return ArrayData({"pixels": rng.normal(size=(STEPS, BATCH, 3, 12, 12)), "labels": rng.integers(0, 10, (STEPS, BATCH, 1))})


@cache
def on_one_device(kind: str) -> Ended:
    model = of_kind(kind)
    single = single_device(model, cluster(), batch=BATCH, seq=seq_of(kind), dtype="float64", optimizer=OPTIMIZERS["adamw"])
    return ended(lower(model, single), data=data(kind))


def apart(kind: str, want: Layout) -> dict[str, Any]:
    """How far three steps under this layout lie from three steps on one device."""
    plan = plan_for(of_kind(kind), want, batch=BATCH, seq=seq_of(kind))
    return between(ended(lower(of_kind(kind), plan), data=data(kind)), on_one_device(kind))


LAYOUTS = {
    "mixtral": (Layout(2, 2, ep=2), Layout(4, 1, ep=2, zero=1), Layout(4, 2, 1, 2, ep=4), Layout(1, 4), Layout(2, 2, 2, 2, ep=2, zero=3, recompute=True)),
    "mixtral, tokens dropped": (Layout(4, 2, ep=2), Layout(2, 1, 2, 2)),
    "mixtral, balanced": (Layout(2, 2, ep=2), Layout(1, 2, 2)),
    "gpt_oss": (Layout(2, 2, 2, 2, ep=2),),
    "deepseek_v3": (Layout(2, 2, ep=2), Layout(1, 2, 2, 2, sp=True), Layout(1, 1, 4, 4)),
    "gemma2": (Layout(2, 2, 2, 2, sp=True),),
    "gpt_neox": (Layout(2, 2, 2, 2, sp=False),),
    "bert": (Layout(2, 2, 2, 2), Layout(1, 4, sp=True)),
    "t5": (Layout(2, 2), Layout(1, 2, 4, 4), Layout(2, 1, 2, 2, zero=2, recompute=True)),
    "vit": (Layout(2, 2, 2, 2),),
}


@pytest.mark.parametrize(("kind", "want"), [(kind, want) for kind, wants in LAYOUTS.items() for want in wants], ids=str)
def test_any_plan_gives_what_one_device_gives(kind: str, want: Layout) -> None:
    found = apart(kind, want)
    assert same(found), found

"""Every optimizer under every placement of its states = one device: losses, gradients and all states after three steps, float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from executor.buffers import state_names
from executor.train import run
from planner.lower import lower
from planner.optimizers import with_defaults
from planner.single import single_device
from tests.models import BATCH, SEQ, gpt
from tests.parity import OPTIONS, STEPS
from tests.plans import Layout, cluster, plan_for

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "nesterov": True},
    "plain sgd": {"name": "sgd", "momentum": 0.0},
    "lamb": {"name": "lamb"},
    "adafactor": {"name": "adafactor", "max_norm": 1.0},
    "muon": {"name": "muon"},
    "adamw8bit": {"name": "adamw8bit", "block": 8, "min_size": 32},
}
LAYOUTS = (Layout(2, 2, 2, 2, zero=1), Layout(4, 2, 1, 1, zero=2), Layout(4, 1, 2, 2, zero=3), Layout(1, 4, 1, 2))
MODEL = gpt(num_layers=2)


@cache
def alone(optimizer: str) -> dict[str, np.ndarray]:
    settings = with_defaults(OPTIMIZERS[optimizer])
    return trained(lower(MODEL, single_device(MODEL, cluster(), batch=BATCH, seq=SEQ, dtype="float64", optimizer=settings)))


def trained(program: Any) -> dict[str, np.ndarray]:
    """Every tensor that outlasts a step, after three."""
    done = run(program, steps=STEPS, **{**OPTIONS, "lr": 1e-2})
    # The gradient of a key's bias is zero but for rounding, which Adafactor and a block's scale make as large as any other.
    compared = [name for name in state_names(program) if not name.partition("@")[0].endswith("k.bias")]
    return {**{name: done.tensor(name) for name in compared}, "loss": np.array(done.loss)}


@pytest.mark.parametrize("want", LAYOUTS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_states_are_those_of_one_device(optimizer: str, want: Layout) -> None:
    plan = plan_for(MODEL, want, batch=BATCH, seq=SEQ, optimizer=OPTIMIZERS[optimizer])
    if want.zero:
        assert any(place.state[0].is_split for place in plan.params.values())
    found, true = trained(lower(MODEL, plan)), alone(optimizer)
    assert found.keys() == true.keys()
    for name, value in true.items():
        if value.dtype == np.uint8:
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        else:
            assert np.abs(found[name] - value).max() <= 1e-10 * max(np.abs(value).max(), 1e-3), name


def test_the_states_are_there() -> None:
    """One recipe each: which states a matrix and a vector keep."""
    kept = {name: {t.rpartition("@")[2] for t in alone(name) if t.startswith("h.0.mlp.up.weight@")} for name in OPTIMIZERS}
    assert kept == {
        "sgd": {"m"}, "plain sgd": set(), "lamb": {"m", "v"}, "adafactor": {"r", "c"}, "muon": {"m"}, "adamw8bit": {"mc", "vc", "ms", "vs"},
    }  # fmt: skip
    assert {t.rpartition("@")[2] for t in alone("adafactor") if t.startswith("ln_f.bias@")} == {"v"}
    assert {t.rpartition("@")[2] for t in alone("muon") if t.startswith("wte.weight@")} == {"m", "v"}
    assert alone("adamw8bit")["wte.weight@mc"].dtype == np.uint8

"""Every optimizer under every placement of its states = one device: losses, gradients and all states after three steps, float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from executor.buffers import state_names
from executor.train import run
from ir.sbp import S
from planner.lower import lower
from planner.optimizers import with_defaults
from planner.single import single_device
from tests.families import of_kind
from tests.models import BATCH, SEQ, gpt
from tests.parity import OPTIONS, STEPS
from tests.plans import Layout, cluster, plan_for

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "nesterov": True},
    "plain sgd": {"name": "sgd", "momentum": 0.0},
    "lamb": {"name": "lamb"},
    "adafactor": {"name": "adafactor", "max_norm": 1.0, "d": 100.0},  # unclipped: a clipped step hides a factor
    "muon": {"name": "muon"},
    "adamw8bit": {"name": "adamw8bit", "block": 8, "min_size": 32},
}
ZERO1, ZERO2, ZERO3, TP = Layout(2, 2, 2, 2, zero=1), Layout(4, 2, 1, 1, zero=2), Layout(4, 1, 2, 2, zero=3), Layout(1, 4, 1, 2)
CASES = (
    *((name, ZERO1) for name in OPTIMIZERS), ("lamb", ZERO2), ("adafactor", ZERO3), ("adafactor", TP), ("muon", ZERO3), ("adamw8bit", ZERO3), ("adamw8bit", TP),
    ("muon", TP), ("muon", Layout(2, 2, zero=0)), ("muon", Layout(2, 1, 2, 4, schedule="dualpipe")),
)  # fmt: skip
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


def assert_same(found: dict[str, np.ndarray], true: dict[str, np.ndarray]) -> None:
    assert found.keys() == true.keys()
    for name, value in true.items():
        if value.dtype == np.uint8:
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        else:
            assert np.abs(found[name] - value).max() <= 1e-10 * max(np.abs(value).max(), 1e-3), name


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor", "muon", "adamw8bit"])
def test_states_split_by_rows_and_columns_at_once(optimizer: str) -> None:
    """The search splits the columns of these small matrices; here every matrix's state is split by rows over dp and by columns over tp."""
    plan = plan_for(MODEL, ZERO1, batch=BATCH, seq=SEQ, optimizer=OPTIMIZERS[optimizer])
    shapes = {p.name: p.shape for p in MODEL.graph(BATCH, SEQ).params}
    spread = {name: place._replace(state=(S(0), S(1))) if len(shapes[name]) > 1 and shapes[name][0] % 2 == 0 else place for name, place in plan.params.items()}
    assert sum(place.state == (S(0), S(1)) for place in spread.values()) >= 13
    assert_same(trained(lower(MODEL, replace(plan, params=spread))), alone(optimizer))


@pytest.mark.parametrize(("optimizer", "want"), CASES, ids=str)
def test_weights_and_states_are_those_of_one_device(optimizer: str, want: Layout) -> None:
    plan = plan_for(MODEL, want, batch=BATCH, seq=SEQ, optimizer=OPTIMIZERS[optimizer])
    if want.zero:
        assert any(place.state[0].is_split for place in plan.params.values())
    assert_same(trained(lower(MODEL, plan)), alone(optimizer))


@pytest.mark.parametrize("want", [Layout(4, 1, ep=2, zero=1), Layout(2, 2, ep=2)], ids=str)
def test_matrices_of_experts_have_owners_among_the_ranks_that_share_them(want: Layout) -> None:
    model = of_kind("mixtral")
    one = single_device(model, cluster(), batch=BATCH, seq=SEQ, dtype="float64", optimizer=with_defaults("muon"))
    program = lower(model, plan_for(model, want, batch=BATCH, seq=SEQ, optimizer="muon"))
    assert {len(a.work.total) for a in program.actors if a.work.op == "orthogonalize"} == {3, 4}
    assert_same(trained(program), trained(lower(model, one)))


def test_the_states_are_there() -> None:
    """One recipe each: which states a matrix and a vector keep."""
    kept = {name: {t.rpartition("@")[2] for t in alone(name) if t.startswith("h.0.mlp.up.weight@")} for name in OPTIMIZERS}
    assert kept == {
        "sgd": {"m"}, "plain sgd": set(), "lamb": {"m", "v"}, "adafactor": {"r", "c"}, "muon": {"m"}, "adamw8bit": {"mc", "vc", "ms", "vs"},
    }  # fmt: skip
    assert {t.rpartition("@")[2] for t in alone("adafactor") if t.startswith("ln_f.bias@")} == {"v"}
    assert {t.rpartition("@")[2] for t in alone("muon") if t.startswith("wte.weight@")} == {"m", "v"}
    assert alone("adamw8bit")["wte.weight@mc"].dtype == np.uint8

"""How parameters are updated: states and their bytes, where they may lie, what is re-sharded, what settings there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ir.errors import PlanError
from ir.graph import Tensor
from ir.sbp import B, S
from planner.frontends import load
from planner.lower import lower
from planner.optimizers import OPTIMIZERS, update_of, updated, with_defaults
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.memory import ledger
from tests.models import BATCH, SEQ, gpt
from tests.plans import Layout, cluster, plan_for

MATRIX, VECTOR = Tensor("w", (4096, 11008), "bfloat16", "param"), Tensor("b", (4096,), "bfloat16", "param")


@pytest.mark.parametrize(
    ("name", "per_element"), [("adamw", 8.0), ("sgd", 4.0), ("lamb", 8.0), ("adafactor", 0.0013), ("adamw8bit", 2 + 8 / 256), ("muon", 4.0)],
)  # fmt: skip
def test_bytes_of_states_for_an_element_of_a_matrix(name: str, per_element: float) -> None:
    """8-bit AdamW: two codes and, for every block of 256, two scales; Adafactor: 4 (n + m) for n m elements."""
    update = update_of(with_defaults(name), MATRIX, True)
    assert update.nbytes / MATRIX.num_elements == pytest.approx(per_element, rel=0.05)


def test_a_block_is_never_cut() -> None:
    """11008 = 43 x 256: the last dim can be split where 43 divides, rows anyhow."""
    update = update_of(with_defaults("adamw8bit"), MATRIX, True)
    assert update.sizes["e"] == 256
    assert update.is_legal((S(0), B), (8, 4))
    assert not update.is_legal((S(1),), (2,))
    assert update.is_legal((S(1),), (43,))
    assert update.state_places((S(1),)) == ((S(1),),) * 4


def test_states_lie_where_the_weights_lie_or_are_whole() -> None:
    """Of a matrix whose rows are split, Adafactor's row means are split and its column means whole."""
    update = update_of(with_defaults("adafactor"), MATRIX, True)
    assert {t.name: nd for t, nd in zip(update.states, update.state_places((S(0), S(1))), strict=True)} == {"r": (S(0), B), "c": (B, S(0))}


def test_what_muon_is_for() -> None:
    muon = with_defaults("muon")
    ops = {hidden: [op.name for op in update_of(muon, MATRIX, hidden).ops] for hidden in (True, False)}
    assert ops == {True: ["muon_direction", "orthogonalize", "muon"], False: ["adamw"]}
    assert [op.name for op in update_of(muon, VECTOR, True).ops] == ["adamw"]


def _end(optimizer: str | dict[str, Any], want: Layout) -> list[tuple[str, str, float]]:
    """(kind, operator, bytes) of rank 0's work at the end of a step that belongs to one matrix."""
    model = gpt(num_layers=2)
    program = lower(model, plan_for(model, want, batch=BATCH, seq=SEQ, optimizer=optimizer))
    mine = [a for a in program.actors if a.rank == 0 and a.phase == "U" and "h.0.mlp.up.weight@" in f"{a.name} {' '.join(a.reads)}"]
    return [(a.work.kind, a.work.op, a.work.nbytes) for a in mine if a.work.op not in ("sum_squares", "add")]


def test_lamb_sums_two_numbers_for_a_tensor_and_muon_gathers_the_matrix() -> None:
    zero1 = Layout(4, 1, 1, 1, zero=1)
    assert ("collective", "all_reduce", 16.0) in _end("lamb", zero1)
    gathered = [n for kind, op, n in _end("muon", zero1) if op == "all_gather"]
    assert 32 * 64 * 8 in gathered
    assert [op for _, op, _ in _end("sgd", Layout())] == ["sgd"]
    # the means of what is not split, and the norms; where the rows are split, the mean of their means as well
    assert sum(op == "all_reduce" for _, op, _ in _end("adafactor", zero1)) in (2, 3)


def test_the_ledger_counts_states_in_their_own_width() -> None:
    model = gpt(num_layers=2)

    def optimizer_bytes(optimizer: dict[str, Any] | str) -> float:
        plan = plan_for(model, Layout(), batch=BATCH, seq=SEQ, dtype="float32", optimizer=optimizer)
        return ledger(lower(model, plan), cluster=cluster()).by_class.get("optimizer", 0.0)

    whole = optimizer_bytes("adamw")
    assert whole == 8 * model.num_params
    coded = optimizer_bytes({"name": "adamw8bit", "block": 16, "min_size": 32})
    assert coded == pytest.approx((2 + 8 / 16) * model.num_params, rel=0.02)
    assert optimizer_bytes({"name": "sgd", "momentum": 0.0}) == 0.0


def test_a_zero_plan_divides_the_states_of_every_optimizer() -> None:
    model = gpt(num_layers=2)
    for name in OPTIMIZERS:
        held = [
            ledger(lower(model, plan_for(model, Layout(dp, zero=zero), batch=BATCH, seq=SEQ, dtype="bfloat16", optimizer=name)), cluster=cluster())
            for dp, zero in ((1, 0), (4, 1))
        ]
        assert held[1].by_class["optimizer"] <= 0.3 * held[0].by_class["optimizer"], name


def test_the_time_of_an_update_is_what_the_search_has_charged() -> None:
    """Orthogonalizing is most of Muon's update of a large model's layers, and the search knows it."""
    model = load("llama-3-8b", num_layers=2)
    times = {}
    for name in ("adamw", "muon"):
        plan = plan_for(model, Layout(8, zero=1), batch=8, seq=128, dtype="bfloat16", optimizer=name)
        program = lower(model, plan, ranks=(0,))
        times[name] = simulate(program, CostModel(cluster()), steps=2).breakdown(program)["optimizer_s"]
    assert times["muon"] > 2 * times["adamw"]


def test_settings() -> None:
    assert with_defaults({"name": "lamb", "lr": 0.5})["lr"] == 0.5
    assert with_defaults("muon") == OPTIMIZERS["muon"]
    for wrong, told in (
        ({"name": "lion"}, "known are adamw"), ({"name": "adamw", "betas": 0.9}, "did you mean beta"), ({"name": "adamw", "beta1": 1.0}, "beta1 is 1.0"),
        ({"name": "sgd", "nesterov": 1}, "true or false"), ({"name": "muon", "adjust": "none"}, "match_rms_adamw"),
        ({"name": "adamw8bit", "block": 0}, "whole number"), ({"name": "adafactor", "beta2_decay": 0.8}, "below 0"), ({"name": "adamw", "lr": "x"}, "finite"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=told):
            with_defaults(wrong)


def test_a_plan_whose_states_cannot_lie_there_is_refused() -> None:
    model = gpt(num_layers=2)
    plan = plan_for(model, Layout(4, zero=1), batch=BATCH, seq=SEQ)
    place = plan.params["h.0.attn.q.weight"]
    wrong = {**plan.params, "h.0.attn.q.weight": place._replace(state=(S(1), *place.state[1:]))}
    coded = replace(plan, optimizer={"name": "adamw8bit", "block": 32, "min_size": 32}, params=wrong)
    with pytest.raises(PlanError, match="cannot be split"):
        lower(model, coded)


def test_operands_by_name_mean_the_same_in_every_operator() -> None:
    for name, settings in OPTIMIZERS.items():
        for tensor, hidden in ((MATRIX, True), (VECTOR, True)):
            update = update_of(settings, tensor, hidden)
            shapes: dict[str, tuple[int, ...]] = {}
            for op in update.ops:
                for o in (*op.inputs, *op.outputs):
                    assert shapes.setdefault(o.name.removesuffix("2"), o.shape(update.sizes)) == o.shape(update.sizes), (name, op)
            assert "w" in updated(update.last)

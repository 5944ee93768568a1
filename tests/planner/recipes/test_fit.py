"""Fits: known shares are found again, few numbers are fitted, and none of them knows a model, a family or a row."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from ir.errors import InputError
from planner.recipes.bill import Bill, Pricer, cluster_name
from planner.recipes.estimate import Estimator
from planner.recipes.fit import Problem, cross_validate, fit, predict
from planner.recipes.learn import parts_of, spread_of
from planner.recipes.release import release_of
from planner.recipes.run import Run, Shape
from planner.recipes.shares import NAMES, Shares
from planner.recipes.step import step
from planner.recipes.study import Study, class_band, class_of, fits, fitted, studies, study_of
from planner.recipes.validate import bundled_entries

SHAPE = Shape("gpt", layers=24, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192, vocab=51200)
RUN = Run(
    "r", "mine", "small", SHAPE, seq=2048, gpu="A100-SXM-80GB", num_gpus=16, tp=2, pp=2, dp=4, mbs=2, gbs=64, schedule="1f1b", recompute="full",
    precision="fp16", nic="ib200x8", release="Megatron-LM 2022", machine="a100-8xHDR (Megatron 2022)",
)  # fmt: skip


@pytest.fixture(scope="module")
def pricer() -> Pricer:
    return Pricer()


def variants() -> list[Run]:
    return [
        replace(RUN, mbs=mbs, tp=tp, dp=16 // tp // pp, pp=pp, shape=replace(SHAPE, hidden=128 * heads, heads=heads, kv_heads=heads, ffn=512 * heads))
        for mbs in (1, 2, 4) for tp in (1, 2, 4) for pp in (1, 2) for heads in (16, 32)
    ]  # fmt: skip


def problem(pricer: Pricer, true: Shares, names: tuple[str, ...]) -> Problem:
    bill = Bill.stack([pricer.bill(run) for run in variants()])
    n = len(bill)
    return Problem(bill, step(bill, true).total, np.zeros(n, int), names, (), (Shares(),), np.ones(n))


def test_known_shares_are_found_again(pricer: Pricer) -> None:
    true = Shares(compute=1.2, memory=1.5, link=0.7)
    made = problem(pricer, true, ("compute", "memory", "link"))
    (found,) = fit(made)
    assert [found.compute, found.memory, found.link] == pytest.approx([1.2, 1.5, 0.7], rel=0.1)
    left_out = cross_validate(made, np.arange(len(made.measured_s)) % 3)
    assert np.abs(left_out / made.measured_s - 1).max() < 0.02


def test_one_run_beyond_reason_moves_a_fit_little(pricer: Pricer) -> None:
    made = problem(pricer, Shares(compute=1.2), ("compute", "memory"))
    made.measured_s[3] *= 3
    assert np.median(np.abs(predict(made, fit(made)) / made.measured_s - 1)) < 0.02


def test_nothing_measured_leaves_what_is_expected(pricer: Pricer) -> None:
    made = problem(pricer, Shares(), ("compute",))
    assert fit(made.take(np.array([], int))) == (Shares(),)


def test_at_most_six_numbers_for_each_gpu_release_and_machine() -> None:
    assert studies()
    assert all(s.num_shares <= 6 for s in studies())
    assert all({*s.common, *s.own, *s.expected} <= set(NAMES) for s in studies())
    members = [str(m) for s in studies() for m in s.members]
    assert len(set(members)) == len(members)


def test_no_fit_knows_a_model_a_family_or_a_row() -> None:
    runs = [e.run for e in bundled_entries() if e.run is not None]
    models = {run.model for run in runs} | {run.id for run in runs}
    keys = {m.gpu for s in studies() for m in s.members} | {m.release for s in studies() for m in s.members} | {m.machine for s in studies() for m in s.members}
    assert not models & keys
    assert {f.name for f in fields(Study)} == {"name", "members", "common", "own", "expected"}


def test_what_a_study_fits_is_what_is_stored() -> None:
    for study in studies():
        for member in study.members:
            stored = fits()["members"][str(member)]
            assert set(stored["shares"]) == {*study.common, *study.own, *study.expected}
            assert stored["study"] == study.name
            assert {"runs", "families", "band", "inside", "thirds"} <= set(stored)


def test_the_band_is_of_own_runs_where_there_are_enough_else_of_the_class() -> None:
    own = fitted(replace(RUN, machine="a100-bloom", release="Megatron-DeepSpeed 2022"))
    few, none = fitted(RUN), fitted(replace(RUN, machine="elsewhere"))
    assert own.basis.startswith("cross-validated on 17 runs")
    assert few.basis.startswith("only 5 runs")
    assert none.basis.startswith("no run")
    assert few.band == none.band == fits()["classes"]["A100"]["band"]
    assert none.shares != few.shares
    assert class_of("T4") == ""
    assert class_band("T4")[0] == fits()["classes"]["all"]["band"]
    assert study_of(replace(RUN, gpu="T4")) is None


def test_an_estimate_sums_up_and_lies_in_its_band() -> None:
    found = Estimator().estimate(RUN)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s)
    assert found.low_s < found.step_s < found.high_s


def test_more_of_anything_takes_longer(pricer: Pricer) -> None:
    base = Estimator()
    base.pricer = pricer
    at = base.estimate(RUN).step_s
    slower = [replace(RUN, gbs=128), replace(RUN, shape=replace(SHAPE, layers=48)), replace(RUN, seq=4096), replace(RUN, shape=replace(SHAPE, vocab=256000)),
              replace(RUN, nic="eth25")]  # fmt: skip
    faster = [replace(RUN, recompute="none"), replace(RUN, schedule="interleaved", vpp=2), replace(RUN, schedule="zb-2p")]
    assert all(base.estimate(run).step_s > at for run in slower)
    assert all(base.estimate(run).step_s < at for run in faster)


@pytest.mark.parametrize(
    ("change", "told"), [({"schedule": "of-my-own"}, "no closed form"), ({"release": "of my own"}, "no profile"), ({"gpu": "X1"}, "no GPU `X1`")]
)  # fmt: skip
def test_what_cannot_be_priced_is_told(change: dict[str, str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Pricer().bill(replace(RUN, **change))  # type: ignore[arg-type]


def test_a_release_differs_by_gpu_and_by_option() -> None:
    titan = release_of("torchtitan 2025-06")
    assert titan is not None
    assert titan.running("A100-SXM-80GB", ()) == titan
    assert titan.running("H100-SXM-80GB", ()).flash_cost > titan.flash_cost
    compiled = titan.running("H200-SXM", ("compile", "of-my-own"))
    assert compiled.moved["norm"] < titan.moved["norm"]
    assert compiled.moved["logits"] == titan.moved["logits"]


def test_a_machine_is_its_shorthand() -> None:
    assert cluster_name(RUN) == "2x8xA100-SXM-80GB@ib200x8"
    assert cluster_name(replace(RUN, num_gpus=8, dp=2)) == "1x8xA100-SXM-80GB"


def test_residuals_are_summed_up_as_said() -> None:
    assert spread_of(np.array([[-0.1, 0.2, 0.05, -0.3, 0.0]])) == pytest.approx(0.284)
    parts = parts_of([RUN, replace(RUN, zero=3)])["mine"]
    assert parts == {"all": [0, 1], "not ZeRO-3": [0], "ZeRO-3": [1]}

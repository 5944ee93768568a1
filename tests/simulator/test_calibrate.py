"""Calibration: a measured step fixes the level, timelines what takes longer; what was kept back is told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ir.cluster import Cluster
from ir.errors import InputError
from ir.program import Program
from planner.lower import lower
from simulator.calibrate import COMMUNICATION, COMPUTE, Sample, calibrate, error, levelled, predicted_s, remembered, scaled
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from tests.models import BATCH, SEQ, gpt
from tests.plans import Layout, plan_for


@pytest.fixture(scope="module")
def program() -> Program:
    model = gpt(num_layers=2)
    return lower(model, plan_for(model, Layout(2, 2, 1, 1), batch=BATCH, seq=SEQ))


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("1x4xH100-SXM")


def measured(program: Program, cluster: Cluster, steps: int = 3) -> Sample:
    """As if the program had run on another cluster."""
    timeline = replace(simulate(program, CostModel(cluster), steps=steps), kind="measured")
    return Sample(program, timeline.step_s, timeline)


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.5])
def test_one_step_fixes_the_level(program: Program, cluster: Cluster, factor: float) -> None:
    step_s = factor * predicted_s(cluster, program)
    found = calibrate(cluster, (Sample(program, step_s),))
    assert predicted_s(found.cluster, program) == pytest.approx(step_s, rel=1e-3)
    assert found.before == pytest.approx(abs(1 / factor - 1))
    assert found.train < 1e-3
    assert found.test is None


def test_timelines_fix_what_takes_longer(program: Program, cluster: Cluster) -> None:
    other = levelled(cluster, {"linear": 1.7, COMMUNICATION: 3.0})
    found = calibrate(cluster, (measured(program, other),), (measured(program, other, steps=4),))
    levels = found.cluster.profile["levels"]
    assert levels["linear"] == pytest.approx(1.7, rel=0.02)
    assert levels[COMMUNICATION] == pytest.approx(3.0, rel=0.02)
    assert levels["adamw"] == pytest.approx(1.0, rel=0.02)
    assert found.before > 0.1
    assert found.train < 1e-3
    assert found.test is not None
    assert found.test < 0.01


def test_a_kind_of_communication_that_nothing_explains_is_named_and_corrects_nothing(program: Program, cluster: Cluster) -> None:
    """B093, marin-community/marin issue 7012: an exchange by a wrong kernel, 7.7 times as slow; a slower link in the profile would hide it."""
    sample = measured(program, cluster)
    assert sample.timeline is not None
    collectives = {a.name: a.work.op for a in program.actors if a.work.kind == "collective"}
    odd = sorted(set(collectives.values()))[0]
    longer = {name: 7.7 if op == odd else 1.0 for name, op in collectives.items()}
    spans = tuple(x._replace(end_s=x.start_s + longer.get(x.actor, 1.0) * (x.end_s - x.start_s)) for x in sample.timeline.spans)
    found = calibrate(cluster, (replace(sample, timeline=replace(sample.timeline, spans=spans), step_s=2 * sample.step_s),))
    assert list(found.outliers) == [odd]
    assert found.outliers[odd] > 3
    assert found.cluster.profile["levels"].get(COMMUNICATION, 1.0) == pytest.approx(1.0, rel=0.02)


def test_levels_multiply_every_price(program: Program, cluster: Cluster) -> None:
    plain, slow = CostModel(cluster), CostModel(scaled(scaled(cluster, 2.0), 1.5))
    for actor in program.actors:
        if actor.work.kind in ("compute", "collective", "send", "recv"):
            assert slow.work_s(actor.work, actor.rank) == pytest.approx(3.0 * plain.work_s(actor.work, actor.rank))
    talking = next(a for a in program.actors if a.work.kind == "collective")
    assert slow.transfer(talking.work, talking.rank)[0] == pytest.approx(3.0 * plain.transfer(talking.work, talking.rank)[0])  # type: ignore[index]


def test_a_level_of_an_operator_starts_from_that_of_all(cluster: Cluster) -> None:
    levels = levelled(scaled(cluster, 2.0), {"linear": 1.5}).profile["levels"]
    assert (levels["linear"], levels[COMPUTE], levels[COMMUNICATION]) == (3.0, 2.0, 2.0)


def test_a_calibrated_cluster_is_read_back_the_same(program: Program, cluster: Cluster) -> None:
    found = scaled(cluster, 1.3)
    assert predicted_s(Cluster.from_json(found.to_json()), program) == predicted_s(found, program) > predicted_s(cluster, program)


def test_a_measurement_of_something_else_is_refused(program: Program, cluster: Cluster) -> None:
    with pytest.raises(InputError, match="another plan or cluster"):
        calibrate(cluster, (Sample(program, 1000.0),))
    with pytest.raises(InputError, match="nothing measured"):
        calibrate(cluster, ())
    assert error(cluster, (Sample(program, predicted_s(cluster, program)),)) == 0.0


def test_what_one_program_took_is_its_own_but_for_the_level_that_all_share(program: Program, cluster: Cluster) -> None:
    """Half of a difference is shared: the program itself is as it was measured, another takes half more, and a second one measured counts beside the first."""
    model = gpt(num_layers=2)
    other = lower(model, plan_for(model, Layout(1, 2, 1, 2), batch=BATCH, seq=SEQ))
    before = predicted_s(cluster, other)

    def half(off: Sequence[float]) -> float:
        return 0.5 * sum(off) / len(off)

    once = remembered(cluster, program, 1.21, half)
    assert predicted_s(once, program) == pytest.approx(1.21 * predicted_s(cluster, program), rel=1e-3)
    assert predicted_s(once, other) == pytest.approx(1.1 * before, rel=1e-3)
    assert remembered(once, program, 1.21 / 1.1, half).profile == once.profile  # the same again is no second witness
    twice = remembered(once, other, 1.1, half)
    assert predicted_s(twice, other) == pytest.approx(1.21 * before, rel=1e-3)
    assert twice.profile["steps"]["level"] == pytest.approx(1.1)
    assert predicted_s(twice, program) == pytest.approx(predicted_s(once, program), rel=1e-3)

"""Frozen-order timing: what a Sweep takes and gives, and when `simulate` uses it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import simulator.engine as engine
from ir.errors import Deadlock, InputError, ProgramError
from ir.program import Program
from simulator.clusters import load_cluster
from simulator.cost import CostModel, Runtime
from simulator.engine import price, simulate
from simulator.sweep import BATCH, compile_sweep
from tests.laws.test_simulator_laws import PUBLISHED, of_stages
from tests.programs import pipeline, with_credits
from tests.simulator.test_cost import threads

H100 = CostModel(load_cluster("2x8xH100@ib400"))


@pytest.mark.parametrize(("p", "m"), PUBLISHED)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_published_makespans(schedule: str, p: int, m: int) -> None:
    program = pipeline(p, m, schedule)
    seconds = of_stages(program, [1.0] * p, [2.0] * p).seconds
    assert compile_sweep(program).makespan([seconds]).tolist() == [PUBLISHED[p, m]]


def test_firings_stand_as_in_the_net() -> None:
    program = pipeline(3, 4)
    sweep = compile_sweep(program, 2)
    start, end = sweep.times(np.arange(len(program.actors), dtype=float))
    assert start.shape == end.shape == (2, sweep.num_firings)
    assert sweep.actor.tolist() == program.net.actor
    assert sweep.microbatch.tolist() == program.net.microbatch
    taken = (end - start)[1].tolist()
    assert all(took == a for took, a in zip(taken, sweep.actor.tolist(), strict=True) if not program.actors[a].channel)


def test_of_a_channel_the_longest_member_counts() -> None:
    program = pipeline(2, 2)
    ends = [a.name for a in program.actors if a.channel == "act0"]
    spans = []
    for slow in ends:
        start, end = compile_sweep(program).times([float(a.name == slow) for a in program.actors])
        spans.append((start.tolist(), end.tolist()))
    assert len(ends) == 2
    assert spans[0] == spans[1]
    assert max(spans[0][1][0]) == 2.0


def test_any_number_of_timings() -> None:
    program = pipeline(3, 4)
    sweep = compile_sweep(program)
    batch = np.random.default_rng(0).random((2 * BATCH + 3, len(program.actors)))
    found = sweep.makespan(batch)
    assert found.shape == (len(batch),)
    assert found[[0, BATCH, -1]].tolist() == [sweep.times(batch[i])[1].max() for i in (0, BATCH, -1)]
    assert sweep.makespan(batch[:0]).shape == (0,)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_durations_that_cannot_be(wrong: float) -> None:
    program = pipeline(3, 4)
    seconds = np.ones(len(program.actors))
    for these, told in ((seconds[1:], "shape"), (np.append(seconds[1:], wrong), "0 or more")):
        with pytest.raises(InputError, match=told):
            compile_sweep(program).times(these)
        with pytest.raises(InputError, match=told):
            compile_sweep(program).makespan([these])


def test_a_program_that_cannot_live_says_why() -> None:
    with pytest.raises(Deadlock, match="stash0"):
        compile_sweep(with_credits(pipeline(3, 4, "gpipe"), {"stash0": 1}))
    with pytest.raises(ProgramError, match="0 steps"):
        compile_sweep(pipeline(3, 4), 0)


def test_simulate_sweeps_where_nothing_contends(monkeypatch: pytest.MonkeyPatch) -> None:
    program = pipeline(3, 4)
    told = simulate(program, H100)
    monkeypatch.setattr(engine, "performed", None)
    assert simulate(program, H100) == told
    for cost, share_links in ((CostModel(threads(3)), False), (H100, True), (CostModel(H100.cluster, Runtime(wake_s=1e-6)), False)):
        assert not price(program, cost, share_links).are_fixed
        with pytest.raises(TypeError):
            simulate(program, cost, share_links=share_links)


def test_nothing_takes_no_time() -> None:
    assert simulate(pipeline(2, 2), H100, steps=0).spans == ()
    nothing = Program("nothing", 1, (), (), {})
    assert simulate(nothing, H100).spans == ()
    assert compile_sweep(nothing).makespan(np.zeros((2, 0))).tolist() == [0.0, 0.0]


def test_prices_are_fixed_unless_something_is_shared() -> None:
    prices = price(pipeline(2, 2), H100)
    assert prices.are_fixed
    assert not replace(prices, firing_s=1e-6).are_fixed
    assert replace(prices, links=[{} for _ in prices.links]).are_fixed

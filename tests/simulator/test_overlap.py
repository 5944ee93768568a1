"""Kernels beside collectives: a fluid, between hiding all and hiding nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ir.program import Actor, Program
from ir.work import Work
from planner.frontends import load
from planner.lower import lower
from simulator.clusters import load_cluster
from simulator.cost import CostModel, Runtime
from simulator.engine import simulate
from simulator.figures import figures
from simulator.overlap import lost, slowed_s, together_s
from simulator.runtimes import documents, facts
from simulator.sweep import compile_sweep
from tests.plans import Layout, plan_for
from tests.plans import cluster as plan_cluster


@pytest.mark.parametrize("comm_s", [0.0, 0.1, 0.5, 1.0, 1.76, 2.0, 10.0])
def test_together_takes_longer_than_each_and_less_than_both(comm_s: float) -> None:
    seconds = float(together_s(1.0, comm_s, lost(1.76)))
    assert max(1.0, comm_s) <= seconds <= 1.0 + comm_s
    if 0 < comm_s < 1.76:
        assert seconds > max(1.0, comm_s)


def test_the_law_is_that_of_a_fluid_followed_in_time() -> None:
    """A kernel advances 1 / slower as fast while the collective runs."""
    for compute_s, comm_s, slower in ((1.0, 0.4, 2.5), (1.0, 1.3, 1.76), (0.2, 1.0, 1.83), (1.0, 2.5, 2.5)):
        done, now, tick = 0.0, 0.0, 1e-4
        while done < compute_s:
            done += tick / (slower if now < comm_s else 1.0)
            now += tick
        assert float(together_s(compute_s, comm_s, lost(slower))) == pytest.approx(max(now, comm_s), rel=1e-3)


def test_without_slowing_it_is_the_longer_one() -> None:
    assert together_s(np.array([1.5, 0.5]), 0.7, lost(1.0)).tolist() == [1.5, 0.7]


def test_every_runtime_says_how_its_kernels_slow_down() -> None:
    """NVIDIA/nccl issue 1428: attention 1.8, GEMM 1.76, elementwise 2.5 times as long under overlap."""
    for kind, alone, beside in (("attention", 0.18, 0.33), ("gemm", 1.18, 2.08), ("memory", 0.02, 0.05)):
        assert {round(alone * facts(name)["slower"][kind], 2) for name in documents()} == {beside}


def program(kernels: int) -> Program:
    """Two ranks that each run so many kernels, and beside them one collective that nothing waits for."""
    compute, collective = Work("compute", "scale", "float32"), Work("collective", "all_reduce", "float32", nbytes=1.0, group=(0, 1))
    actors, order = [], {}
    for rank in (0, 1):
        mine = [Actor(f"k{i}.{rank}", rank, "compute", "step", compute) for i in range(kernels)]
        actors += [*mine, Actor(f"sum.{rank}", rank, "comm", "step", collective, channel="sum")]
        order[rank, "compute"] = tuple((a.name, 0) for a in mine)
        order[rank, "comm"] = ((f"sum.{rank}", 0),)
    return Program("beside", 1, tuple(actors), (), order).check()


@pytest.mark.parametrize(("kernels", "comm_s", "near"), [(1, 0.5, 0.02), (1, 4.0, 1e-9), (64, 0.5, 0.02), (64, 4.0, 1e-9), (64, 1.3, 0.02)])
def test_a_simulated_rank_follows_the_same_law(kernels: int, comm_s: float, near: float) -> None:
    """Half of the speed is lost: kernels that together take a second alone."""
    made = program(kernels)
    kernel = [a.work.kind == "compute" for a in made.actors]
    seconds = [1.0 / kernels if k else comm_s for k in kernel]
    sweep = compile_sweep(made, 1)
    slowed = slowed_s(sweep, made, seconds, None, [0.5 * k for k in kernel], [1.0 - k for k in kernel])
    end = sweep.times(slowed)[1].max()
    assert end == pytest.approx(float(together_s(1.0, comm_s, 0.5)), rel=near)
    assert [s for s, k in zip(slowed, kernel, strict=True) if not k] == [comm_s, comm_s]
    assert slowed_s(sweep, made, seconds, None, [0.0] * len(seconds), [1.0] * len(seconds)) == seconds


def test_a_collective_over_a_slow_network_slows_nothing() -> None:
    """It takes next to nothing of the memory; one over NVLink as much as where the slow-down was measured, or nearly."""
    work, wide = (Work("collective", "all_gather", "bfloat16", nbytes=1e9, group=tuple(range(n))) for n in (2, 8))
    inside, between = CostModel(load_cluster("1x8xA100-SXM-80GB")), CostModel(load_cluster("2x1xA100-SXM-80GB@eth1"))
    assert inside.crowding(wide, 0, inside.work_s(wide, 0)) > 0.6
    assert between.crowding(work, 0, between.work_s(work, 0)) < 1e-3
    assert inside.crowding(replace(work, op="shift"), 0, 1e-3) == 0.0 == inside.lost(work)


def test_a_plan_whose_gradients_are_reduced_beside_its_backward_is_slower_by_what_its_kernels_lose() -> None:
    """Simulated as a timeline and as figures alike."""
    model = load("gpt2", num_layers=2)
    made = lower(model, plan_for(model, Layout(dp=2), batch=16, seq=512, dtype="bfloat16"))
    cluster = plan_cluster()
    free, own = CostModel(cluster, Runtime()), CostModel(cluster)
    told = figures(made, own)
    assert simulate(made, own, steps=2).step_s == pytest.approx(told.step_s)
    assert figures(made, free).step_s < told.step_s < 1.3 * figures(made, free).step_s
    assert told.parts["compute_s"] > 1.002 * figures(made, free).parts["compute_s"]

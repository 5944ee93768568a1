"""The sweep is the event engine, bit for bit, wherever durations are fixed; a batch is its timings one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from ir.errors import Deadlock
from ir.program import Program
from planner.lower import lower
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import Prices, performed, price, swept
from simulator.sweep import compile_sweep
from tests.laws.test_simulator_laws import fixed
from tests.models import BATCH, SEQ, gpt
from tests.plans import Layout, plan_for
from tests.programs import ORDERS, Builder, pipeline, random_program

LAYOUTS = [
    Layout(1, 1, 4, 8),
    Layout(2, 2, 2, 4),
    Layout(2, 1, 4, 4, zero=1),
    Layout(1, 2, 4, 8, schedule="gpipe", recompute=True),
    Layout(1, 1, 2, 4, schedule="zb-v"),
]
COST = CostModel(load_cluster("2x4xH100-SXM@ib400"))


def random_prices(program: Program, seed: int) -> Prices:
    """Durations of any bits, some of them 0 and some equal, of which firings after the first take longer."""
    rng = random.Random(seed)
    prices = fixed(program, [rng.choice((0.0, 1.0, rng.uniform(0, 9))) for _ in program.actors])
    added = fixed(program, [rng.choice((0.0, rng.uniform(0, 1))) for _ in program.actors]).seconds
    opens = [program.net.microbatch[min(nodes)] if nodes else 0 for nodes in program.net.nodes]
    return replace(prices, added=added, opens=opens)


def side_by_side(num_ranks: int, m: int) -> Program:
    """Pairs of ranks that compute and sum, none waiting for another pair: a wide Program."""
    b = Builder(m)
    for rank in range(num_ranks):
        b.register(f"y{rank}", rank, credits=1 + rank % 2)
        b.actor(f"F{rank}", rank, "compute", writes=(f"y{rank}",))
        b.actor(f"sum{rank}", rank, "comm", reads=(f"y{rank}",), channel=f"sum{rank // 2}", work=replace(b.actors[0].work, kind="collective"))
    return b.build("side-by-side")


def assert_same(program: Program, prices: Prices, steps: int) -> None:
    """The spans of both, and the batch of the same timing thrice with others between."""
    told = performed(program, prices, steps)
    assert swept(program, prices, steps) == told
    sweep = compile_sweep(program, steps)
    seconds = np.array(prices.seconds)
    batch = np.array([seconds, seconds * 1.5, seconds, np.zeros_like(seconds), seconds])
    found = sweep.complete(batch, prices.added or None)
    ends = [max(s.end_s for s in told if s.step == k) for k in range(steps)]
    assert found[0].tolist() == found[2].tolist() == found[4].tolist() == ends
    for row, one in zip(found, batch, strict=True):
        assert row.tolist() == sweep.times(one, prices.added or None)[1].max(axis=1).tolist()


@pytest.mark.parametrize("seed", range(200))
def test_random_programs(seed: int) -> None:
    program = random_program(seed)
    prices = random_prices(program, seed)
    try:
        program.check()
    except Deadlock:
        with pytest.raises(Deadlock):
            performed(program, prices, 3)
        with pytest.raises(Deadlock, match="wait"):
            swept(program, prices, 3)
        return
    assert_same(program, prices, 1 + seed % 4)


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize(("p", "m", "hop_credits"), [(1, 3, 1), (4, 6, 1), (3, 2, 2), (8, 12, 3)])
def test_pipelines(schedule: str, p: int, m: int, hop_credits: int) -> None:
    program = pipeline(p, m, schedule, hop_credits=hop_credits)
    assert_same(program, random_prices(program, p * m), 3)


def test_a_wide_program() -> None:
    program = side_by_side(200, 5)
    sweep = compile_sweep(program, 3)
    assert sweep.is_wide
    assert not compile_sweep(pipeline(4, 6)).is_wide
    assert_same(program, random_prices(program, 1), 3)


@pytest.mark.parametrize("want", LAYOUTS, ids=str)
def test_lowered_plans(want: Layout) -> None:
    program = lower(gpt(), plan_for(gpt(), want, batch=BATCH, seq=SEQ))
    prices = price(program, COST)
    assert prices.are_fixed
    assert any(prices.added) == (want.num_microbatches > 1)
    assert_same(program, prices, 2)

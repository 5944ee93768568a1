"""The simulator's fast paths against their slow twins."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import pytest

from ir.errors import Deadlock
from ir.program import Program
from simulator.engine import Prices, events
from simulator.estimate import busiest_queue, gpipe_makespan, one_forward_one_backward_makespan, pipeline_lower_bound
from tests.laws.longest_path import longest_path
from tests.programs import pipeline, random_program

# Makespans for F = 1, B = 2 on every stage without hops; torch 2.13 ScheduleGPipe, and 1F1B by the action order of Schedule1F1B (corrected on the last rank).
PUBLISHED = {(2, 4): 15.0, (4, 4): 21.0, (4, 8): 33.0, (4, 16): 57.0, (8, 16): 69.0}


def fixed(program: Program, seconds: Sequence[float]) -> Prices:
    """Prices that depend on nothing else; members of a channel take what the longest takes."""
    number = {c: i for i, c in enumerate(program.channels)}
    channel = [number.get(a.channel, -1) for a in program.actors]
    longest = [max((s for s, c in zip(seconds, channel, strict=True) if c == i), default=0.0) for i in range(len(number))]
    paid = [longest[c] if c >= 0 else s for s, c in zip(seconds, channel, strict=True)]
    return Prices(paid, channel, [len(m) for m in program.channels.values()], [0.0] * len(paid), [None] * len(paid))


def of_stages(program: Program, forward: Sequence[float], backward: Sequence[float], hop: float = 0.0, once: float = 0.0) -> Prices:
    seconds = []
    for a in program.actors:
        if a.work.kind in ("send", "recv"):
            seconds.append(hop)
        elif a.name.startswith("F"):
            seconds.append(forward[a.rank])
        elif a.name.startswith("B"):
            seconds.append(backward[a.rank])
        else:
            seconds.append(once if a.name.startswith("opt") else 0.0)
    return fixed(program, seconds)


def makespan(program: Program, prices: Prices, steps: int = 1) -> float:
    return max(e.end_s for e in events(program, prices, steps))


@pytest.mark.parametrize("seed", range(250))
def test_the_engine_is_the_longest_path(seed: int) -> None:
    program = random_program(seed)
    rng = random.Random(seed)
    prices = fixed(program, [float(rng.randint(0, 9)) for _ in program.actors])
    try:
        program.check()
    except Deadlock:
        with pytest.raises(Deadlock):
            events(program, prices, 3)
        return
    found = {(program.actors[e.action.actor].name, e.action.step, e.action.microbatch): (e.start_s, e.end_s) for e in events(program, prices, 3)}
    assert found == longest_path(program, prices.seconds, 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "serial"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 6), (3, 2)])
def test_the_engine_is_the_longest_path_of_pipelines(schedule: str, p: int, m: int) -> None:
    program, rng = pipeline(p, m, schedule), random.Random(p * m)
    prices = fixed(program, [float(rng.randint(1, 9)) for _ in program.actors])
    found = {(program.actors[e.action.actor].name, e.action.step, e.action.microbatch): (e.start_s, e.end_s) for e in events(program, prices, 3)}
    assert found == longest_path(program, prices.seconds, 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), PUBLISHED)
def test_uniform_pipelines_take_their_closed_form(schedule: str, p: int, m: int) -> None:
    program = pipeline(p, m, schedule)
    found = makespan(program, of_stages(program, [1.0] * p, [2.0] * p))
    assert found == PUBLISHED[p, m] == one_forward_one_backward_makespan(1, 2, p, m) == gpipe_makespan([1] * p, [2] * p, m)


@pytest.mark.parametrize("seed", range(20))
def test_gpipe_of_unequal_stages_takes_its_closed_form(seed: int) -> None:
    rng = random.Random(seed)
    p, m = rng.randint(1, 5), rng.randint(1, 7)
    forward, backward, hop = [float(rng.randint(1, 9)) for _ in range(p)], [float(rng.randint(1, 9)) for _ in range(p)], float(rng.choice((0, 1, 12)))
    program = pipeline(p, m, "gpipe", hop_credits=m)
    assert makespan(program, of_stages(program, forward, backward, hop)) == gpipe_makespan(forward, backward, m, hop_s=[hop] * (p - 1))


@pytest.mark.parametrize("seed", range(60))
def test_no_pipeline_is_faster_than_its_estimate(seed: int) -> None:
    rng = random.Random(seed)
    p, m, schedule = rng.randint(1, 5), rng.randint(1, 8), rng.choice(("gpipe", "1f1b"))
    forward, backward = ([rng.uniform(0.1, 9) for _ in range(p)] for _ in range(2))
    hop, once = rng.choice((0.0, rng.uniform(0, 4))), rng.choice((0.0, rng.uniform(0, 9)))
    program = pipeline(p, m, schedule)
    bound = pipeline_lower_bound(forward, backward, m, hop_s=[hop] * (p - 1), once_s=[once] * p)
    assert bound <= makespan(program, of_stages(program, forward, backward, hop, once)) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(0, 100, 2))
def test_no_program_is_faster_than_its_busiest_queue(seed: int) -> None:
    program = random_program(seed)
    rng = random.Random(seed)
    prices = fixed(program, [float(rng.randint(0, 9)) for _ in program.actors])
    with contextlib.suppress(Deadlock):
        assert makespan(program, prices, 4) >= 4 * busiest_queue(program, prices)[1]

"""Fluid sharing: nothing runs faster than alone, work is conserved, and a small simulation by fine time steps agrees."""

from __future__ import annotations

import random

import pytest

from simulator.contention import INFINITY, Cores, Links

A, B, C = ("a", "b"), ("b", "c"), ("c", "d")


def drain(pool: Cores | Links, arrivals: list[tuple[float, float, object]]) -> dict[int, float]:
    """Ends of jobs (arrival, seconds, demand) by number."""
    ends: dict[int, float] = {}
    for job, (at, seconds, demand) in enumerate(arrivals):
        while pool.next_s() <= at:
            now = pool.next_s()
            ends[pool.pop()] = now
        pool.add(at, job, seconds, demand)  # type: ignore[arg-type]
    while (now := pool.next_s()) < INFINITY:
        ends[pool.pop()] = now
    return ends


def test_as_many_threads_as_cores_run_at_full_speed() -> None:
    assert drain(Cores(2), [(0.0, 1.0, 1.0), (0.5, 1.0, 1.0)]) == {0: 1.0, 1: 1.5}


def test_more_threads_than_cores_share_them() -> None:
    assert drain(Cores(2), [(0.0, 1.0, 1.0)] * 4) == pytest.approx({0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0})
    assert drain(Cores(2), [(0.0, 1.0, 4.0)]) == pytest.approx({0: 2.0})


def test_a_link_is_shared_and_others_are_not_touched() -> None:
    assert drain(Links(), [(0.0, 1.0, {A: 1.0}), (0.0, 1.0, {A: 1.0, B: 0.5}), (0.0, 1.0, {B: 0.5})]) == pytest.approx({0: 2.0, 1: 2.0, 2: 1.0})
    assert drain(Links(), [(0.0, 1.0, {A: 0.5}), (0.0, 1.0, {A: 0.5})]) == {0: 1.0, 1: 1.0}


def by_small_steps(capacity: float, arrivals: list[tuple[float, float, float]], dt: float = 1e-4) -> dict[int, float]:
    left, ends, now = {i: seconds for i, (_, seconds, _) in enumerate(arrivals)}, {}, 0.0
    while left:
        running = [i for i in left if arrivals[i][0] <= now]
        rate = min(1.0, capacity / max(1e-9, sum(arrivals[i][2] for i in running)))
        now += dt
        for i in running:
            left[i] -= rate * dt
            if left[i] <= 0:
                ends[i] = now
                del left[i]
    return ends


@pytest.mark.parametrize("seed", range(6))
def test_cores_agree_with_small_time_steps(seed: int) -> None:
    rng = random.Random(seed)
    arrivals = sorted((rng.uniform(0, 1), rng.uniform(0.05, 0.6), float(rng.randint(1, 3))) for _ in range(8))
    assert drain(Cores(2), list(arrivals)) == pytest.approx(by_small_steps(2, arrivals), abs=2e-3)
    as_links = [(at, seconds, {A: demand / 2}) for at, seconds, demand in arrivals]
    assert drain(Links(), list(as_links)) == pytest.approx(by_small_steps(2, arrivals), abs=2e-3)


def links_by_small_steps(arrivals: list[tuple[float, float, dict[tuple[str, str], float]]], dt: float = 1e-4) -> dict[int, float]:
    left, ends, now = {i: seconds for i, (_, seconds, _) in enumerate(arrivals)}, {}, 0.0
    while left:
        running = [i for i in left if arrivals[i][0] <= now]
        load = {link: sum(arrivals[i][2].get(link, 0.0) for i in running) for link in (A, B, C)}
        now += dt
        for i in running:
            left[i] -= dt / max(1.0, *(load[link] for link in arrivals[i][2]))
            if left[i] <= 0:
                ends[i] = now
                del left[i]
    return ends


@pytest.mark.parametrize("seed", range(6))
def test_transfers_over_several_links_agree_with_small_time_steps(seed: int) -> None:
    rng = random.Random(seed)
    paths = [{link: rng.choice((0.3, 0.5, 1.0)) for link in rng.sample((A, B, C), rng.randint(1, 3))} for _ in range(9)]
    arrivals = sorted(((rng.uniform(0, 1), rng.uniform(0.05, 0.6), path) for path in paths), key=lambda a: a[0])
    assert drain(Links(), list(arrivals)) == pytest.approx(links_by_small_steps(arrivals), abs=3e-3)


def test_a_transfer_that_nobody_slows_keeps_its_end_to_the_bit() -> None:
    arrivals = [(0.1, 0.7, {A: 0.4}), (0.2, 0.1, {A: 0.4, B: 1.0}), (0.25, 0.3, {B: 1.0}), (0.3, 0.1, {A: 0.2})]
    assert drain(Links(), arrivals)[0] == 0.1 + 0.7

"""Searched orders: against every built-in schedule, all words, HiGHS, and the event engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from ir.errors import PlanError
from planner.schedules import SCHEDULES, Orders
from planner.schedules.auto import Effort, Found, Limits, StageTimes, search_orders
from planner.schedules.bound import lower_bound
from planner.schedules.certificate import certify
from planner.schedules.pipe import Pipe
from planner.schedules.proof import check_orders, program_of
from planner.schedules.retime import retime
from planner.schedules.slot import Slot, gives, waits_for
from simulator.engine import Prices, events

NUM_SETTINGS = 200
Setting = tuple[StageTimes, int, Limits]


def draw(seed: int, p: int, m: int, memory: tuple[int, int], vee: bool = False) -> Setting:
    """Random seconds; memory in units from `memory`, and none, half or all of an activation freed at I."""
    rng = np.random.default_rng(seed)
    rank = (*range(p), *reversed(range(p))) if vee else tuple(range(p))
    n = len(rank)
    f, i, w = rng.uniform(0.5, 2.0, n), rng.uniform(0.5, 2.0, n), rng.uniform(0.3, 1.5, n)
    hop = [float(h) * (a != b) for h, a, b in zip(rng.uniform(0.0, 0.6, n - 1), rank, rank[1:], strict=False)]
    times = StageTimes(tuple(f), tuple(i), tuple(w), tuple(hop), rank)
    return times, m, Limits.units(times, int(rng.integers(memory[0], memory[1] + 1)), float(rng.choice([0.0, 0.5, 1.0])))


def setting(seed: int) -> Setting:
    """One of those of the claim: at least the memory of 1F1B, at most that of ZB-H2."""
    rng = np.random.default_rng(900 + seed)
    p = int(rng.integers(2, 5))
    return draw(seed, p, int(rng.integers(2, 11)), (p, 2 * p))


def takes(times: StageTimes, slot: Slot) -> float:
    return sum({"F": times.f, "I": times.i, "W": times.w}[k][slot.stage] for k in ("IW" if slot.kind == "B" else slot.kind))


def twin(times: StageTimes, orders: Orders) -> float:
    """The makespan by going round the ranks; B hands its gradient on when all of it is over. inf where the orders stand still."""
    made: dict[tuple[str, int, int], float] = {}
    left, clock = [list(reversed(order)) for order in orders], [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(left):
            while todo and all(need in made for need in waits_for(todo[-1], times.num_stages)):
                slot, moved = todo.pop(), True
                hops = [times.hop[min(need[1], slot.stage)] if need[1] != slot.stage else 0.0 for need in waits_for(slot, times.num_stages)]
                start = max([clock[rank], *(made[need] + hop for need, hop in zip(waits_for(slot, times.num_stages), hops, strict=True))])
                clock[rank] = start + takes(times, slot)
                if (gift := gives(slot)) is not None:
                    made[gift] = clock[rank]
    return float("inf") if any(left) else max(clock)


def keeps(limits: Limits, orders: Orders) -> bool:
    for rank, order in enumerate(orders):
        live = 0.0
        for s in order:
            shares = {"F": 1.0, "I": -limits.freed_at_i, "W": limits.freed_at_i - 1.0, "B": -1.0}
            live += limits.activation[s.stage] * shares[s.kind]
            if live > limits.memory[rank] + 1e-6:
                return False
    return True


def built_in(times: StageTimes, m: int, limits: Limits) -> dict[str, float]:
    """Seconds of every built-in schedule that lies on the same ranks and keeps the limits, as it is written."""
    p, found = times.num_ranks, {}
    for name, schedule in SCHEDULES.items():
        v = times.num_chunks
        if schedule.copies != 1 or schedule.pieces != 1:
            continue  # holds its stages on other ranks as well, or runs parts of microbatches
        if schedule.num_chunks(v if schedule.chunks is None else 1) != v or tuple(schedule.rank_of(s, p) for s in range(times.num_stages)) != times.rank:
            continue
        try:
            orders = schedule.orders(p, m, v)
        except PlanError:
            continue
        if keeps(limits, orders):
            found[name] = twin(times, orders)
    return found


@cache
def searched(seed: int) -> Found:
    return search_orders(*setting(seed))


@pytest.mark.parametrize("seed", range(NUM_SETTINGS))
def test_never_worse_than_a_built_in_schedule_and_within_memory(seed: int) -> None:
    times, m, limits = setting(seed)
    found = searched(seed)
    check_orders(found.orders, lambda stage: times.rank[stage], m)
    assert keeps(limits, found.orders)
    assert found.makespan_s == pytest.approx(twin(times, found.orders), rel=1e-12)
    others = built_in(times, m, limits)
    assert "1f1b" in others
    assert "zb-h1" in others
    assert found.bound_s <= found.makespan_s <= min(others.values()) * (1 + 1e-12)


def test_better_by_a_percent_in_at_least_a_quarter() -> None:
    better = sum(searched(seed).makespan_s * 1.01 <= min(built_in(*setting(seed)).values()) for seed in range(NUM_SETTINGS))
    assert better >= NUM_SETTINGS / 4


@pytest.mark.parametrize("seed", range(4))
def test_two_stages_a_rank_are_never_worse(seed: int) -> None:
    p = 2 + seed % 2
    times, m, limits = draw(seed, p, 7, (2 * p, 3 * p), vee=True)
    found = search_orders(times, m, limits)
    others = built_in(times, m, limits)
    assert "zb-v" in others
    check_orders(found.orders, lambda stage: times.rank[stage], m)
    assert keeps(limits, found.orders)
    assert found.makespan_s == pytest.approx(twin(times, found.orders), rel=1e-12)
    assert found.bound_s <= found.makespan_s <= min(others.values()) * (1 + 1e-12)


def all_rows(pipe: Pipe, rank: int) -> np.ndarray:
    """Every legal order of a rank with one stage."""

    def go(f: int, i: int, w: int) -> Iterator[tuple[int, ...]]:
        if w == pipe.m:
            yield ()
        for token, may, then in ((0, f < pipe.m, (f + 1, i, w)), (1, i < f, (f, i + 1, w)), (2, w < i, (f, i, w + 1))):
            if may:
                yield from ((token, *rest) for rest in go(*then))

    rows = np.array(list(go(0, 0, 0)), dtype=np.int8)
    return rows[pipe.legal(rows, np.full(len(rows), rank))]


def brute_force(pipe: Pipe) -> float:
    rows = [all_rows(pipe, r) for r in range(pipe.p)]
    choices = np.array(list(itertools.product(*(range(len(found)) for found in rows))))
    parts = np.array_split(choices, 1 + len(choices) // 4000)
    return min(float(retime(pipe, np.stack([rows[r][part[:, r]] for r in range(pipe.p)], axis=1))[0].min()) for part in parts)


@pytest.mark.parametrize("seed", range(24))
def test_the_search_the_certificate_and_all_words_agree(seed: int) -> None:
    """HiGHS is given a fifth more time than needed, so that it has to find the order itself."""
    p, m = ((2, 2), (2, 3), (3, 2))[seed % 3]
    times, m, limits = draw(seed, p, m, (1, m))
    pipe, found = Pipe(times, m, limits), search_orders(times, m, limits, effort=Effort(prove=0))
    best, proof = brute_force(pipe), certify(pipe, 1.2 * found.makespan_s)
    assert found.makespan_s == pytest.approx(best, rel=1e-9)
    assert proof.proven
    assert proof.bound_s == pytest.approx(best, rel=1e-6)
    assert proof.word is not None
    assert retime(pipe, proof.word[None])[0][0] == pytest.approx(best, rel=1e-6)
    assert pipe.fits(proof.word[None])[0]
    assert lower_bound(pipe) <= best * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_the_search_alone_finds_what_highs_proves(seed: int) -> None:
    p, m = ((2, 4), (3, 3), (3, 4))[seed % 3]
    times, m, limits = draw(100 + seed, p, m, (1, 2 * p))
    found = search_orders(times, m, limits, effort=Effort(prove=0))
    proof = certify(Pipe(times, m, limits), found.makespan_s)
    assert proof.proven
    assert found.makespan_s == pytest.approx(proof.bound_s, rel=1e-6)
    assert search_orders(times, m, limits).optimal


def a_walk(pipe: Pipe, rng: np.random.Generator) -> np.ndarray:
    """A random word that keeps F before I before W on each rank; it may stand still."""
    rows = []
    for _ in range(pipe.p):
        left = np.zeros((pipe.v, 3), dtype=int)
        row: list[int] = []
        while len(row) < pipe.length:
            may = [(c, k) for c in range(pipe.v) for k in range(3) if left[c, k] < (pipe.m if k == 0 else left[c, k - 1])]
            c, k = may[int(rng.integers(0, len(may)))]
            left[c, k] += 1
            row.append(3 * c + k)
        rows.append(row)
    return np.array(rows, dtype=np.int8)


@pytest.mark.parametrize("vee", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_retiming_is_the_longest_path_and_the_engine(seed: int, vee: bool) -> None:
    times, m, limits = draw(seed, 2 + seed % 3, 3, (99, 99), vee)
    pipe, rng = Pipe(times, m, limits), np.random.default_rng(seed)
    words = np.stack([a_walk(pipe, rng) for _ in range(60)] + [pipe.word(pipe.orders(np.array([list(serial(pipe))] * pipe.p, dtype=np.int8)))])
    makespans, starts = retime(pipe, words)
    orders = [pipe.orders(word) for word in words]
    assert makespans == pytest.approx([twin(times, o) for o in orders], rel=1e-12)
    assert np.isinf(makespans).any() or pipe.p < 3
    for k in np.nonzero(np.isfinite(makespans))[0][-3:]:
        assert engine_starts(times, orders[k]) == pytest.approx(
            {str(s): t for order, row in zip(orders[k], starts[k], strict=True) for s, t in zip(order, row, strict=True)}
        )


def serial(pipe: Pipe) -> Iterator[int]:
    for _ in range(pipe.m):
        yield from (3 * c for c in range(pipe.v))
        yield from (3 * c + k for c in reversed(range(pipe.v)) for k in (1, 2))


def engine_starts(times: StageTimes, orders: Orders) -> dict[str, float]:
    program = program_of(orders)
    seconds = []
    for a in program.actors:
        slot = Slot.parse(a.name) if not a.channel else None
        seconds.append(
            takes(times, slot)
            if slot
            else times.hop[min(int(end.partition(word)[0]) for end in a.channel.split(">") for word in ("SEND", "RECV") if word in end)]
        )
    number = {c: i for i, c in enumerate(program.channels)}
    prices = Prices(seconds, [number.get(a.channel, -1) for a in program.actors], [2] * len(number), [0.0] * len(seconds), [None] * len(seconds))
    return {program.actors[e.action.actor].name: e.start_s for e in events(program, prices, 1) if not program.actors[e.action.actor].channel}


def test_the_same_settings_give_the_same_orders() -> None:
    times, m, limits = draw(7, 3, 7, (3, 4))
    assert search_orders(times, m, limits) == search_orders(times, m, limits)


def test_less_memory_takes_no_less_time_and_one_unit_runs_one_by_one() -> None:
    times = StageTimes.equal(3, f=1.0, i=1.0, w=1.0, hop=0.25)
    found = [search_orders(times, 5, Limits.units(times, n)) for n in (1, 2, 3, 6)]
    assert [f.makespan_s for f in found] == sorted((f.makespan_s for f in found), reverse=True)
    assert all(f.optimal for f in found[:1])


def test_found_orders_are_a_schedule_of_their_own() -> None:
    times, m, limits = draw(3, 3, 5, (3, 4))
    found = search_orders(times, m, limits)
    schedule = found.schedule()
    assert (schedule.name, schedule.num_chunks(), schedule.splits) == ("auto", 1, True)
    assert schedule.orders(3, 5) == found.orders
    with pytest.raises(PlanError, match="schedule `auto` cannot run 6 microbatches"):
        schedule.legal(3, 6)


def test_zero_seconds_and_one_rank_have_orders() -> None:
    nothing = StageTimes.equal(2, f=0.0, i=0.0, w=0.0)
    assert search_orders(nothing, 3).makespan_s == 0.0
    one = StageTimes.equal(1, f=1.0, i=2.0, w=3.0)
    found = search_orders(one, 4, Limits.units(one, 1))
    assert found.optimal
    assert found.makespan_s == 24.0


def test_a_microbatch_that_does_not_fit_is_refused() -> None:
    times = StageTimes.equal(2, f=1.0, i=1.0, w=1.0)
    with pytest.raises(PlanError, match=r"rank 0 may hold 0\.5 units, and one microbatch leaves 1 there; give it 1 or more"):
        search_orders(times, 2, Limits.units(times, 0.5))
    with pytest.raises(PlanError, match="disagree on the number of stages"):
        StageTimes((1.0, 1.0), (1.0,), (1.0, 1.0), (0.0,), (0, 1))
    with pytest.raises(PlanError, match="give every rank the same number"):
        StageTimes.equal(2, f=1.0, i=1.0, w=1.0, rank=(0, 1, 1))
    with pytest.raises(PlanError, match="0 microbatches"):
        search_orders(times, 0)

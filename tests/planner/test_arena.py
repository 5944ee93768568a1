"""Shared memory: nothing that lives is overwritten, in any performance of the program; and it is not much more than what lives."""

from __future__ import annotations

import itertools
import random
import zlib
from collections import defaultdict
from dataclasses import replace

import pytest

from ir.program import Actor, Program, Register
from ir.timeline import Timeline
from ir.work import Work
from planner.arena import ALIGNMENT, Life, first_fit, share
from planner.lower import lower
from simulator.cost import CostModel
from simulator.engine import simulate
from tests.models import BATCH, SEQ, gpt, llama
from tests.plans import Layout, cluster, plan_for
from tests.virtual import perform_timed

LAYOUTS = [
    Layout(), Layout(8), Layout(2, 2, 2, 2), Layout(1, 4, sp=True, num_microbatches=2), Layout(4, 2, zero=3), Layout(2, 1, 4, 4, zero=2),
    Layout(1, 2, 2, 4, recompute=True), Layout(1, 2, 4, 4, schedule="gpipe"),
]  # fmt: skip


def program_of(want: Layout, family: str, optimizer: str = "adamw") -> Program:
    model = {"gpt": gpt, "llama": llama}[family]()
    return lower(model, plan_for(model, want, batch=BATCH, seq=SEQ, optimizer=optimizer))


def uneven(program: Program, seed: int) -> Timeline:
    """A performance in which every firing takes between no time and a second, half of the communication very long."""

    def seconds(actor: Actor, microbatch: int) -> float:
        rng = random.Random(zlib.crc32(f"{seed} {actor.channel or actor.name} {microbatch}".encode()))
        slow = actor.queue != "compute" and rng.random() < 0.5
        return rng.choice((0.01, 0.1, 1.0)) * (20 if slow else 1)

    return perform_timed(program, seconds, steps=2)


def items(program: Program, timeline: Timeline) -> list[tuple[float, float, Register]]:
    """(opened, closed, register) of every item in an arena: from the start of the firing that writes it to the end of the last that reads it."""
    when = {(s.actor, s.step, s.microbatch): s for s in timeline.spans}
    readers: dict[str, list[Actor]] = defaultdict(list)
    for a in program.actors:
        for r in a.reads:
            readers[r].append(a)
    writer = {w: a for a in program.actors for w in a.writes}
    out = []
    for r in program.registers:
        if not r.arena:
            continue
        firings = range(program.firings(writer[r.name]))
        for step, m in itertools.product(timeline.steps, firings):
            spans = [when[a.name, step, m] for a in (writer[r.name], *readers[r.name])]
            out.append((spans[0].start_s, max(s.end_s for s in spans), r))
    return out


def assert_nothing_is_overwritten(program: Program, timeline: Timeline) -> None:
    """No two items of an arena that live at the same time lie on the same bytes; the slow twin of positions on a queue."""
    alive: dict[str, list[tuple[float, Register]]] = defaultdict(list)
    for opened, closed, r in sorted(items(program, timeline), key=lambda item: (item[0], item[1], item[2].name)):
        here = alive[r.arena] = [(end, other) for end, other in alive[r.arena] if end > opened]
        for _, other in here:
            assert r.offset + r.nbytes <= other.offset or other.offset + other.nbytes <= r.offset, f"at {opened} s `{r.name}` overwrites `{other.name}`"
        here.append((closed, r))


@pytest.mark.parametrize("want", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_nothing_alive_is_overwritten_whatever_takes_how_long(want: Layout, family: str) -> None:
    program = program_of(want, family)
    assert any(r.arena for r in program.registers)
    assert all(r.offset % ALIGNMENT == 0 for r in program.registers)
    assert_nothing_is_overwritten(program, simulate(program, CostModel(cluster()), steps=2))
    assert_nothing_is_overwritten(program, uneven(program, seed=1))


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_what_an_update_hands_on_is_shared_and_not_overwritten(optimizer: str) -> None:
    program = program_of(Layout(4, 2, zero=1), "llama", optimizer)
    shared = [r for r in program.registers if r.arena and r.clock == "step"]
    assert sum(r.nbytes for r in shared if r.rank == 0) > 1.5 * max(r.offset + r.nbytes for r in shared if r.rank == 0)
    assert_nothing_is_overwritten(program, uneven(program, seed=2))


def test_the_twin_finds_what_is_overwritten() -> None:
    program = program_of(Layout(), "gpt")
    flat = replace(program, registers=tuple(replace(r, offset=0) if r.arena else r for r in program.registers))
    with pytest.raises(AssertionError, match="overwrites"):
        assert_nothing_is_overwritten(flat, uneven(flat, seed=1))


@pytest.mark.parametrize("want", [Layout(), Layout(2, 2, 2, 2), Layout(1, 2, 1, 2, recompute=True)], ids=str)
def test_an_arena_is_little_more_than_the_most_that_lives_in_it(want: Layout) -> None:
    program = program_of(want, "llama")
    timeline = simulate(program, CostModel(cluster()), steps=1)
    found = items(program, timeline)
    for arena in sorted({r.arena for _, _, r in found}):
        events = sorted(e for a, b, r in found if r.arena == arena for e in ((a, 1, r.nbytes), (b, 0, -r.nbytes)))
        live = max(itertools.accumulate(n for _, _, n in events))
        size = max(r.offset + r.nbytes for r in program.registers if r.arena == arena)
        own = sum(r.nbytes for r in program.registers if r.arena == arena)
        assert live <= size <= 1.5 * live + ALIGNMENT
        assert size < 0.5 * own


def test_first_fit_on_random_blocks() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        starts = [rng.randrange(30) for _ in range(40)]
        blocks = tuple((Life(a, a + rng.randrange(6)), rng.choice((0, 8, 64, 100, 256))) for a in starts)
        offsets = first_fit(blocks)
        for (a, i), (b, j) in itertools.combinations(zip(blocks, offsets, strict=True), 2):
            apart = a[0].end < b[0].start or b[0].end < a[0].start
            assert apart or i + a[1] <= j or j + b[1] <= i or not a[1] or not b[1]


def actor(name: str, reads: tuple[str, ...], writes: tuple[str, ...], queue: str = "compute", channel: str = "") -> Actor:
    return Actor(name, 0, queue, "microbatch", Work("compute", "scale", "float32"), reads, writes, channel=channel)


def test_what_no_kernel_waits_for_has_memory_of_its_own() -> None:
    """A copy on another queue that nobody reads may come at any time."""
    registers = tuple(Register(name, 0, (4,), "float32", 16) for name in ("a", "copy", "b", "c"))
    actors = (actor("A", (), ("a",)), actor("Copy", ("a",), ("copy",), queue="comm.dp"), actor("B", (), ("b",)), actor("C", ("b",), ("c",)))
    orders = {(0, "compute"): (("A", 0), ("B", 0), ("C", 0)), (0, "comm.dp"): (("Copy", 0),)}
    shared = share(Program("ahead", 1, actors, registers, orders), {a.name: a.phase for a in actors})
    assert [r.name for r in shared.registers if r.arena] == ["b", "c"]

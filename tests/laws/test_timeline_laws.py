"""What a Timeline says holds for whatever was performed: random programs, random durations."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from ir.errors import Deadlock
from ir.program import Program
from ir.timeline import Timeline, diff
from tests.programs import random_program
from tests.virtual import perform_timed


def performed() -> list[tuple[Program, Timeline]]:
    out = []
    for seed in range(200):
        program, rng = random_program(seed), random.Random(seed)
        try:
            program.check()
        except Deadlock:
            continue
        out.append((program, perform_timed(program, lambda actor, m, rng=rng: rng.choice((0.0, 0.5, 1.0, 3.0)), steps=rng.randint(1, 4))))
    return out


PERFORMED = performed()


def test_every_moment_of_a_step_is_counted_once():
    for program, timeline in PERFORMED:
        parts = timeline.breakdown(program)
        assert sum(parts.values()) == pytest.approx(timeline.step_s), program.name
        assert min(parts.values()) >= 0
        assert sum(timeline.bubbles(program).values()) == pytest.approx(parts["bubble_s"]), program.name


def test_live_memory_agrees_with_looking_at_every_item():
    """Bytes live at a moment, counted item by item from the spans; never more than what is allocated."""
    for program, timeline in PERFORMED[:60]:
        last = max(s.end_s for s in timeline.spans)
        for memory in timeline.live_memory(program):
            allocated = sum(r.nbytes * r.credits for r in program.registers if r.rank == memory.rank)
            assert memory.peak_bytes <= allocated
            for at in (0.25, last / 3 + 0.25, last / 2 + 0.25):
                found = memory.total[np.searchsorted(memory.times_s, at, side="right") - 1] if len(memory.times_s) and at < last else 0
                assert found == (sum(_live_at(program, timeline, r.name, at) for r in program.registers if r.rank == memory.rank) if at < last else 0)


def _live_at(program: Program, timeline: Timeline, name: str, at: float) -> int:
    register = program.register[name]
    if register.initial:
        return register.nbytes * register.credits
    writer = next(a.name for a in program.actors if name in a.writes)
    readers = [a.name for a in program.actors if name in a.reads]
    items: dict[tuple[int, int], list[float]] = {}
    for s in timeline.spans:
        item = (s.step, s.microbatch if register.clock == "microbatch" else 0)
        if s.actor == writer:
            life = items.setdefault(item, [np.inf, -np.inf])
            life[0] = min(life[0], s.start_s)
        if s.actor in (readers or [writer]):
            life = items.setdefault(item, [np.inf, -np.inf])
            life[1] = max(life[1], s.end_s)
    return register.nbytes * sum(opened <= at < closed for opened, closed in items.values())


def test_documents_read_back_and_nothing_differs_from_itself():
    for program, timeline in PERFORMED[:60]:
        assert Timeline.from_json(json.loads(timeline.dumps())) == timeline
        json.dumps(timeline.to_perfetto(program), allow_nan=False)
        found = diff(timeline, timeline, program)
        assert all(r.error_s == 0 for r in (found.step, *found.classes, *found.ranks, *found.worst))

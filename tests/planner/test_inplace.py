"""Reduced gradients in the buffers where they were added up: half the bytes, nothing overwritten whatever takes how long, the same numbers."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from executor.buffers import state_names
from executor.train import run
from ir.errors import ProgramError
from ir.program import Actor, Program, Register
from ir.sbp import S
from planner.inplace import in_place
from planner.lower import lower
from simulator.memory import ledger
from tests.models import BATCH, SEQ, gpt, llama
from tests.parity import OPTIONS
from tests.plans import Layout, plan_for
from tests.virtual import perform_timed

LAYOUTS = [Layout(2, 2, zero=1), Layout(2, 2, 2, 2), Layout(2, 1, 2, 4, schedule="zb-h2")]


MODEL = gpt(num_layers=2)


def program_of(want: Layout) -> Program:
    return lower(MODEL, plan_for(MODEL, want, batch=BATCH, seq=SEQ))


def overlaps(program: Program, seed: int) -> list[str]:
    """Items that lie on the same bytes at one time when every firing takes another time, half of the communication very long."""

    def seconds(actor: Actor, microbatch: int) -> float:
        rng = random.Random(zlib.crc32(f"{seed} {actor.channel or actor.name} {microbatch}".encode()))
        return rng.choice((0.01, 0.1, 1.0)) * (20 if actor.queue != "compute" and rng.random() < 0.5 else 1)

    timeline = perform_timed(program, seconds, steps=3)
    spans = defaultdict(list)
    for s in timeline.spans:
        spans[s.actor, s.step].append((s.start_s, s.end_s))
    touched: dict[str, list[Actor]] = defaultdict(list)
    for a in program.actors:
        for name in (*a.writes, *a.takes):
            touched[name].append(a)
    found: dict[str, list[tuple[float, float, Register]]] = defaultdict(list)
    hosts = {r.inside for r in program.registers}
    for r in program.registers:
        if r.inside or r.name in hosts:
            for step in timeline.steps:
                writes = [t for a in touched[r.name] if r.name in a.writes for t in spans[a.name, step]]
                # in place: what is written is there when the reduction is over, and until then what it reads
                opened = max(end for _, end in writes) if r.inside else min(start for start, _ in writes)
                found[r.inside or r.name].append((opened, max(end for a in touched[r.name] for _, end in spans[a.name, step]), r))
    pairs = (pair for held in found.values() for pair in combinations(held, 2))
    return [f"{a.name} {b.name}" for (x, y, a), (u, v, b) in pairs if x < v and u < y and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes]


@pytest.mark.parametrize("want", LAYOUTS, ids=str)
def test_nothing_alive_is_overwritten_whatever_takes_how_long(want: Layout) -> None:
    program = program_of(want)
    assert any(r.inside for r in program.registers)
    assert not overlaps(program, 1)


def test_the_twin_finds_what_is_overwritten() -> None:
    """A sum that lies where another gradient is added up meanwhile."""
    program = program_of(Layout(2))
    first, *others = (r for r in program.registers if r.inside and r.rank == 0)
    other = next(r for r in others if r.nbytes == first.nbytes)
    wrong = replace(program, registers=tuple(replace(r, inside=other.inside) if r is first else r for r in program.registers))
    assert overlaps(wrong, 0)


def test_what_another_queue_reads_stays_apart() -> None:
    program = program_of(Layout(2))
    late = next(a for a in program.actors if a.work.op == "adamw" and a.rank == 0 and program.register[a.reads[0]].inside)
    registers = [replace(r, inside="", offset=0 if r.inside else r.offset) for r in program.registers if r.rank == 0]
    for queue, inside in (("compute", True), ("aside", False)):
        actors = [replace(a, queue=queue) if a is late else a for a in program.actors if a.rank == 0]
        assert bool(next(r for r in in_place(registers, actors) if r.name == late.reads[0]).inside) == inside


@pytest.mark.parametrize(("want", "share"), [(Layout(2), 0.5), (Layout(2, zero=1), 2 / 3), (Layout(1, 1, 4, 4), 1.0)], ids=str)
def test_a_gradient_is_held_once(want: Layout, share: float) -> None:
    """`share` of the bytes that gradients and their sums would take; where the search cuts columns a sum has memory of its own."""
    model = llama()
    program = lower(model, plan_for(model, want, batch=BATCH, seq=SEQ))
    apart = sum(r.nbytes for r in program.registers if r.memory == "gradient" and r.rank == 0)
    held = ledger(program).ranks[0]["gradient"]
    columns = sum(r.nbytes for r in program.registers if r.memory == "gradient" and r.rank == 0 and not r.inside and len(r.tensor.split("@")) == 1)
    assert held - (columns if want.zero else 0) == pytest.approx(share * (apart - (columns if want.zero else 0)), rel=0.12)


def test_the_numbers_are_the_same() -> None:
    program = program_of(LAYOUTS[0])
    apart = replace(program, registers=tuple(replace(r, inside="", offset=0) if r.inside else r for r in program.registers))
    one, two = (run(p, steps=2, **OPTIONS) for p in (program, apart.check()))
    assert one.loss == two.loss
    assert all(np.array_equal(one.tensor(name), two.tensor(name)) for name in state_names(program))


def test_what_cuts_columns_has_memory_of_its_own() -> None:
    plan = plan_for(gpt(), Layout(4, zero=1), batch=BATCH, seq=SEQ)
    name = "h.0.mlp.up.weight"
    for dim, inside in ((0, True), (1, False)):
        cut = replace(plan, params={**plan.params, name: plan.params[name]._replace(state=(S(dim), *plan.params[name].state[1:]))})
        sums = [r for r in lower(gpt(), cut).registers if r.tensor == f"d.{name}"]
        assert {bool(r.inside) for r in sums} == {inside}


def test_what_lies_inside_must_fit() -> None:
    program = program_of(Layout(2))
    r = next(r for r in program.registers if r.inside)
    for wrong, told in (
        ({"inside": "nobody"}, "no register with memory"), ({"offset": 64}, "does not fit"), ({"initial": 1}, "does not fit"), ({"credits": 2}, "does not fit"),
    ):  # fmt: skip
        with pytest.raises(ProgramError, match=told):
            replace(program, registers=tuple(replace(x, **wrong) if x is r else x for x in program.registers)).check()

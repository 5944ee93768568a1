"""Two copies of every parameter: equal to the last bit after every step, counted once, each fed its own half of the batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from executor.buffers import newest_item
from executor.train import Run, run
from ir.errors import PlanError
from ir.plan import Plan
from ir.program import Program
from planner.lower import lower
from simulator.memory import ledger
from tests.models import SEQ
from tests.parity import DEEP, OPTIONS, model
from tests.plans import Layout, cluster, plan_for

WANTED = [Layout(pp=2, num_microbatches=6, schedule="dualpipe"), Layout(dp=2, pp=2, num_microbatches=4, zero=2, schedule="dualpipe")]


@cache
def planned(want: Layout) -> Plan:
    return plan_for(model(DEEP), want, batch=want.dp * want.num_microbatches, seq=SEQ)


@cache
def program_of(want: Layout) -> Program:
    return lower(model(DEEP), planned(want))


def held(done: Run, name: str) -> list[tuple[object, np.ndarray]]:
    """(region, content) of every register that holds a part of a tensor that lasts, at the end of a run."""
    mine = [r for r in done.program.registers if r.tensor == name and r.initial]
    return [(r.region, done.buffers.slots[r.name][newest_item(done.program, r, done.steps) % r.credits]) for r in mine]


@pytest.mark.parametrize("want", WANTED, ids=str)
def test_copies_stay_equal_to_the_last_bit(want: Layout) -> None:
    done = run(program_of(want), steps=3, **OPTIONS)
    for p in model(DEEP).graph(1, SEQ, "float64").params:
        for name in (p.name, f"{p.name}@m", f"{p.name}@v"):
            by_region: dict[object, list[np.ndarray]] = {}
            for region, content in held(done, name):
                by_region.setdefault(region, []).append(content)
            assert all(len(copies) >= 2 for copies in by_region.values()), name
            assert all(np.array_equal(copies[0], other) for copies in by_region.values() for other in copies[1:]), name
    start = run(program_of(want), steps=1, **OPTIONS)
    assert not np.array_equal(held(done, "wte.weight")[0][1], held(start, "wte.weight")[0][1])


@pytest.mark.parametrize("want", WANTED, ids=str)
def test_the_norm_counts_every_element_once(want: Layout) -> None:
    counted: Counter[str] = Counter()
    for a in program_of(want).actors:
        if a.work.op == "sum_squares":
            counted[a.origin] += int(np.prod(program_of(want).register[a.reads[0]].shape, dtype=int))
    assert counted == {p.name: p.num_elements for p in model(DEEP).graph(1, SEQ, "float64").params}


@pytest.mark.parametrize("want", WANTED, ids=str)
def test_the_copies_share_the_batch_and_its_random_numbers(want: Layout) -> None:
    """As often as an input is loaded, every sample of the batch comes in once; dropout of a layer meets every sample once."""
    program, batch = program_of(want), planned(want).batch
    samples: dict[str, Counter[int]] = {}
    for a in program.actors:
        for microbatch in range(program.firings(a)):
            if a.work.kind == "load":
                first, last = (at + microbatch * a.work.batch_stride for at in a.work.attrs["dst_region"][0])
                samples.setdefault(a.work.op, Counter()).update(range(first, last))
            elif a.work.op == "dropout" and a.phase == "F":
                first = a.work.at.get("b", 0) + microbatch * a.work.batch_stride
                samples.setdefault(a.origin, Counter()).update(range(first, first + a.work.sizes["b"]))
    assert len(samples) > 10
    for name, seen in samples.items():
        assert set(seen) == set(range(batch)), name
        assert len(set(seen.values())) == 1, name


def test_every_rank_holds_two_stages_and_the_ledger_says_so() -> None:
    twice, once = (program_of(Layout(pp=2, num_microbatches=6, schedule=name)) for name in ("dualpipe", "1f1b"))
    for kind, program in (("parameter", twice), ("optimizer", twice)):
        here = [ledger(program, cluster=cluster()).ranks[rank][kind] for rank in (0, 1)]
        # the table of a tied embedding is needed by both stages, and is there once on every rank
        whole = sum(ledger(once, cluster=cluster()).ranks[rank][kind] for rank in (0, 1))
        tied = next(r.nbytes for r in once.registers if r.tensor == "wte.weight") * {"parameter": 1, "optimizer": 2}[kind]
        assert here == [whole - tied, whole - tied]


def test_plans_of_two_copies_that_cannot_be_run_are_refused() -> None:
    plan, whole = planned(WANTED[0]), model(DEEP)
    first, second = plan.stages[:2]
    with pytest.raises(PlanError, match=r"`dualpipe` runs 2 times through the layers; the stages of the plan go once through them"):
        lower(whole, replace(plan, stages=(first, second)))
    with pytest.raises(PlanError, match=r"`1f1b` runs once through the layers; the stages of the plan go 2 times through them"):
        lower(whole, replace(plan, schedule="1f1b"))
    with pytest.raises(PlanError, match=r"layer 0 lies twice on ranks \(0,\)"):
        lower(whole, replace(plan, stages=(first, second, first, second)))
    with pytest.raises(PlanError, match="2 copies of the pipeline cannot share 3 microbatches equally; give a multiple of 2"):
        lower(whole, replace(plan, num_microbatches=3))
    rows = ("0F1 0B1 3F0 3B0", "1F1 1B1 2F0 2B0")
    with pytest.raises(PlanError, match="0F1 runs in copy 0 of the pipeline; of 2 microbatches it takes 0 to 0: number them so"):
        lower(whole, replace(plan, schedule="table", orders=rows, num_microbatches=2))

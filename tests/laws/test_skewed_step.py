"""The next step begins where ranks are done while others still drain, unless the gradient's global norm holds everybody back."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from executor import train, verify
from ir.program import Program
from ir.timeline import Span
from planner.frontends.model import Model
from planner.lower import lower
from planner.single import single_device
from simulator.cost import CostModel
from simulator.engine import simulate
from tests.models import SEQ, gpt, llama
from tests.parity import LIMIT, OPTIONS, STEPS
from tests.plans import Layout, cluster, plan_for

NUM_RANKS, NUM_MICROBATCHES = 4, 8
EARLY = ("zb-h1", "zb-h2", "zb-v", "interleaved-zb")
"""Schedules whose first rank has its last pass before another rank has."""
ORDERLY = ("1f1b", "gpipe", "seq1f1b")
"""Schedules whose first rank ends last."""


@cache
def model(tied: bool) -> Model:
    return gpt(num_layers=6) if tied else llama(num_layers=6)


@cache
def program(name: str, max_norm: float, tied: bool = False) -> Program:
    want = Layout(pp=NUM_RANKS, num_microbatches=NUM_MICROBATCHES, schedule=name, pieces=(6, 6) if name == "seq1f1b" else ())
    plan = plan_for(model(tied), want, batch=NUM_MICROBATCHES, seq=SEQ)
    return lower(model(tied), replace(plan, optimizer={**plan.optimizer, "max_norm": max_norm}))


@cache
def spans(name: str, max_norm: float, tied: bool = False) -> tuple[Span, ...]:
    made = program(name, max_norm, tied)
    return tuple(s for s in simulate(made, CostModel(cluster()), steps=3).spans if s.queue == "compute" or made.actor[s.actor].work.kind == "collective")


def passes(name: str, max_norm: float, rank: int, step: int, tied: bool = False) -> list[Span]:
    """The compute firings of a rank's microbatches in a step."""
    made = program(name, max_norm, tied)
    return [s for s in spans(name, max_norm, tied) if (s.rank, s.step, s.queue) == (rank, step, "compute") and made.actor[s.actor].clock == "microbatch"]


def begins_s(name: str, max_norm: float, rank: int, step: int, tied: bool = False) -> float:
    return min(s.start_s for s in passes(name, max_norm, rank, step, tied))


def ends_s(name: str, max_norm: float, step: int, tied: bool = False) -> float:
    """When the last rank has its last pass of a step."""
    return max(s.end_s for rank in range(NUM_RANKS) for s in passes(name, max_norm, rank, step, tied))


@pytest.mark.parametrize("name", EARLY)
def test_without_clipping_the_first_rank_is_ahead(name: str) -> None:
    assert begins_s(name, 0.0, 0, 2) < ends_s(name, 0.0, 1)
    updates = [a for a in program(name, 0.0).actors if a.updates and a.rank == 0]
    assert updates
    last = max(s.end_s for s in spans(name, 0.0) if s.step == 1 and s.actor in {a.name for a in updates})
    assert last < ends_s(name, 0.0, 1)


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_so_is_it_where_its_table_is_tied_to_the_last_stage(name: str) -> None:
    assert begins_s(name, 0.0, 0, 2, tied=True) < ends_s(name, 0.0, 1, tied=True)


@pytest.mark.parametrize("name", [*EARLY, *ORDERLY])
def test_with_clipping_every_update_waits_for_the_last_pass_of_all(name: str) -> None:
    made = program(name, 1.0)
    norm = [s for s in spans(name, 1.0) if s.step == 1 and made.actor[s.actor].origin == "" and s.actor.startswith("norm2.join")]
    assert len(norm) == NUM_RANKS
    assert min(s.end_s for s in norm) >= ends_s(name, 1.0, 1)
    for rank in range(NUM_RANKS):
        assert begins_s(name, 1.0, rank, 2) > max(s.end_s for s in norm if s.rank == rank)


@pytest.mark.parametrize("name", EARLY)
def test_being_ahead_shortens_the_step(name: str) -> None:
    """By more than the norm itself takes, which 1F1B saves as well."""
    gain = {n: [begins_s(n, norm, 0, 2) - begins_s(n, norm, 0, 1) for norm in (1.0, 0.0)] for n in (name, "1f1b")}
    saved, alone = (clipped - free for clipped, free in gain.values())
    assert saved > 1.5 * alone > 0


@pytest.mark.parametrize("name", ORDERLY)
def test_where_the_first_rank_ends_last_nothing_is_gained(name: str) -> None:
    assert begins_s(name, 0.0, 0, 2) >= ends_s(name, 0.0, 1)


@pytest.mark.parametrize(("name", "tied"), [("zb-h2", False), ("zb-v", True), ("seq1f1b", True)])
def test_three_steps_in_one_run_give_what_one_device_gives(name: str, tied: bool) -> None:
    """Ranks of a run are in different steps at once; losses of all steps and the last gradients are the same."""
    plan = single_device(model(tied), cluster(), batch=NUM_MICROBATCHES, seq=SEQ, dtype="float64", optimizer=program(name, 0.0, tied).meta["optimizer"])
    ours, theirs = (verify.seen(train.run(p, steps=STEPS, **OPTIONS)) for p in (program(name, 0.0, tied), lower(model(tied), plan)))  # type: ignore[arg-type]
    found = verify.compare(ours, theirs)
    assert max(found["loss_max_rel"], found["grad_max_rel"]) <= LIMIT, found

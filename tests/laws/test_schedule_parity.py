"""Any schedule = one device: losses, gradients and states of three steps, float64, 1e-10 relative; tied embeddings on two stages, dropout and clipping on.

Every schedule at every size: `benchmarks/parity.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.lower import lower
from planner.optimizers import OPTIMIZERS
from planner.schedules import SCHEDULES
from tests.models import SEQ
from tests.parity import CUTS, DEEP, apart, apart_in_time, between, ended, model, on_one_device, pipelines, same
from tests.plans import Layout, plan_for


def covering() -> list[Layout]:
    """Every schedule on 2 and on 4 ranks, the numbers of microbatches in turn, each of `CUTS` on 2; on 2 ranks, and of two copies, the most as well."""
    found: dict[tuple[str, int], list[Layout]] = {}
    cuts: dict[tuple[int, ...], Layout] = {}
    for want in pipelines():
        found.setdefault((want.schedule, want.pp), []).append(want)
        cuts.setdefault(want.pieces, want)
    turns = [sizes[i // 2 % len(sizes)] for i, sizes in enumerate(found.values())]
    cut = [want for pieces, want in cuts.items() if pieces]
    return list(dict.fromkeys((*turns, *cut, *(sizes[-1] for (name, pp), sizes in found.items() if pp == 2 or SCHEDULES[name].copies > 1))))


SPREAD = [
    Layout(2, 1, 2, 4, zero=1), Layout(2, 1, 2, 4, zero=2, recompute=True), Layout(2, 1, 2, 4, zero=3), Layout(1, 2, 2, 4, sp=True),
    Layout(2, 2, 2, 4, zero=1, sp=False),
]  # fmt: skip
"""Pipelines whose ranks are split over data and tensor parallelism too."""
CHUNKED = [name for name, s in SCHEDULES.items() if s.splits or s.chunks != 1]
"""Schedules with several stages a rank, or weight gradients apart."""


@pytest.mark.parametrize("want", covering(), ids=str)
def test_any_schedule_gives_what_one_device_gives(want: Layout) -> None:
    found = apart_in_time(want)
    assert same(found), found


@pytest.mark.parametrize("want", [replace(SPREAD[i % len(SPREAD)], schedule=name) for i, name in enumerate(CHUNKED)], ids=str)
def test_whatever_the_ranks_are_split_over(want: Layout) -> None:
    found = apart(DEEP, want)
    assert same(found), found


@pytest.mark.parametrize("want", [replace(w, schedule="seq1f1b", pieces=CUTS[i % len(CUTS)]) for i, w in enumerate(SPREAD)], ids=str)
def test_sequences_in_pieces_whatever_the_ranks_are_split_over(want: Layout) -> None:
    found = apart(DEEP, want)
    assert same(found), found


def test_grouped_queries_and_rotary_positions_in_pieces() -> None:
    found = apart("llama", Layout(1, 2, 2, 2, schedule="seq1f1b", pieces=(5, 4, 3)))
    assert same(found), found


@pytest.mark.parametrize(("name", "pp", "vpp"), [("interleaved", 2, 4), ("looped-bfs", 2, 3), ("interleaved-zb", 2, 4)])
def test_more_stages_a_rank(name: str, pp: int, vpp: int) -> None:
    found = apart_in_time(Layout(pp=pp, num_microbatches=4, schedule=name, vpp=vpp))
    assert same(found), found


def test_a_table_of_ones_own() -> None:
    """Stages of a V, microbatches out of turn, some backwards whole and some in two."""
    rows = ("0F1 0F0 0F2 3F1 3B1 0B1 3F0 3I0 0I0 3F2 3B2 3W0 0B2 0W0", "1F1 2F1 1F0 2B1 1B1 2F0 2I0 1F2 1I0 2F2 2B2 1W0 1B2 2W0")
    plan = replace(plan_for(model(DEEP), Layout(pp=2, num_microbatches=3, schedule="zb-v"), batch=3, seq=SEQ), schedule="table", orders=rows)
    found = between(ended(lower(model(DEEP), plan)), on_one_device(DEEP, "adamw", 3))
    assert same(found), found


def test_every_schedule_and_number_of_ranks_is_covered() -> None:
    assert {(w.schedule, w.pp) for w in covering()} == {(name, p) for name in SCHEDULES for p in (2, 4)}
    assert {(w.pp, w.num_microbatches) for w in covering()} == {(w.pp, w.num_microbatches) for w in pipelines()}


def test_it_is_tied_and_it_clips() -> None:
    assert model(DEEP).config.tied
    gradients = on_one_device(DEEP, "adamw", 4).seen.gradients
    assert np.sqrt(sum(float((g**2).sum()) for g in gradients.values())) > 2 * OPTIMIZERS["adamw"]["max_norm"]

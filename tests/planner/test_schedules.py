"""Orders of pipeline stages, against published ones; what they keep, against their text."""

from __future__ import annotations

import pytest

from ir.errors import PlanError
from planner.lower import stash
from planner.schedules import SCHEDULES, schedule

# torch 2.13: ScheduleGPipe._get_pipeline_order, and 1F1B by the order of Schedule1F1B._step_microbatches (its _get_pipeline_order is wrong on the last rank).
PUBLISHED = {
    ("gpipe", 2, 4): ("F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 B0 B1 B2 B3"),
    ("1f1b", 2, 4): ("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"),
    ("1f1b", 4, 4): ("F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"),
    ("1f1b", 4, 8): (
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7", "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ),
}  # fmt: skip
SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 4), (4, 8), (5, 3)]


@pytest.mark.parametrize(("name", "p", "m"), PUBLISHED)
def test_published_orders(name: str, p: int, m: int) -> None:
    assert tuple(" ".join(map(str, schedule(name).slots(s, p, m))) for s in range(p)) == PUBLISHED[name, p, m]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_pass_once_in_turn_and_forward_first(name: str, p: int, m: int) -> None:
    for s in range(p):
        slots = schedule(name).slots(s, p, m)
        assert [k.microbatch for k in slots if k.kind == "F"] == list(range(m))
        assert [k.microbatch for k in slots if k.kind == "B"] == list(range(m))
        assert all(slots.index(("F", i)) < slots.index(("B", i)) for i in range(m))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_what_a_stage_keeps_is_what_its_order_says(name: str, p: int, m: int) -> None:
    for s in range(p):
        assert schedule(name).stash(s, p, m) == stash(schedule(name).slots(s, p, m)) == (min(p - s, m) if name == "1f1b" else m)


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match="`zb` is not known; known are gpipe, 1f1b"):
        schedule("zb")

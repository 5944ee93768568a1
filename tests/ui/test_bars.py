"""Merging of spans: nothing is lost, nothing is bridged, and what can be seen stays apart."""

from __future__ import annotations

import pytest

from ir.timeline import Span
from ui.bars import NARROW, PIXELS, merge


def span(actor: str, microbatch: int, start_s: float, end_s: float, rank: int = 0, queue: str = "compute", step: int = 0) -> Span:
    return Span(actor, step, microbatch, rank, queue, start_s, start_s, end_s)


def kind(actor: str) -> str:
    return actor.split(".")[0]


def chain(*durations: tuple[str, int, float], rank: int = 0) -> list[Span]:
    out, t = [], 0.0
    for i, (name, microbatch, duration) in enumerate(durations):
        out.append(span(f"{name}.{i}", microbatch, t, t + duration, rank))
        t += duration
    return out


def test_neighbours_of_one_kind_and_microbatch_become_one_bar():
    bars = merge(chain(("F", 0, 1.0), ("F", 0, 2.0), ("F", 1, 3.0), ("I", 1, 3.0)), kind)
    assert [(b.busy_s, b.microbatch, b.start_s, b.end_s, b.num) for b in bars] == [
        ((("F", 3.0),), 0, 0.0, 3.0, 2),
        ((("F", 3.0),), 1, 3.0, 6.0, 1),
        ((("I", 3.0),), 1, 6.0, 9.0, 1),
    ]
    assert (bars[0].first, bars[0].last) == ("F.0", "F.1")


def test_a_visible_gap_is_never_bridged():
    gap = 3.0 / PIXELS
    apart = [span("F.a", 0, 0.0, 1.0), span("F.b", 0, 1.0 + 2 * gap, 3.0)]
    close = [span("F.a", 0, 0.0, 1.0), span("F.b", 0, 1.0 + gap / 2, 3.0)]
    assert len(merge(apart, kind)) == 2
    assert len(merge(close, kind)) == 1


def test_narrow_turns_of_one_microbatch_are_one_bar_that_knows_both_kinds():
    turns = [("I" if i % 2 else "W", 0, 0.5 / NARROW) for i in range(NARROW)]
    bars = merge(chain(*turns, ("U", 0, 0.5)), kind)
    assert len(bars) == 2
    assert [k for k, _ in bars[0].busy_s] == ["I", "W"]
    assert bars[0].busy_s[0][1] == pytest.approx(0.25)
    assert bars[0].microbatch == 0


def test_wide_turns_stay_apart():
    assert len(merge(chain(*[("I" if i % 2 else "W", 0, 1.0) for i in range(10)]), kind)) == 10


def test_thousands_of_spans_keep_their_busy_seconds_within_the_limit_of_bars():
    spans = [s for rank in range(3) for s in chain(*[("FIW"[i % 3], i // 2, 1.0 + i % 7) for i in range(4000)], rank=rank)]
    bars = merge(spans, kind, max_bars=500)
    assert 100 < len(bars) <= 500
    for rank in range(3):
        for name in "FIW":
            drawn = sum(s for b in bars if b.rank == rank for k, s in b.busy_s if k == name)
            assert drawn == pytest.approx(sum(s.end_s - s.start_s for s in spans if s.rank == rank and s.actor.startswith(name)))
    assert sum(b.num for b in bars) == len(spans)
    assert max(b.end_s - b.start_s for b in bars) < 0.05 * max(s.end_s for s in spans), "a pooled bar is longer than its stretch"


def test_rows_come_by_rank_and_queue_and_never_mix():
    spans = [span("F.a", 0, 0.0, 1.0, rank=1), span("F.b", 0, 0.0, 1.0, rank=0, queue="z"), span("F.c", 0, 1.0, 2.0, rank=0)]
    assert [(b.rank, b.queue) for b in merge(spans, kind, max_bars=1)] == [(0, "compute"), (0, "z"), (1, "compute")]


def test_steps_are_not_pooled_under_one_microbatch_number():
    spans = [span("F.a", 0, 0.0, 1e-4, step=0), span("F.b", 0, 1e-4, 2e-4, step=1), span("F.c", 0, 2e-4, 1.0, step=1)]
    assert [b.microbatch for b in merge(spans, kind, max_bars=1)] == [-1]
    assert [b.step for b in merge(spans, kind)] == [0, 1]


def test_no_spans_no_bars():
    assert merge([], kind) == ()


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="max_bars is 0"):
        merge([], kind, max_bars=0)

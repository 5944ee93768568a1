"""Spans of a timeline, merged to as many bars as an eye can tell apart.

A step of a real model has thousands of spans, most of them narrower than a pixel. Three merges, from the gentlest on: neighbours on one queue that do the same
for the same microbatch; neighbours too narrow to be seen by themselves that belong to the same microbatch (input and weight gradients take turns);
and, only where there are still too many, whatever lies within one short stretch of time. A merged bar knows the busy seconds of every kind in it. No bar of the
first two merges bridges a visible gap, none of the third is longer than its stretch, and the busy seconds of all bars together are those of the spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ir.timeline import Span

KINDS = {
    "F": "forward", "R": "forward again", "I": "input gradient", "W": "weight gradient", "U": "update",
    "collective": "collective", "p2p": "point to point", "io": "input and output",
}  # fmt: skip
"""What a queue may be busy with, in the order of a step, and how people call it."""

PIXELS = 2000
"""A gap shorter than this share of the whole time cannot be seen."""

NARROW = 250
"""A bar shorter than this share of the whole time cannot be told from its neighbours."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing to draw: `num` spans of one row from `start_s` to `end_s`, `busy_s` by kind in KINDS' order; `microbatch` is -1 where it holds several."""

    rank: int
    queue: str
    step: int
    microbatch: int
    start_s: float
    end_s: float
    busy_s: tuple[tuple[str, float], ...]
    num: int
    first: str
    last: str


def merge(spans: Iterable[Span], kind_of: Callable[[str], str], max_bars: int = 6000) -> tuple[Bar, ...]:
    """The bars of all rows, ordered by rank, queue and start; `kind_of` maps an actor to one of KINDS.

    The third merge begins with stretches of 1/2000 of the whole time and doubles them until at most `max_bars` are left.
    """
    if max_bars < 1:
        raise ValueError(f"max_bars is {max_bars}; at least 1 is needed")
    rows: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        rows.setdefault((span.rank, span.queue), []).append(span)
    if not rows:
        return ()
    length_s = max(s.end_s for row in rows.values() for s in row) - min(s.start_s for row in rows.values() for s in row)
    out = [_gentle([_bar(s, kind_of(s.actor)) for s in sorted(rows[key], key=lambda s: (s.start_s, s.end_s))], length_s) for key in sorted(rows)]
    stretch_s = length_s / PIXELS
    while sum(map(len, out)) > max(max_bars, len(out)) and stretch_s < 2 * length_s:
        out = [_pool(bars, min(stretch_s, length_s)) for bars in out]
        stretch_s *= 2
    return tuple(bar for bars in out for bar in bars)


def _bar(span: Span, kind: str) -> Bar:
    busy = ((kind, span.end_s - span.start_s),)
    return Bar(span.rank, span.queue, span.step, span.microbatch, span.start_s, span.end_s, busy, 1, span.actor, span.actor)


def _gentle(bars: Sequence[Bar], length_s: float) -> list[Bar]:
    gap_s, narrow_s = length_s / PIXELS, length_s / NARROW

    def touch(a: Bar, b: Bar) -> bool:
        return (a.step, a.microbatch) == (b.step, b.microbatch) and b.start_s - a.end_s <= gap_s

    def narrow(bar: Bar) -> bool:
        return bar.end_s - bar.start_s < narrow_s or len(bar.busy_s) > 1

    alike = _join_if(bars, lambda a, b: touch(a, b) and len(a.busy_s) == 1 and a.busy_s[0][0] == b.busy_s[0][0])
    return _join_if(alike, lambda a, b: touch(a, b) and narrow(a) and narrow(b))


def _pool(bars: Sequence[Bar], stretch_s: float) -> list[Bar]:
    return _join_if(bars, lambda a, b: b.end_s - a.start_s <= stretch_s)


def _join_if(bars: Sequence[Bar], joins: Callable[[Bar, Bar], bool]) -> list[Bar]:
    out: list[Bar] = []
    for bar in bars:
        if out and joins(out[-1], bar):
            out[-1] = _join(out[-1], bar)
        else:
            out.append(bar)
    return out


def _join(a: Bar, b: Bar) -> Bar:
    busy = dict.fromkeys(KINDS, 0.0)
    for kind, seconds in a.busy_s + b.busy_s:
        busy[kind] += seconds
    microbatch = a.microbatch if (a.step, a.microbatch) == (b.step, b.microbatch) else -1
    present = {kind for kind, _ in a.busy_s + b.busy_s}
    kept = tuple((kind, seconds) for kind, seconds in busy.items() if kind in present)
    return Bar(a.rank, a.queue, a.step, microbatch, a.start_s, max(a.end_s, b.end_s), kept, a.num + b.num, a.first, b.last)

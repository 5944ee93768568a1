"""Where the time of a step goes, by interval union on each rank.

In the steady window every moment of a rank is counted once, for the first of these that holds: compute (kernels of forward and backward run), optimizer
(kernels of phase U run), exposed communication (a collective or p2p transfers), other (loading, storing, or a kernel or a transfer could run and the runtime
has not started it), bubble (nothing can run: the rank waits for others). A collective that waits for its slowest member is bubble, not communication.

The bubble of a rank is *imbalance* between its first and last kernel of forward and backward in a step, *warm-up* before and *drain* after these. One step's
drain becomes the next one's warm-up at the moment when any rank begins the next step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ir.intervals import Intervals, common, length, minus, union
from ir.program import Program
from ir.timed import UPDATE, Timed, timed

if TYPE_CHECKING:
    from ir.timeline import Timeline

PARTS = ("compute_s", "optimizer_s", "exposed_comm_s", "other_s", "bubble_s")


def breakdown(timeline: Timeline, program: Program) -> dict[str, float]:
    """Seconds of a step by part, mean over the program's ranks."""
    ranks = _by_rank(timeline, program)
    per_rank = [_parts(spans, timeline.window_s) for spans in ranks.values()]
    scale = len(timeline.steady_steps) * max(1, len(ranks))
    return {part: sum(length(parts[part]) for parts in per_rank) / scale for part in PARTS}


def bubbles(timeline: Timeline, program: Program) -> dict[str, float]:
    """Seconds of a step's bubble by class, mean over the program's ranks."""
    ranks = _by_rank(timeline, program)
    out = {"warm_up_s": 0.0, "imbalance_s": 0.0, "drain_s": 0.0}
    begins = _first_begin(ranks)
    if begins:
        begins[min(begins)] = -math.inf
    scale = len(timeline.steady_steps) * max(1, len(ranks))
    for spans in ranks.values():
        idle = _parts(spans, timeline.window_s)["bubble_s"]
        inside, warming = _phases(spans, begins)
        out["imbalance_s"] += length(common(idle, inside)) / scale
        outside = minus(idle, inside)
        out["warm_up_s"] += length(common(outside, warming)) / scale
        out["drain_s"] += length(minus(outside, warming)) / scale
    return out


def _by_rank(timeline: Timeline, program: Program) -> Mapping[int, list[Timed]]:
    out: dict[int, list[Timed]] = {rank: [] for rank in program.ranks}
    for t in timed(timeline, program):
        out[t.actor.rank].append(t)
    return out


def _is_pass(t: Timed) -> bool:
    """Whether it is a kernel of forward or backward."""
    return t.actor.work.kind == "compute" and t.actor.phase != UPDATE


def _parts(spans: Sequence[Timed], window: tuple[float, float]) -> dict[str, Intervals]:
    """The window of one rank, divided."""
    left = union([window])
    kernels = [t for t in spans if t.actor.work.kind == "compute"]
    claims = {
        "compute_s": ((t.span.start_s, t.span.end_s) for t in kernels if _is_pass(t)),
        "optimizer_s": ((t.span.start_s, t.span.end_s) for t in kernels if not _is_pass(t)),
        "exposed_comm_s": ((t.begin_s, t.span.end_s) for t in spans if t.is_comm),
        "other_s": [
            *((t.span.start_s, t.span.end_s) for t in spans if t.actor.work.kind in ("load", "store")),
            *((t.met_s, t.begin_s) for t in spans if t.is_comm or t.actor.work.kind == "compute"),
        ],
    }
    out = {}
    for part, pairs in claims.items():
        claimed = union(pairs)
        out[part] = common(left, claimed)
        left = minus(left, claimed)
    return out | {"bubble_s": left}


def _first_begin(ranks: Mapping[int, Sequence[Timed]]) -> dict[int, float]:
    """When any rank begins each step."""
    out: dict[int, float] = {}
    for spans in ranks.values():
        for t in spans:
            if _is_pass(t):
                out[t.span.step] = min(out.get(t.span.step, math.inf), t.span.start_s)
    return out


def _phases(spans: Sequence[Timed], begins: Mapping[int, float]) -> tuple[Intervals, Intervals]:
    """(between this rank's first and last kernel of each step, from anybody's first kernel of each step to this rank's)."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for t in spans:
        if _is_pass(t):
            first[t.span.step] = min(first.get(t.span.step, math.inf), t.span.start_s)
            last[t.span.step] = max(last.get(t.span.step, -math.inf), t.span.end_s)
    return union((first[k], last[k]) for k in first), union((begins[k], first[k]) for k in first)

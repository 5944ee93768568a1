"""From a driver's records to a timeline, and what is read off it: ends of steps, the share of communication that was hidden."""

from __future__ import annotations

from collections.abc import Sequence

from executor.backend import Backend
from executor.driver import Driver
from ir.program import Program
from ir.timeline import Span, Timeline

COMMUNICATION = ("collective", "send", "recv")


def timeline(driver: Driver, backend: Backend) -> Timeline:
    """The spans of everything that finished, in seconds since the threads started.

    A span is issued when it came to the head of its queue, starts when its work does, and the members of a rendezvous end together, with the last share.
    """
    actors = driver.machine.actors
    times = [[backend.times(mark) for _, _, mark in lane.records] for lane in driver.lanes]
    ends: dict[tuple[str, int, int], float] = {}
    for lane, mine in zip(driver.lanes, times, strict=True):
        for (action, _, _), (_, end_s) in zip(lane.records, mine, strict=True):
            if channel := actors[action.actor].channel:
                key = (channel, action.step, action.microbatch)
                ends[key] = max(ends.get(key, 0.0), end_s)
    zero, spans = driver.start_s, []
    for lane, mine in zip(driver.lanes, times, strict=True):
        for (action, head_s, _), (start_s, end_s) in zip(lane.records, mine, strict=True):
            actor = actors[action.actor]
            end_s = ends.get((actor.channel, action.step, action.microbatch), end_s)
            spans.append(Span(actor.name, action.step, action.microbatch, lane.rank, lane.queue, head_s - zero, start_s - zero, end_s - zero))
    return Timeline("measured", tuple(spans), {"program": driver.machine.program.fingerprint, "backend": backend.name})


def step_ends(measured: Timeline) -> list[float]:
    """When the last action of every step ended; of a run that was stopped, the last step may be a part of one."""
    ends: dict[int, float] = {}
    for span in measured.spans:
        ends[span.step] = max(ends.get(span.step, 0.0), span.end_s)
    return [ends[step] for step in sorted(ends)]


def hidden_share(measured: Timeline, program: Program) -> float:
    """Seconds of communication during which the same rank computed, over all seconds of communication; 1 where there is none."""
    total = hidden = 0.0
    for rank in program.ranks:
        here = [s for s in measured.spans if s.rank == rank]
        sent = union([(s.start_s, s.end_s) for s in here if program.actor[s.actor].work.kind in COMMUNICATION])
        computed = union([(s.start_s, s.end_s) for s in here if program.actor[s.actor].work.kind == "compute"])
        total += sum(b - a for a, b in sent)
        hidden += overlap(sent, computed)
    return hidden / total if total else 1.0


def union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals in order that cover the same.

    >>> union([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    out: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def overlap(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """The length that two lists of disjoint, ordered intervals have in common.

    >>> overlap([(0, 4), (6, 8)], [(3, 7)])
    2.0
    """
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total

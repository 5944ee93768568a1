"""From a driver's records to a timeline, and the share of its communication that was hidden."""

from __future__ import annotations

from executor.backend import Backend
from executor.driver import Driver
from ir.intervals import common, length, union
from ir.program import Program
from ir.timed import COMM
from ir.timeline import Span, Timeline


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


def hidden_share(measured: Timeline, program: Program) -> float:
    """Seconds of communication during which the same rank computed, over all seconds of communication; 1 where there is none."""
    total = hidden = 0.0
    for rank in program.ranks:
        here = [s for s in measured.spans if s.rank == rank]
        sent = union((s.start_s, s.end_s) for s in here if program.actor[s.actor].work.kind in COMM)
        computed = union((s.start_s, s.end_s) for s in here if program.actor[s.actor].work.kind == "compute")
        total += length(sent)
        hidden += length(common(sent, computed))
    return hidden / total if total else 1.0

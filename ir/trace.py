"""Timelines as a trace for Perfetto and chrome://tracing: a process is a rank, a thread a queue, an arrow a message.

The format is Chrome's trace event format; times in it are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ir.live import live_memory
from ir.program import Program
from ir.timed import check_belongs

if TYPE_CHECKING:
    from ir.timeline import Span, Timeline

Event = dict[str, Any]
MICROSECONDS = 1e6


def trace(timelines: Sequence[Timeline], program: Program | None = None) -> dict[str, Any]:
    """One document of one or more timelines, each beginning at 0, the processes of the first above those of the second.

    With a program: operators and phases, arrows from each send to its recv, live memory by class. Raises InputError where a timeline is of another program.
    """
    ranks = max((s.rank for t in timelines for s in t.spans), default=0) + 1
    events: list[Event] = []
    for i, timeline in enumerate(timelines):
        name = f"{timeline.kind} " if len(timelines) > 1 else ""
        events += _events(timeline, program, i * ranks, name)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"timelines": [t.kind for t in timelines]}}


def _events(timeline: Timeline, program: Program | None, first_pid: int, name: str) -> Iterator[Event]:
    zero = min((s.start_s for s in timeline.spans), default=0.0)
    threads = {q: i for i, q in enumerate(sorted({(s.rank, s.queue) for s in timeline.spans}, key=lambda q: (q[0], q[1] != "compute", q[1])))}
    for rank in sorted({rank for rank, _ in threads}):
        yield {"ph": "M", "name": "process_name", "pid": first_pid + rank, "args": {"name": f"{name}rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": first_pid + rank, "args": {"sort_index": first_pid + rank}}
    for (rank, queue), tid in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": first_pid + rank, "tid": tid, "args": {"name": queue}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": first_pid + rank, "tid": tid, "args": {"sort_index": tid}}
    for s in timeline.spans:
        yield _slice(s, program, zero) | {"pid": first_pid + s.rank, "tid": threads[s.rank, s.queue]}
    if program is not None:
        check_belongs(timeline, program)
        yield from _arrows(timeline, program, zero, first_pid, threads)
        yield from _counters(timeline, program, zero, first_pid)


def _micro(moment_s: float, zero: float) -> float:
    return round((moment_s - zero) * MICROSECONDS, 3)


def _slice(s: Span, program: Program | None, zero: float) -> Event:
    args: dict[str, Any] = {"step": s.step, "microbatch": s.microbatch, "issued_us": _micro(s.issued_s, zero)}
    category = "firing"
    if program is not None:
        actor = program.actor[s.actor]
        category = f"{actor.work.kind},{actor.phase}"
        args |= {
            "op": actor.work.op,
            "phase": actor.phase,
            "origin": actor.origin,
            "layer": actor.layer,
            "flops": actor.work.flops,
            "nbytes": actor.work.nbytes,
        }
    start = _micro(s.start_s, zero)
    return {"ph": "X", "name": s.actor, "cat": category, "ts": start, "dur": round(_micro(s.end_s, zero) - start, 3), "args": args}


def _arrows(timeline: Timeline, program: Program, zero: float, first_pid: int, threads: dict[tuple[int, str], int]) -> Iterator[Event]:
    ends: dict[tuple[str, int, int], dict[str, Span]] = {}
    for s in timeline.spans:
        actor = program.actor[s.actor]
        if actor.work.kind in ("send", "recv"):
            ends.setdefault((actor.channel, s.step, s.microbatch), {})[actor.work.kind] = s
    for i, ((channel, step, microbatch), pair) in enumerate(sorted(ends.items())):
        if len(pair) == 2:
            for ph, s in (("s", pair["send"]), ("f", pair["recv"])):
                middle = _micro((s.start_s + s.end_s) / 2, zero)
                arrow = {"ph": ph, "id": f"{first_pid}.{i}", "name": channel, "cat": "message", "ts": middle, "args": {"step": step, "microbatch": microbatch}}
                yield arrow | {"pid": first_pid + s.rank, "tid": threads[s.rank, s.queue]} | ({"bp": "e"} if ph == "f" else {})


def _counters(timeline: Timeline, program: Program, zero: float, first_pid: int) -> Iterator[Event]:
    for memory in live_memory(timeline, program):
        for i, t in enumerate(memory.times_s.tolist()):
            args = {c: float(v[i]) for c, v in memory.by_class.items()}
            yield {"ph": "C", "name": "live bytes", "pid": first_pid + memory.rank, "ts": _micro(t, zero), "args": args}

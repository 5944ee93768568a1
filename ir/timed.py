"""Spans joined with their Program: what each firing was, when its own rank was ready for it, when its whole channel had begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ir.errors import InputError
from ir.net import awaited
from ir.program import Actor, Program

if TYPE_CHECKING:
    from ir.timeline import Span, Timeline

COMM = ("collective", "send", "recv")
UPDATE = "U"
"""The phase of the update: gradient norm, clipping, optimizer."""


class Timed(NamedTuple):
    """`ready_s`: when its queue was free and its items and slots were there. `met_s`: when this held for every member of its channel. `begin_s`: when the
    last member of the channel started. In this order, and not after the end; without channel the last two are `ready_s` and the start."""

    span: Span
    actor: Actor
    ready_s: float
    met_s: float
    begin_s: float

    @property
    def is_comm(self) -> bool:
        return self.actor.work.kind in COMM

    @property
    def busy_s(self) -> float:
        """Seconds of work: of a collective or p2p, the transfer alone."""
        return self.span.end_s - self.begin_s

    @property
    def waiting_s(self) -> float:
        """Seconds that its rank, itself ready, waited for the slowest member of its channel to be ready."""
        return self.met_s - self.ready_s


def check_belongs(timeline: Timeline, program: Program) -> None:
    """Raises InputError at the first span that is no firing of the program."""
    actors, num = program.actor, program.num_microbatches
    for s in timeline.spans:
        actor = actors.get(s.actor)
        if actor is None or actor.rank != s.rank or actor.queue != s.queue or s.microbatch >= (num if actor.clock == "microbatch" else 1):
            told = f"`{s.actor}` microbatch {s.microbatch} on rank {s.rank} ({s.queue})"
            raise InputError(f"the {timeline.kind} timeline has {told}, which program `{program.name}` has not; give the program that it is of")


def timed(timeline: Timeline, program: Program) -> list[Timed]:
    """Every span with its actor and moments, remembered for the program asked last; raises InputError where the timeline is of another program."""
    known: list[tuple[Program, list[Timed]]] = timeline.__dict__.setdefault("_timed", [])
    if not known or known[0][0] is not program:
        known[:] = [(program, _timed(timeline, program))]
    return known[0][1]


def _timed(timeline: Timeline, program: Program) -> list[Timed]:
    check_belongs(timeline, program)
    actors, joint = program.actor, dict[tuple[str, int, int], tuple[float, float]]()
    readies = _ready(timeline.spans, program)
    for s, ready in zip(timeline.spans, readies, strict=True):
        if channel := actors[s.actor].channel:
            met, begin = joint.get((channel, s.step, s.microbatch), (ready, s.start_s))
            joint[channel, s.step, s.microbatch] = (max(met, ready), max(begin, s.start_s))
    return [_of(s, actors[s.actor], ready, joint) for s, ready in zip(timeline.spans, readies, strict=True)]


def _of(s: Span, actor: Actor, ready: float, joint: Mapping[tuple[str, int, int], tuple[float, float]]) -> Timed:
    """On a channel, with its moments; clocks of ranks that disagree cannot put them after the end."""
    if not actor.channel:
        return Timed(s, actor, ready, ready, s.start_s)
    met, begin = joint[actor.channel, s.step, s.microbatch]
    return Timed(s, actor, ready, min(met, s.end_s), min(begin, s.end_s))


def _ready(spans: Sequence[Span], program: Program) -> list[float]:
    """For each span the latest end of all that it had to wait for on its own rank, the first start of all where there is nothing; not after its start."""
    net = program.net
    incoming = awaited(net)
    for node in range(net.num_nodes):
        after, offset = net.next_in_queue(node)
        incoming[after].append((node, offset))
    nodes = {a.name: net.nodes[i] for i, a in enumerate(program.actors)}
    first = min((s.start_s for s in spans), default=0.0)
    never = [first] * net.num_nodes
    ends = {k: [first] * net.num_nodes for k in {s.step for s in spans}}
    for s in spans:
        ends[s.step][nodes[s.actor][s.microbatch]] = s.end_s
    out = []
    for s in spans:
        before = [ends.get(s.step - offset, never)[src] for src, offset in incoming[nodes[s.actor][s.microbatch]]]
        out.append(min(max(before), s.start_s))
    return out

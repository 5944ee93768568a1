"""A clock for the Machine: performs a Program with given durations, and writes the Timeline."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from ir.machine import Action, Machine
from ir.program import Actor, Program
from ir.timeline import Span, Timeline

Duration = Callable[[Actor, int], float]
"""(actor, microbatch) -> seconds."""


def perform_timed(program: Program, duration: Duration, steps: int = 1, kind: str = "predicted") -> Timeline:
    machine = Machine(program, steps)
    ties, now, spans = itertools.count(), 0.0, list[Span]()
    running: list[tuple[float, int, float, Action]] = []
    ready = list(machine.startable)
    while ready or running:
        for queue in ready:
            action = machine.start(queue)
            seconds = duration(machine.actors[action.actor], action.microbatch)
            heapq.heappush(running, (now + seconds, next(ties), now, action))
        now, _, start, action = heapq.heappop(running)
        actor = machine.actors[action.actor]
        spans.append(Span(actor.name, action.step, action.microbatch, actor.rank, actor.queue, start, start, now))
        ready = machine.finish(action)
    assert machine.done, machine.story()
    return Timeline(kind, tuple(spans), {"program": program.fingerprint})

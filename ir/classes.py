"""Seconds by actor class: the operator and the phase it runs in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ir.program import Actor, Program
from ir.timed import Timed, timed

if TYPE_CHECKING:
    from ir.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ActorClass:
    """All firings of one operator in one phase. Seconds are of a step, summed over ranks: `busy_s` of work (of a collective or p2p, the transfer),
    `waiting_s` for the slowest member of the channel; `num_firings` of a step."""

    op: str
    phase: str
    kind: str
    num_firings: float
    busy_s: float
    waiting_s: float

    @property
    def name(self) -> str:
        return f"{self.op} {self.phase}"

    def to_json(self) -> dict[str, Any]:
        names = ("op", "phase", "kind", "num_firings", "busy_s", "waiting_s")
        return {name: getattr(self, name) for name in names}


Key = tuple[str, str, str]


def class_of(actor: Actor) -> Key:
    """(operator, phase, kind of work)."""
    return actor.work.op or actor.work.kind, actor.phase, actor.work.kind


def by_class(timeline: Timeline, program: Program) -> tuple[ActorClass, ...]:
    """The classes of the steady steps, the one with most seconds first."""
    steady = set(timeline.steady_steps)
    found: dict[Key, list[Timed]] = {}
    for t in timed(timeline, program):
        if t.span.step in steady:
            found.setdefault(class_of(t.actor), []).append(t)
    classes = (_total(key, spans, len(steady)) for key, spans in found.items())
    return tuple(sorted(classes, key=lambda c: (-c.busy_s - c.waiting_s, c.op, c.phase)))


def _total(key: Key, spans: Iterable[Timed], num_steps: int) -> ActorClass:
    spans = list(spans)
    return ActorClass(*key, len(spans) / num_steps, sum(t.busy_s for t in spans) / num_steps, sum(t.waiting_s for t in spans) / num_steps)

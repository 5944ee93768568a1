"""A Timeline: what was performed, span by span; the simulator's and the executor's are alike, so that they can be laid on each other.

All times are seconds from a common zero. Steps follow each other without a gap to cut at, since queues run ahead; so a step is *complete at* the latest end of
its spans, and a step *takes* the time between two such moments.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ir.breakdown import breakdown, bubbles
from ir.classes import ActorClass, by_class
from ir.communication import CommRow, communication
from ir.diff import Diff, diff
from ir.errors import InputError
from ir.live import LiveMemory, live_memory
from ir.program import Program
from ir.trace import trace

SCHEMA_VERSION = 1
KINDS = ("predicted", "measured")


class Span(NamedTuple):
    """One firing: handed to its queue at `issued_s`, it ran from `start_s` to `end_s`."""

    actor: str
    step: int
    microbatch: int
    rank: int
    queue: str
    issued_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Spans of whole steps, in any order. `kind` is predicted or measured; `meta` says of what and where (`program`: its fingerprint).

    >>> spans = [Span("F", k, m, 0, "compute", 0.0, 2.0 * k + m, 2.0 * k + m + 0.75) for k in range(3) for m in range(2)]
    >>> timeline = Timeline("predicted", tuple(spans))
    >>> timeline.step_s, timeline.steady_steps
    (2.0, (2,))
    """

    kind: str
    spans: tuple[Span, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The whole steps: those with as many spans as any other (a run that was interrupted ends with one that is not whole)."""
        counts = Counter(s.step for s in self.spans)
        most = max(counts.values(), default=0)
        return tuple(sorted(k for k, n in counts.items() if n == most))

    @cached_property
    def complete_s(self) -> Mapping[int, float]:
        """When each step was complete."""
        out: dict[int, float] = {}
        for s in self.spans:
            out[s.step] = max(out.get(s.step, -math.inf), s.end_s)
        return out

    @property
    def steady_steps(self) -> tuple[int, ...]:
        """The later half of the whole steps, without the first unless it is the only one: what is reported and compared."""
        return self.steps if len(self.steps) == 1 else self.steps[(len(self.steps) - 1) // 2 + 1 :]

    @cached_property
    def window_s(self) -> tuple[float, float]:
        """From the moment when the step before the steady ones was complete (the first start, where there is none) to when the last was.

        Raises InputError when there are no spans.
        """
        if not self.spans:
            raise InputError(f"the {self.kind} timeline is empty; perform at least one whole step")
        steady = self.steady_steps
        before = [k for k in self.steps if k < steady[0]]
        return self.complete_s[before[-1]] if before else min(s.start_s for s in self.spans), self.complete_s[steady[-1]]

    @property
    def step_s(self) -> float:
        """Seconds a step takes: the mean over the steady steps."""
        start, end = self.window_s
        return (end - start) / len(self.steady_steps)

    # ---- what it says of a program -------------------------------------------------------------------------------------------------------------------

    def breakdown(self, program: Program) -> dict[str, float]:
        """Where a step's time goes, mean over ranks: compute_s, exposed_comm_s, bubble_s, optimizer_s, other_s; they sum to `step_s`."""
        return breakdown(self, program)

    def bubbles(self, program: Program) -> dict[str, float]:
        """The bubble by class: warm_up_s, imbalance_s, drain_s; they sum to `bubble_s` of the breakdown."""
        return bubbles(self, program)

    def bubble(self, program: Program) -> float:
        """The bubble's share of a step, 0 to 1."""
        return breakdown(self, program)["bubble_s"] / self.step_s if self.step_s else 0.0

    def by_class(self, program: Program) -> tuple[ActorClass, ...]:
        """Seconds of a step by actor class (operator and phase), summed over ranks, most first."""
        return by_class(self, program)

    def communication(self, program: Program) -> tuple[CommRow, ...]:
        """What a step communicates, by mesh axis and kind of collective, most seconds first."""
        return communication(self, program)

    def live_memory(self, program: Program) -> tuple[LiveMemory, ...]:
        """Bytes that live over time, by rank and memory class."""
        return live_memory(self, program)

    def to_perfetto(self, program: Program | None = None) -> dict[str, Any]:
        """A trace that Perfetto and chrome://tracing show; with a program it has operators, arrows between ranks and live memory."""
        return trace((self,), program)

    # ---- text --------------------------------------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        actors = list(dict.fromkeys(s.actor for s in self.spans))
        queues = list(dict.fromkeys(s.queue for s in self.spans))
        actor, queue = {a: i for i, a in enumerate(actors)}, {q: i for i, q in enumerate(queues)}
        return {
            "schema_version": SCHEMA_VERSION, "kind": "timeline", "timeline": self.kind, "meta": dict(self.meta), "actors": actors, "queues": queues,
            "spans": [[actor[s.actor], s.step, s.microbatch, s.rank, queue[s.queue], s.issued_s, s.start_s, s.end_s] for s in self.spans],
        }  # fmt: skip

    def dumps(self) -> str:
        return json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timeline:
        """Reads `to_json`; raises InputError when the document is of another kind or version, misses a key or has a span that cannot be."""
        if not isinstance(data, Mapping) or data.get("kind") != "timeline":
            raise InputError("this document is no timeline; `headrace simulate --timeline` and `headrace run --timeline` write one")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise InputError(f"timeline of schema version {data.get('schema_version')}; this headrace reads version {SCHEMA_VERSION}: perform it again")
        try:
            actors, queues = data["actors"], data["queues"]
            spans = tuple(_span(i, actors, queues, row) for i, row in enumerate(data["spans"]))
            kind, meta = data["timeline"], dict(data["meta"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"the timeline document is incomplete or damaged ({error!r}); perform it again") from error
        if kind not in KINDS:
            raise InputError(f"the timeline is `{kind}`; legal are {', '.join(KINDS)}")
        return cls(kind, spans, meta)


def _span(number: int, actors: list[str], queues: list[str], row: list[Any]) -> Span:
    actor, step, microbatch, rank, queue, *times = row
    issued, start, end = map(float, times)
    whole = all(isinstance(n, int) and n >= 0 for n in (actor, step, microbatch, rank, queue))
    if not whole or not (math.isfinite(issued) and -math.inf < start <= end < math.inf):
        raise InputError(f"span {number} of the timeline cannot be: {row}; counts are 0 or more, times finite, the start not after the end")
    if not isinstance(actors[actor], str) or not isinstance(queues[queue], str):
        raise TypeError(f"span {number} has an actor or queue that is no name")
    return Span(actors[actor], step, microbatch, rank, queues[queue], issued, start, end)


__all__ = ["ActorClass", "CommRow", "Diff", "LiveMemory", "Span", "Timeline", "diff", "trace"]

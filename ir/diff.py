"""Predicted against measured, firing by firing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ir.breakdown import breakdown
from ir.classes import class_of
from ir.errors import InputError
from ir.program import Program
from ir.timed import timed

if TYPE_CHECKING:
    from ir.timeline import Timeline

NUM_WORST = 10


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step, predicted and measured, of whatever `name` is. `waiting_s` pairs are of channels: time lost to the slowest member."""

    name: str
    num_firings: int
    predicted_s: float
    measured_s: float
    predicted_waiting_s: float = 0.0
    measured_waiting_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured over predicted; NaN where nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else math.nan

    @property
    def error_s(self) -> float:
        """Measured minus predicted."""
        return self.measured_s - self.predicted_s

    def to_json(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        return out | {"ratio": self.ratio if math.isfinite(self.ratio) else None}


@dataclass(frozen=True, slots=True)
class Diff:
    """Two timelines of one program. Rows hold firings that both have: `classes` (operator and phase), `ranks`, `worst` (actors with the largest error),
    each with the largest first. `breakdown`: part of the step -> (predicted, measured) seconds. `num_joined` firings of a step were compared,
    `only_predicted` and `only_measured` were not."""

    step: Row
    breakdown: Mapping[str, tuple[float, float]]
    classes: tuple[Row, ...]
    ranks: tuple[Row, ...]
    worst: tuple[Row, ...]
    num_joined: int
    only_predicted: int
    only_measured: int

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step.to_json(),
            "breakdown": {part: {"predicted_s": p, "measured_s": m} for part, (p, m) in self.breakdown.items()},
            "classes": [r.to_json() for r in self.classes], "ranks": [r.to_json() for r in self.ranks], "worst": [r.to_json() for r in self.worst],
            "num_joined": self.num_joined, "only_predicted": self.only_predicted, "only_measured": self.only_measured,
        }  # fmt: skip


Firings = Mapping[tuple[str, int], tuple[float, float]]
"""(actor, microbatch) -> (seconds of work, seconds of waiting), mean over the steady steps."""


def diff(predicted: Timeline, measured: Timeline, program: Program) -> Diff:
    """Joins the steady steps of both on (actor, microbatch), each averaged over its own steady steps.

    Raises InputError when a timeline is not of this program, or when they have no firing in common.
    """
    of = {t.meta["program"] for t in (predicted, measured) if "program" in t.meta}
    if len(of) > 1:
        raise InputError(f"the timelines are of different programs ({', '.join(sorted(map(str, of)))}); perform one program twice")
    ours, theirs = _firings(predicted, program), _firings(measured, program)
    joined = [key for key in ours if key in theirs]
    if not joined:
        raise InputError(f"the timelines have no firing of program `{program.name}` in common; perform one whole step of it twice")
    groups: dict[str, dict[str, list[tuple[str, int]]]] = {"class": {}, "rank": {}, "actor": {}}
    for key in joined:
        actor = program.actor[key[0]]
        op, phase, _ = class_of(actor)
        for what, name in (("class", f"{op} {phase}"), ("rank", f"rank {actor.rank}"), ("actor", actor.name)):
            groups[what].setdefault(name, []).append(key)
    rows = {what: tuple(_row(name, keys, ours, theirs) for name, keys in named.items()) for what, named in groups.items()}
    parts, real = breakdown(predicted, program), breakdown(measured, program)
    return Diff(
        Row("step", len(joined), predicted.step_s, measured.step_s), {part: (parts[part], real[part]) for part in parts},
        tuple(sorted(rows["class"], key=lambda r: (-max(r.predicted_s, r.measured_s), r.name))),
        tuple(sorted(rows["rank"], key=lambda r: (-abs(r.error_s), r.name))),
        tuple(sorted(rows["actor"], key=lambda r: (-abs(r.error_s), r.name))[:NUM_WORST]),
        len(joined), len(ours) - len(joined), len(theirs) - len(joined),
    )  # fmt: skip


def _firings(timeline: Timeline, program: Program) -> Firings:
    steady = set(timeline.steady_steps)
    sums: dict[tuple[str, int], list[float]] = {}
    for t in timed(timeline, program):
        if t.span.step in steady:
            here = sums.setdefault((t.span.actor, t.span.microbatch), [0.0, 0.0, 0.0])
            for i, value in enumerate((t.busy_s, t.waiting_s, 1.0)):
                here[i] += value
    return {key: (busy / n, waiting / n) for key, (busy, waiting, n) in sums.items()}


def _row(name: str, keys: Iterable[tuple[str, int]], ours: Firings, theirs: Firings) -> Row:
    keys = list(keys)
    totals = [sum(side[k][i] for k in keys) for i in (0, 1) for side in (ours, theirs)]
    return Row(name, len(keys), *totals)

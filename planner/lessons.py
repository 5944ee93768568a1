"""What drafts teach of the candidates that are not drafted yet: how far guesses are off, by how much like them a candidate is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.candidates import Candidate

REACH = 1.0
"""How far a lesson carries, in doublings of a degree."""

DOUBT = 0.04
"""By how much a guess may be better than lessons say, for each doubling that the nearest of them is away."""

MOST_DOUBT = 0.16
"""However far away."""

NUM_PLACES = 8
"""Of a candidate's place, see `_place`."""


@dataclass
class Lessons:
    """The candidates of one search with their guesses in seconds; what is learned of one corrects the others."""

    candidates: Sequence[Candidate]
    guesses: Sequence[float]
    _at: dict[Candidate, int] = field(default_factory=dict)
    _known: list[int] = field(default_factory=list)
    _off: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._at.update((c, i) for i, c in enumerate(self.candidates))
        self._places = np.array([_place(c) for c in self.candidates], dtype=float).reshape(-1, NUM_PLACES)
        self._log_guesses = np.log(np.maximum(np.array(self.guesses, dtype=float), 1e-12))

    def learn(self, c: Candidate, seconds: float) -> None:
        """That a draft of this candidate takes so long."""
        at = self._at[c]
        self._known.append(at)
        self._off.append(math.log(seconds) - float(self._log_guesses[at]))

    def hopes_s(self, waiting: Sequence[Candidate]) -> np.ndarray:
        """Seconds that each of these may be expected to take at best: its guess, off by as much as those like it, less a doubt where none is like it."""
        at = [self._at[c] for c in waiting]
        if not self._known:
            return np.array(self.guesses, dtype=float)[at]
        distances = np.abs(self._places[at][:, None] - self._places[self._known][None]).sum(axis=2)
        nearest = distances.min(axis=1)
        weights = np.exp(-(distances - nearest[:, None]) / REACH)
        off = (weights * np.array(self._off)).sum(axis=1) / weights.sum(axis=1)
        hopes: np.ndarray = np.exp(self._log_guesses[at] + off - np.minimum(DOUBT * nearest, MOST_DOUBT))
        return hopes


def _place(c: Candidate) -> tuple[float, ...]:
    """Where a candidate lies among others, in doublings; layers run again are one more, single operators half of one, a ring of keys another."""
    return (
        math.log2(c.tp), math.log2(c.pp), math.log2(c.ep), math.log2(c.mbs), math.log2(max(1, c.pieces)), math.log2(c.cp),
        float(c.context.startswith("ring")), {"none": 0.0, "selective": 0.5, "full": 1.0}[c.recompute],
    )  # fmt: skip


__all__ = ["Lessons"]

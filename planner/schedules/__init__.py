"""The order in which a pipeline stage runs its microbatches, one file a schedule.

`order(stage, num_stages, num_microbatches)` lists a stage's slots: `F3` the forward of microbatch 3, `B3` its backward (input and weight gradients).
`stash(stage, num_stages, num_microbatches)` is how many microbatches' activations the stage holds at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ir.errors import PlanError
from planner.schedules import gpipe, one_f_one_b


class Slot(NamedTuple):
    """One pass of one microbatch through a stage; prints and reads back as `F3`, `B3`."""

    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: its name, the order of a stage's slots and the activations it keeps."""

    name: str
    order: Callable[[int, int, int], tuple[tuple[str, int], ...]]
    stash: Callable[[int, int, int], int]

    def slots(self, stage: int, num_stages: int, num_microbatches: int) -> tuple[Slot, ...]:
        return tuple(Slot(*slot) for slot in self.order(stage, num_stages, num_microbatches))


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule("gpipe", gpipe.order, gpipe.stash),
    "1f1b": Schedule("1f1b", one_f_one_b.order, one_f_one_b.stash),
}


def schedule(name: str) -> Schedule:
    """The schedule of this name; PlanError with the names there are."""
    if name not in SCHEDULES:
        raise PlanError(f"schedule `{name}` is not known; known are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]

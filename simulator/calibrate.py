"""Corrects a cluster by measured runs of programs on it: levels, by which everything that is priced is multiplied (`profile["levels"]`).

One measured step fixes the level of all. Timelines fix that of every operator and of communication, then that of the step; half of what was measured is kept
back, so that the error of what was fitted and of what was not are told apart. A kind of communication that takes far longer than all else
would explain is named and corrects nothing: that is a wrong kernel or a broken link, which a slower link in the profile would hide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ir.cluster import Cluster
from ir.errors import InputError
from ir.program import Program
from ir.timed import timed
from ir.timeline import Timeline
from simulator.cost import CostModel
from simulator.engine import simulate

ROUNDS = 6
CLOSE = 1e-4
"""A predicted step this near to the measured one is the same."""

COMPUTE, COMMUNICATION = "compute", "communication"
SUSPECT = 20.0
"""A level further than this from 1 says that the measurement is of something else."""

OUTLIER = 3.0
"""Times that a kind of communication may take longer than all else that was measured, each beside what was predicted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A program and the seconds of its step as measured; the timeline of its spans where there is one."""

    program: Program
    step_s: float
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The corrected cluster; the mean |predicted / measured - 1| of a step before, on what was fitted, and on what was not (None where nothing was left).

    `outliers`: measured over predicted seconds of the kinds of communication by which nothing was corrected.
    """

    cluster: Cluster
    before: float
    train: float
    test: float | None
    outliers: Mapping[str, float] = field(default_factory=dict)


def calibrate(cluster: Cluster, train: Sequence[Sample], test: Sequence[Sample] = ()) -> Calibration:
    """Fits levels to `train`; InputError where what was measured has nothing to do with what is predicted.

    With an outlier among the kinds of communication the step's own level is left alone: the others would be blamed for it.
    """
    if not train:
        raise InputError("nothing measured was given to calibrate by")
    before = error(cluster, train)
    found, outliers = cluster, dict[str, float]()
    if timelines := [s for s in train if s.timeline is not None]:
        busy = _busy(found, timelines)
        outliers = _outliers(busy)
        found = levelled(found, _by_operator(busy, outliers))
    if not outliers:
        found = _level_of_step(found, train)
    return Calibration(found, before, error(found, train), error(found, test) if test else None, outliers)


def error(cluster: Cluster, samples: Sequence[Sample]) -> float:
    """The mean |predicted / measured - 1| of the step."""
    return sum(abs(predicted_s(cluster, s.program) / s.step_s - 1) for s in samples) / len(samples)


def predicted_s(cluster: Cluster, program: Program) -> float:
    return simulate(program, CostModel(cluster), steps=3).step_s


def levelled(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """The cluster with its levels times `factors`: of single operators, of `compute` (all others) and of `communication`."""
    before: Mapping[str, float] = cluster.profile.get("levels", {})
    every = before.get(COMPUTE, 1.0)
    changed = {name: factor * before.get(name, 1.0 if name == COMMUNICATION else every) for name, factor in factors.items()}
    return replace(cluster, profile={**cluster.profile, "levels": {**before, **changed}})


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """The cluster where everything takes `factor` times as long."""
    names = {COMPUTE, COMMUNICATION, *cluster.profile.get("levels", {})}
    return levelled(cluster, dict.fromkeys(sorted(names), factor))


def _level_of_step(cluster: Cluster, samples: Sequence[Sample]) -> Cluster:
    """Scales the cluster until the mean predicted step is the measured one; what a driver adds to every action stays as it is, so this takes a few rounds."""
    found, total = cluster, 1.0
    for _ in range(ROUNDS):
        ratio = sum(s.step_s / predicted_s(found, s.program) for s in samples) / len(samples)
        total *= ratio
        if not 1 / SUSPECT < total < SUSPECT:
            raise InputError(f"the measured step is {total:.3g} times the predicted one: it is of another plan or cluster, or not in seconds")
        if abs(ratio - 1) < CLOSE:
            break
        found = scaled(cluster, total)
    return found


Busy = Mapping[tuple[str, bool], Sequence[float]]
"""Predicted and measured seconds of work, waiting not counted, of every operator and of every kind of communication (True)."""


def _busy(cluster: Cluster, samples: Sequence[Sample]) -> Busy:
    sums: dict[tuple[str, bool], list[float]] = {}
    for s in samples:
        for side, timeline in enumerate((simulate(s.program, CostModel(cluster), steps=3), s.timeline)):
            if timeline is not None:
                _add_busy(sums, side, timeline, s.program)
    return {key: both for key, both in sorted(sums.items()) if min(both) > 0}


def _add_busy(sums: dict[tuple[str, bool], list[float]], side: int, timeline: Timeline, program: Program) -> None:
    steady = set(timeline.steady_steps)
    for t in timed(timeline, program):
        work = t.actor.work
        if t.span.step in steady and work.kind in ("compute", "collective", "send", "recv"):
            name = "p2p" if work.kind in ("send", "recv") else work.op
            sums.setdefault((name, t.is_comm), [0.0, 0.0])[side] += t.busy_s / len(steady)


def _outliers(busy: Busy) -> dict[str, float]:
    """Measured over predicted of the kinds of communication that all else does not explain."""
    found = {}
    for (name, is_comm), (predicted, measured) in busy.items():
        rest = [sum(both[side] for key, both in busy.items() if key != (name, is_comm)) for side in (0, 1)]
        if is_comm and rest[0] and measured / predicted > OUTLIER * rest[1] / rest[0]:
            found[name] = measured / predicted
    return found


def _by_operator(busy: Busy, outliers: Mapping[str, float]) -> dict[str, float]:
    """Measured over predicted seconds of every operator, and of communication but for the outliers."""
    levels = {name: measured / predicted for (name, is_comm), (predicted, measured) in busy.items() if not is_comm}
    talk = [both for (name, is_comm), both in busy.items() if is_comm and name not in outliers]
    return levels | ({COMMUNICATION: sum(m for _, m in talk) / sum(p for p, _ in talk)} if talk else {})

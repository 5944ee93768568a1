"""Corrects a cluster by measured runs of programs on it: levels, by which everything that is priced is multiplied (`profile["levels"]`).

One measured step fixes the level of all, or of this program alone where the level that all share is told apart (`remembered`). Timelines fix that of every
operator and of communication, then that of the step; half of what was measured is kept back, so that the error of what was fitted and of what was not are told
apart. A kind of communication that takes far longer than all else would explain is named and corrects nothing: that is a wrong kernel or a broken link, which a
slower link in the profile would hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
STEPS = "steps"
"""Key of a profile: the `level` that all programs share, and how many times its price each `measured` program took, by fingerprint."""

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

    `level`: times that everything takes, by the steps. `outliers`: measured over predicted seconds of the kinds of communication by which nothing was
    corrected.
    """

    cluster: Cluster
    before: float
    train: float
    test: float | None
    level: float = 1.0
    outliers: Mapping[str, float] = field(default_factory=dict)


def calibrate(cluster: Cluster, train: Sequence[Sample], test: Sequence[Sample] = ()) -> Calibration:
    """Fits levels to `train`; InputError where what was measured has nothing to do with what is predicted.

    With an outlier among the kinds of communication the step's own level is left alone: the others would be blamed for it.
    """
    if not train:
        raise InputError("nothing measured was given to calibrate by")
    before = error(cluster, train)
    found, outliers, level = _forgotten(cluster), dict[str, float](), 1.0
    if timelines := [s for s in train if s.timeline is not None]:
        busy = _busy(found, timelines)
        outliers = _outliers(busy)
        found = levelled(found, _by_operator(busy, outliers))
    if not outliers:
        level = _level_of_step(found, train)
        found = scaled(found, level)
    return Calibration(found, before, error(found, train), error(found, test) if test else None, level, outliers)


def error(cluster: Cluster, samples: Sequence[Sample]) -> float:
    """The mean |predicted / measured - 1| of the step."""
    return sum(abs(predicted_s(cluster, s.program) / s.step_s - 1) for s in samples) / len(samples)


def predicted_s(cluster: Cluster, program: Program) -> float:
    return simulate(program, CostModel(of_program(cluster, program)), steps=3).step_s


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


def remembered(cluster: Cluster, program: Program, times: float, shared: Callable[[Sequence[float]], float]) -> Cluster:
    """The cluster once a program took `times` what it was priced: that program does henceforth, all others take the level that its programs share.

    `shared`: that level by what each program measured so far took, both as logarithms. A program that was measured before counts once, as it was last.
    """
    steps = cluster.profile.get(STEPS, {"level": 1.0, "measured": {}})
    measured = {**steps["measured"], _key(program): times * steps["level"]}
    level = math.exp(shared([math.log(x) for x in measured.values()]))
    found = scaled(cluster, level / steps["level"])
    return replace(found, profile={**found.profile, STEPS: {"level": level, "measured": measured}})


def of_program(cluster: Cluster, program: Program) -> Cluster:
    """The cluster as this program was measured on it (`remembered`); as it is where it was not."""
    steps = cluster.profile.get(STEPS)
    times = steps["measured"].get(_key(program)) if steps else None
    return cluster if steps is None or times is None else scaled(cluster, times / steps["level"])


def _forgotten(cluster: Cluster) -> Cluster:
    """Without what single programs took."""
    return replace(cluster, profile={k: v for k, v in cluster.profile.items() if k != STEPS})


def _key(program: Program) -> str:
    """Of what it does, whatever cluster its plan was made for."""
    return replace(program, meta={}).fingerprint


def _level_of_step(cluster: Cluster, samples: Sequence[Sample]) -> float:
    """By how much to scale the cluster for the mean predicted step to be the measured one; what a driver adds to every action stays as it is, so this takes a
    few rounds.
    """
    found, total = cluster, 1.0
    for _ in range(ROUNDS):
        ratio = sum(s.step_s / predicted_s(found, s.program) for s in samples) / len(samples)
        total *= ratio
        if not 1 / SUSPECT < total < SUSPECT:
            raise InputError(f"the measured step is {total:.3g} times the predicted one: it is of another plan or cluster, or not in seconds")
        if abs(ratio - 1) < CLOSE:
            break
        found = scaled(cluster, total)
    return total


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

"""The verb `calibrate`: a cluster corrected by what was measured on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.planning import ALL_RANKS, cluster_of, load_cluster, model_of, read_plan
from headrace.timelines import read_timeline
from ir.cluster import Cluster
from ir.errors import InputError
from ir.plan import Plan
from ir.program import Program
from ir.timeline import Timeline
from planner import lower as planner_lower
from planner.recipes.study import class_level
from simulator import calibrate as levels
from simulator.calibrate import Calibration, Sample


def calibrate(cluster: Cluster | str, plan: Plan | str | Path, step_s: float | None = None, measured: Sequence[str | Path] = ()) -> Calibration:
    """Corrects `cluster` by one measured step of `plan`, or by measured timelines (`headrace run --timeline`).

    A step of `plan` is foretold as it was measured from now on; of all other plans as far as bundled families on such a GPU share what one of their runs takes
    beyond its prediction, and further with every plan that is measured. Of several timelines the last is kept back to test on, of a single one its later steps.
    Raises InputError where both or neither is given.
    """
    if (step_s is None) == (not measured):
        raise InputError("calibrate takes either --step-s, the seconds of one step, or --measured, timelines that were measured")
    devices = load_cluster(cluster) if isinstance(cluster, str) else cluster
    made = read_plan(plan)
    if step_s is not None:
        program = _program(made, devices)
        found = levels.calibrate(devices, (Sample(program, step_s),))
        return replace(found, cluster=levels.remembered(devices, program, found.level, class_level(devices.devices[0].name).of))
    samples = [_sample(path) for path in measured]
    if len(samples) > 1:
        return levels.calibrate(devices, samples[:-1], samples[-1:])
    train, test = halves(samples[0])
    return levels.calibrate(devices, (train,), (test,) if test else ())


def halves(sample: Sample) -> tuple[Sample, Sample | None]:
    """A sample of the earlier and one of the later steps of a timeline, the first of all left out; None for the later ones where there are too few."""
    timeline = sample.timeline
    if timeline is None or len(timeline.steps) < 4:
        return sample, None
    steps = timeline.steps[1:]
    cut = steps[len(steps) // 2]
    return _only(sample, timeline, lambda k: k < cut), _only(sample, timeline, lambda k: k >= cut - 1)


def _only(sample: Sample, whole: Timeline, keeps: Callable[[int], bool]) -> Sample:
    part = Timeline(whole.kind, tuple(s for s in whole.spans if keeps(s.step)), whole.meta)
    return replace(sample, step_s=part.step_s, timeline=part)


def _sample(path: str | Path) -> Sample:
    timeline, program = read_timeline(path)
    if timeline.kind != "measured":
        raise InputError(f"`{path}` holds a predicted timeline; calibrate takes measured ones (`headrace run --timeline`)")
    return Sample(program, timeline.step_s, timeline)


def _program(plan: Plan, cluster: Cluster) -> Program:
    cluster_of(plan, cluster)
    ranks = planner_lower.representatives(plan, cluster) if plan.num_ranks > ALL_RANKS else None
    return planner_lower.lower(model_of(plan, None), plan, ranks)

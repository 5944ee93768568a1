"""Closed forms of pipelines, against published makespans and against the engine."""

from __future__ import annotations

import pytest

from ir.errors import PlanError
from simulator.estimate import gpipe_makespan, one_forward_one_backward_makespan, pipeline_lower_bound

# F = 1, B = 2 on every stage, no hops: torch 2.13 ScheduleGPipe, and 1F1B by the action order of Schedule1F1B (corrected on the last rank).
PUBLISHED = [("gpipe", 2, 4, 15.0), ("1f1b", 2, 4, 15.0), ("gpipe", 4, 8, 33.0), ("1f1b", 4, 8, 33.0)]


@pytest.mark.parametrize(("schedule", "p", "m", "makespan"), PUBLISHED)
def test_published_makespans(schedule: str, p: int, m: int, makespan: float) -> None:
    assert one_forward_one_backward_makespan(1, 2, p, m) == makespan
    assert gpipe_makespan([1] * p, [2] * p, m) == makespan
    assert pipeline_lower_bound([1] * p, [2] * p, m) == makespan


def test_the_slowest_stage_sets_the_pace() -> None:
    assert gpipe_makespan([1, 5, 1], [2, 2, 2], 10) == (1 + 5 + 1 + 9 * 5) + (2 + 2 + 2 + 9 * 2)
    assert pipeline_lower_bound([1, 5, 1], [2, 2, 2], 10) == 1 + 10 * 7 + 2


def test_weight_gradients_are_waited_for_at_the_end_only() -> None:
    fused, split = pipeline_lower_bound([1, 1], [2, 2], 3), pipeline_lower_bound([1, 1], [1, 1], 3, weight_s=[1, 1])
    assert (fused, split) == (12.0, 11.0)
    assert gpipe_makespan([1, 1], [1, 1], 3, weight_s=[1, 1]) == 11.0


def test_hops_and_the_end_of_a_step_add_up() -> None:
    assert pipeline_lower_bound([1, 1], [2, 2], 3, hop_s=[0.5]) == 13.0
    assert pipeline_lower_bound([1, 1], [2, 2], 3, once_s=[4, 0]) == 16.0
    assert gpipe_makespan([1, 1], [2, 2], 3, hop_s=[10]) == (1 + 10 + 1 + 2 * 10) + (2 + 10 + 2 + 2 * 10)


@pytest.mark.parametrize(
    "bad",
    [{"forward_s": [], "input_s": []}, {"input_s": [1]}, {"hop_s": [1, 1]}, {"num_microbatches": 0}, {"forward_s": [1, float("nan")]}, {"input_s": [1, -1]}],
)
def test_refusals(bad: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="pipeline"):
        pipeline_lower_bound(**({"forward_s": [1, 1], "input_s": [1, 1], "num_microbatches": 2} | bad))  # type: ignore[arg-type]

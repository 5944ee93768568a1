"""What drafts teach: guesses nearest to what was drafted are corrected most, and nothing is promised far from it."""

from __future__ import annotations

import pytest

from planner.candidates import Candidate
from planner.lessons import DOUBT, MOST_DOUBT, Lessons

NEAR, MIDDLE, FAR = (Candidate(8 // tp, tp, 1, 1, tp, "1f1b", "none") for tp in (1, 2, 8))


def test_before_the_first_lesson_guesses_stand() -> None:
    assert list(Lessons([NEAR, FAR], [2.0, 3.0]).hopes_s([FAR, NEAR])) == [3.0, 2.0]


def test_a_lesson_carries_over_with_a_doubt() -> None:
    lessons = Lessons([NEAR, MIDDLE, FAR], [1.0, 1.0, 1.0])
    lessons.learn(NEAR, 2.0)
    near, middle, far = lessons.hopes_s([NEAR, MIDDLE, FAR])
    assert near == pytest.approx(2.0)
    assert near > middle > far >= 2.0 * (1 - MOST_DOUBT)
    assert middle == pytest.approx(2.0 * (1 - DOUBT), rel=1e-2)


def test_the_nearest_lesson_counts_most() -> None:
    lessons = Lessons([NEAR, MIDDLE, FAR], [1.0, 1.0, 1.0])
    lessons.learn(NEAR, 2.0)
    lessons.learn(FAR, 1.0)
    assert lessons.hopes_s([MIDDLE])[0] > 1.4


def test_nothing_waits() -> None:
    assert not len(Lessons([], []).hopes_s([]))

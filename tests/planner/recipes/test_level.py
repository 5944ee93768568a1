"""Levels: what one run tells of the others of its family, and that a band is never wider once one was measured."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from planner.recipes.level import Level, shared
from planner.recipes.study import class_level, fits


@pytest.mark.parametrize(("level", "within"), [(0.1, 0.05), (0.1, 0.1), (0.02, 0.1)])
def test_the_part_that_is_shared_is_found_in_families_made_with_it(level: float, within: float) -> None:
    """Between families and within them: the one over the sum of both, as variances."""
    rng = np.random.default_rng(0)
    families = [rng.normal(0.0, level) + rng.normal(0.0, within, 12) for _ in range(800)]
    assert shared(families, [1.0] * 800, band=1.0) == pytest.approx(level**2 / (level**2 + within**2), abs=0.06)


def test_more_runs_tell_more() -> None:
    """Mean errors of a further run, families made as above: k runs taken as said are better than taken whole, or not at all."""
    rng, made = np.random.default_rng(1), Level(0.5, 1.0)
    families = [rng.normal(0.0, 0.1) + rng.normal(0.0, 0.1, 5) for _ in range(2000)]
    for k in (1, 4):
        off = {
            "as said": [f[-1] - made.of(f[:k].tolist()) for f in families], "whole": [f[-1] - f[:k].mean() for f in families], "not": [f[-1] for f in families]
        }  # fmt: skip
        mean = {name: float(np.mean(np.square(x))) for name, x in off.items()}
        assert mean["as said"] < min(mean["whole"], mean["not"])


def test_what_lies_beyond_reason_is_the_machines_own() -> None:
    level = Level(0.3, 0.1)
    told = [level.of([x]) for x in np.linspace(0.0, 1.0, 101)]
    assert all(a <= b for a, b in pairwise(told))
    assert told[10] == pytest.approx(0.03)
    assert told[-1] == 1.0
    assert level.of([-1.0]) == -1.0
    assert np.abs(Level(1.0, 0.1).fixed(np.full(4, 0.3))).max() == 0.0


def test_a_family_of_one_tells_nothing() -> None:
    assert shared([np.array([0.3])], [1.0], 0.1) == 0.0
    assert len(Level(0.5, 0.1).fixed(np.array([0.3]))) == 0


def test_bands_are_never_wider_once_one_run_was_measured() -> None:
    for name, found in fits()["classes"].items():
        assert found["band_after_one"] <= found["band"], name
        assert 0.0 <= found["shared"] <= 1.0
    assert class_level("T4") == Level(fits()["classes"]["all"]["shared"], fits()["classes"]["all"]["band"])

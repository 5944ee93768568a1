"""Cuts of a pipeline, against all cuts there are."""

from __future__ import annotations

import itertools
import random

import pytest

from ir.errors import PlanError
from planner.stages import cut


def brute(weights: list[float], num_stages: int) -> float:
    """The least weight of the heaviest stage over all cuts."""
    n = len(weights)
    cuts = itertools.combinations(range(1, n), num_stages - 1)
    return min(max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *c, n))) for c in cuts)


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_has_a_lighter_heaviest_stage(seed: int) -> None:
    rng = random.Random(seed)
    weights = [float(rng.choice((0, 0.25, 1, 1, 2, 3.5, 7))) for _ in range(rng.randint(1, 9))]
    num_stages = rng.randint(1, len(weights))
    found = cut(weights, num_stages)
    assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])]
    assert (found[-1][1], len(found)) == (len(weights), num_stages)
    assert all(a < b for a, b in found)
    assert max(sum(weights[a:b]) for a, b in found) == brute(weights, num_stages)


def test_equal_layers_are_spread() -> None:
    assert cut([1.0] * 8, 4) == ((0, 2), (2, 4), (4, 6), (6, 8))


@pytest.mark.parametrize("num_stages", [0, 4])
def test_stages_that_cannot_be(num_stages: int) -> None:
    with pytest.raises(PlanError, match=f"3 layers cannot be cut into {num_stages} stages; legal are 1 to 3"):
        cut([1.0, 1.0, 1.0], num_stages)

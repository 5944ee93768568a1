"""Random numbers depend on where they are used and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from ir.errors import GraphError
from ir.random import GOLDEN, MASK, growth, initial, kept, mix, normal, stream, words

NORMAL = {"init": "normal", "std": 0.02}


def test_the_generator_is_splitmix64() -> None:
    """The first three numbers of seed 0, as every implementation gives them."""
    assert [int(w) for w in words(np, 0, np.arange(1, 4, dtype=np.uint64))] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(w) for w in words(np, 77, np.arange(50, dtype=np.uint64))] == [mix((77 + n * GOLDEN) & MASK) for n in range(50)]


@pytest.mark.parametrize("width", [7, 8])
def test_a_shard_sees_its_part_of_the_mask(width: int) -> None:
    whole = kept(np, 5, 0.4, np.arange(12), width, 0, width)
    for first in range(width):
        for stop in range(first + 1, width + 1):
            assert (kept(np, 5, 0.4, np.arange(3, 9), width, first, stop) == whole[3:9, first:stop]).all()


def test_masks_have_the_right_share_and_are_independent() -> None:
    n, p = 1_000_000, 0.3
    masks = [kept(np, stream(seed, step, salt), p, np.arange(1000), 1000, 0, 1000) for seed, step, salt in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    for mask in masks:
        assert abs(mask.mean() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
        assert abs((mask[:-1] & mask[1:]).mean() - (1 - p) ** 2) < 0.003
        assert abs((mask[:, :-1] & mask[:, 1:]).mean() - (1 - p) ** 2) < 0.003
    for other in masks[1:]:
        assert abs((masks[0] & other).mean() - (1 - p) ** 2) < 0.003


def test_normal_numbers_have_the_right_moments() -> None:
    x = normal(3, np.arange(1000), 1001, 0, 1001)
    assert abs(x.mean()) < 0.005
    assert abs(x.std() - 1) < 0.005
    assert abs((x**4).mean() - 3) < 0.05
    assert abs(np.corrcoef(x[:, :-1:2].ravel(), x[:, 1::2].ravel())[0, 1]) < 0.005


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_parameter_starts_alike_however_it_is_cut(dtype: str) -> None:
    shape = (5, 3, 7)
    whole = initial(NORMAL, shape, tuple((0, n) for n in shape), dtype, 9, "h.0.w")
    assert whole.dtype == dtype
    assert whole.shape == shape
    for region in (((1, 4), (0, 3), (3, 6)), ((4, 5), (2, 3), (0, 1)), ((0, 5), (1, 2), (1, 7))):
        assert (initial(NORMAL, shape, region, dtype, 9, "h.0.w") == whole[tuple(slice(*r) for r in region)]).all()


def test_parameters_and_seeds_differ() -> None:
    region = ((0, 40),)
    a, b, c = (initial(NORMAL, (40,), region, "float64", seed, name) for seed, name in ((0, "a"), (0, "b"), (1, "a")))
    assert len({*a, *b, *c}) == 120


def test_zeros_ones_scalars_and_the_unknown() -> None:
    assert (initial({"init": "ones"}, (4, 2), ((1, 3), (0, 2)), "float32", 0, "g") == np.ones((2, 2))).all()
    assert (initial({"init": "zeros"}, (4,), ((0, 4),), "float32", 0, "c") == 0).all()
    assert initial(NORMAL, (), (), "float64", 0, "t").shape == ()
    with pytest.raises(GraphError, match="init `glorot` is not known; known are normal, uniform, zeros, ones"):
        initial({"init": "glorot"}, (4,), ((0, 4),), "float32", 0, "w")
    with pytest.raises(GraphError, match=r"dropout with p = 1.0"):
        growth(1.0)


def test_large_parameters_come_in_pieces_that_fit_together() -> None:
    shape = (700, 513)
    whole = initial({"init": "normal", "std": 2.0, "mean": 1.0}, shape, ((0, 700), (0, 513)), "float32", 4, "w")
    part = initial({"init": "normal", "std": 2.0, "mean": 1.0}, shape, ((600, 700), (256, 513)), "float32", 4, "w")
    assert (whole[600:, 256:] == part).all()
    assert abs(whole.mean() - 1.0) < 0.02


def test_uniform_numbers_are_the_same_however_they_are_cut() -> None:
    init = {"init": "uniform", "bound": 0.25}
    whole = initial(init, (300, 7), ((0, 300), (0, 7)), "float64", 3, "a")
    assert (whole[100:200, 1:4] == initial(init, (300, 7), ((100, 200), (1, 4)), "float64", 3, "a")).all()
    assert -0.25 <= whole.min() < -0.24 < 0.24 < whole.max() <= 0.25
    assert abs(whole.mean()) < 0.01
    assert abs(whole.std() - 0.25 / np.sqrt(3)) < 0.005

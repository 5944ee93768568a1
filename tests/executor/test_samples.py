"""Every operator of the catalogue has operands, and its kernel writes all of its outputs, whatever was in them."""

from __future__ import annotations

import numpy as np
import pytest

from executor.samples import SMALL, sample
from ir.ops import CATALOGUE


@pytest.mark.parametrize("name", sorted(CATALOGUE))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_kernel_writes_every_output_wholly(name, dtype):
    run = sample(CATALOGUE[name], SMALL, dtype, 0).work(np)
    first = [x.copy() for x in run()]
    for array in run():
        array[...] = -3.0
    for a, b in zip(first, run(), strict=True):
        assert np.isfinite(a).all()
        assert np.array_equal(a, b)

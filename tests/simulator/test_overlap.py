"""Kernels beside collectives: a fluid, between hiding all and hiding nothing."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.overlap import lost, together_s
from simulator.runtimes import documents, facts


@pytest.mark.parametrize("comm_s", [0.0, 0.1, 0.5, 1.0, 1.76, 2.0, 10.0])
def test_together_takes_longer_than_each_and_less_than_both(comm_s: float) -> None:
    seconds = float(together_s(1.0, comm_s, lost(1.76)))
    assert max(1.0, comm_s) <= seconds <= 1.0 + comm_s
    if 0 < comm_s < 1.76:
        assert seconds > max(1.0, comm_s)


def test_the_law_is_that_of_a_fluid_followed_in_time() -> None:
    """A kernel advances 1 / slower as fast while the collective runs."""
    for compute_s, comm_s, slower in ((1.0, 0.4, 2.5), (1.0, 1.3, 1.76), (0.2, 1.0, 1.83), (1.0, 2.5, 2.5)):
        done, now, tick = 0.0, 0.0, 1e-4
        while done < compute_s:
            done += tick / (slower if now < comm_s else 1.0)
            now += tick
        assert float(together_s(compute_s, comm_s, lost(slower))) == pytest.approx(max(now, comm_s), rel=1e-3)


def test_without_slowing_it_is_the_longer_one() -> None:
    assert together_s(np.array([1.5, 0.5]), 0.7, lost(1.0)).tolist() == [1.5, 0.7]


def test_every_runtime_says_how_its_kernels_slow_down() -> None:
    """NVIDIA/nccl issue 1428: attention 1.8, GEMM 1.76, elementwise 2.5 times as long under overlap."""
    for kind, alone, beside in (("attention", 0.18, 0.33), ("gemm", 1.18, 2.08), ("memory", 0.02, 0.05)):
        assert {round(alone * facts(name)["slower"][kind], 2) for name in documents()} == {beside}

"""Kernels beside collectives: a fluid, between hiding all and hiding nothing."""

from __future__ import annotations

import pytest

from simulator.overlap import SLOWER, Overlap


@pytest.mark.parametrize("comm_s", [0.0, 0.1, 0.5, 1.0, 1.76, 2.0, 10.0])
def test_together_takes_longer_than_each_and_less_than_both(comm_s: float) -> None:
    seconds = Overlap().beside_s({"gemm": 1.0}, comm_s)
    assert max(1.0, comm_s) <= seconds <= 1.0 + comm_s
    if 0 < comm_s < 1.76:
        assert seconds > max(1.0, comm_s)


def test_without_slowing_it_is_the_longer_one() -> None:
    assert Overlap(slower={}).beside_s({"gemm": 1.0, "memory": 0.5}, 0.7) == pytest.approx(1.5)


def test_published_slow_downs_are_kept_by_class() -> None:
    """NVIDIA/nccl issue 1428: attention 1.8, GEMM 1.76, elementwise 2.5 times as long under overlap."""
    for kind, alone, beside in (("attention", 0.18, 0.33), ("gemm", 1.18, 2.08), ("memory", 0.02, 0.05)):
        assert Overlap().beside_s({kind: alone}, 10 * alone) == 10 * alone
        assert alone * SLOWER[kind] == pytest.approx(beside, rel=0.01)


def test_what_starts_late_is_exposed_and_every_doubling_of_nodes_costs() -> None:
    early, late = (Overlap(slower={}, share=share).step_s({"gemm": 1.0}, hidden_s=0.8) for share in (1.0, 0.5))
    assert (early, late) == (1.0, 1.4)
    assert Overlap(straggler=0.01).step_s({"gemm": 1.0}, num_nodes=64) == pytest.approx(1.06)

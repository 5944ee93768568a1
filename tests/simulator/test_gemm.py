"""Bundled GEMM grids: what was measured comes back, and in between tiles and waves are kept."""

from __future__ import annotations

import math
from importlib.resources import files

import numpy as np
import pytest

from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.gemm import STEP, Gridded
from simulator.profile import bundled, gpu_names

POINTS = {
    ("A100-SXM-80GB", "bfloat16", 4096, 12288, 12288): 4995.9, ("H100-SXM", "bfloat16", 4097, 4096, 4096): 180.7, ("B200", "fp8", 8192, 8192, 4096): 239.7,
}  # fmt: skip
"""Microseconds of a few products, as published with ai-dynamo/aiconfigurator."""


def product_s(gpu: str, dtype: str, batch: int, m: int, n: int, k: int) -> float:
    return CostModel(load_cluster(gpu)).compute_s("linear", dtype, 2.0 * batch * m * n * k, 2.0 * batch * (m * k + k * n + m * n), (batch, m, n, k))


def gridded(gpu: str, dtype: str = "bfloat16") -> Gridded:
    cluster = load_cluster(gpu)
    found = CostModel(cluster)._gemm(cluster.devices[0], dtype)
    assert isinstance(found, Gridded)
    return found


def test_published_times_come_back() -> None:
    for (gpu, dtype, *shape), us in POINTS.items():
        assert product_s(gpu, dtype, 1, *shape) == pytest.approx(us * 1e-6, rel=0.02)


def test_a_point_of_the_grid_has_its_own_factor_and_the_middle_the_mean() -> None:
    one = gridded("H100-SXM")
    i, j, k, factors = 50, 12, 9, one.log_factors.astype(float)
    sizes = [math.exp(axis[at]) for axis, at in zip(one.axes, (i, j, k), strict=True)]
    assert one.log_factor(*sizes) == pytest.approx(STEP * factors[i, j, k], abs=1e-6)
    middle = math.exp((one.axes[1][j] + one.axes[1][j + 1]) / 2)
    assert one.log_factor(sizes[0], middle, sizes[2]) == pytest.approx(STEP * factors[i, j : j + 2, k].mean(), abs=1e-6)


def test_outside_of_the_grid_its_edge_counts() -> None:
    one = gridded("A100-SXM-80GB")
    assert one.log_factor(1e7, 1e6, 1e6) == pytest.approx(STEP * float(one.log_factors[-1, -1, -1]))
    assert one.log_factor(1, 1, 1) == pytest.approx(STEP * float(one.log_factors[0, 0, 0]))


def test_one_row_more_than_whole_waves_costs_a_wave() -> None:
    """A100: 4096 x 1536 is 192 tiles of 256 x 128, and its grid has both 4096 and 4097 rows; in between is where the law decides."""
    law = gridded("A100-SXM-80GB").law
    full, more = (law.seconds((1, m, 13824, 4096), 0.0, 1e12) for m in (256 * 4, 256 * 4 + 1))
    assert more > 1.02 * full


def test_a_batch_fills_the_device_that_one_product_leaves_idle() -> None:
    one, many = product_s("A100-SXM-80GB", "bfloat16", 1, 256, 256, 64), product_s("A100-SXM-80GB", "bfloat16", 64, 256, 256, 64)
    assert many < 16 * one


def test_heads_pay_for_whole_tiles_and_for_rows_that_start_anywhere() -> None:
    """Vendor kernels tile by 64 and more, so a head of 80 pays for 128; and where a head is no multiple of 8, rows do not start at 16 bytes."""
    rate = {d: 2 * 64 * 2048 * 2048 * d / product_s("A100-SXM-80GB", "bfloat16", 64, 2048, d, 2048) for d in (64, 80, 128, 144, 150, 152)}
    assert rate[80] < rate[128]
    assert rate[150] < 0.7 * min(rate[144], rate[152])


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_says_where_its_gemm_comes_from(name: str) -> None:
    cluster = load_cluster(name)
    device = cluster.devices[0]
    dtype = "bfloat16" if "bfloat16" in device.flops_per_s else "float16"
    rate = 2 * 8192**3 / product_s(name, dtype, 1, 8192, 8192, 8192) / device.flops_per_s[dtype]
    assert 0.4 < rate < 0.95
    own = device.profile.get("gemm_grid", {}).get("source") == "measured on this card"
    assert own or any("GEMM" in sentence for sentence in cluster.assumed)


def test_where_kernels_were_made_for_another_card_its_grid_stands_at_this_peak() -> None:
    """Products in nvfp4 on the Blackwells of half as many flops again; others have their own grid."""
    shape = 1, 8192, 16384, 8192
    assert product_s("GB200", "nvfp4", *shape) / product_s("GB300", "nvfp4", *shape) == pytest.approx(1.5, rel=0.05)
    assert product_s("GB200", "fp8", *shape) / product_s("GB300", "fp8", *shape) < 1.25


def test_tables_have_sources_and_held_out_errors() -> None:
    with (files("simulator") / "profiles" / "gemm.npz").open("rb") as stream, np.load(stream) as arrays:
        for key, table in bundled("gemm")["tables"].items():
            assert "Apache-2.0" in table["source"]
            assert table["held_out"]["half"][0] < 0.085
            assert arrays[key].shape == tuple(len(arrays[f"{table['axes']}|{x}"]) for x in "mnk")

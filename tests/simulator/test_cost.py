"""Seconds for Work: rooflines, GEMM by shape, measured tables, threads of one machine."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from ir.cluster import Cluster, Device, Link
from ir.errors import ClusterError
from ir.work import Work
from simulator.clusters import load_cluster
from simulator.cost import CostModel, Runtime
from simulator.gemm import Measured, Tiled
from simulator.profile import bundled

H100 = load_cluster("1x8xH100-SXM")

ROWS = [[1, m, n, k, 2e-6 + 2.0 * m * n * k / (40e9 if m >= 128 else 20e9)] for m in (32, 128, 512) for n in (64, 256, 1024) for k in (64, 256, 1024)]
OPS = {
    "gelu": {"s_per_element": {"float32": 2e-9}, "launch_s": 3e-6},
    "attention": {"s_per_element": {"float32": 1e-9}, "s_per_flop": {"float32": 1e-10}, "launch_s": 5e-6},
}


def threads(num: int = 2, cores: int = 2) -> Cluster:
    """A machine whose devices are threads, measured."""
    profile = {"gemm": {"float32": {"rows": ROWS}}, "ops": OPS}
    devices = tuple(Device(r, "core", 0, 4e9, 4e9, {"float32": 40e9, "float64": 20e9}, 8e9, 2e-6, profile) for r in range(num))
    links = tuple(Link(f"gpu{r}", "memory", 1e-6, 8e9, "memory") for r in range(num))
    about = {"transport": {"latency_s": 2e-5, "bytes_per_s": 4e9}, "num_cores": cores, "driver": {"firing_s": 6e-6, "wake_s": 2e-5}}
    return Cluster("threads", devices, links, about).check()


def gemm_s(cost: CostModel, batch: int, m: int, n: int, k: int, dtype: str = "bfloat16", rank: int = 0) -> float:
    return cost.compute_s("linear", dtype, 2.0 * batch * m * n * k, 2.0 * batch * (m * k + k * n + m * n), (batch, m, n, k), rank)


def test_large_products_reach_a_share_of_peak() -> None:
    cost = CostModel(H100)
    rate = 2 * 16384**3 / gemm_s(cost, 1, 16384, 16384, 16384)
    assert 0.6 < rate / 989e12 < bundled("gemm")["tables"]["h100_sxm|bfloat16"]["best_share"]


def test_small_products_are_slow() -> None:
    cost = CostModel(H100)
    assert 2 * 128**3 / gemm_s(cost, 1, 128, 128, 128) < 0.01 * 989e12
    assert gemm_s(cost, 1, 1, 1, 1) >= 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_by_the_law_a_bigger_product_is_never_faster(seed: int) -> None:
    """What was measured may be: libraries choose badly now and then. Twice the product in every direction takes longer all the same."""
    rng, cost = random.Random(seed), CostModel(H100)
    law = cost._gemm(H100.devices[0], "bfloat16").law
    shape = [rng.choice((1, 4)), *(8 * rng.randint(1, 600) for _ in range(3))]
    seconds = law.seconds(tuple(shape), 0.0, 3e12)
    for i in range(4):
        bigger = list(shape)
        bigger[i] += 8 * rng.randint(1, 60)
        assert law.seconds(tuple(bigger), 0.0, 3e12) >= seconds
    assert gemm_s(cost, *(2 * x for x in shape)) > gemm_s(cost, *shape)


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_goes_below_the_floor(seed: int) -> None:
    rng, cost = random.Random(seed), CostModel(H100)
    shape = (1, *(rng.choice((128, 512, 1000, 4096, 16384)) for _ in range(3)))
    flops, parts = 2.0 * math.prod(shape), rng.choice((2, 4, 8))
    floor_s = cost.floor_s("linear", "bfloat16", flops, 0.0, shape)
    for i in range(1, 4):
        cut = tuple(max(1, x // parts) if j == i else x for j, x in enumerate(shape))
        assert cost.compute_s("linear", "bfloat16", flops / parts, 0.0, cut) >= floor_s / parts


def test_memory_bound_work_takes_bytes_over_bandwidth() -> None:
    cost, device = CostModel(H100), H100.devices[0]
    seconds = cost.compute_s("gelu", "bfloat16", 1e6, 1e9)
    assert seconds == pytest.approx(1e9 / (device.bytes_per_s * device.profile["hbm_share"]) + device.launch_s)


def test_attention_runs_on_matrix_units_and_everything_else_on_vector_units() -> None:
    cost = CostModel(H100)
    attention, other = (cost.compute_s(op, "bfloat16", 1e13, 1e3) for op in ("attention.grad", "softmax"))
    assert attention == pytest.approx(1e13 / (0.5 * 989e12), rel=1e-2)
    assert other == pytest.approx(1e13 / 67e12, rel=1e-2)


def test_a_dtype_that_the_card_lacks_is_refused() -> None:
    with pytest.raises(ClusterError, match="V100-SXM2-16GB computes no bfloat16; it has float64, float32, float16"):
        gemm_s(CostModel(load_cluster("V100-SXM2-16GB")), 1, 64, 64, 64)


def test_measured_products_have_their_measured_time() -> None:
    cost = CostModel(threads())
    for batch, m, n, k, seconds in ROWS:
        assert gemm_s(cost, int(batch), int(m), int(n), int(k), "float32") == pytest.approx(seconds, rel=1e-6)


def test_products_in_between_have_a_rate_in_between() -> None:
    table = Measured.of_rows(ROWS, 2e-6)
    for shape in ((1, 64, 100, 100), (4, 90, 700, 300), (1, 300, 300, 300)):
        assert 20e9 * 0.9 < 2.0 * shape[0] * shape[1] * shape[2] * shape[3] / (table.seconds(shape, 0, 1e9) - table.launch_s) < 40e9 * 1.1
    assert 2 * 4096**3 / table.seconds((1, 4096, 4096, 4096), 0, 1e9) == pytest.approx(40e9, rel=0.3)


def test_a_law_that_the_rows_follow_is_found() -> None:
    rows = [
        [b, m, n, k, 1e-6 * b + 2 * b * m * n * k / 5e10 + 4e-10 * b * m * n + 3e-6] for b in (1, 8) for m in (16, 256) for n in (32, 512) for k in (64, 900)
    ]
    table = Measured.of_rows(rows, 3e-6)
    b, m, n, k = 2, 100, 2000, 5000
    assert table.seconds((b, m, n, k), 0, 1e9) == pytest.approx(1e-6 * b + 2 * b * m * n * k / 5e10 + 4e-10 * b * m * n + 3e-6, rel=1e-3)


def test_a_launch_time_above_the_fastest_row_is_not_believed() -> None:
    table = Measured.of_rows([[1, 8, 8, 8, 1e-6], [1, 64, 64, 64, 1e-5]], launch_s=5e-6)
    assert table.seconds((1, 8, 8, 8), 0, 1e9) == pytest.approx(1e-6)


def test_without_a_table_the_peak_counts() -> None:
    bare = replace(H100.devices[0], rank=0, profile={}, flops_per_s={"float32": 1e10}, launch_s=0.0)
    cost = CostModel(Cluster("bare", (bare,), ()))
    assert gemm_s(cost, 1, 1024, 1024, 1024, "float32") == pytest.approx(2 * 1024**3 / 1e10)


def test_measured_operators_count_elements_and_flops() -> None:
    cost = CostModel(threads())
    assert cost.compute_s("gelu", "float32", 1e6, 4000) == pytest.approx(3e-6 + 1000 * 2e-9)
    assert cost.compute_s("attention", "float32", 1e6, 4000) == pytest.approx(5e-6 + 1000 * 1e-9 + 1e-4)
    assert cost.compute_s("gelu", "float64", 0, 8000) == pytest.approx(8000 / 8e9 + 2e-6)


def attention(d: int, p: float, op: str = "attention") -> Work:
    """4 samples of 8 heads, 128 queries and keys, causal."""
    flops = 2.0 * {"attention": 2, "attention.grad": 5}[op] * 4 * 8 * d * 128 * 64
    return Work("compute", op, "float32", flops, 4000.0, attrs={"p": p}, sizes={"b": 4, "s": 128, "z": 128, "g": 8, "r": 1, "d": d})


@pytest.mark.parametrize("op", ["attention", "attention.grad"])
def test_attention_knows_the_size_of_a_head_and_dropout(op: str) -> None:
    """The table has heads of 64 and no dropout: half the head saves the products alone, and dropout draws a number for every pair."""
    one = threads()
    ops = OPS | {"attention.grad": OPS["attention"], "dropout": {"s_per_element": {"float32": 1e-9}, "launch_s": 0.0}}
    profile = dict(one.devices[0].profile) | {"ops": ops}
    cost = CostModel(replace(one, devices=tuple(replace(d, profile=profile) for d in one.devices)))
    full, half, dropped = (cost.work_s(attention(d, p, op), 0) for d, p in ((64, 0.0), (32, 0.0), (64, 0.1)))
    assert full == cost.compute_s(op, "float32", attention(64, 0.0, op).flops, 4000.0)
    assert full / 2 < half < full
    assert dropped - full == pytest.approx(4 * 8 * 128 * 64 * 2 * 1e-9)


def test_threads_copy() -> None:
    """What `executor.transport` does: assemble, reduce one's own part, or for an all-reduce reduce one n-th and hand it to every member."""
    cost = CostModel(threads(4))
    expect = {"all_gather": 1.0, "all_to_all": 1.0, "reduce_scatter": 3 / 4, "all_reduce": 2 * 3 / 4}
    for kind, copies in expect.items():
        assert cost.collective_s(kind, 4e6, (0, 1, 2, 3)) == pytest.approx(2e-5 + copies * 1e-3)
    assert cost.p2p_s(4e6, 0, 1) == pytest.approx(2e-5 + 1e-3)
    assert cost.collective_s("all_reduce", 4e6, (0,)) == 0.0


def test_work_is_priced_by_its_kind() -> None:
    cost = CostModel(H100)
    group = (0, 1, 2, 3)
    assert cost.work_s(Work("collective", "all_gather", "float32", nbytes=1e6, group=group), 2) == cost.collective_s("all_gather", 1e6, group)
    send, recv = (Work(kind, kind, "float32", nbytes=1e6, group=(0, 1)) for kind in ("send", "recv"))
    assert cost.work_s(send, 0) == cost.work_s(recv, 1) == cost.p2p_s(1e6, 0, 1)
    assert cost.work_s(Work("load", "tokens", "int64", nbytes=3.35e6), 0) == pytest.approx(1e-6)
    assert cost.work_s(Work("compute", "gelu", "float32", 10.0, 100.0), 0) == cost.compute_s("gelu", "float32", 10.0, 100.0)


def test_a_runtime_adds_to_every_kernel() -> None:
    plain, slow = CostModel(H100), CostModel(H100, Runtime("slow", launch_s=1e-3))
    assert gemm_s(slow, 1, 64, 64, 64) == pytest.approx(gemm_s(plain, 1, 64, 64, 64) + 1e-3)


def test_unlike_devices_are_priced_apart() -> None:
    slow = replace(H100.devices[1], flops_per_s={"bfloat16": 100e12})
    cost = CostModel(replace(H100, devices=(H100.devices[0], slow, *H100.devices[2:])))
    assert gemm_s(cost, 1, 4096, 4096, 4096, rank=1) > 5 * gemm_s(cost, 1, 4096, 4096, 4096, rank=0)
    assert gemm_s(cost, 1, 4096, 4096, 4096, rank=2) == gemm_s(cost, 1, 4096, 4096, 4096, rank=0)


def test_the_tile_model_counts_waves() -> None:
    tiled = Tiled(rate=1e12, num_sms=4, extra_k=0, launch_s=0.0)
    full, one_more = (tiled.seconds((1, 256 * n, 128, 1000), 0, 1e12) for n in (4, 5))
    assert full == pytest.approx(2 * 4 * 256 * 128 * 1000 / 1e12)
    assert one_more > full

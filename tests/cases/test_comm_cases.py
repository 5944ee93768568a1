"""What communication costs and where it should lie, in cases from public reports. Each test names its thread."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import headrace as hr
from headrace.cli import main
from ir.cluster import Cluster
from ir.plan import Plan
from planner.reasons import advice
from planner.recipes.run import Shape
from planner.recipes.serve import Server
from simulator.clusters import build, load_cluster
from simulator.cost import CostModel
from simulator.overlap import lost, together_s
from simulator.runtimes import facts
from simulator.topology import Nic
from tests.models import gpt, llama

GIB = float(1 << 30)
MIB = float(1 << 20)
SLIM = gpt(hidden=512, num_heads=8, mlp_hidden=2048, max_positions=512)
WIDE = llama(num_layers=6, hidden=4096, num_heads=32, num_kv_heads=32, head_dim=128, mlp_hidden=11264, vocab=32000)


def bus_factor(n: int) -> float:
    return 2 * (n - 1) / n


def without_curves(cluster: Cluster) -> Cluster:
    return replace(cluster, profile={k: v for k, v in cluster.profile.items() if k != "collectives"})


def algorithm_busbw(text: str, algorithm: str, nbytes: float) -> float:
    """Bus bandwidth of one algorithm, GB/s."""
    cost = CostModel(without_curves(load_cluster(text)))
    group = tuple(range(cost.cluster.num_devices))
    line = next(found for found in cost.lines("all_reduce", group) if found.algorithm == algorithm)
    return bus_factor(len(group)) * nbytes / line.at(nbytes) / 1e9


def busbw(cluster: Cluster, nbytes: float) -> float:
    group = tuple(range(cluster.num_devices))
    return bus_factor(len(group)) * nbytes / CostModel(cluster).collective_s("all_reduce", nbytes, group) / 1e9


@pytest.mark.parametrize(
    ("gpu", "algorithm", "published"),
    [("H100", "ring", 370), ("H100", "nvls", 480), ("H200", "nvls", 475), ("A100", "ring", 232.5), ("B300", "ring", 695), ("B300", "nvls", 845)],
)
def test_bus_bandwidth_of_switched_nodes(gpu: str, algorithm: str, published: float) -> None:
    """NVIDIA/nccl-tests issues 212, 149, 175, 272, NVIDIA/nccl issue 2140: 370 by the ring, 480 where the switch reduces, never the line's 450."""
    told = algorithm_busbw(f"8x{gpu}", algorithm, 8 * GIB)
    assert told == pytest.approx(published, rel=0.06)
    line = load_cluster(f"8x{gpu}").links[0]
    assert line.bytes_per_s < 0.84 * {"A100": 300e9, "H100": 450e9, "H200": 450e9, "B300": 900e9}[gpu]


def test_measured_curves_of_h100() -> None:
    """8 GiB in 31.2 ms; 256 MiB runs slower."""
    h100 = load_cluster("8xH100")
    assert CostModel(h100).collective_s("all_reduce", 8 * GIB, tuple(range(8))) == pytest.approx(31.2e-3, rel=0.06)
    assert 455 < busbw(h100, 8 * GIB) < 495
    assert busbw(h100, 256 * MIB) < busbw(h100, 8 * GIB)
    assert 256 * MIB / CostModel(h100).collective_s("all_reduce", 256 * MIB, tuple(range(8))) / 1e9 == pytest.approx(250, rel=0.06)


def test_bus_bandwidth_is_algorithm_bandwidth_times_a_factor() -> None:
    assert [algbw * bus_factor(8) for algbw in (275, 211, 483)] == [481.25, 369.25, 845.25]


def test_600_gb_s_of_an_a100_are_both_directions() -> None:
    """NVIDIA/nccl-tests issue 149, NVIDIA/nccl issue 1054: 230 achieved of 300 a direction; two nodes by 4 x 200 Gb/s 86 of 100."""
    assert 220 < busbw(load_cluster("8xA100"), 4 * GIB) < 240
    assert 75 < busbw(load_cluster("2x8xA100@ib200x4"), 4 * GIB) < 100


def test_kernels_slow_down_beside_collectives() -> None:
    """NVIDIA/nccl issue 1428: 1.8, 1.76 and 2.5 times as long; the step is longer than the longer of both."""
    slower = facts("headrace")["slower"]
    for kind, low, high in (("attention", 1.3, 2.0), ("gemm", 1.2, 2.0), ("memory", 1.5, 3.0)):
        assert low <= slower[kind] <= high
    kernels = {"attention": 0.18e-3, "gemm": 1.18e-3, "memory": 0.02e-3}
    alone = sum(kernels.values())
    mean = sum(slower[kind] * seconds for kind, seconds in kernels.items()) / alone
    assert together_s(alone, 1.3e-3, lost(mean)) > max(alone, 1.3e-3)
    assert together_s(1.0, 0.5, lost(1.0)) == 1.0


def test_data_parallel_over_slow_ethernet_goes_backwards() -> None:
    """horovod/horovod issue 752: ResNet50, two nodes of two cards on 1 Gb/s; a step of 0.374 s on one card (64 images)."""
    cost = CostModel(load_cluster("2x2xA10@eth1"))
    comm_s = cost.collective_s("all_reduce", 25.6e6 * 4, (0, 1, 2, 3))
    assert 0.8 < comm_s < 1.8
    assert 3 < (0.374 + comm_s) / 0.374 < 12
    assert cost.collective_s("all_reduce", 25.6e6 * 4, (0, 1)) < 0.05 * comm_s


def test_what_slow_ethernet_asks_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The same thread, which wants one node or more accumulation, and from how much on two nodes pay. Checked against what a search on one node finds."""

    def planned(cluster: str, batch: int) -> Plan:
        return hr.plan(SLIM, cluster, batch=batch, seq=512, fix={"tp": 1, "pp": 1, "mbs": 32, "recompute": "none"}, top=1).plans[0]

    alone, more = advice(planned("2x2xA10@eth1", 128), load_cluster("2x2xA10@eth1"))
    assert re.match(r"prefer one node: \d\d% of the step is communication that nothing hides; one node alone would take about", alone)
    found = re.search(r"2 nodes overtake one from (\d+) microbatches a step on \(--batch (\d+)\)", more)
    assert found is not None
    even = int(found[2])
    assert even == 128 * int(found[1])
    for batch, pays in ((even // 512 * 384, False), (even // 512 * 640, True)):
        assert (planned("2x2xA10@eth1", batch).predicted["step_s"] < planned("2xA10", batch).predicted["step_s"]) == pays
    assert advice(planned("2xA10", 128), load_cluster("2x2xA10@eth1")) == ()
    assert main(["plan", "gpt2-tiny", "2x2xA10@eth1", "--batch", "16", "--fix", "dp=4,tp=1,pp=1,recompute=none", "--top", "1"]) == 0
    assert "overtake one from" in capsys.readouterr().out


def test_sharded_parameters_belong_inside_the_node() -> None:
    """deepspeedai/DeepSpeed issue 6889, Qwen3 issue 773: 1.5 B on two nodes of two A10. Three passes over 2 N bytes a microbatch, or one reduction across."""
    cost = CostModel(load_cluster("2x2xA10@eth25"))
    params = 1.5e9

    def zero3_s(group: tuple[int, ...]) -> float:
        return 2 * cost.collective_s("all_gather", 2 * params, group) + cost.collective_s("reduce_scatter", 2 * params, group)

    everywhere, one_node = zero3_s((0, 1, 2, 3)), zero3_s((0, 1))
    hybrid = one_node + cost.collective_s("all_reduce", 2 * params / 2, (0, 2))
    assert everywhere > one_node
    assert everywhere > hybrid


@pytest.mark.parametrize("gbit", [10, 25])
def test_over_slow_ethernet_the_planner_shards_no_parameters_across_nodes(gbit: int) -> None:
    """The same threads: what the search chooses for 1.5 B where all of it fits otherwise, and how much ZeRO-3 over all four or in one node takes instead."""

    def planned(cluster: str, **fix: int) -> Plan:
        return hr.plan(WIDE, cluster, batch=4, seq=512, fix=fix, top=1).plans[0]

    both = f"2x2xA10@eth{gbit}"
    assert 1.4e9 < WIDE.num_params < 1.6e9
    everywhere, inside = planned(both, tp=1, pp=1, zero=3), planned("2xA10", tp=1, pp=1, zero=3)
    assert everywhere.predicted["step_s"] > inside.predicted["step_s"]
    for chosen in (planned(both), planned(both, tp=1, pp=1)):
        assert chosen.layout["zero"] <= 2
        assert chosen.predicted["fits"] == "yes"
        assert chosen.predicted["step_s"] < 0.8 * everywhere.predicted["step_s"]


def test_each_collective_has_a_curve_of_its_own() -> None:
    """NVIDIA/nccl issue 1603: with a patched peer-to-peer 4090s reduce at 22 GB/s and exchange at 2; experts must not be spread there, replicas may."""
    rows = {kind: [[1 << 10, 2e-5], [1 << 30, (1 << 30) / rate]] for kind, rate in (("all_reduce", 22e9 / bus_factor(4)), ("all_to_all", 2e9 * 4 / 3))}
    curves = [{"kind": kind, "ranks_per_node": 4, "num_nodes": 1, "rows": points, "source": "the thread"} for kind, points in rows.items()]
    base = load_cluster("4xRTX-4090")
    measured = CostModel(replace(base, profile={**base.profile, "collectives": curves}))
    group, nbytes = (0, 1, 2, 3), 256 * MIB
    assert measured.collective_s("all_to_all", nbytes, group) > 5 * measured.collective_s("all_reduce", nbytes, group) / 2
    plain = CostModel(without_curves(base))
    assert plain.collective_s("all_to_all", nbytes, group) < plain.collective_s("all_reduce", nbytes, group)


def seconds(cost: CostModel, layout: str, grads: float) -> float:
    """Of the six ranks of B103's machines: pipeline pairs inside a machine and replicas across, or the other way round; 16 microbatches both ways."""
    hidden = 8192 * 4096 * 2.0
    if layout == "pairs inside":
        hops, replicas = (0, 1), (0, 2, 4)
    else:
        hops, replicas = (0, 3), (0, 1, 2)
    return 2 * 16 * cost.p2p_s(hidden, *hops) + cost.collective_s("all_reduce", grads, replicas)


def test_for_lora_the_pipeline_stays_inside_a_machine_and_for_full_training_the_gradients_do() -> None:
    """tdrussell/qlora-pipe issue 44: three machines of two cards, pp 2 x dp 3, 70 B, 4,096 tokens: 2 GiB of hidden states a step against 16 MB of gradients."""
    cost = CostModel(load_cluster("3x2xL40S@eth25"))
    assert 16 * 8192 * 4096 * 2 * 2 == 2147483648
    lora, full = 8.2e6 * 2, 70e9 / 2 * 2
    assert seconds(cost, "pairs inside", lora) < seconds(cost, "pairs across", lora)
    assert seconds(cost, "pairs inside", full) > seconds(cost, "pairs across", full)


def test_tensor_parallel_groups_stay_in_one_socket() -> None:
    """NVIDIA/nccl-tests issue 74: eight A40 on two sockets."""
    weak = build("two sockets", "A10", 1, 8, None, layout={"kind": "pcie", "sockets": 2, "per_switch": 1})
    cost = CostModel(weak)
    assert cost.collective_s("all_reduce", 64 * MIB, (0, 1, 2, 3)) < cost.collective_s("all_reduce", 64 * MIB, (0, 2, 4, 6))


def test_tensor_parallelism_over_nodes_is_bound_by_the_nic_of_the_node() -> None:
    """DLPerf: one 100 Gb/s port for eight V100; the all-reduce of 16 or 32 ranks takes what that port carries, whoever shares it."""
    cost = CostModel(load_cluster("4xdlperf-v100"))
    inside, across = (cost.collective_s("all_reduce", 64 * MIB, tuple(range(n))) for n in (8, 32))
    assert across > 8 * inside
    told: Mapping[str, Any] = {"kind": "ib", "gbit_per_s": 100.0, "per_node": 8}
    own = CostModel(build("own", "V100-SXM2-16GB", 4, 8, Nic(**told)))
    assert own.collective_s("all_reduce", 64 * MIB, tuple(range(32))) < 0.3 * across


def test_over_pcie_small_prompts_want_whole_layers_and_single_tokens_want_split_ones() -> None:
    """turboderp-org/exllamav2 issue 734 (70 B of 4.5 bits, 2 RTX 3090, 16 k tokens: 1045.8 tokens/s by layers, 378.9 split), ggml-org/llama.cpp issue 19378
    (1 B on 4 RTX 4090: 44,766 and 18,753 for a prompt of 512; 314.75 and 409.87 one by one). exllamav2 takes 2,048 tokens at a time and gathers what its
    products give; llama.cpp takes 512 and sums in float32; both let float16 products sum in float16."""
    four, two = (CostModel(load_cluster(text)) for text in ("4xRTX-4090", "2xRTX-3090"))
    small = replace(Server(Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256, gated=True), four), sums="float16_sum16")
    large = Server(Shape("llama", 80, 8192, 64, 8, 128, 28672, 128256, gated=True), two, 1, 2048, 4.5 / 8, 2.0, "float16_sum16", gathers=True)
    cases = (
        (16384 / large.prompt_s(16384), 16384 / replace(large, tp=2).prompt_s(16384), 1045.8, 378.9),
        (512 / small.prompt_s(512), 512 / replace(small, tp=4).prompt_s(512), 44766, 18753),
        (1 / small.token_s(512), 1 / replace(small, tp=4).token_s(512), 314.75, 409.87),
    )
    for dealt, split, measured_dealt, measured_split in cases:
        assert (dealt > split) == (measured_dealt > measured_split)
        assert 0.4 < dealt / measured_dealt < 2.5
        assert 0.4 < split / measured_split < 2.5

"""Nodes as they are built: cables, bridges, PCIe with and without peer-to-peer, NVLink domains, narrow and far networks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ir.cluster import Cluster
from ir.errors import ClusterError, InputError
from simulator.clusters import build, load_cluster
from simulator.collectives import cable_rings
from simulator.cost import CostModel
from simulator.profile import curves
from simulator.routes import Routes
from simulator.topology import Nic

GIB = float(1 << 30)


def bare(cluster: str | Cluster) -> CostModel:
    """Prices without measured curves."""
    found = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return CostModel(replace(found, profile={k: v for k, v in found.profile.items() if k != "collectives"}))


def busbw(cost: CostModel, group: tuple[int, ...], nbytes: float = GIB) -> float:
    return 2 * (len(group) - 1) / len(group) * nbytes / cost.collective_s("all_reduce", nbytes, group)


def test_the_lanes_of_a_dgx1_foretell_its_measured_all_reduce() -> None:
    """Rings over cables, against NCCL on 2 to 8 V100 (VIA-Research/vTrain). Five GPUs have no ring of cables: NCCL does better there than one by rank."""
    cost = bare("dgx-1")
    for curve in curves("V100-SXM2-16GB"):
        n, (nbytes, seconds) = curve["ranks_per_node"], curve["rows"][-1]
        told = cost.collective_s("all_reduce", nbytes, tuple(range(n)))
        assert told == pytest.approx(seconds, rel=0.7 if n == 5 else 0.12), n


def test_rings_use_no_cable_twice() -> None:
    routes = Routes(load_cluster("dgx-1"))
    rings = cable_rings(routes, tuple(range(8)))
    assert len(rings) == 6
    used: dict[tuple[int, int], int] = {}
    for ring in rings:
        assert sorted(ring) == list(range(8))
        for pair in zip(ring, (*ring[1:], ring[0]), strict=True):
            used[pair] = used.get(pair, 0) + 1
    lanes = routes.lanes(tuple(range(8)))
    lane = min(lanes.values())
    assert all(n <= round(lanes[pair] / lane) for pair, n in used.items())
    assert cable_rings(Routes(load_cluster("8xH100")), tuple(range(8))) == ()


def test_two_mi300x_use_one_link_and_eight_use_most() -> None:
    """47.7 and 312.9 GB/s measured (stas00/ml-engineering)."""
    cost = bare("8xMI300X")
    assert busbw(cost, (0, 1), 4 * GIB) == pytest.approx(47.7e9, rel=0.02)
    assert busbw(cost, tuple(range(8)), 4 * GIB) == pytest.approx(312.9e9, rel=0.1)


def test_a_bridge_joins_a_pair_and_no_more() -> None:
    cost = bare("nc-a100-v4")
    assert cost.p2p_s(GIB, 0, 1) < 0.15 * cost.p2p_s(GIB, 1, 2)
    with pytest.raises(ClusterError, match="no NVLink bridge"):
        build("none", "L40S", 1, 2, None, layout={"kind": "switch", "bridges": True})


def test_trays_of_one_rack_share_its_nvlink_domain() -> None:
    cluster = load_cluster("36x4xGB200")
    assert {v for edge in cluster.path(0, 71) for v in edge} == {"gpu0", "gpu71", "nvlink-domain0"}
    assert any("nic" in v for edge in cluster.path(0, 72) for v in edge)
    assert load_cluster("gb200-nvl72").num_devices == 72


def pcie_box(p2p: bool, **layout: Any) -> CostModel:
    return bare(build("box", "RTX-4090", 1, 4, None, layout={"kind": "pcie", "sockets": 2, "per_switch": 2, "p2p": p2p, **layout}))


def test_without_peer_to_peer_a_pair_on_one_switch_is_slower_than_one_across_sockets() -> None:
    """NVIDIA/nccl issue 1309: its traffic goes up and down the same uplink; both ways at once, as in an all-reduce."""
    off, on = pcie_box(False), pcie_box(True)
    one_switch, across = (CostModel(off.cluster, active=pair) for pair in ((2, 3), (0, 3)))
    assert busbw(one_switch, (2, 3)) == pytest.approx(0.5 * busbw(across, (0, 3)), rel=0.25)
    assert busbw(on, (2, 3)) >= busbw(on, (0, 3))


def test_groups_in_one_socket_beat_groups_across() -> None:
    """NVIDIA/nccl-tests issue 74: eight A40 on two sockets."""
    cost = bare(build("a40", "A10", 1, 8, None, layout={"kind": "pcie", "sockets": 2, "per_switch": 1}))
    assert busbw(cost, (0, 1, 2, 3)) > busbw(cost, (0, 2, 4, 6))


def test_an_oversubscribed_network_carries_less() -> None:
    full, half = (bare(f"2x8xH100@ib400x8{suffix}").line("all_reduce", GIB, tuple(range(16))).s_per_byte for suffix in ("", ":2"))
    assert half == pytest.approx(2 * full)
    assert str(Nic("ib", 400.0, 8, 2.0)) == "8 x 400 Gb/s ib, oversubscribed 2:1"


def test_bandwidth_falls_with_distance() -> None:
    """NVIDIA/nccl-tests issue 241: a ring over two sites, some hundred microseconds apart, halves; what is in flight does not fill the way."""
    group = tuple(range(32))
    rates = [busbw(bare(f"4x8xH100@ib400x8{suffix}"), group, 1e9) for suffix in ("", "+20us", "+100us", "+300us", "+1000us")]
    assert rates == sorted(rates, reverse=True)
    assert rates[1] > 0.9 * rates[0]
    assert 0.2 < rates[3] / rates[0] < 0.7


@pytest.mark.parametrize(
    ("text", "words"), [("2x8xH100@ib400x8:0.5", "oversubscription is 0.5"), ("2x8xH100@ib400x8:1.2.3", "1.2.3"), ("2x8xH100@ib400+us", "NIC")]
)
def test_bad_networks_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_cluster(text)


def test_unknown_layouts_are_refused() -> None:
    with pytest.raises(ClusterError, match="no layout is called `star`"):
        build("none", "L40S", 1, 2, None, layout={"kind": "star"})
    with pytest.raises(ClusterError, match="lanes are known of 8 GPUs"):
        build("none", "V100-SXM2-16GB", 1, 9, None, layout={"kind": "lanes", "lanes": "hybrid-cube-mesh"})


@pytest.mark.parametrize(("text", "parts"), [("72x4xGB200@ib400x4", 4), ("36x8xH100@ib400x8r:4", 8)])
def test_paths_between_parts_are_found_part_by_part(text: str, parts: int) -> None:
    """Racks on NVLink domains, nodes on rails: as short as by searching the whole, and without searching it."""
    cluster = load_cluster(text)
    routes = Routes(cluster)
    for a, b in ((0, 71), (0, 72), (5, 287), (100, 143), (150, 151)):
        assert routes.latency_s(routes.path(a, b)) == pytest.approx(routes.latency_s(cluster.path(a, b)))
    assert len(routes._parts) <= parts

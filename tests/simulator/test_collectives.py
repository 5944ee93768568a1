"""Alpha-beta collectives on the topology: closed forms, shared NICs, monotony."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from ir.cluster import Cluster, Device, Link
from ir.errors import ClusterError, InputError
from simulator.clusters import load_cluster
from simulator.collectives import _pairwise, siblings
from simulator.cost import COLLECTIVES, CostModel, curve_s
from simulator.profile import curves
from simulator.routes import Routes

GIB = float(1 << 30)


def bare(text: str) -> Cluster:
    """The cluster without measured curves: alpha-beta alone."""
    cluster = load_cluster(text)
    return replace(cluster, profile={k: v for k, v in cluster.profile.items() if k != "collectives"})


def link(cluster: Cluster, kind: str) -> Link:
    return next(k for k in cluster.links if k.kind == kind)


@pytest.mark.parametrize("kind", [*COLLECTIVES, "p2p"])
def test_a_group_of_one_is_free(kind: str) -> None:
    cost = CostModel(bare("2x8xH100"))
    assert (cost.p2p_s(GIB, 3, 3) if kind == "p2p" else cost.collective_s(kind, GIB, (3,))) == 0.0


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(("kind", "factor"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1)])
def test_bytes_over_bandwidth_for_large_messages(kind: str, factor: int, n: int) -> None:
    cluster = bare("1x8xA100")
    seconds = CostModel(cluster).collective_s(kind, 1000 * GIB, tuple(range(n)))
    assert seconds == pytest.approx(factor * (n - 1) / n * 1000 * GIB / link(cluster, "nvlink3").bytes_per_s, rel=1e-5)


def test_small_messages_take_the_way_of_fewest_hops() -> None:
    cost = CostModel(bare("4x8xH100"))
    group = tuple(range(32))
    chosen = [cost.line("all_reduce", nbytes, group).algorithm for nbytes in (1e3, 1e10)]
    assert chosen == ["tree", "ring"]
    assert cost.collective_s("all_reduce", 1e3, group) == min(line.at(1e3) for line in cost.lines("all_reduce", group))


def test_eight_groups_over_one_nic_take_eight_times_as_long() -> None:
    cost = CostModel(bare("2x8xH100@ib400"))
    alone = cost.line("all_reduce", GIB, (0, 8), alone=True)
    together = cost.line("all_reduce", GIB, (0, 8))
    assert together.s_per_byte == pytest.approx(8 * alone.s_per_byte)
    own_nic = CostModel(bare("2x8xH100@ib400x8")).line("all_reduce", GIB, (0, 8))
    assert own_nic.s_per_byte == pytest.approx(alone.s_per_byte)
    only_two_take_part = CostModel(bare("2x8xH100@ib400"), active=(0, 1, 8, 9)).line("all_reduce", GIB, (0, 8))
    assert only_two_take_part.s_per_byte == pytest.approx(2 * alone.s_per_byte)


def test_tensor_parallelism_over_nodes_is_bound_by_the_nic_of_the_node() -> None:
    """One 100 Gb/s NIC for eight V100 (the DLPerf testbed): whatever the group's size, a node's NIC carries the whole tensor twice."""
    cluster = bare("4x8xV100-SXM2-16GB")
    nic = link(cluster, "ib").bytes_per_s
    cost = CostModel(cluster)
    for n in (16, 32):
        assert cost.line("all_reduce", GIB, tuple(range(n))).s_per_byte == pytest.approx(2 * (n - 1) / n / nic)
    assert cost.line("all_reduce", GIB, tuple(range(8))).s_per_byte < 0.1 / nic * 2


def test_a_ring_over_nodes_uses_every_nic() -> None:
    cluster = bare("4x8xH100@ib200x8")
    line = CostModel(cluster).line("all_gather", GIB, tuple(range(32)))
    assert line.s_per_byte == pytest.approx(31 / 32 / (8 * link(cluster, "ib").bytes_per_s))
    ports = [load for edge, load in line.loads.items() if edge[0].startswith("nic") and edge[1] == "fabric"]
    assert ports == pytest.approx([31 / 32 / 8] * 32)


def test_a_library_with_a_hierarchy_moves_less_between_nodes() -> None:
    cluster = bare("2x8xH100@ib100")
    free = replace(cluster, profile={"collective": {"launch_s": 1e-5}})
    group = tuple(range(16))
    line = CostModel(free).line("all_reduce", 1000 * GIB, group)
    assert line.algorithm == "hierarchical"
    across, inside = 2 * 1 / 2 / link(cluster, "ib").bytes_per_s, 2 * 7 / 8 / link(cluster, "nvlink4").bytes_per_s
    assert line.s_per_byte == pytest.approx(across + inside)
    assert CostModel(cluster).line("all_reduce", 1000 * GIB, group).algorithm == "ring"


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("group", [(0, 1), (0, 4, 8, 12), (0, 1, 2, 3, 4, 5, 6, 7), (1, 2, 9), tuple(range(16))])
def test_what_leaves_arrives(kind: str, group: tuple[int, ...]) -> None:
    """On every switch as many bytes come in as go out, and every member sends and receives."""
    for line in CostModel(bare("4x4xH100@ib400x2")).lines(kind, group):
        vertices = {v for edge in line.loads for v in edge}
        for v in vertices:
            into, out = (sum(load for edge, load in line.loads.items() if edge[i] == v) for i in (1, 0))
            assert into == pytest.approx(out), (line.algorithm, v)
        assert {f"gpu{r}" for r in group} <= vertices


def test_switches_that_reduce_help_all_reduce_alone_and_from_five_members_on() -> None:
    """H200: 259 to 275 GB/s at 5 to 8 GPUs whatever their number, none at 4; B200 from 6 (stas00/ml-engineering, SHARP section)."""
    for gpu, first, algbw in (("H200", 5, 270e9), ("B200", 6, 477e9)):
        cost = CostModel(bare(f"8x{gpu}"))
        for n in range(2, 9):
            line = cost.line("all_reduce", 8 * GIB, tuple(range(n)))
            assert line.algorithm == ("nvls" if n >= first else "ring"), n
            if n >= first:
                assert 1 / line.s_per_byte == pytest.approx(algbw, rel=0.05)
            assert {found.algorithm for found in cost.lines("all_gather", tuple(range(n)))} == {"ring"}
    assert "nvls" not in {line.algorithm for line in CostModel(bare("2x8xH200")).lines("all_reduce", tuple(range(16)))}
    assert "nvls" in {line.algorithm for line in CostModel(bare("16x4xGB200")).lines("all_reduce", tuple(range(64)))}


def test_a_broadcast_passes_every_byte_on_once() -> None:
    cluster = bare("2x4xA100@ib200x4")
    cost = CostModel(cluster)
    assert cost.collective_s("broadcast", 1000 * GIB, (0, 1, 2, 3)) == pytest.approx(1000 * GIB / link(cluster, "nvlink3").bytes_per_s, rel=1e-5)
    assert cost.collective_s("broadcast", GIB, (0, 4)) == pytest.approx(cost.p2p_s(GIB, 0, 4), rel=1e-3)


def test_on_rails_only_what_changes_rails_is_narrowed() -> None:
    """Peers of equal place meet on their own switch; one GPU's message to another place takes the node's NVLink first."""
    plain, narrow = (CostModel(bare(f"4x8xH100@ib400x8r{suffix}")) for suffix in ("", ":8"))
    peers = tuple(range(0, 32, 8))
    assert narrow.line("all_reduce", GIB, peers).s_per_byte == pytest.approx(plain.line("all_reduce", GIB, peers).s_per_byte)
    assert not any("fabric" in edge for edge in Routes(narrow.cluster).path(0, 9))
    flat = CostModel(bare("4x8xH100@ib400x8:8"))
    assert flat.line("all_reduce", GIB, peers).s_per_byte == pytest.approx(8 * plain.line("all_reduce", GIB, peers).s_per_byte)


@pytest.mark.parametrize("name", ["2x4xH100-SXM", "3x2xA100-SXM-80GB@eth25", "2xp4d.24xlarge"])
def test_who_sends_to_whom_counted_by_halves_is_what_all_paths_say(name: str) -> None:
    routes = Routes(load_cluster(name))
    group = tuple(range(0, routes.cluster.num_devices, 1 + (routes.cluster.num_devices > 8)))
    pairs = [routes.path(a, b) for a in group for b in group if a != b]
    loads = _pairwise(routes, group)
    assert loads == pytest.approx({edge: sum(path.count(edge) for path in pairs) / len(group) for path in pairs for edge in path})


def test_siblings_are_disjoint_translations() -> None:
    cluster = bare("2x8xH100")
    assert siblings(cluster, (0, 4, 8, 12)) == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert siblings(cluster, (2, 3)) == ((2, 3), (4, 5), (0, 1), (6, 7))
    assert siblings(cluster, (7, 8)) == ((7, 8),)
    assert siblings(cluster, (4, 8)) == ((4, 8), (5, 9), (6, 10), (7, 11))
    for group in itertools.combinations(range(16), 3):
        found = siblings(cluster, group)
        members = [r for g in found for r in g]
        assert len(members) == len(set(members))
        assert found[0] == group


def test_messages_of_neighbouring_stages_share_the_nic() -> None:
    cost = CostModel(bare("2x8xH100@ib400"))
    stage_a_node = cost.line("p2p", GIB, (0, 8)).s_per_byte
    last_to_first = cost.line("p2p", GIB, (7, 8)).s_per_byte
    assert stage_a_node == pytest.approx(8 * last_to_first)


@pytest.mark.parametrize("seed", range(30))
def test_more_bandwidth_never_costs_time_and_more_bytes_never_save_it(seed: int) -> None:
    rng = random.Random(seed)
    cluster = bare(rng.choice(("4x4xH100@ib400", "2x8xA100@ib200x4", "2x4xL40S", "4x1xV100@eth25")))
    kind, n = rng.choice(COLLECTIVES), rng.randint(2, 6 if cluster.num_devices > 6 else 4)
    group, sizes = tuple(rng.sample(range(cluster.num_devices), n)), sorted(10 ** rng.uniform(2, 10) for _ in range(4))
    faster = replace(cluster, links=tuple(replace(k, bytes_per_s=k.bytes_per_s * rng.choice((1, 1, 3))) for k in cluster.links))
    before, after = CostModel(cluster), CostModel(faster)
    seconds = [before.collective_s(kind, size, group) for size in sizes]
    assert seconds == sorted(seconds)
    assert all(after.collective_s(kind, size, group) <= s * (1 + 1e-12) for size, s in zip(sizes, seconds, strict=True))


def test_measured_curves_count_where_the_group_has_their_shape() -> None:
    rows = next(c["rows"] for c in curves("H100-SXM") if c["kind"] == "all_reduce" and c["ranks_per_node"] == 4)
    cost = CostModel(load_cluster("2x8xH100"))
    for nbytes, seconds in rows:
        assert cost.collective_s("all_reduce", nbytes, (4, 5, 6, 7)) == pytest.approx(seconds)
    assert cost.collective_s("all_reduce", GIB, (0, 1, 8, 9)) == cost.line("all_reduce", GIB, (0, 1, 8, 9)).at(GIB)
    assert curve_s(rows, 1) == rows[0][1]
    assert curve_s(rows, 2 * rows[-1][0]) == pytest.approx(2 * rows[-1][1])


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_alpha_beta_is_near_the_measured_curves(kind: str) -> None:
    """Bundled NCCL times on 2, 4 and 8 GPUs (ai-dynamo/aiconfigurator): within a factor of 3 everywhere."""
    for gpu in ("A100-SXM-80GB", "H100-SXM", "H200", "B200"):
        cost = CostModel(bare(f"1x8x{gpu}"))
        for curve in curves(gpu):
            if curve["kind"] == kind and curve["ranks_per_node"] in (2, 4, 8):
                for nbytes, seconds in curve["rows"]:
                    assert 1 / 3 < cost.collective_s(kind, nbytes, tuple(range(curve["ranks_per_node"]))) / seconds < 3, (gpu, curve["ranks_per_node"], nbytes)


def test_paths_of_a_topology_of_ones_own() -> None:
    """Two devices a node on one bus that all share, no vertex called fabric."""
    devices = tuple(Device(r, "any", r // 2, 1e9, 1e9, {"float32": 1e12}, 1e11, 1e-6) for r in range(4))
    links = (
        Link("gpu0", "bus", 1e-6, 1e9), Link("gpu1", "bus", 1e-6, 1e9), Link("gpu2", "hub", 1e-6, 1e9),
        Link("gpu3", "hub", 1e-6, 1e9), Link("bus", "hub", 5e-6, 1e8),
    )  # fmt: skip
    cluster = Cluster("own", devices, links).check()
    routes = Routes(cluster)
    for a, b in itertools.product(range(4), repeat=2):
        assert tuple((min(e), max(e)) for e in routes.path(a, b)) == cluster.path(a, b)
    cost = CostModel(cluster)
    assert cost.line("p2p", 1e6, (0, 2)).s_per_byte == pytest.approx(2 / 1e8)
    assert cost.line("p2p", 1e6, (0, 2)).fixed_s == pytest.approx(7e-6)


def test_refusals() -> None:
    cost = CostModel(bare("2x2xH100"))
    with pytest.raises(InputError, match="no collective is called `gather`"):
        cost.collective_s("gather", 1.0, (0, 1))
    with pytest.raises(ClusterError, match=r"ranks 0 to 3.*\[9\]"):
        cost.collective_s("all_reduce", 1.0, (0, 9))


def test_a_group_of_thousands_is_priced_in_reasonable_work() -> None:
    cost = CostModel(bare("256x8xH100"))
    line = cost.line("all_reduce", GIB, tuple(range(0, 2048, 8)))
    nic = link(cost.cluster, "ib").bytes_per_s
    assert line.s_per_byte == pytest.approx(2 * 255 / 256 / nic)

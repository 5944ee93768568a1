"""Output of other tools, read as it comes: prefixes, cut rows, glued columns, both generations of headers; and what is odd about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ir.errors import InputError
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.importers import assemble, read_files, slow_nodes
from simulator.importers.assemble import diagnose
from simulator.importers.nccl_tests import read as read_sweeps
from simulator.importers.topo_matrix import read as read_matrix
from simulator.profile import gpu_profile
from simulator.topology import Nic

HEAD = "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong"


def sweep(
    rows: list[tuple[int, float]], ranks: int, nodes: int = 1, gpu: str = "NVIDIA H100 80GB HBM3", kind: str = "all_reduce", prefix: str = "", wrong: int = 0
) -> str:
    """Output of nccl-tests for sizes and microseconds."""
    lines = [f"# Collective test starting: {kind}_perf", "# Using devices"]
    per_node = ranks // nodes
    lines += [f"#  Rank {r:2d} Group  0 Pid {900 + r} on    box-{r // per_node} device {r % per_node:2d} [0x{16 + r:02x}] {gpu}" for r in range(ranks)]
    lines.append(HEAD)
    factor = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
    for size, us in rows:
        algbw = size / us / 1e3
        numbers = f"{us:10.2f} {algbw:7.2f} {algbw * factor:7.2f} {wrong:6d}"
        lines.append(f"{size:12d} {size // 4:12d}     float     sum      -1 {numbers} {numbers}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 123.4"]
    return "\n".join(prefix + line for line in lines) + "\n"


def matrix(ways: list[list[str]], nics: list[list[str]] | None = None, sep: str = "    ") -> str:
    """`nvidia-smi topo -m` of GPUs, with the columns of NICs."""
    num_nics = len(nics[0]) if nics else 0
    out = [sep.join(["", *(f"GPU{i}" for i in range(len(ways[0]))), *(f"NIC{i}" for i in range(num_nics)), "CPU Affinity", "NUMA Affinity"])]
    for i, row in enumerate(ways):
        out.append(sep.join([f"GPU{i}", *row, *(nics[i] if nics else []), f"{i}-{i + 9}", "0"]))
    return "\n".join(out) + "\n\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"


def full(n: int, way: str) -> list[list[str]]:
    return [["X" if i == j else way for j in range(n)] for i in range(n)]


def pairs(n: int) -> list[list[str]]:
    """Bridges between neighbours, sockets of four."""
    return [["X" if i == j else "NV4" if i // 2 == j // 2 else "NODE" if i // 4 == j // 4 else "SYS" for j in range(n)] for i in range(n)]


def peers(rates: list[list[float]], connected: int = 1) -> str:
    n = range(len(rates))
    table = [f"     {i} " + " ".join(f"{x:7.2f}" for x in row) for i, row in enumerate(rates)]
    link = [f"     {i}\t     " + "     ".join(str(int(i == j or connected)) for j in n) for i in n]
    head = "   D\\D     " + "      ".join(map(str, n))
    return "\n".join(["P2P Connectivity Matrix", head, *link, "Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)", head, *table, ""])


def write(folder: Path, **texts: str) -> list[str]:
    out = []
    for name, text in texts.items():
        path = folder / f"{name}.txt"
        path.write_text(text)
        out.append(str(path))
    return out


def levels(folder: Path, gpu: str, **texts: str) -> list[tuple[str, str]]:
    return [(f.level, f.text) for f in diagnose(read_files(write(folder, **texts)), gpu)]


# ---- reading ------------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "    ", "[1,0]<stdout>:"])
def test_sweeps_in_whatever_frame(prefix: str) -> None:
    rows = [(1 << 20, 40.0), (1 << 28, 1100.0)]
    (found,) = read_sweeps(sweep(rows, 8, prefix=prefix))
    assert (found.kind, found.num_ranks, found.num_nodes, found.gpu) == ("all_reduce", 8, 1, "NVIDIA H100 80GB HBM3")
    assert found.rows == ((1 << 20, pytest.approx(40e-6)), (1 << 28, pytest.approx(1100e-6)))


def test_two_sweeps_in_one_file_and_ranks_from_the_factor() -> None:
    first, second = read_sweeps(sweep([(1 << 30, 5000.0)], 4) + "## on other cards\n" + HEAD + "\n" + sweep([(1 << 30, 9000.0)], 8).splitlines()[-3] + "\n")
    assert (first.num_ranks, second.num_ranks, second.kind, second.num_nodes) == (4, 8, "", 0)


def test_a_cut_list_of_ranks_counts_nodes_by_device_numbers() -> None:
    text = sweep([(1 << 30, 9000.0)], 16, nodes=2)
    kept = [line for line in text.splitlines() if "Rank" not in line or any(f"Rank {r:2d}" in line for r in (0, 7, 8, 15))]
    (found,) = read_sweeps("\n".join(kept))
    assert (found.num_ranks, found.num_nodes) == (16, 2)


def test_matrices_with_tabs_with_old_names_cut_and_glued() -> None:
    plain = matrix(full(4, "NV18"), [["PIX", "NODE"]] * 4)
    assert read_matrix(plain) == read_matrix(plain.replace("    ", "\t"))
    assert read_matrix(plain.replace("NIC0", "mlx4_0")).nics == ("mlx4_0", "NIC1")
    cut = read_matrix("\n".join(plain.splitlines()[:3]))
    assert cut.left_out == ("row GPU2 is missing", "row GPU3 is missing")
    glued = read_matrix(plain.replace("PIX    NODE", "PIXNODE"))
    assert glued.way == read_matrix(plain).way
    short = read_matrix(plain.replace("NV18    PIX    NODE", "NV18    PIX", 1))
    assert any("ends after" in row for row in short.left_out)


# ---- clusters -----------------------------------------------------------------------------------------------------------------------------------------------


def test_measured_curves_count_and_the_other_shapes_keep_theirs(tmp_path: Path) -> None:
    rows = [(1 << 20, 60.0), (1 << 24, 200.0), (1 << 30, 4500.0)]
    files = write(tmp_path, topo=matrix(full(8, "NV18")), sweep=sweep(rows, 8), far=sweep([(1 << 20, 300.0), (1 << 30, 6000.0)], 16, nodes=2))
    cluster, findings = assemble(read_files(files), nic=Nic("ib", 400.0, 8))
    assert (len(cluster.nodes), cluster.num_devices, cluster.devices[0].name, findings) == (2, 16, "H100-SXM", ())
    cost = CostModel(cluster)
    assert cost.collective_s("all_reduce", 1 << 24, tuple(range(8))) == pytest.approx(200e-6, rel=1e-3)
    assert cost.collective_s("all_reduce", 1 << 30, tuple(range(16))) == pytest.approx(6e-3, rel=1e-3)
    assert {c["kind"] for c in cluster.profile["collectives"]} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


def test_small_messages_cost_no_more_than_without_a_file_that_begins_with_large_ones(tmp_path: Path) -> None:
    files = write(tmp_path, topo=matrix(full(8, "NV18")), sweep=sweep([(1 << 28, 1200.0), (1 << 30, 4500.0)], 8))
    cost, usual, group = CostModel(assemble(read_files(files))[0]), CostModel(load_cluster("8xH100-SXM")), tuple(range(8))
    for nbytes in (2, 512, 1 << 20):
        assert cost.collective_s("all_reduce", nbytes, group) == pytest.approx(usual.collective_s("all_reduce", nbytes, group), rel=0.2)
    assert cost.collective_s("all_reduce", 1 << 28, group) == pytest.approx(1200e-6, rel=1e-3)


def test_bridges_and_sockets_come_from_the_matrix(tmp_path: Path) -> None:
    cluster, findings = assemble(read_files(write(tmp_path, topo=matrix(pairs(8)))), gpu="A100-PCIe-80GB")
    assert sorted({k.kind for k in cluster.links}) == ["nvlink-bridge", "pcie", "socket"]
    assert len([k for k in cluster.links if k.kind == "nvlink-bridge"]) == 4
    assert any("some pairs have NVLink" in f.text for f in findings)


def test_cut_matrices_of_switched_nodes_are_switched(tmp_path: Path) -> None:
    text = "\n".join(matrix(full(8, "NV8")).splitlines()[:7])
    cluster, _ = assemble(read_files(write(tmp_path, topo=text)), gpu="A800")
    assert {k.b for k in cluster.links} == {"nvswitch0"}


def test_cables_in_a_cube_become_lanes(tmp_path: Path) -> None:
    ways = [["X", "NV1", "NV1", "NV2"], ["NV1", "X", "NV2", "SYS"], ["NV1", "NV2", "X", "NV1"], ["NV2", "SYS", "NV1", "X"]]
    cluster, _ = assemble(read_files(write(tmp_path, topo=matrix(ways))), gpu="V100")
    rates = {(k.a, k.b): k.bytes_per_s for k in cluster.links}
    assert rates["gpu0", "gpu3"] == 2 * rates["gpu0", "gpu1"]
    assert ("gpu1", "gpu3") not in rates


def test_measured_peers_set_the_rate_of_pcie(tmp_path: Path) -> None:
    text = peers([[900.0, 24.0, 24.2], [24.1, 900.0, 24.0], [24.0, 24.3, 900.0]])
    cluster, _ = assemble(read_files(write(tmp_path, p2p=text)), gpu="L40S")
    assert {k.bytes_per_s for k in cluster.links} == {24.1e9}
    off, findings = assemble(read_files(write(tmp_path, p2p=peers([[900.0, 38.0], [38.5, 900.0]], connected=0))), gpu="RTX-5090")
    assert off.profile["p2p"] is False
    assert any("no GPU reaches another" in f.text for f in findings)


def test_pcie_trees_give_sockets_switches_and_nics(tmp_path: Path) -> None:
    gpu = '<pci busid="{0}:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"><gpu dev="0" sm="89"/></pci>'
    switch = '<pci busid="{0}:00.0" class="0x060400" link_speed="16 GT/s" link_width="16">{1}</pci>'
    cpus = "".join(f'<cpu numaid="{c}">{switch.format(f"a{c}", gpu.format(f"b{c}") + gpu.format(f"c{c}"))}</cpu>' for c in (0, 1))
    nic = '<cpu numaid="2"><nic><net name="mlx5_0" dev="0" speed="200000"/></nic></cpu>'
    path = tmp_path / "topo.xml"
    path.write_text(f'<system version="1">{cpus}{nic}</system>')
    cluster, _ = assemble(read_files([str(path)]), gpu="L40S", num_nodes=2)
    assert sorted({k.a for k in cluster.links if k.a.startswith("plx")}) == ["plx0.0", "plx0.1", "plx1.0", "plx1.1"]
    assert [round(k.bytes_per_s / 1e9, 1) for k in cluster.links if k.kind == "ib"] == [22.5, 22.5]


# ---- what is odd -------------------------------------------------------------------------------------------------------------------------------------------


def test_a_sound_machine_has_nothing_odd(tmp_path: Path) -> None:
    rows = [(1 << 20, 60.0), (1 << 30, 4100.0)]
    assert levels(tmp_path, "H100", topo=matrix(full(8, "NV18"), [["PIX"]] * 8), sweep=sweep(rows, 8)) == []


@pytest.mark.parametrize(
    ("rows", "wrong", "level", "words"),
    [
        ([(1 << 30, 1e6 * (1 << 30) * 1.75 / 600e9)], 0, "wrong", "600 GB/s of bus bandwidth, but nvlink3 carries 300 GB/s in each direction; a figure twice"),
        ([(1 << 30, 40000.0)], 0, "slow", "of bus bandwidth on one node, 234.9 GB/s are usual"),
        ([(1 << 20, 4400.0), (1 << 30, 8300.0)], 0, "slow", "4.4 ms for 1 MiB"),
        ([(1 << 30, 8300.0)], 3, "wrong", "3 wrong results"),
    ],
)
def test_figures_that_cannot_be_or_should_be_better(tmp_path: Path, rows: list[tuple[int, float]], wrong: int, level: str, words: str) -> None:
    found = levels(tmp_path, "A100", sweep=sweep(rows, 8, gpu="NVIDIA A100-SXM4-80GB", wrong=wrong))
    assert any(level == got and words in text for got, text in found), found


def test_a_slow_card_and_far_nics_are_named(tmp_path: Path) -> None:
    rates = [[900.0 if i == j else 51.0 if 3 in (i, j) else 56.5 for j in range(6)] for i in range(6)]
    assert any("GPU 3 sends at 51 GB/s, the others at 56.5 GB/s" in text for _, text in levels(tmp_path, "RTX-5090", p2p=peers(rates)))
    far = levels(tmp_path, "H100", topo=matrix(full(4, "NV18"), [["NODE"], ["PIX"], ["SYS"], ["PXB"]]))
    assert far == [("slow", "topology: GPU0, GPU2 reach no NIC without crossing a host bridge (NODE or SYS); GPUDirect over it is slow")]


def test_slow_nodes_from_runs_on_pairs() -> None:
    """NVIDIA/nccl-tests issue 106: 644 is slow, one of 284 and 678 is."""
    pairs_of_nodes = [(644, 699, 49.36), (632, 641, 88.36), (284, 678, 49.28), (641, 644, 49.3), (404, 699, 86.81)]
    assert slow_nodes(pairs_of_nodes) == ((644,), (284, 678), (404, 632, 641, 699))


# ---- refusals ----------------------------------------------------------------------------------------------------------------------------------------------


def test_refusals(tmp_path: Path) -> None:
    for text, words in (
        ("hello", "not output of"),
        ("<system", "no XML"),
        ("<graphs version='1'></graphs>", "NCCL's search"),
        (f"{HEAD}\n# out of memory\n", "without any row"),
    ):
        with pytest.raises(InputError, match=words):
            read_files(write(tmp_path, bad=text))
    with pytest.raises(InputError, match="cannot be read: no such file"):
        read_files([str(tmp_path / "none.txt")])
    (path,) = write(tmp_path, topo=matrix(full(2, "NV12")))
    with pytest.raises(InputError, match="say it with --gpu"):
        assemble(read_files([path]))
    (path,) = write(tmp_path, sweep=f"{HEAD}\n" + sweep([(1 << 30, 9000.0)], 8).splitlines()[-3] + "\n")
    with pytest.raises(InputError, match="how many GPUs a node has"):
        assemble(read_files([path]), gpu="H100")


def test_names_of_drivers_mean_the_right_cards(tmp_path: Path) -> None:
    names = {
        "NVIDIA A100-SXM4-40GB": "A100-SXM-40GB", "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB", "Tesla V100-SXM2-16GB": "V100-SXM2-16GB",
        "NVIDIA GeForce RTX 4090": "RTX-4090", "NVIDIA H200": "H200", "NVIDIA L40S": "L40S", "NVIDIA L4": "L4", "NVIDIA GB200": "GB200",
    }  # fmt: skip
    for told, name in names.items():
        files = write(tmp_path, sweep=sweep([(1 << 30, 9000.0)], 2, gpu=told))
        assert gpu_profile(read_files(files).gpu)[0] == name

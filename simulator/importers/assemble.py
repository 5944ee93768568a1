"""Imported files to a cluster: the GPU's profile, joined as the files say, with the curves that they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ir.cluster import Cluster
from ir.errors import InputError
from simulator.clusters import build
from simulator.cost import COLLECTIVES, CostModel
from simulator.importers import nccl_tests, p2p, topo_matrix, topo_xml
from simulator.importers.findings import Finding, doctor
from simulator.importers.nccl_tests import Sweep
from simulator.importers.p2p import Peers
from simulator.importers.topo_matrix import Matrix
from simulator.importers.topo_xml import Tree
from simulator.profile import bundled, gpu_profile
from simulator.topology import Nic

MODELS = (
    (r"H100.*PCIe", "H100-PCIe"), (r"H100.*96GB|96GB.*H100", "H100-SXM-96GB-500W"), (r"H100", "H100-SXM"), (r"H200", "H200"), (r"GB300", "GB300"),
    (r"GB200", "GB200"), (r"B300", "B300"), (r"B200", "B200"), (r"H800", "H800-SXM"), (r"A800", "A800-SXM-80GB"), (r"A100.*40GB", "A100-SXM-40GB"),
    (r"A100.*PCIe|A100 80GB PCIe", "A100-PCIe-80GB"), (r"A100", "A100-SXM-80GB"), (r"V100.*32GB", "V100-SXM2-32GB"), (r"V100", "V100-SXM2-16GB"),
    (r"L40S", "L40S"), (r"\bL4\b", "L4"), (r"\bA10\b", "A10"), (r"\bT4\b", "T4"), (r"3090", "RTX-3090"), (r"4090", "RTX-4090"), (r"5090", "RTX-5090"),
    (r"MI300X", "MI300X"), (r"MI325X", "MI325X"), (r"MI355X", "MI355X"), (r"MI250X", "MI250X"),
)  # fmt: skip
"""Names that drivers print, and the profile that is meant; the first that fits counts."""

MAX_BYTES = 64 << 20

SMALLER = tuple(512 * 4**i for i in range(12))
"""Sizes of messages that stand below those of a file, up to 2 GiB."""

BRIDGED = 4.0
"""Between two GPUs of a PCIe node, so many times what the others reach is a bridge."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What files hold, by kind."""

    sweeps: tuple[Sweep, ...] = ()
    matrices: tuple[Matrix, ...] = ()
    peers: tuple[Peers, ...] = ()
    trees: tuple[Tree, ...] = ()

    @property
    def gpu(self) -> str:
        """The profile of the GPU that the files name, or nothing."""
        told = next((s.gpu for s in self.sweeps if s.gpu), "")
        return next((name for pattern, name in MODELS if re.search(pattern, told, re.IGNORECASE)), "")

    @property
    def gpus_per_node(self) -> int:
        """As the files say, or 0: a topology before a sweep."""
        counts = [len(m.gpus) for m in self.matrices] + [len(t.gpus) for t in self.trees] + [p.num_gpus for p in self.peers]
        return next((n for n in counts if n), max((s.num_ranks // max(1, s.num_nodes) for s in self.sweeps if s.num_nodes), default=0))


def read_files(paths: Sequence[str]) -> Imported:
    """Reads files of any of the four kinds; InputError where one cannot be read or is none of them."""
    found = Imported()
    for path in paths:
        text = _text(Path(path))
        if topo_xml.looks_like(text):
            found = replace(found, trees=(*found.trees, _named(path, topo_xml.read, text)))
        elif nccl_tests.looks_like(text):
            sweeps = nccl_tests.read(text)
            if not sweeps:
                raise InputError(f"{path}: output of nccl-tests without any row of numbers; the run failed or was cut")
            found = replace(found, sweeps=(*found.sweeps, *sweeps))
        elif topo_matrix.looks_like(text):
            found = replace(found, matrices=(*found.matrices, topo_matrix.read(text)))
        elif p2p.looks_like(text):
            found = replace(found, peers=(*found.peers, p2p.read(text)))
        else:
            raise InputError(f"{path}: not output of nccl-tests, `nvidia-smi topo -m` or p2pBandwidthLatencyTest, and no topology XML of NCCL")
    return found


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} has {path.stat().st_size >> 20} MiB; such output has some kilobytes")
        return path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def _named(path: str, read: Any, text: str) -> Tree:
    try:
        found: Tree = read(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return found


def diagnose(found: Imported, gpu: str = "") -> tuple[Finding, ...]:
    """What is odd about the files."""
    return doctor(gpu_profile(_gpu(found, gpu))[1], found.sweeps, found.matrices, found.peers)


def assemble(found: Imported, gpu: str = "", num_nodes: int = 0, nic: Nic | None = None) -> tuple[Cluster, tuple[Finding, ...]]:
    """The cluster, and what is odd. `gpu`, `num_nodes` and `nic` where the files do not say; InputError where they must be given."""
    name = _gpu(found, gpu)
    per_node = found.gpus_per_node
    if not per_node:
        raise InputError("no file says how many GPUs a node has; add the output of `nvidia-smi topo -m`")
    nodes = num_nodes or max((s.num_nodes for s in found.sweeps), default=0) or 1
    profile = gpu_profile(name)[1]
    nic = nic or _nic(found, per_node)
    assumed = []
    if nic is None and nodes > 1:
        typical = profile["typical_nic"] or bundled("links")["default_nic"]
        nic = Nic(typical["kind"], float(typical["gbit_per_s"]), int(typical["per_node"]))
        assumed.append(f"NICs: {nic} a node, as typical for {name}; no file says their speed")
    cluster = build(f"{nodes}x{per_node}x{name}", name, nodes, per_node, nic if nodes > 1 else None, tuple(assumed), _layout(found, profile, per_node))
    about = {**cluster.profile, "collectives": _curves(found, cluster)}
    return replace(cluster, links=_measured_links(cluster, found), profile=about).check(), diagnose(found, name)


def _gpu(found: Imported, gpu: str) -> str:
    name = gpu or found.gpu
    if not name:
        raise InputError("no file names the GPU; say it with --gpu, such as --gpu H100-SXM")
    return gpu_profile(name)[0]


def _nic(found: Imported, per_node: int) -> Nic | None:
    """NICs of the topology XML, those with a speed."""
    for tree in found.trees:
        fast = [n.gbit_per_s for n in tree.nics if n.gbit_per_s]
        if fast:
            return Nic("eth" if any(n.busid.startswith("eth") for n in tree.nics) else "ib", max(fast), min(len(fast), per_node))
    return None


def _layout(found: Imported, profile: Mapping[str, Any], per_node: int) -> Mapping[str, Any] | None:
    """How the files say that the GPUs are joined; None where none does."""
    off = any(p.connected and not any(x for i, row in enumerate(p.connected) for j, x in enumerate(row) if i != j) for p in found.peers)
    if not found.matrices:
        return _without_matrix(found, profile, off)
    matrix = found.matrices[0]
    told = [(a, b) for i, a in enumerate(matrix.gpus) for b in matrix.gpus[i + 1 :] if (a, b) in matrix.way or (b, a) in matrix.way]
    links = {pair: matrix.nvlinks(*pair) for pair in told}
    if links and all(links.values()):
        return {"kind": "switch"} if per_node > 2 or not profile["link"].get("bridge_bytes_per_s") else _pcie(matrix, off, bridges=True)
    pairs = [pair for pair, n in links.items() if n]
    if not pairs:
        return _pcie(matrix, off, bridges=False)
    if len({g for pair in pairs for g in pair}) == 2 * len(pairs) and profile["link"].get("bridge_bytes_per_s"):
        return _pcie(matrix, off, bridges=True)
    lanes = [[matrix.nvlinks(a, b) if a != b else 0 for b in matrix.gpus] for a in matrix.gpus]
    return {"kind": "lanes", "lanes": {"matrix": lanes, "bytes_per_s": profile["link"]["bytes_per_s"] / max(map(sum, lanes))}}


def _without_matrix(found: Imported, profile: Mapping[str, Any], off: bool) -> Mapping[str, Any] | None:
    """From a PCIe tree, or from what peers reach each other with; None where these say nothing that the profile does not."""
    link = profile["link"]
    for tree in found.trees:
        if link["kind"] == "pcie":
            switches = [g.switch for g in tree.gpus if g.switch]
            most = max((switches.count(s) for s in switches), default=1)
            bridges = any(g.nvlinks for g in tree.gpus) and "bridge_bytes_per_s" in link
            return {"kind": "pcie", "sockets": len({g.socket for g in tree.gpus}), "per_switch": most, "bridges": bridges, "p2p": not off}
    rates = sorted(x for p in found.peers for i, row in enumerate(p.one_way) for j, x in enumerate(row) if i != j)
    if rates and link["kind"] == "pcie" and rates[-1] > BRIDGED * rates[0] and "bridge_bytes_per_s" in link:
        return {"kind": "pcie", "sockets": 1, "bridges": True}
    return {"kind": "pcie", "sockets": 1, "p2p": False} if off else None


def _pcie(matrix: Matrix, off: bool, bridges: bool) -> Mapping[str, Any]:
    """Sockets are what SYS separates, switches what PIX and PXB join."""

    def near(g: str, ways: Sequence[str]) -> int:
        return 1 + sum(matrix.way.get((g, other), matrix.way.get((other, g), "")).startswith(tuple(ways)) for other in matrix.gpus if other != g)

    first = matrix.gpus[0]
    socket, switch = near(first, ("NV", "PIX", "PXB", "PHB", "NODE")), near(first, ("PIX", "PXB"))
    return {"kind": "pcie", "sockets": max(1, len(matrix.gpus) // socket), "per_switch": switch, "bridges": bridges, "p2p": not off}


def _curves(found: Imported, cluster: Cluster) -> list[Mapping[str, Any]]:
    """The curves of the files, and the bundled ones of other kinds and group shapes. Below a file's smallest message the cluster's own price counts."""
    own, cost, per_node = {}, CostModel(cluster), len(cluster.nodes[0])
    for sweep in found.sweeps:
        nodes = sweep.num_nodes or 1
        if sweep.num_ranks and sweep.num_ranks % nodes == 0 and nodes <= len(cluster.nodes):
            key = (sweep.kind or "all_reduce", sweep.num_ranks // nodes, nodes)
            group = tuple(node * per_node + i for node in range(nodes) for i in range(key[1]))
            rows = _rising(sweep.rows)
            below = [n for n in SMALLER if n < rows[0][0]] if key[0] in COLLECTIVES and key[1] <= per_node else []
            before = [[n, min(cost.collective_s(key[0], n, group), rows[0][1])] for n in below]
            own[key] = {"kind": key[0], "ranks_per_node": key[1], "num_nodes": nodes, "rows": [*before, *rows], "source": "imported from nccl-tests"}
    bundled_curves = cluster.profile.get("collectives", ())
    return [*own.values(), *(c for c in bundled_curves if (c["kind"], c["ranks_per_node"], c["num_nodes"]) not in own)]


def _rising(rows: Sequence[tuple[int, float]]) -> list[list[float]]:
    """By size, no larger message faster than a smaller one."""
    out: list[list[float]] = []
    for nbytes, seconds in sorted(rows):
        out.append([nbytes, max(seconds, out[-1][1] if out else 0.0)])
    return out


def _measured_links(cluster: Cluster, found: Imported) -> tuple[Any, ...]:
    """PCIe links at the rate that was measured between two GPUs that have nothing better; the others as the profile says."""
    peers = next((p for p in found.peers if p.one_way), None)
    if peers is None:
        return cluster.links
    rates = sorted(x for i, row in enumerate(peers.one_way) for j, x in enumerate(row) if i != j)
    line = max((k.bytes_per_s for k in cluster.links if k.kind == "pcie"), default=0.0)
    slow = [x for x in rates if x < 2 * line]
    return tuple(replace(k, bytes_per_s=slow[len(slow) // 2]) if slow and k.kind == "pcie" and "nic" not in k.a + k.b else k for k in cluster.links)

"""The links of one node: how its GPUs reach each other, and the NICs by which it reaches the others.

| layout | what joins the GPUs |
|---|---|
| `switch` | one switch: NVSwitch, or a PCIe switch; over several nodes where an NVLink domain is larger than a node |
| `lanes` | cables between pairs, as many as a matrix says (`lanes`: a name of `nodes.json`, or matrix and rate), or one between any two (`all`, xGMI) |
| `pcie` | PCIe switches of `per_switch` GPUs below the host bridges of `sockets` sockets |

Bandwidths of the links are what flows: the datasheet's figure times the measured share of the profile. A NIC that serves several GPUs is one edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ir.cluster import Link
from ir.errors import ClusterError
from simulator.profile import bundled


@dataclass(frozen=True, slots=True)
class Nic:
    """The NICs of one node: `per_node` ports of `gbit_per_s` each; where there are fewer than GPUs, neighbours share one.

    `oversubscribed`: how many times the ports of the nodes could carry more than the network between them. `far_s`: latency beyond what the kind has.
    `rails`: the first ports of all nodes are on one switch, the second ones on another, and only what changes rails crosses the network between them.
    """

    kind: str
    gbit_per_s: float
    per_node: int
    oversubscribed: float = 1.0
    far_s: float = 0.0
    rails: bool = False

    def __str__(self) -> str:
        narrow = f", oversubscribed {self.oversubscribed:g}:1" if self.oversubscribed != 1 else ""
        far = f", {self.far_s * 1e6:g} us away" if self.far_s else ""
        return f"{self.per_node} x {self.gbit_per_s:g} Gb/s {self.kind}{' on rails' if self.rails else ''}{narrow}{far}"

    @property
    def latency_s(self) -> float:
        """Seconds from one node to another."""
        return float(bundled("links")["nics"][self.kind]["latency_s"]) + self.far_s

    def bytes_per_s(self, ports: int) -> float:
        """What flows through one of `ports` equal ports of the node: its share of the wire, less where data in flight cannot fill the way there and back."""
        figures = bundled("links")["nics"][self.kind]
        wire = self.gbit_per_s / 8 * 1e9 * figures["share"] * self.per_node / ports / (1 if self.rails else self.oversubscribed)
        return float(min(wire, figures["window_bytes"] * self.per_node / ports / (2 * self.latency_s)))


def layout_of(profile: Mapping[str, Any], num_gpus: int) -> Mapping[str, Any]:
    """How GPUs of this profile are joined where nobody says: by their lanes where there are as many GPUs as lanes are known of, all to all, or by a switch."""
    link = profile["link"]
    name = link.get("lanes")
    if name is not None and num_gpus <= len(bundled("nodes")["lanes"][name]["matrix"]):
        return {"kind": "lanes", "lanes": name}
    if link.get("mesh"):
        return {"kind": "lanes", "lanes": "all"}
    return {"kind": "switch"}


def node_links(node: int, num_gpus: int, profile: Mapping[str, Any], layout: Mapping[str, Any], nic: Nic | None) -> list[Link]:
    """The links of node number `node`; ClusterError where the layout is not known or does not hold so many GPUs."""
    gpus = [f"gpu{node * num_gpus + i}" for i in range(num_gpus)]
    kinds = {"switch": _switch, "lanes": _lanes, "pcie": _pcie}
    if layout["kind"] not in kinds:
        raise ClusterError(f"no layout is called `{layout['kind']}`; known are {', '.join(kinds)}")
    inside = kinds[layout["kind"]](node, gpus, profile, layout) if num_gpus > 1 or "domain" in profile["link"] else []
    return inside + (_nics(node, gpus, profile, nic) if nic is not None else [])


def _hop_s(profile: Mapping[str, Any]) -> float:
    return float(profile["collective"]["hop_s"])


def _switch(node: int, gpus: list[str], profile: Mapping[str, Any], layout: Mapping[str, Any]) -> list[Link]:
    link = profile["link"]
    name = "pcie" if link["kind"] == "pcie" else "nvswitch"
    if "domain" in link:
        node //= max(1, int(link["domain"]) // len(gpus))
        name = "nvlink-domain"
    out = [Link(g, f"{name}{node}", _hop_s(profile) / 2, link["bytes_per_s"] * link["share"], link["kind"]) for g in gpus]
    return out + _bridges(gpus, profile, layout)


def _bridges(gpus: list[str], profile: Mapping[str, Any], layout: Mapping[str, Any]) -> list[Link]:
    """A cable between the first and second GPU, the third and fourth, and so on."""
    if not layout.get("bridges"):
        return []
    link = profile["link"]
    if "bridge_bytes_per_s" not in link:
        raise ClusterError("this GPU takes no NVLink bridge")
    share = bundled("nodes")["bridge_share"]["value"]
    return [Link(a, b, _hop_s(profile) / 2, link["bridge_bytes_per_s"] * share, "nvlink-bridge") for a, b in zip(gpus[::2], gpus[1::2], strict=False)]


def _lanes(node: int, gpus: list[str], profile: Mapping[str, Any], layout: Mapping[str, Any]) -> list[Link]:
    link = profile["link"]
    if layout["lanes"] == "all":
        return [Link(a, b, _hop_s(profile), link["bytes_per_s"] * link["share"], link["kind"]) for i, a in enumerate(gpus) for b in gpus[i + 1 :]]
    lanes = layout["lanes"] if isinstance(layout["lanes"], Mapping) else bundled("nodes")["lanes"][layout["lanes"]]
    matrix, lane = lanes["matrix"], lanes["bytes_per_s"] * link["share"]
    if len(gpus) > len(matrix):
        raise ClusterError(f"lanes are known of {len(matrix)} GPUs a node; there are {len(gpus)}")
    pairs = [(i, j) for i in range(len(gpus)) for j in range(i + 1, len(gpus)) if matrix[i][j]]
    return [Link(gpus[i], gpus[j], _hop_s(profile), matrix[i][j] * lane, link["kind"]) for i, j in pairs]


def _pcie(node: int, gpus: list[str], profile: Mapping[str, Any], layout: Mapping[str, Any]) -> list[Link]:
    """GPUs below PCIe switches (where `per_switch` is above 1), these below host bridges, which the socket link joins."""
    rate, hop_s = profile["pcie_bytes_per_s"] * profile["pcie_share"], float(bundled("links")["pcie_hop_s"]["value"])
    sockets, per_switch = int(layout.get("sockets", 1)), int(layout.get("per_switch", 1))
    out = []
    for i, g in enumerate(gpus):
        host = f"host{node}.{i * sockets // len(gpus)}"
        if per_switch == 1:
            out.append(Link(g, host, hop_s, rate, "pcie"))
            continue
        switch = f"plx{node}.{i // per_switch}"
        out.append(Link(g, switch, hop_s / 2, rate, "pcie"))
        if i % per_switch == 0:
            out.append(Link(switch, host, hop_s, rate, "pcie"))
    figures = bundled("nodes")["socket_link"]
    for s in range(1, sockets):
        out.append(Link(f"host{node}.{s - 1}", f"host{node}.{s}", figures["latency_s"], figures["bytes_per_s"], "socket"))
    return out + _bridges(gpus, profile, layout)


def _nics(node: int, gpus: list[str], profile: Mapping[str, Any], nic: Nic) -> list[Link]:
    num_nics = min(nic.per_node, len(gpus))
    pcie_hop_s = max(bundled("links")["pcie_hop_s"]["value"], 2 * _hop_s(profile))  # a NIC is never the shorter way between two GPUs of a node
    pcie = profile["pcie_bytes_per_s"] * profile["pcie_share"] * max(1, nic.per_node // num_nics)
    out = [Link(g, f"nic{node}.{i * num_nics // len(gpus)}", pcie_hop_s, pcie, "pcie") for i, g in enumerate(gpus)]
    ends = [f"rail{i}" if nic.rails else "fabric" for i in range(num_nics)]
    return out + [Link(f"nic{node}.{i}", end, nic.latency_s / 2, nic.bytes_per_s(num_nics), nic.kind) for i, end in enumerate(ends)]


def rail_links(num_nodes: int, num_gpus: int, nic: Nic | None) -> list[Link]:
    """What joins the rails: of each as much as its ports carry, less by the oversubscription."""
    if nic is None or not nic.rails:
        return []
    num_nics = min(nic.per_node, num_gpus)
    rate = num_nodes * nic.bytes_per_s(num_nics) / nic.oversubscribed
    return [Link(f"rail{i}", "fabric", nic.latency_s / 2, rate, nic.kind) for i in range(num_nics)]

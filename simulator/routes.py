"""Paths of the topology: which links, in which direction, a message between two devices crosses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import networkx as nx

from ir.cluster import Cluster
from ir.errors import ClusterError

Edge = tuple[str, str]
"""A link in one direction: (from vertex, to vertex); each direction has the link's whole bandwidth."""


class Routes:
    """Paths of least latency between devices, found node by node so that a cluster of thousands stays cheap.

    Where the topology has a vertex `fabric` that alone joins the nodes, a path between nodes is two halves meeting there; any other topology is searched whole.
    Where the cards have no peer-to-peer (`profile["p2p"]` is false), a path inside a node goes through the hosts of both, if the topology has any.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.graph: nx.Graph[Any] = cluster.nx
        self._hub = "fabric" if self._separates("fabric") else None
        self._paths: dict[tuple[str, str], tuple[Edge, ...]] = {}
        self._trees: dict[str, dict[str, list[str]]] = {}
        self._parts: dict[int, nx.Graph[Any]] = {}

    def path(self, src: int, dst: int) -> tuple[Edge, ...]:
        """The directed links from one device to another, none between a device and itself; ClusterError where there is no way.

        >>> from simulator.clusters import shorthand
        >>> Routes(shorthand("2x2xH100@ib400")).path(0, 3)
        (('gpu0', 'nic0.0'), ('nic0.0', 'fabric'), ('fabric', 'nic1.0'), ('nic1.0', 'gpu3'))
        """
        key = (f"gpu{src}", f"gpu{dst}")
        found = self._paths.get(key)
        if found is None:
            if self._hub is not None and self.node(src) != self.node(dst):
                up, down = self._to_hub(src), self._to_hub(dst)
                found = up + tuple((b, a) for a, b in reversed(down))
            else:
                found = self._search(src, dst)
            self._paths[key] = found
        return found

    def node(self, rank: int) -> int:
        return self.cluster.devices[rank].node

    def latency_s(self, path: tuple[Edge, ...]) -> float:
        return float(sum(self.graph.edges[edge]["latency_s"] for edge in path))

    def bytes_per_s(self, edge: Edge) -> float:
        rate: float = self.graph.edges[edge]["bytes_per_s"]
        return rate

    def _separates(self, hub: str) -> bool:
        if hub not in self.graph:
            return False
        rest = self.graph.subgraph([v for v in self.graph if v != hub])
        return all(len({self.graph.nodes[v]["node"] for v in part if "node" in self.graph.nodes[v]}) <= 1 for part in nx.connected_components(rest))

    def _to_hub(self, rank: int) -> tuple[Edge, ...]:
        key = (f"gpu{rank}", "")
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = self._walk(self._node_graph(rank), f"gpu{rank}", str(self._hub))
        return found

    def _search(self, src: int, dst: int) -> tuple[Edge, ...]:
        graph = self._node_graph(src) if self._hub is not None else self.graph
        if not self.cluster.profile.get("p2p", True) and src != dst:
            here, there = self._host(graph, src), self._host(graph, dst)
            if here and there:
                back = self._walk(graph, f"gpu{dst}", there)
                return self._walk(graph, f"gpu{src}", here) + self._walk(graph, here, there) + tuple((b, a) for a, b in reversed(back))
        return self._walk(graph, f"gpu{src}", f"gpu{dst}")

    def _host(self, graph: nx.Graph[Any], rank: int) -> str:
        """The host bridge nearest to a device, or nothing."""
        near = nx.single_source_dijkstra_path_length(graph, f"gpu{rank}", weight="latency_s")
        return min((v for v in near if v.startswith("host")), key=lambda v: (near[v], v), default="")

    def lanes(self, ranks: tuple[int, ...]) -> dict[tuple[int, int], float]:
        """Bandwidth of the cables that join two of `ranks` directly, both ways round; empty where a switch joins them."""
        return {
            (a, b): float(self.graph.edges[f"gpu{a}", f"gpu{b}"]["bytes_per_s"])
            for a in ranks for b in ranks if a != b and self.graph.has_edge(f"gpu{a}", f"gpu{b}")
        }  # fmt: skip

    def _node_graph(self, rank: int) -> nx.Graph[Any]:
        """The vertices of one node, with the hub."""
        node = self.node(rank)
        if node not in self._parts:
            rest = self.graph.subgraph([v for v in self.graph if v != self._hub]) if not self._parts else self._parts[-1]
            self._parts[-1] = rest
            inside = nx.node_connected_component(rest, f"gpu{rank}")
            for other in self.cluster.nodes[node]:
                inside = inside if f"gpu{other}" in inside else inside | nx.node_connected_component(rest, f"gpu{other}")
            self._parts[node] = nx.Graph(self.graph.subgraph([*sorted(inside), str(self._hub)]))
        return self._parts[node]

    def _walk(self, graph: nx.Graph[Any], a: str, b: str) -> tuple[Edge, ...]:
        if a not in self._trees:
            self._trees[a] = nx.single_source_dijkstra_path(graph, a, weight="latency_s")
        route = self._trees[a].get(b)
        if route is None:
            raise ClusterError(f"cluster `{self.cluster.name}`: no path from {a} to {b}")
        return tuple(pairwise(route))

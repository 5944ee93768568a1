"""Paths of the topology: which links, in which direction, a message between two devices crosses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import networkx as nx

from ir.cluster import Cluster
from ir.errors import ClusterError

Edge = tuple[str, str]
"""A link in one direction: (from vertex, to vertex); each direction has the link's whole bandwidth."""

HUB = "fabric"
"""What joins the nodes; rails, `rail0` and so on, hang on it."""


class Routes:
    """Paths of least latency between devices, found part by part so that a cluster of thousands stays cheap.

    Where the topology has a vertex `fabric`, its parts are what is left connected without it and without rails: nodes, or racks of nodes on one switch. A path
    between parts is two halves meeting in one of these; inside a part, and where there is no `fabric`, it is searched.
    Where the cards have no peer-to-peer (`profile["p2p"]` is false), a path inside a node goes through the hosts of both, if the topology has any.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.graph: nx.Graph[Any] = cluster.nx
        self._hubs = (HUB, *sorted(v for v in self.graph if v.startswith("rail"))) if HUB in self.graph else ()
        self._members = self._without_hubs() if self._hubs else ()
        self._part = {v: i for i, members in enumerate(self._members) for v in members}
        self._paths: dict[tuple[str, str], tuple[Edge, ...]] = {}
        self._trees: dict[str, dict[str, list[str]]] = {}
        self._parts: dict[int, nx.Graph[Any]] = {}
        self._hosts: dict[int, str] = {}

    def path(self, src: int, dst: int) -> tuple[Edge, ...]:
        """The directed links from one device to another, none between a device and itself; ClusterError where there is no way.

        >>> from simulator.clusters import shorthand
        >>> Routes(shorthand("2x2xH100@ib400")).path(0, 3)
        (('gpu0', 'nic0.0'), ('nic0.0', 'fabric'), ('fabric', 'nic1.0'), ('nic1.0', 'gpu3'))
        """
        key = (f"gpu{src}", f"gpu{dst}")
        found = self._paths.get(key)
        if found is None:
            if self._part and self._part[key[0]] != self._part[key[1]]:
                halves = [(self._to_hub(src, hub), self._to_hub(dst, hub)) for hub in self._hubs]
                up, down = min(halves, key=lambda pair: self.latency_s(pair[0]) + self.latency_s(pair[1]))
                found = up + tuple((b, a) for a, b in reversed(down))
            else:
                found = self._search(src, dst)
            self._paths[key] = found
        return found

    def parts(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The ranks part by part where all ways between parts meet in one vertex; all of them as one where they do not."""
        if len(self._hubs) != 1:
            return (tuple(ranks),)
        found: dict[int, list[int]] = {}
        for r in ranks:
            found.setdefault(self._part[f"gpu{r}"], []).append(r)
        return tuple(map(tuple, found.values()))

    def way_out(self, rank: int) -> tuple[Edge, ...]:
        """The links from a device to where the parts meet."""
        return self._to_hub(rank, self._hubs[0])

    def node(self, rank: int) -> int:
        return self.cluster.devices[rank].node

    def latency_s(self, path: tuple[Edge, ...]) -> float:
        return float(sum(self.graph.edges[edge]["latency_s"] for edge in path))

    def bytes_per_s(self, edge: Edge) -> float:
        rate: float = self.graph.edges[edge]["bytes_per_s"]
        return rate

    def _without_hubs(self) -> tuple[tuple[str, ...], ...]:
        """The vertices of every part."""
        rest = self.graph.subgraph([v for v in self.graph if v not in self._hubs])
        return tuple(tuple(sorted(part)) for part in nx.connected_components(rest))

    def _to_hub(self, rank: int, hub: str) -> tuple[Edge, ...]:
        key = (f"gpu{rank}", hub)
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = self._walk(self._around(rank), f"gpu{rank}", hub)
        return found

    def _search(self, src: int, dst: int) -> tuple[Edge, ...]:
        graph = self._around(src)
        if not self.cluster.profile.get("p2p", True) and src != dst:
            here, there = self._host(graph, src), self._host(graph, dst)
            if here and there:
                back = self._walk(graph, f"gpu{dst}", there)
                return self._walk(graph, f"gpu{src}", here) + self._walk(graph, here, there) + tuple((b, a) for a, b in reversed(back))
        return self._walk(graph, f"gpu{src}", f"gpu{dst}")

    def _host(self, graph: nx.Graph[Any], rank: int) -> str:
        """The host bridge nearest to a device, or nothing."""
        if rank not in self._hosts:
            near = nx.single_source_dijkstra_path_length(graph, f"gpu{rank}", weight="latency_s")
            self._hosts[rank] = min((v for v in near if v.startswith("host")), key=lambda v: (near[v], v), default="")
        return self._hosts[rank]

    def lanes(self, ranks: tuple[int, ...]) -> dict[tuple[int, int], float]:
        """Bandwidth of the cables that join two of `ranks` directly, both ways round; empty where a switch joins them."""
        return {
            (a, b): float(self.graph.edges[f"gpu{a}", f"gpu{b}"]["bytes_per_s"])
            for a in ranks for b in ranks if a != b and self.graph.has_edge(f"gpu{a}", f"gpu{b}")
        }  # fmt: skip

    def _around(self, rank: int) -> nx.Graph[Any]:
        """The vertices of a device's part, with the hubs; all where there are none."""
        if not self._part:
            return self.graph
        part = self._part[f"gpu{rank}"]
        if part not in self._parts:
            self._parts[part] = nx.Graph(self.graph.subgraph([*self._members[part], *self._hubs]))
        return self._parts[part]

    def _walk(self, graph: nx.Graph[Any], a: str, b: str) -> tuple[Edge, ...]:
        if a not in self._trees:
            self._trees[a] = nx.single_source_dijkstra_path(graph, a, weight="latency_s")
        route = self._trees[a].get(b)
        if route is None:
            raise ClusterError(f"cluster `{self.cluster.name}`: no path from {a} to {b}")
        return tuple(pairwise(route))

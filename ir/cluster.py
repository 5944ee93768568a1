"""The machine: devices, switches and NICs as a networkx graph whose edges are links with a latency and a bandwidth.

A link is shared by all flows that cross it: a NIC that eight devices share is one edge. Everything numeric is measured or comes from a profile with its source;
rates that depend on the shape (a GEMM curve) are carried as tables, interpreted by `simulator.cost`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import networkx as nx

from ir.errors import ClusterError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one core of a CPU.

    `flops_per_s` by dtype is the peak of a GEMM; `profile` holds what was measured of it (tables by name, each with `source`), interpreted by the cost model.
    `launch_s` passes before a kernel runs.
    """

    rank: int
    name: str
    node: int
    memory_bytes: float
    usable_bytes: float
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    launch_s: float
    profile: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """An undirected edge of the topology; `bytes_per_s` is for each direction. `kind` says what it is (NVLink, a NIC), for people."""

    a: str
    b: str
    latency_s: float
    bytes_per_s: float
    kind: str = ""


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order, links between named vertices; device `r` is the vertex `gpu{r}`.

    `profile` holds what is true of the cluster as a whole (collective curves by kind and group shape, host speed), each with its source;
    `assumed` are sentences on what was not given and had to be assumed.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    profile: Mapping[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @cached_property
    def nodes(self) -> Mapping[int, tuple[int, ...]]:
        """Ranks of every node (a host with its devices)."""
        found: dict[int, list[int]] = {}
        for d in self.devices:
            found.setdefault(d.node, []).append(d.rank)
        return {n: tuple(ranks) for n, ranks in found.items()}

    @cached_property
    def nx(self) -> nx.Graph[Any]:
        out: nx.Graph[Any] = nx.Graph(name=self.name)
        for d in self.devices:
            out.add_node(f"gpu{d.rank}", kind="device", node=d.node)
        for link in self.links:
            out.add_edge(link.a, link.b, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s, kind=link.kind)
        return out

    def path(self, a: int, b: int) -> tuple[tuple[str, str], ...]:
        """The edges between two devices: the path of least latency, ties broken by name."""
        route = self._routes(a).get(f"gpu{b}")
        if route is None:
            raise ClusterError(f"cluster `{self.name}`: no path from gpu{a} to gpu{b}")
        return tuple((min(u, v), max(u, v)) for u, v in itertools.pairwise(route))

    def _routes(self, a: int) -> Mapping[str, list[str]]:
        cache: dict[int, Mapping[str, list[str]]] = self.__dict__.setdefault("_route_cache", {})
        if a not in cache:
            cache[a] = nx.single_source_dijkstra_path(self.nx, f"gpu{a}", weight="latency_s")
        return cache[a]

    def check(self) -> Cluster:
        """Returns the cluster, or raises ClusterError naming the first thing that is wrong."""
        _check_type(f"cluster `{self.name}`", "name", self.name, str)
        _check_type(f"cluster `{self.name}`", "profile", self.profile, Mapping)
        if not self.devices:
            raise ClusterError(f"cluster `{self.name}` has no devices")
        for i, d in enumerate(self.devices):
            if d.rank != i:
                raise ClusterError(f"cluster `{self.name}`: device {i} has rank {d.rank}; devices stand in rank order from 0")
            _check_device(f"cluster `{self.name}`, device {i}", d)
        for link in self.links:
            where = f"cluster `{self.name}`, link {link.a} - {link.b}"
            _check_number(where, "bytes_per_s", link.bytes_per_s, above=True)
            _check_number(where, "latency_s", link.latency_s, above=False)
        parts = list(nx.connected_components(self.nx))
        if len(parts) > 1:
            lost = sorted(str(v) for v in set(self.nx) - max(parts, key=lambda part: (len(part), sorted(map(str, part)))))
            raise ClusterError(f"cluster `{self.name}` is not connected: no link reaches {', '.join(lost[:8])}; add the missing links")
        return self

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION, "kind": "cluster", "name": self.name, "profile": dict(self.profile), "assumed": list(self.assumed),
            "devices": [
                {"rank": d.rank, "name": d.name, "node": d.node, "memory_bytes": d.memory_bytes, "usable_bytes": d.usable_bytes,
                 "flops_per_s": dict(d.flops_per_s), "bytes_per_s": d.bytes_per_s, "launch_s": d.launch_s, "profile": dict(d.profile)}
                for d in self.devices
            ],
            "links": [{"a": k.a, "b": k.b, "latency_s": k.latency_s, "bytes_per_s": k.bytes_per_s, "kind": k.kind} for k in self.links],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cluster:
        """Reads `to_json` and checks it."""
        if not isinstance(data, Mapping) or data.get("kind") != "cluster":
            raise ClusterError("this document is no cluster; `headrace measure -o cluster.json` writes one")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ClusterError(f"cluster of schema version {data.get('schema_version')}; this headrace reads version {SCHEMA_VERSION}")
        try:
            devices: Sequence[Device] = [Device(**d) for d in data["devices"]]
            links = [Link(**k) for k in data["links"]]
            return cls(data["name"], tuple(devices), tuple(links), data["profile"], tuple(data["assumed"])).check()
        except (KeyError, TypeError) as error:
            raise ClusterError(f"the cluster document is incomplete or damaged: {error!r}") from error


def _check_device(where: str, d: Device) -> None:
    _check_type(where, "name", d.name, str)
    _check_type(where, "node", d.node, int)
    _check_type(where, "profile", d.profile, Mapping)
    _check_type(where, "flops_per_s", d.flops_per_s, Mapping)
    for what, value in (("memory_bytes", d.memory_bytes), ("usable_bytes", d.usable_bytes), ("bytes_per_s", d.bytes_per_s)):
        _check_number(where, what, value, above=True)
    if not d.flops_per_s:
        raise ClusterError(f"{where}: flops_per_s is empty; give the rate of one dtype at least, such as bfloat16")
    for dtype, value in d.flops_per_s.items():
        _check_number(where, f"flops_per_s.{dtype}", value, above=True)
    _check_number(where, "launch_s", d.launch_s, above=False)


def _check_type(where: str, what: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = {str: "a name", int: "a whole number", Mapping: "an object"}[kind]
        raise ClusterError(f"{where}: {what} is {value!r}; give {wanted}")


def _check_number(where: str, what: str, value: Any, above: bool) -> None:
    """Raises ClusterError when `value` is no finite number above 0, or of 0 or more."""
    legal = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not legal or value < 0 or (above and value == 0):
        raise ClusterError(f"{where}: {what} is {value!r}; give a finite number {'above 0' if above else 'of 0 or more'}")

"""Collectives in the alpha-beta model on the topology: every algorithm is a line, seconds = fixed + bytes x slope, and the cheapest line counts.

A slope is the load of the fullest link over its bandwidth, all groups that run at once included: eight data-parallel groups that cross one NIC a node load it
eight times. Bytes follow `ir.work`: the larger of what a rank reads and writes, so N is the whole tensor of an all-reduce, the gathered tensor of an
all-gather, the tensor before a reduce-scatter. With n ranks, g of them on each of k nodes (Thakur, Rabenseifner and Gropp, 2005; Sanders, Speck and Traeff,
2009, for the double tree):

| algorithm | bytes that leave a rank | latency |
|---|---|---|
| ring, all-gather or reduce-scatter | N (n-1)/n | n-1 hops |
| ring, all-reduce | 2 N (n-1)/n | 2 (n-1) hops |
| double tree, all-reduce | 2 N | 2 (g-1) hops in the node + 2 ceil(log2 k) between nodes |
| hierarchical | inside: N (g-1)/g, between nodes: N/g (k-1)/k; twice for all-reduce | g-1 and k-1 hops; twice for all-reduce |
| in-switch (NVLS), all-reduce in a node | N, at the switch's share of the wire, whatever n | 2 hops |
| chain, broadcast | N | n-1 hops |
| pairwise all-to-all | N (n-1)/n | the longest path |
| shift to the next member, the last's to the first | N | the longest hop |

Where cables join GPUs in pairs, a node has as many rings as use no cable twice (`cable_rings`). A ring over nodes is g rings at once, each leaving a node
by another member, so that all NICs of the node carry an equal part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ir.cluster import Cluster
from simulator.routes import Edge, Routes

Group = tuple[int, ...]

MAX_TRIES = 2000
"""Choices of rings over cables that are looked at; a DGX-1 needs some dozens."""

ALGORITHMS = ("ring", "tree", "hierarchical")
"""What a library can do that chooses freely; a profile may name fewer: NCCL has rings and trees, and its hierarchy (NVLSTree) loses to the ring."""


@dataclass(frozen=True, slots=True)
class Line:
    """One algorithm's time: `fixed_s + nbytes * s_per_byte`. `loads`: bytes that each link carries for one byte of the collective, this group alone."""

    algorithm: str
    fixed_s: float
    s_per_byte: float
    loads: Mapping[Edge, float]

    def at(self, nbytes: float) -> float:
        return self.fixed_s + nbytes * self.s_per_byte

    def slowed(self, factor: float) -> Line:
        """The same line where everything takes `factor` times as long."""
        if factor == 1.0:
            return self
        return Line(self.algorithm, factor * self.fixed_s, factor * self.s_per_byte, {edge: factor * load for edge, load in self.loads.items()})


FREE = Line("none", 0.0, 0.0, {})


def lines(routes: Routes, kind: str, group: Group, siblings: Sequence[Group], library: Mapping[str, Any]) -> tuple[Line, ...]:
    """The algorithms for this collective, of those that the machine's library has; one of zero seconds for a group of one.

    `library`: `launch_s`, `algorithms` (default: those that move least) and, where switches reduce, `nvls`: `load` on each link, from `min_ranks` members on.
    `siblings`: the groups that do the same at the same time, `group` among them. An all-to-all is always pairwise, and a ring is always there.
    """
    if len(group) == 1:
        return (FREE,)
    launch_s, algorithms = float(library.get("launch_s", 0.0)), tuple(library.get("algorithms", ALGORITHMS))
    if kind == "all_to_all":
        return (_line("pairwise", routes, launch_s + max(_latencies(routes, group)), _pairwise(routes, group), [_pairwise(routes, s) for s in siblings]),)
    if kind == "broadcast":
        chains = [_chain_loads(routes, s) for s in siblings]
        own = chains[list(siblings).index(group)]
        return (_line("chain", routes, launch_s + _chain_latency(routes, group), own, chains),)
    if kind == "shift":
        hops = [routes.latency_s(routes.path(a, b)) for a, b in _hops(group)]
        return (_line("shift", routes, launch_s + max(hops), _shift_loads(routes, group), [_shift_loads(routes, s) for s in siblings]),)
    passes = 2 if kind == "all_reduce" else 1
    rings = [_ring_loads(routes, s, passes * (len(s) - 1) / len(s)) for s in siblings]
    out = [_line("ring", routes, launch_s + passes * _ring_latency(routes, group), rings[list(siblings).index(group)], rings)]
    if kind == "all_reduce" and "tree" in algorithms:
        out.append(_tree(routes, group, siblings, launch_s))
    if "hierarchical" in algorithms and _regular(routes, group):
        out.append(_hierarchical(routes, group, siblings, passes, launch_s))
    if kind == "all_reduce" and "nvls" in algorithms and len(group) >= library["nvls"]["min_ranks"]:
        out += _in_switch(routes, group, siblings, float(library["nvls"]["load"]), launch_s)
    return tuple(out)


def p2p_line(routes: Routes, pair: Group, siblings: Sequence[Group], launch_s: float) -> Line:
    """One message from the first of `pair` to the second; `siblings` are the pairs that send at the same time."""
    src, dst = pair
    if src == dst:
        return FREE
    loads = [_path_loads(routes, a, b) for a, b in siblings]
    return _line("p2p", routes, launch_s + routes.latency_s(routes.path(src, dst)), _path_loads(routes, src, dst), loads)


def siblings(cluster: Cluster, group: Group, active: frozenset[int] | None = None) -> tuple[Group, ...]:
    """The groups that do what `group` does at the same time: its translations inside the nodes it touches, disjoint, over `active` ranks (default all).

    A rank runs the same program as its neighbours, so what one group of a mesh axis does, all do. Members keep their places relative to each other.

    >>> from simulator.clusters import shorthand
    >>> siblings(shorthand("2x4xH100"), (0, 4)), siblings(shorthand("2x4xH100"), (1, 2)), siblings(shorthand("2x4xH100"), (3, 4))
    (((0, 4), (1, 5), (2, 6), (3, 7)), ((1, 2),), ((3, 4),))
    """
    touched = dict.fromkeys(cluster.devices[r].node for r in group)
    place = {rank: (node, i) for node in touched for i, rank in enumerate(cluster.nodes[node])}
    found, taken = [group], set(group)
    width = max(len(cluster.nodes[place[r][0]]) for r in group)
    for shift in sorted((s for s in range(1 - width, width) if s), key=lambda s: (abs(s), -s)):
        moved = _moved(cluster, group, place, shift)
        if moved is not None and taken.isdisjoint(moved) and (active is None or active.issuperset(moved)):
            found.append(moved)
            taken.update(moved)
    return tuple(found)


def _moved(cluster: Cluster, group: Group, place: Mapping[int, tuple[int, int]], shift: int) -> Group | None:
    out = []
    for rank in group:
        node, i = place[rank]
        ranks = cluster.nodes[node]
        if not 0 <= i + shift < len(ranks):
            return None
        out.append(ranks[i + shift])
    return tuple(out)


# ---- algorithms ---------------------------------------------------------------------------------------------------------------------------------------


def _line(algorithm: str, routes: Routes, fixed_s: float, own: Mapping[Edge, float], everyone: Iterable[Mapping[Edge, float]]) -> Line:
    total = _total(everyone)
    return Line(algorithm, fixed_s, max((total.get(e, own[e]) / routes.bytes_per_s(e) for e in own), default=0.0), own)


def _add(a: dict[Edge, float], b: Mapping[Edge, float]) -> dict[Edge, float]:
    for edge, load in b.items():
        a[edge] = a.get(edge, 0.0) + load
    return a


def _by_node(routes: Routes, group: Group) -> list[Group]:
    found: dict[int, list[int]] = {}
    for rank in group:
        found.setdefault(routes.node(rank), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _regular(routes: Routes, group: Group) -> bool:
    """Whether the group stands on several nodes, with the same number of members, more than one, on each."""
    nodes = _by_node(routes, group)
    return len(nodes) > 1 and len(nodes[0]) > 1 and len({len(n) for n in nodes}) == 1


def _rings(routes: Routes, group: Group) -> list[list[int]]:
    """Inside a node one ring, or as many as its cables allow; over nodes one for each member of the fullest node, its nodes' members rotated."""
    nodes = _by_node(routes, group)
    if len(nodes) == 1:
        return [list(ring) for ring in cable_rings(routes, group)] or [list(group)]
    orders = [cable_rings(routes, ranks) or (ranks,) for ranks in nodes]
    return [
        [rank for ranks, rings in zip(nodes, orders, strict=True) for rank in _from(rings[c % len(rings)], ranks[c % len(ranks)])]
        for c in range(max(map(len, nodes)))
    ]


def _from(ring: Group, first: int) -> Group:
    """The ring, begun at `first`."""
    at = ring.index(first)
    return ring[at:] + ring[:at]


def cable_rings(routes: Routes, group: Group) -> tuple[Group, ...]:
    """Rings through all of `group` over direct cables, each cable used by one, and each ring both ways round; none where a switch joins the GPUs.

    >>> from simulator.clusters import load_cluster
    >>> dgx1 = Routes(load_cluster("dgx-1"))
    >>> [len(cable_rings(dgx1, tuple(range(n)))) for n in (2, 3, 4, 8)]
    [1, 2, 4, 6]
    """
    rates = routes.lanes(group)
    if not rates or len(group) < 2:
        return ()
    lane = min(rates.values())
    lanes = {pair: round(rate / lane) for pair, rate in rates.items()}
    if len(group) == 2:
        return (group,) * lanes.get((group[0], group[1]), 0)
    cycles = tuple(_cycles(group, lanes))
    found: tuple[Group, ...] = ()
    for most in range(min(sum(n for (a, _), n in lanes.items() if a == r) for r in group) // 2, 0, -1):
        found = _disjoint(cycles, lanes, most)
        if found:
            break
    return tuple(ring for cycle in found for ring in (cycle, (cycle[0], *reversed(cycle[1:]))))


def _cycles(group: Group, lanes: Mapping[tuple[int, int], int]) -> Iterable[Group]:
    """Rings through all members over lanes, from the first member, each in one direction only."""
    paths: list[Group] = [group[:1]]
    while paths:
        path = paths.pop()
        if len(path) == len(group):
            if (path[-1], path[0]) in lanes and path[1] < path[-1]:
                yield path
            continue
        paths += [(*path, r) for r in reversed(group) if r not in path and (path[-1], r) in lanes]


def _disjoint(cycles: Sequence[Group], lanes: Mapping[tuple[int, int], int], most: int) -> tuple[Group, ...]:
    """`most` rings that together use no lane twice, or none; the first in order."""
    stack: list[tuple[int, tuple[Group, ...]]] = [(0, ())]
    tries = 0
    while stack and tries < MAX_TRIES:
        at, chosen = stack.pop()
        if len(chosen) == most:
            return chosen
        tries += 1
        for i in range(len(cycles) - 1, at - 1, -1):
            if _fits((*chosen, cycles[i]), lanes):
                stack.append((i, (*chosen, cycles[i])))
    return ()


def _fits(cycles: Sequence[Group], lanes: Mapping[tuple[int, int], int]) -> bool:
    used: dict[tuple[int, int], int] = {}
    for cycle in cycles:
        for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            pair = (min(a, b), max(a, b))
            used[pair] = used.get(pair, 0) + 1
    return all(n <= lanes[pair] for pair, n in used.items())


def _ring_loads(routes: Routes, group: Group, share: float) -> dict[Edge, float]:
    rings = _rings(routes, group)
    loads: dict[Edge, float] = defaultdict(float)
    for ring in rings:
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
            for edge in routes.path(a, b):
                loads[edge] += share / len(rings)
    return dict(loads)


def _chain_loads(routes: Routes, group: Group) -> dict[Edge, float]:
    """The first member's bytes, passed on from each to the next."""
    return _total(_path_loads(routes, a, b) for a, b in pairwise(group))


def _hops(group: Group) -> list[tuple[int, int]]:
    return list(zip(group, (*group[1:], group[0]), strict=True))


def _shift_loads(routes: Routes, group: Group) -> dict[Edge, float]:
    """Every member's bytes, sent to the next one."""
    return _total(_path_loads(routes, a, b) for a, b in _hops(group))


def _total(loads: Iterable[Mapping[Edge, float]]) -> dict[Edge, float]:
    out: dict[Edge, float] = {}
    for one in loads:
        _add(out, one)
    return out


def _ring_latency(routes: Routes, group: Group) -> float:
    """A piece passes all hops of the ring but one."""
    ring = _rings(routes, group)[0]
    hops = [routes.latency_s(routes.path(a, b)) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)]
    return sum(hops) - min(hops)


def _tree(routes: Routes, group: Group, everyone: Sequence[Group], launch_s: float) -> Line:
    nodes = _by_node(routes, group)
    inside = max((_chain_latency(routes, ranks) for ranks in nodes), default=0.0)
    heads = [ranks[0] for ranks in nodes]
    between = max((routes.latency_s(routes.path(heads[0], h)) for h in heads[1:]), default=0.0)
    if len(nodes) == 1:
        inside = math.ceil(math.log2(len(group))) * max(_latencies(routes, group))
    fixed_s = launch_s + 2 * inside + 2 * math.ceil(math.log2(len(nodes))) * between
    loads = [_ring_loads(routes, s, 2.0) for s in everyone]
    return _line("tree", routes, fixed_s, _ring_loads(routes, group, 2.0), loads)


def _in_switch(routes: Routes, group: Group, everyone: Sequence[Group], load: float, launch_s: float) -> list[Line]:
    """Every member writes to the switch that joins them all and reads the sum; none where something else joins them."""
    switches = {edge[1] for rank in group[1:] for edge in routes.path(group[0], rank)[:1]}
    switch = min(switches)
    if len(switches) > 1 or not switch.startswith("nv") or any(len(routes.path(group[0], rank)) > 2 for rank in group[1:]):
        return []
    loads = [{edge: load for r in ranks for edge in ((f"gpu{r}", switch), (switch, f"gpu{r}"))} for ranks in everyone]
    own = loads[list(everyone).index(group)]
    return [_line("nvls", routes, launch_s + max(_latencies(routes, group)), own, loads)]


def _chain_latency(routes: Routes, ranks: Group) -> float:
    return sum(routes.latency_s(routes.path(a, b)) for a, b in pairwise(ranks))


def _hierarchical(routes: Routes, group: Group, everyone: Sequence[Group], passes: int, launch_s: float) -> Line:
    """Inside the nodes, and between nodes among the members of equal place; the two phases follow each other."""
    nodes = _by_node(routes, group)
    inside_s = passes * max(_ring_latency(routes, ranks) for ranks in nodes)
    across = [tuple(ranks[i] for ranks in nodes) for i in range(len(nodes[0]))]
    between_s = passes * max(_ring_latency(routes, peers) for peers in across)
    inner = [_inside_loads(routes, s, passes) for s in everyone]
    outer = [_between_loads(routes, s, passes) for s in everyone]
    first = _line("inside", routes, inside_s, _inside_loads(routes, group, passes), inner)
    second = _line("between", routes, between_s, _between_loads(routes, group, passes), outer)
    loads = _add(dict(first.loads), second.loads)
    return Line("hierarchical", launch_s + first.fixed_s + second.fixed_s, first.s_per_byte + second.s_per_byte, loads)


def _inside_loads(routes: Routes, group: Group, passes: int) -> dict[Edge, float]:
    loads: dict[Edge, float] = {}
    for ranks in _by_node(routes, group):
        _add(loads, _ring_loads(routes, ranks, passes * (len(ranks) - 1) / len(ranks)))
    return loads


def _between_loads(routes: Routes, group: Group, passes: int) -> dict[Edge, float]:
    nodes = _by_node(routes, group)
    k, g = len(nodes), len(nodes[0])
    loads: dict[Edge, float] = {}
    for i in range(g):
        _add(loads, _ring_loads(routes, tuple(ranks[i] for ranks in nodes), passes * (k - 1) / k / g))
    return loads


def _pairwise(routes: Routes, group: Group) -> dict[Edge, float]:
    """Every member sends to every other; what leaves a part of the topology, or comes into it, takes the same half of its path each time."""
    num: dict[Edge, int] = defaultdict(int)
    for members in routes.parts(group):
        for a in members:
            for b in members:
                for edge in routes.path(a, b) if a != b else ():
                    num[edge] += 1
        away = len(group) - len(members)
        for a in members if away else ():
            for u, v in routes.way_out(a):
                num[u, v] += away
                num[v, u] += away
    return {edge: n / len(group) for edge, n in num.items()}


def _path_loads(routes: Routes, src: int, dst: int) -> dict[Edge, float]:
    return dict.fromkeys(routes.path(src, dst), 1.0)


def _latencies(routes: Routes, group: Group) -> list[float]:
    return [routes.latency_s(routes.path(group[0], b)) for b in group[1:]]

"""What is odd about measured figures, each as a sentence: what was found, beside what was expected, and what it usually means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ir.units import nbytes, seconds
from simulator.importers.nccl_tests import Sweep
from simulator.importers.p2p import Peers
from simulator.importers.topo_matrix import Matrix

SLOW, LAME = 0.7, 0.93
"""Below this share of what is expected, or of the other cards, a figure is reported."""

SLOW_START_S = 1e-3
LINE_FACTOR = 1.2
"""Above this multiple of a direction's line rate a bandwidth cannot be one direction's, even where switches reduce."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence; `level` is `wrong` (do not use the figures), `slow` (they are real and should be better) or `note`."""

    level: str
    text: str


def doctor(
    profile: Mapping[str, Any], sweeps: Sequence[Sweep] = (), matrices: Sequence[Matrix] = (), peers: Sequence[Peers] = ()
) -> tuple[Finding, ...]:  # fmt: skip
    """Everything odd about these files of machines whose GPU has this profile."""
    found: list[Finding] = []
    for sweep in sweeps:
        found += _sweep(profile, sweep)
    for matrix in matrices:
        found += _matrix(matrix)
    for peer in peers:
        found += _peers(profile, peer)
    return tuple(found)


def _sweep(profile: Mapping[str, Any], sweep: Sweep) -> Iterable[Finding]:
    link = profile["link"]
    line_rate = link["bytes_per_s"] * (sweep.num_ranks - 1 if link.get("mesh") else 1)
    what = f"{sweep.kind or 'collective'} of {sweep.num_ranks or 'unknown many'} ranks"
    if sweep.wrong:
        yield Finding("wrong", f"{what}: {sweep.wrong} wrong results; the links or the library lose data, do not train on this")
    if not sweep.kind:
        yield Finding("note", "no line says which collective this is; all_reduce is taken")
    if sweep.num_ranks and sweep.best_busbw > LINE_FACTOR * line_rate:
        line = f"{link['kind']} carries {_rate(line_rate)} in each direction"
        yield Finding("wrong", f"{what}: {_rate(sweep.best_busbw)} of bus bandwidth, but {line}; {BOTH}")
    expected = line_rate * link["share"]
    if sweep.num_nodes == 1 and sweep.rows[-1][0] >= 1 << 27 and sweep.best_busbw < SLOW * expected:
        yield Finding("slow", f"{what}: {_rate(sweep.best_busbw)} of bus bandwidth on one node, {_rate(expected)} are usual over {link['kind']}; {OTHER_WAY}")
    first = sweep.rows[0]
    if first[1] > SLOW_START_S and first[0] <= 1 << 20:
        yield Finding("slow", f"{what}: {seconds(first[1])} for {nbytes(first[0])}; a fabric takes microseconds, plain sockets take this long")


BOTH = "a figure twice as large counts both directions at once"
OTHER_WAY = "traffic goes another way (peer-to-peer off, a missing bridge, a slow card)"


def _matrix(matrix: Matrix) -> Iterable[Finding]:
    for row in matrix.left_out:
        yield Finding("note", f"topology: {row}; what it says is not used")
    known = [g for g in matrix.gpus if matrix.nics and (g, matrix.nics[0]) in matrix.way]
    far = [g for g in known if not any(matrix.way.get((g, n)) in ("PIX", "PXB", "PHB") for n in matrix.nics)]
    if far:
        yield Finding("slow", f"topology: {', '.join(far)} reach no NIC without crossing a host bridge (NODE or SYS); GPUDirect over it is slow")
    links = {matrix.nvlinks(a, b) for a in matrix.gpus for b in matrix.gpus if a < b and ((a, b) in matrix.way or (b, a) in matrix.way)}
    if len(links) > 1 and 0 in links:
        yield Finding("note", "topology: some pairs have NVLink and others do not; keep tensor parallelism inside the pairs that have")


def _peers(profile: Mapping[str, Any], peers: Peers) -> Iterable[Finding]:
    pairs = [(i, j) for i in range(len(peers.connected)) for j in range(len(peers.connected)) if i != j]
    if pairs and not any(peers.connected[i][j] for i, j in pairs):
        yield Finding("slow", "no GPU reaches another directly (peer-to-peer is off or the card has none): everything goes through host memory")
    rows = [median(x for j, x in enumerate(row) if j != i) for i, row in enumerate(peers.one_way)] if len(peers.one_way) > 2 else []
    for i, rate in enumerate(rows):
        if rate < LAME * median(rows):
            yield Finding(
                "slow", f"GPU {i} sends at {_rate(rate)}, the others at {_rate(median(rows))}: a narrower slot, a lower PCIe generation or a bad riser"
            )
    best = max((x for i, row in enumerate(peers.one_way) for j, x in enumerate(row) if i != j), default=0.0)
    line = max(profile["link"]["bytes_per_s"], profile["link"].get("bridge_bytes_per_s", 0.0))
    if best > LINE_FACTOR * line:
        yield Finding("wrong", f"{_rate(best)} between two GPUs, but a link carries {_rate(line)} in each direction; {BOTH}")


def slow_nodes(pairs: Sequence[tuple[int, int, float]], share: float = SLOW) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(slow, suspect, good) nodes, from bandwidths of runs on pairs of nodes: a slow pair has a slow node in it, a fast one has none.

    A node is slow where each of its partners in slow pairs is known to be good, or where it is in several slow pairs whose other nodes have nothing else in
    common; where that does not decide, both are suspect.

    >>> slow_nodes([(1, 2, 50.0), (1, 3, 50.0), (2, 4, 90.0), (5, 6, 50.0)])
    ((1,), (3, 5, 6), (2, 4))
    """
    best = max(rate for _, _, rate in pairs)
    good = {n for a, b, rate in pairs if rate >= share * best for n in (a, b)}
    bad = [(a, b) for a, b, rate in pairs if rate < share * best]
    slow = {b if a in good else a for a, b in bad if (a in good) != (b in good)}
    explained = [(a, b) for a, b in bad if a in slow or b in slow]
    open_pairs = [(a, b) for a, b in bad if (a, b) not in explained]
    suspects = {n for pair in (*open_pairs, *explained) for n in pair} - slow - good
    return tuple(sorted(slow)), tuple(sorted(suspects)), tuple(sorted(good - slow))


def _rate(value: float) -> str:
    return f"{value / 1e9:.4g} GB/s"

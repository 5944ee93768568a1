"""What the CUDA sample p2pBandwidthLatencyTest prints: matrices between GPUs.

>>> found = read('''
... P2P Connectivity Matrix
...      D\\\\D     0     1
...      0       1     0
...      1       0     1
... Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
...    D\\\\D     0      1
...      0 1509.66  38.20
...      1  38.66 1536.43
... ''')
>>> found.connected, found.one_way[0][1]
(((True, False), (False, True)), 38200000000.0)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBERS = re.compile(r"^\s*\d+(?:\s+[\d.]+)+\s*$")
Square = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Peers:
    """Bytes a second one way and both ways with peer-to-peer where it is possible, seconds of a small message; empty where the file has none."""

    connected: tuple[tuple[bool, ...], ...]
    one_way: Square
    both_ways: Square
    latency_s: Square

    @property
    def num_gpus(self) -> int:
        return max(len(self.one_way), len(self.both_ways), len(self.connected))


def looks_like(text: str) -> bool:
    """Whether this is such output."""
    return "D\\D" in text and "P2P" in text


def read(text: str) -> Peers:
    """The matrices of a file; of those with and without peer-to-peer the ones with."""
    tables: dict[str, list[list[float]]] = {}
    title = ""
    for line in text.splitlines():
        if "Matrix" in line:
            title = " ".join(line.split())
        elif line.strip().startswith("CPU"):
            title = ""  # the host's view of the same latencies
        elif title and _NUMBERS.match(line):
            tables.setdefault(title, []).append([float(x) for x in line.split()[1:]])
    words = {
        "connected": ("Connectivity",), "one_way": ("Unidirectional", "Enabled"), "both_ways": ("Bidirectional", "Enabled"),
        "latency_s": ("P2P=Enabled", "Latency"),
    }  # fmt: skip
    found = {key: _square(tables, *needed) for key, needed in words.items()}
    rates = {key: tuple(tuple(1e9 * x for x in row) for row in found[key]) for key in ("one_way", "both_ways")}
    connected = tuple(tuple(bool(x) for x in row) for row in found["connected"])
    return Peers(connected, rates["one_way"], rates["both_ways"], tuple(tuple(1e-6 * x for x in row) for row in found["latency_s"]))


def _square(tables: dict[str, list[list[float]]], *words: str) -> Square:
    rows = next((rows for title, rows in tables.items() if all(w in title for w in words)), [])
    return tuple(tuple(row) for row in rows if len(row) == len(rows))

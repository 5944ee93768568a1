"""What nccl-tests and rccl-tests print: one sweep over message sizes of one collective.

>>> sweep = read('''
... # nThread 1 nGpus 8 minBytes 1048576 maxBytes 2097152
... # Collective test starting: all_gather_perf
... #  Rank  0 Group  0 Pid 11 on  host-0 device  0 [0x1b] NVIDIA H100 80GB HBM3
... #  Rank  1 Group  0 Pid 11 on  host-0 device  1 [0x43] NVIDIA H100 80GB HBM3
... #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
...      1048576        131072     float    none      -1    20.00   52.43   26.21      0    21.00   49.93   24.97      0
... ''')[0]
>>> sweep.kind, sweep.num_ranks, sweep.num_nodes, sweep.gpu, sweep.rows
('all_gather', 2, 1, 'NVIDIA H100 80GB HBM3', ((1048576, 2e-05),))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KINDS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all", "sendrecv": "p2p",
    "broadcast": "broadcast",
}  # fmt: skip
"""Programs by the collective that they measure."""

_PREFIX = re.compile(r"^\s*\[\d+,\d+\]<std(?:out|err)>:")
_RANK = re.compile(r"#\s*Rank\s+(\d+)\b.*? on\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\](.*)")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+\w+\s+\w+\s+-?\d+\s+[\d.]+")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Out-of-place seconds by message size. `kind` is empty where nothing says it; ranks and nodes are 0 where nothing does."""

    kind: str
    num_ranks: int
    num_nodes: int
    gpu: str
    rows: tuple[tuple[int, float], ...]
    busbw: tuple[float, ...]
    wrong: int = 0

    @property
    def best_busbw(self) -> float:
        return max(self.busbw)


def looks_like(text: str) -> bool:
    """Whether this is such output."""
    return "algbw" in text and "busbw" in text


def read(text: str) -> tuple[Sweep, ...]:
    """The sweeps of a file, one for each table of numbers."""
    out: list[Sweep] = []
    head: list[str] = []
    rows: list[list[str]] = []
    for raw in text.splitlines():
        line = _PREFIX.sub("", raw)
        if _ROW.match(line):
            rows.append(line.split())
            continue
        if rows and line.lstrip(" #"):
            out.append(_sweep(head, rows))
            rows = []
            head = [line]
        else:
            head.append(line)
    if rows:
        out.append(_sweep(head, rows))
    return tuple(out)


def _sweep(head: Iterable[str], rows: Sequence[Sequence[str]]) -> Sweep:
    lines = list(head)
    found = [m for m in map(_RANK.search, lines) if m]
    kind = next((KINDS[k] for line in lines for k in KINDS if f"{k}_perf" in line), "")
    numbers = [(int(r[0]), float(r[5]) / 1e6, float(r[6]), float(r[7])) for r in rows if float(r[6]) > 0]
    num_ranks = max((int(m[1]) + 1 for m in found), default=0) or _implied(kind or "all_reduce", [(a, b) for _, _, a, b in numbers])
    wrong = sum(int(r[8]) for r in rows if len(r) > 8 and r[8].isdigit())
    gpu = next((m[4].strip() for m in found if m[4].strip()), "")
    return Sweep(kind, num_ranks, _num_nodes(found, num_ranks), gpu, tuple((n, s) for n, s, _, _ in numbers), tuple(1e9 * b for _, _, _, b in numbers), wrong)


def _num_nodes(found: Sequence[re.Match[str]], num_ranks: int) -> int:
    """Hosts, where every rank has its line; else as many as the highest device number implies."""
    if len(found) == num_ranks:
        return len({m[2] for m in found})
    return num_ranks // (1 + max(int(m[3]) for m in found)) if found else 0


def _implied(kind: str, rates: Sequence[tuple[float, float]]) -> int:
    """The number of ranks that the factor between algorithm and bus bandwidth implies: 2 (n-1)/n of an all-reduce, (n-1)/n of others; 0 where none does."""
    if not rates:
        return 0
    algbw, busbw = max(rates)
    factor = busbw / algbw / (2 if kind == "all_reduce" else 1)
    return round(1 / (1 - factor)) if 0.4 < factor < 0.999 else 0

"""What `nvidia-smi topo -m` prints: how every GPU reaches every other and every NIC.

>>> found = read('''
...         GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
... GPU0     X      NV18    PIX     0-47    0
... GPU1    NV18     X      NODE    0-47    0
... ''')
>>> found.gpus, found.nics, found.way["GPU0", "GPU1"], found.way["GPU1", "NIC0"], found.left_out
(('GPU0', 'GPU1'), ('NIC0',), 'NV18', 'NODE', ())
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

WAYS = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")
"""From nearest to farthest, NVLink (`NV` and its number) before all."""

_WAY = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
_ROW = re.compile(r"^\s*(GPU\d+|NIC\d+|mlx\w+)\s+(.*)$")
_HEAD = re.compile(r"GPU\d+|NIC\d+|mlx\w+")


@dataclass(frozen=True, slots=True)
class Matrix:
    """`way[a, b]` between named devices; `left_out` says which rows could not be read and why."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    way: Mapping[tuple[str, str], str]
    left_out: tuple[str, ...]

    def nvlinks(self, a: str, b: str) -> int:
        way = self.way.get((a, b), "") or self.way.get((b, a), "")
        return int(way[2:]) if way.startswith("NV") else 0


def looks_like(text: str) -> bool:
    """Whether this is such output."""
    return bool(re.search(r"^\s*GPU0\s+X\b", text, re.MULTILINE)) and "GPU1" in text


def read(text: str) -> Matrix:
    """The matrix of a file."""
    columns: tuple[str, ...] = ()
    way: dict[tuple[str, str], str] = {}
    left_out = []
    for line in text.splitlines():
        row = _ROW.match(line)
        if not columns and _HEAD.search(line) and not (row and _WAY.fullmatch(row[2].split()[0])):
            columns = tuple(_HEAD.findall(line))
            continue
        if row is None or not columns:
            continue
        cells = _cells(row[2])
        if len(cells) > len(columns) or any(not _WAY.fullmatch(c) for c in cells):
            left_out.append(f"row {row[1]} has {len(cells)} cells for {len(columns)} columns")
            continue
        if len(cells) < len(columns):
            left_out.append(f"row {row[1]} ends after {len(cells)} of {len(columns)} columns")
        way |= {(row[1], column): cell for column, cell in zip(columns, cells, strict=False)}
    rows = {a for a, _ in way}
    gpus = tuple(c for c in columns if c.startswith("GPU"))
    left_out += [f"row {g} is missing" for g in gpus if g not in rows]
    return Matrix(gpus, tuple(c for c in columns if not c.startswith("GPU")), way, tuple(left_out))


def _cells(text: str) -> list[str]:
    """The ways of a row until something else begins; cells that a narrow terminal glued together are taken apart."""
    out: list[str] = []
    for word in text.split():
        parts = _WAY.findall(word)
        if "".join(parts) != word:
            break
        out += parts
    return out

"""Boxing beside OneFlow's own costs: between any two placements of one mesh we move as many bytes, or fewer."""

from __future__ import annotations

import csv
from math import prod
from pathlib import Path

import pytest

from ir.boxing import bytes_moved, chain, step_nbytes
from ir.sbp import NdSbp, parse_sbp

FIXTURE = Path(__file__).parent.parent / "fixtures" / "oneflow_boxing.csv"
SHAPE = (64, 64)


def rows() -> list[dict[str, str]]:
    lines = [line for line in FIXTURE.read_text("utf-8").splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def placement(text: str) -> NdSbp:
    return tuple(map(parse_sbp, text.split("|")))


def moved(src: NdSbp, dst: NdSbp, mesh: tuple[int, ...]) -> float:
    """Bytes over all devices, in sizes of the tensor; each collective as a ring moves it."""
    total = 0.0
    for step in chain(src, dst, SHAPE, mesh, bytes_moved(SHAPE, mesh, 1)):
        read, written = step_nbytes(step, SHAPE, mesh, 1)
        n = mesh[step.axis]
        total += 0.0 if step.is_local else (2 * written if step.kind == "all_reduce" else max(read, written)) * (n - 1) / n
    return total * prod(mesh) / prod(SHAPE)


def is_exchange_of_all(src: NdSbp, dst: NdSbp) -> bool:
    """Whether one end splits a dim over both axes, or the two dims change places: OneFlow exchanges among all devices in one collective there.

    Ours go along one axis after the other.
    """
    return len(src) == 2 and (src[::-1] == dst or any(nd[0] == nd[1] and nd[0].is_split for nd in (src, dst)))


@pytest.mark.parametrize("mesh", ["2", "4", "8", "2x4", "4x8"])
def test_no_boxing_moves_more_than_oneflows_but_an_exchange_among_all(mesh: str) -> None:
    here = [row for row in rows() if row["mesh"] == mesh]
    assert len(here) in (14, 256)
    sizes, more, fewer = tuple(map(int, mesh.split("x"))), 0, 0
    for row in here:
        src, dst = placement(row["from"]), placement(row["to"])
        found, true = moved(src, dst, sizes), float(row["cost"])
        if found > true + 1e-9:
            more += 1
            assert is_exchange_of_all(src, dst), row
        fewer += found < true - 1e-9
    assert (more, fewer > 100) == ((16, True) if "x" in mesh else (0, False))

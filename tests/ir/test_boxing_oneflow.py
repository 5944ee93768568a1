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
        n = step.num_ranks(mesh)
        total += 0.0 if step.is_local else (2 * written if step.kind == "all_reduce" else max(read, written)) * (n - 1) / n
    return total * prod(mesh) / prod(SHAPE)


@pytest.mark.parametrize("mesh", ["2", "4", "8", "2x4", "4x8"])
def test_no_boxing_moves_more_than_oneflows(mesh: str) -> None:
    here = [row for row in rows() if row["mesh"] == mesh]
    assert len(here) in (14, 256)
    sizes, fewer = tuple(map(int, mesh.split("x"))), 0
    for row in here:
        found, true = moved(placement(row["from"]), placement(row["to"]), sizes), float(row["cost"])
        assert found <= true + 1e-9, row
        fewer += found < true - 1e-9
    assert (fewer > 100) == ("x" in mesh)

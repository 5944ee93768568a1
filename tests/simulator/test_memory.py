"""The ledger: every byte in one class, arenas once, the peak named, the risk band."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.program import Program
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.memory import ledger
from tests.programs import pipeline

GIB = 1 << 30


def sized(program: Program, sizes: dict[str, int]) -> Program:
    return replace(program, registers=tuple(replace(r, nbytes=sizes.get(r.memory, r.nbytes)) for r in program.registers))


def test_every_register_is_counted_once_with_its_credits() -> None:
    program = pipeline(3, 4)
    found = ledger(program)
    assert sum(found.total(r) for r in program.ranks) == sum(r.nbytes * r.credits for r in program.registers)
    assert found.ranks[0] == {"parameter": 16, "gradient": 16, "saved": 3 * 16, "input": 16, "activation": 2 * 16}
    assert found.peak_rank == 0
    assert sum(found.by_class.values()) == found.peak_bytes


def test_an_arena_is_counted_once() -> None:
    program = pipeline(1, 2)
    arena = {"stash0": 0, "x": 8}
    shared = replace(program, registers=tuple(replace(r, arena="a", offset=arena[r.name]) if r.name in arena else r for r in program.registers))
    assert ledger(program).ranks[0] == {"parameter": 16, "gradient": 16, "saved": 16, "input": 16}
    assert ledger(shared).ranks[0] == {"parameter": 16, "gradient": 16, "saved": 24}


def test_the_live_peak_is_named_and_never_above_what_is_allocated() -> None:
    program = pipeline(4, 8)
    cost = CostModel(load_cluster("1x8xH100"))
    found = ledger(program, simulate(program, cost))
    for rank in program.ranks:
        assert 0 < found.live[rank].nbytes <= found.total(rank)
    assert found.live[0].actor in program.actor
    assert f"rank {found.peak_rank}" in found.peak_at
    assert found.live[found.peak_rank].actor in found.peak_at
    assert "allocated before the first step" in ledger(program).peak_at


@pytest.mark.parametrize(("gib", "fits"), [(20.0, "yes"), (75.1, "yes"), (75.3, "tight"), (79.0, "tight"), (79.2, "no"), (90.0, "no")])
def test_the_risk_band(gib: float, fits: str) -> None:
    """79.11 GiB are usable of an H100's 80 (public out-of-memory reports); above 95 % of it is tight."""
    program = sized(pipeline(2, 2), {"parameter": int(gib * GIB)})
    found = ledger(program, cluster=load_cluster("1x8xH100-SXM"))
    assert found.usable_bytes == pytest.approx(79.11 * GIB)
    assert found.fits == fits


def test_the_fraction_and_the_framework_count() -> None:
    program, cluster = sized(pipeline(2, 2), {"parameter": 70 * GIB}), load_cluster("1x8xH100-SXM")
    assert ledger(program, cluster=cluster).fits == "yes"
    assert ledger(program, cluster=cluster, safe_fraction=0.8).fits == "tight"
    found = ledger(program, cluster=cluster, framework_bytes=20.0 * GIB)
    assert found.fits == "no"
    assert found.by_class["framework"] == 20 * GIB
    assert ledger(program).fits == "yes"


def test_the_peak_rank_is_the_one_nearest_to_its_limit() -> None:
    program = pipeline(2, 2)
    cluster = load_cluster("1x2xH100")
    small = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], usable_bytes=100.0)))
    assert ledger(program).peak_rank == 0
    assert ledger(program, cluster=small).peak_rank == 1
    assert ledger(program, cluster=small).to_json()["usable_bytes"] == 100.0

"""The outer space: every legal point once, and contradictions by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ir.errors import HeadraceError, InputError, PlanError
from planner.candidates import Candidate, block_layers, candidates, legal_tp, parse_fix, splits_experts
from planner.schedules import SCHEDULES
from tests.families import of_kind
from tests.models import SEQ, gpt, llama

GRAPH = llama().graph(1, SEQ, "float32")  # four blocks, 8 heads, 4 KV heads


def brute(num_devices: int, batch: int) -> set[Candidate]:
    found = set()
    for dp in range(1, num_devices + 1):
        for tp in range(1, num_devices + 1):
            for pp in range(1, num_devices + 1):
                if dp * tp * pp != num_devices or 4 % tp or pp > 4 or batch % dp:
                    continue
                for mbs in range(1, batch // dp + 1):
                    m = batch // (dp * mbs)
                    if m * dp * mbs == batch:
                        found |= {Candidate(dp, tp, pp, mbs, m, s, r, v) for s, v in brute_schedules(pp, m) for r in ("none", "selective", "full")}
    return found


def brute_schedules(pp: int, m: int) -> list[tuple[str, int]]:
    """(schedule, stages a rank): every one whose orders can be written, on four blocks."""
    if pp == 1:
        return [("1f1b", 1)]
    found = [("auto", 1)]
    for name, known in SCHEDULES.items():
        for v in range(1, 5):
            fits = pp * v <= 4 and known.num_chunks(known.chunks or v) == v and known.copies == known.pieces == 1 and name != "interleaved-megatron"
            if fits and not known.refuse(pp, m, v):
                found.append((name, v))
    return found


@pytest.mark.parametrize(("num_devices", "batch"), [(1, 1), (1, 6), (4, 8), (8, 8), (8, 12), (6, 12), (16, 16)])
def test_every_legal_point_once(num_devices: int, batch: int) -> None:
    found = list(candidates({}, num_devices, batch, GRAPH))
    assert len(found) == len(set(found))
    assert set(found) == brute(num_devices, batch)


@pytest.mark.parametrize("fix", [{"dp": 2}, {"tp": 2, "pp": 2}, {"mbs": 2}, {"schedule": "gpipe"}, {"recompute": "full"}, {"pp": 1, "mbs": 4}], ids=str)
def test_what_is_fixed_stays(fix: Mapping[str, Any]) -> None:
    found = list(candidates(fix, 8, 16, GRAPH))
    assert found
    assert set(found) >= {c for c in brute(8, 16) if all(getattr(c, k) == v for k, v in fix.items())}
    assert all(getattr(c, k) == v for c in found for k, v in fix.items())


def test_values_are_typed() -> None:
    fix = {"tp": "2", "zero": "0", "sp": "True", "schedule": "gpipe", "recompute": "full", "cp": 1}
    assert parse_fix(fix, 8, 16, GRAPH) == {"tp": 2, "zero": 0, "sp": True, "schedule": "gpipe", "recompute": "full", "cp": 1}


@pytest.mark.parametrize(
    ("fix", "kind", "sentence"),
    [
        (
            {"nodes": 2},
            InputError,
            "`nodes` is not known; known are dp, tp, pp, cp, cp_form, cp_order, ep, vpp, mbs, schedule, seq_chunks, loss_chunks, recompute, zero",
        ),
        ({"tp": "two"}, InputError, "--fix tp=two: give a whole number"),
        ({"dp": 0}, InputError, "--fix dp=0: give a whole number of 1 or more"),
        ({"zero": -1}, InputError, "--fix zero=-1: give a whole number of 0 or more"),
        ({"sp": "maybe"}, InputError, "--fix sp=maybe: give true or false"),
        ({"ep": 2}, PlanError, "--fix ep=2: `.*` has no experts to split; leave ep out"),
        ({"vpp": 3, "schedule": "zb-v"}, PlanError, "schedule `zb-v` puts 2 stages on a rank, not 3"),
        ({"schedule": "zb"}, PlanError, "known schedules are gpipe, 1f1b"),
        ({"recompute": "some"}, PlanError, "--fix recompute=some: legal are none, selective .* and full"),
        ({"zero": 4}, PlanError, "--fix zero=4: legal are 0, 1, 2 and 3"),
        ({"dp": 2, "tp": 2, "pp": 4}, PlanError, "--fix dp=2 x tp=2 x pp=4 asks for 16 devices, the cluster has 8; dp x tp x pp must be 8"),
        ({"dp": 2, "tp": 2, "pp": 4, "cp": 2}, PlanError, "asks for 32 devices, the cluster has 8; dp x tp x pp x cp must be 8"),
        ({"cp_form": "ring"}, PlanError, "--fix cp_form=ring: sequences are not split; give cp=N"),
        ({"cp": 2, "cp_form": "spiral"}, InputError, "--fix cp_form=spiral: give one of ring, gather, exchange"),
        ({"cp": 2, "seq_chunks": 2}, PlanError, "cp=2,seq_chunks=2: both cut the sequence"),
        ({"cp": 4, "tp": 2, "cp_form": "exchange"}, PlanError, "4 key heads do not divide by cp x tp = 8"),
        ({"cp": 2, "dp": 3}, PlanError, "does not divide the 8 devices"),
        ({"dp": 3}, PlanError, "--fix dp=3: 3 does not divide the 8 devices"),
        ({"tp": 8}, PlanError, "has 8 heads and 4 KV heads, which 8 does not divide; legal tp are 1, 2, 4"),
        ({"pp": 8}, PlanError, "has 4 blocks, so pp x vpp can be 1 to 4"),
        ({"dp": 4, "mbs": 3}, PlanError, "batch 16 is not divisible by 12 \\(dp=4 x mbs=3\\); batches near it that are: 12, 24"),
    ],
    ids=str,
)
def test_contradictions_are_named(fix: Mapping[str, Any], kind: type[HeadraceError], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        parse_fix(fix, 8, 16, GRAPH)


def test_legal_tp_divides_the_heads_of_keys_and_values() -> None:
    assert legal_tp(GRAPH, 8) == (1, 2, 4)
    assert legal_tp(gpt(num_heads=2).graph(1, SEQ, "float32"), 8) == (1, 2)


def test_blocks_are_what_lies_between_embedding_and_head() -> None:
    assert block_layers(GRAPH) == (1, 2, 3, 4)


# ---- experts -----------------------------------------------------------------------------------------------------------------------------------------

EXPERTS = of_kind("mixtral").graph(1, SEQ, "float32")  # two blocks, four heads, four experts


def test_experts_are_split_over_what_divides_them_and_the_data_parallel_ranks() -> None:
    found = list(candidates({"tp": 1, "pp": 1, "mbs": 1, "recompute": "none"}, 8, 8, EXPERTS))
    assert [(c.dp, c.ep, c.mesh) for c in found] == [
        (8, 1, (("dp", "tp"), (8, 1))), (8, 2, (("dp", "ep", "tp"), (4, 2, 1))), (8, 4, (("dp", "ep", "tp"), (2, 4, 1))),
    ]  # fmt: skip
    assert str(found[1]) == "dp8 tp1 pp1 ep2 mbs1 x 1 1f1b recompute=none"
    assert {c.ep for c in candidates({"ep": 2, "tp": 1}, 8, 8, EXPERTS)} == {2}
    assert {c.ep for c in candidates({}, 8, 8, GRAPH)} == {1}


def test_experts_are_split_over_the_tensor_parallel_ranks_too_where_more_parts_are_asked_for() -> None:
    found = list(candidates({"ep": 4, "mbs": 1, "recompute": "none", "pp": 1}, 8, 8, EXPERTS))
    assert [(c.dp, c.tp, c.ep) for c in found] == [(8, 1, 4), (4, 2, 2), (4, 2, 4), (2, 4, 1)]
    assert [splits_experts(4, c.ep, c.tp) for c in found] == [False, True, False, True]


def test_experts_that_do_not_divide_are_named() -> None:
    with pytest.raises(PlanError, match=r"--fix ep=3: 3 does not divide the 4 experts of a layer; legal are 1, 2, 4"):
        parse_fix({"ep": 3}, 8, 8, EXPERTS)
    with pytest.raises(PlanError, match=r"--fix ep=4: experts are split over data-parallel ranks.*; with dp=1, tp=2 ep can be 1, 2"):
        parse_fix({"ep": 4, "tp": 2, "dp": 1}, 8, 8, EXPERTS)

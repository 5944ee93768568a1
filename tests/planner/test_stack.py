"""What several passes keep in one stack: items that live at once lie apart, and no more is taken than slots of each pass by itself would take."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ir.program import Register
from planner.arena import Life, first_fit
from planner.lower import in_flight, lower
from planner.pieces import unrolled_slots
from planner.schedules import schedule
from planner.stack import Kept, most_at_once, packed, stack
from tests.models import BATCH, SEQ, gpt
from tests.plans import Layout, plan_for


def pieces_of(p: int, m: int, rank: int, nbytes: tuple[int, ...]) -> tuple[list[Register], dict[str, Kept], list[int]]:
    """(two registers for each piece, their lives, the slots that each piece would need by itself) under Seq1F1B."""
    k = len(nbytes)
    (order,) = unrolled_slots((schedule("seq1f1b", k).orders(p, m)[rank],), k)
    at = {(s.stage, s.kind, s.microbatch): place for place, s in enumerate(order)}
    registers, lives, alone = [], {}, []
    for j, n in enumerate(nbytes):
        stage = rank * k + j
        for name in ("x", "y"):
            registers.append(Register(f"{name}{j}", rank, (n,), "int8", n, credits=2))
            lives[f"{name}{j}"] = Kept(tuple(Life(at[stage, "F", i], at[stage, "B", i]) for i in range(m)), j)
        alone.append(in_flight(order, (stage, "F"), {(stage, "I"), (stage, "W")}))
    return registers, lives, alone


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("nbytes", [(64, 64, 64, 64), (640, 384, 320, 256), (1000, 30), (64,)])
def test_items_that_live_at_once_lie_apart(nbytes: tuple[int, ...], rank: int) -> None:
    registers, lives, alone = pieces_of(4, 6, rank, nbytes)
    placed = stack(registers, lives)
    assert [r.name for r in placed] == [r.name for r in registers]
    items = [(r.offsets[i], r.offsets[i] + r.nbytes, lives[r.name].lives[i]) for r in placed for i in range(6)]
    for (a, b, one), (c, d, two) in combinations(items, 2):
        assert b <= c or d <= a or one.end < two.start or two.end < one.start
    assert all(r.credits == 6 and r.arena == f"saved@{rank}" and all(o % 64 == 0 for o in r.offsets) for r in placed)
    size = max(place + r.nbytes for r in placed for place in r.places)
    assert size <= 2 * sum(n * -(-width // 64) * 64 for n, width in zip(alone, nbytes, strict=True))


@pytest.mark.parametrize("rank", range(4))
def test_of_equal_pieces_no_more_than_lives_at_once(rank: int) -> None:
    registers, lives, alone = pieces_of(4, 8, rank, (64,) * 4)
    size = max(place + r.nbytes for r in stack(registers, lives) for place in r.places)
    assert size == 2 * 64 * 4 * schedule("seq1f1b", 4).stash(rank, 4, 8) < 2 * 64 * sum(alone)


def test_what_is_not_told_stays_as_it_is() -> None:
    registers, _, _ = pieces_of(2, 2, 0, (64, 64))
    assert stack(registers, {}) == registers
    assert np.all([r.places == (0, 64) for r in registers])


@pytest.mark.parametrize("seed", range(4))
def test_packing_is_no_worse_than_the_largest_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 40, 60)
    blocks = tuple((Life(int(a), int(a + d)), int(64 * n)) for a, d, n in zip(starts, rng.integers(0, 20, 60), rng.integers(1, 9, 60), strict=True))

    def height(offsets: tuple[int, ...]) -> int:
        return max(at + nbytes for at, (_, nbytes) in zip(offsets, blocks, strict=True))

    assert most_at_once(blocks) <= height(packed(blocks)) <= height(first_fit(blocks))


@pytest.mark.parametrize("want", [Layout(1, 1, 2, 4, schedule="seq1f1b", pieces=(5, 4, 3)), Layout(1, 1, 2, 4, schedule="interleaved", vpp=2)], ids=str)
def test_what_one_slot_writes_and_reads_is_not_kept(want: Layout) -> None:
    """Cotangents that a B slot gives and takes share the arena from layer to layer; gradients of keys, which wait for the piece before, are in the stack."""
    program = lower(gpt(), plan_for(gpt(), want, batch=BATCH, seq=SEQ))
    phases = {w: a.phase for a in program.actors for w in a.writes}
    held = {r.name for r in program.registers if r.offsets and phases[r.name] != "F"}
    assert bool(held) == bool(want.pieces)
    assert all(name.startswith("d.") for name in held)

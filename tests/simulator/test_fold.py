"""Folding: one rank of each kind stands for all, and takes the same time."""

from __future__ import annotations

import pytest

from ir.errors import ProgramError
from ir.program import Program
from ir.work import Work
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.fold import fold, kinds, representatives
from tests.programs import Builder

COST = CostModel(load_cluster("2x8xH100@ib400"))


def work(nbytes: float) -> Work:
    return Work("compute", "gelu", "float32", nbytes=nbytes)


def reduction(nbytes: float, group: tuple[int, ...]) -> Work:
    return Work("collective", "all_reduce", "float32", nbytes=nbytes, group=group)


def sharded_pipeline(stages: int, tp: int, dp: int, m: int, uneven: bool = False) -> Program:
    """`stages` x dp x tp ranks: a tensor-parallel sum in every forward, GPipe hops at equal places, a data-parallel sum once a step."""
    b = Builder(m)
    ranks = {(s, d, t): (s * dp + d) * tp + t for s in range(stages) for d in range(dp) for t in range(tp)}
    for (s, d, t), r in ranks.items():
        nbytes = 5e8 * (s + 1) * (1.5 if uneven and t == 0 else 1.0)
        for name in ("part", "out", *(("in", "dx") if s else ()), *(("back",) if s < stages - 1 else ())):
            b.register(f"{name}{r}", r, credits=m)
        b.register(f"g{r}", r, "step")
        reads = () if s == 0 else (f"in{r}",)
        b.actor(f"F{r}", r, "compute", reads, (f"part{r}",), work=work(nbytes))
        group = tuple(ranks[s, d, i] for i in range(tp))
        b.actor(f"tp{r}", r, "comm.tp", (f"part{r}",), (f"out{r}",), work=reduction(4e7, group), channel=f"tp{s}.{d}")
        b.actor(f"B{r}", r, "compute", (f"back{r}",) if s < stages - 1 else (f"out{r}",), (f"g{r}", f"dx{r}") if s else (f"g{r}",), work=work(2 * nbytes))
        peers = tuple(ranks[s, i, t] for i in range(dp))
        b.actor(f"dp{r}", r, "comm.dp", (f"g{r}",), clock="step", work=reduction(3e8, peers), channel=f"dp{s}.{t}")
    for (s, d, t), r in ranks.items():
        if s < stages - 1:
            up = ranks[s + 1, d, t]
            b.hop(f"act{r}", r, up, f"out{r}", f"in{up}", "F")
            b.hop(f"grad{r}", up, r, f"dx{up}", f"back{r}", "B")
    return b.build(f"{stages}x{dp}x{tp}").check()


@pytest.mark.parametrize(
    ("stages", "tp", "dp", "uneven", "num_kinds", "num_kept"),
    [(1, 2, 2, False, 1, 1), (1, 4, 2, True, 2, 2), (2, 2, 4, False, 2, 2), (2, 2, 2, True, 4, 4), (4, 2, 2, False, 4, 4), (2, 4, 2, True, 4, 4)],
)
def test_folded_takes_as_long_as_unfolded(stages: int, tp: int, dp: int, uneven: bool, num_kinds: int, num_kept: int) -> None:
    program = sharded_pipeline(stages, tp, dp, 4, uneven)
    kept = representatives(program, COST)
    assert (len(kinds(program, COST)), len(kept)) == (num_kinds, num_kept)
    whole, part = simulate(program, COST), simulate(fold(program, kept), COST)
    assert part.step_s == whole.step_s
    by_name = {(s.actor, s.step, s.microbatch): s for s in whole.spans}
    assert all(by_name[s.actor, s.step, s.microbatch][5:] == s[5:] for s in part.spans)


def test_ranks_of_one_kind_do_the_same_at_the_same_time() -> None:
    program = sharded_pipeline(2, 4, 2, 3, uneven=True)
    ends: dict[int, list[float]] = {}
    for s in simulate(program, COST).spans:
        ends.setdefault(s.rank, []).append(s.end_s)
    for ranks in kinds(program, COST):
        assert len({tuple(sorted(ends[r])) for r in ranks}) == 1


def test_a_slower_link_makes_another_kind() -> None:
    """Of the four ranks of a stage, those whose group crosses nodes are unlike the others in price alone."""
    b = Builder(1)
    for group in ((0, 1), (7, 8)):
        for r in group:
            b.actor(f"sum{r}", r, "comm.tp", work=reduction(1e8, group), channel=f"c{group}")
    assert kinds(b.build("links").check(), COST) == ((0, 1), (7, 8))


def test_partners_that_differ_make_kinds_that_differ() -> None:
    b = Builder(1)
    for r, nbytes in enumerate((1e6, 1e6, 1e6, 1e6, 1e6, 9e8)):
        b.register(f"x{r}", r)
        b.actor(f"F{r}", r, "compute", writes=(f"x{r}",), work=work(nbytes))
    for r in range(6):
        group = (0, 1) if r < 2 else (2, 3) if r < 4 else (4, 5)
        b.actor(f"sum{r}", r, "comm.tp", (f"x{r}",), work=reduction(1e8, group), channel=f"c{group}")
    assert kinds(b.build("partners").check(), COST) == ((0, 1, 2, 3), (4,), (5,))


def test_a_p2p_is_never_cut() -> None:
    program = sharded_pipeline(2, 2, 2, 2)
    with pytest.raises(ProgramError, match=r"cuts p2p .* between ranks \(0, 4\)"):
        fold(program, (0,))
    with pytest.raises(ProgramError, match="has no rank 9"):
        fold(program, (9,))

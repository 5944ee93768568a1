"""PyTorch's own schedules and its own reading of our tables: the same orders, and messages that its simulator can run."""

from __future__ import annotations

from typing import Any

import pytest

from planner.schedules import SCHEDULES, Orders, schedule
from planner.schedules.proof import with_messages
from planner.schedules.text import parse, write

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

THEIRS = {
    "interleaved": ("ScheduleInterleaved1F1B", (2, 3)), "looped-bfs": ("ScheduleLoopedBFS", (2, 3)),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", (1, 2, 3)),
    "zb-v": ("ScheduleZBVZeroBubble", (2,)), "dualpipe-v": ("ScheduleDualPipeV", (2,)),
}  # fmt: skip
SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 6, 7, 8, 12, 13, 16)]


def theirs(name: str, p: int, m: int, v: int) -> Orders:
    """What PyTorch's class lists for every rank, without a process group."""
    made: Any = object.__new__(getattr(torch_schedules, name))
    made.pp_group_size, made.n_local_stages, made._stages, made._n_microbatches = p, v, [None] * v, m
    made.num_stages = made._num_stages = p * v
    made.number_of_rounds = max(1, m // p)
    made.microbatches_per_round = m // made.number_of_rounds
    rows = [made._calculate_single_rank_operations(rank) for rank in range(p)]
    return tuple(tuple(slot for a in row if a is not None for slot in parse(str(a))) for row in rows)  # type: ignore[misc]


@pytest.mark.parametrize("name", THEIRS)
def test_orders_are_those_of_pytorch(name: str) -> None:
    their, chunks = THEIRS[name]
    compared = 0
    for p, m in SIZES:
        for v in chunks:
            ours = schedule("zb-h1") if (name, v) == ("interleaved-zb", 1) else schedule(name)
            if not schedule(name).refuse(p, m, v):
                assert ours.orders(p, m, v) == theirs(their, p, m, v), (p, m, v)
                compared += 1
    assert compared >= 20


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 6)])
@pytest.mark.parametrize("name", [s.name for s in SCHEDULES.values() if s.copies == 1])
def test_pytorch_reads_our_tables_and_can_run_their_messages(name: str, p: int, m: int) -> None:
    s = schedule(name)
    table = with_messages(s.orders(p, m))
    read = {r: [torch_schedules._Action.from_str(cell) for cell in line.split(",")] for r, line in enumerate(write(table).splitlines())}
    assert [[str(a) for a in read[r]] for r in range(p)] == [[str(a) for a in row] for row in table]
    run = torch_schedules._simulate_comms_compute(read, lambda stage: s.rank_of(stage, p), p * s.num_chunks())
    assert {r: [a for a in row if a is not None] for r, row in run.items()}.keys() == read.keys()

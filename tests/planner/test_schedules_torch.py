"""PyTorch's own schedules and its own reading of our tables: the same orders, and messages that its simulator can run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.schedules import SCHEDULES, Orders, schedule
from planner.schedules.proof import with_messages
from planner.schedules.text import Message, parse, write

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


def test_pytorchs_runtime_trains_under_our_tables_to_the_loss_of_one_process(tmp_path: Path) -> None:
    """Two processes on gloo. Passes alone, and passes with our messages."""
    p, m = 2, 4
    tables: dict[str, list[Any]] = {}
    for name in ("gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "1f1b-v", "dualpipe-v"):
        s = schedule(name)
        home = [s.rank_of(stage, p) for stage in range(p * s.num_chunks())]
        orders = s.orders(p, m)
        (tmp_path / f"{name}.csv").write_text(write(orders))
        tables[name] = [home, m, "compute_only"]
        reduced = [[Message(stage, "REDUCE_GRAD", -1) for stage, at in enumerate(home) if at == rank] for rank in range(p)]
        (tmp_path / f"{name}+messages.csv").write_text(write([[*row, *last] for row, last in zip(with_messages(orders), reduced, strict=True)]))
        tables[f"{name}+messages"] = [home, m, "compute_comms"]
    (tmp_path / "tables.json").write_text(json.dumps(tables))
    root = Path(__file__).parents[2]
    script = str(root / "tests/planner/torch_pipeline.py")
    logs = [open(tmp_path / f"log{rank}", "w+") for rank in range(p)]  # noqa: SIM115
    runs = [subprocess.Popen([sys.executable, script, str(rank), str(tmp_path)], stdout=log, stderr=log) for rank, log in enumerate(logs)]
    try:
        codes = [run.wait(timeout=300) for run in runs]
    finally:
        for run in runs:
            run.kill()
        for log in logs:
            log.close()
    assert codes == [0, 0], "".join((tmp_path / f"log{rank}").read_text() for rank in range(p))
    found = {k: v for rank in range(p) for k, v in json.loads((tmp_path / f"losses{rank}.json").read_text()).items()}
    assert found.keys() == tables.keys()
    for name, (losses, alone) in found.items():
        assert losses == pytest.approx(alone, rel=1e-10), name

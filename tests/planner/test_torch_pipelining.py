"""Our schedules as files, run by PyTorch's own pipeline runtime in two processes: losses and gradients of the same training in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from planner.schedules import SCHEDULES
from planner.schedules.proof import with_messages
from planner.schedules.text import Message, write
from tests.torch_ranks import NUM_MICROBATCHES, NUM_RANKS, Seen, alone

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
NAMES = [name for name, s in SCHEDULES.items() if s.copies == 1]
"""All that keep one copy of the parameters: PyTorch's runtime knows a stage on one rank only."""


FORMS = {"passes": "compute_only", "messages": "compute_comms"}
"""How much of a schedule the file says: the passes, to which PyTorch adds its messages, or all of it."""
FILES = {f"{name}.{what}": form for name in NAMES for what, form in FORMS.items()}


def put(folder: Path) -> None:
    """Writes every schedule in both forms. PyTorch divides the sums of gradients by the number of microbatches where it is told to reduce them."""
    for name in NAMES:
        orders = SCHEDULES[name].orders(NUM_RANKS, NUM_MICROBATCHES // SCHEDULES[name].pieces)
        (folder / f"{name}.passes.csv").write_text(write(orders), "utf-8")
        rows = [
            (*row, *(Message(s, "REDUCE_GRAD", -1) for s in sorted({slot.stage for slot in order})))
            for row, order in zip(with_messages(orders), orders, strict=True)
        ]
        (folder / f"{name}.messages.csv").write_text(write(rows), "utf-8")
    (folder / "forms.json").write_text(json.dumps(FILES), "utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The schedules as files, and after the run what the ranks left."""
    folder = tmp_path_factory.mktemp("ranks")
    put(folder)
    run(folder)
    return folder


def run(folder: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([sys.executable, "-m", "tests.torch_ranks", str(r), str(folder)], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        for r in range(NUM_RANKS)
    ]
    try:
        errors = [process.communicate(timeout=150)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [p.returncode for p in ranks] == [0] * NUM_RANKS, "".join(e[-3000:] for e in errors)


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Seen]:
    """What both ranks saw together, by schedule."""
    found: dict[str, Seen] = {name: {} for name in FILES}
    for rank in range(NUM_RANKS):
        with np.load(folder / f"rank{rank}.npz") as file:
            for key, array in file.items():
                name, _, what = key.partition("/")
                assert what not in found[name]
                found[name][what] = array
    return found


@pytest.fixture(scope="module")
def single() -> Seen:
    return alone()


@pytest.mark.parametrize("name", FILES)
def test_pytorch_trains_under_our_orders(name: str, trained: dict[str, Seen], single: Seen) -> None:
    assert trained[name].keys() == single.keys()
    for key, true in single.items():
        assert np.abs(trained[name][key] - true).max() <= 1e-12 * max(1e-3, np.abs(true).max()), key


@pytest.mark.parametrize("name", FILES)
def test_it_ran_them_as_they_were_written(name: str, folder: Path, trained: dict[str, Seen]) -> None:
    for rank in range(NUM_RANKS):
        assert (folder / f"{name}.rank{rank}").read_text("utf-8") == (folder / f"{name}.csv").read_text("utf-8")

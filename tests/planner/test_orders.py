"""Orders of a plan's own: a user's table from file to Program, and what the search for a schedule finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ir.errors import Deadlock, HeadraceError, InputError, PlanError
from ir.plan import Plan
from planner.frontends import load
from planner.lower import lower
from planner.orders import orders_of
from planner.schedules import schedule
from planner.schedules.text import write
from planner.search import plan
from simulator.clusters import load_cluster

MODEL = load("gpt2-tiny", num_layers=6)
CLUSTER = load_cluster("1x4xH100-SXM")


def found(**fix: Any) -> Plan:
    return plan(MODEL, CLUSTER, batch=16, seq=64, fix=fix, top=1).plans[0]


@pytest.mark.parametrize(("name", "pp", "m", "v"), [("zb-h1", 4, 8, 1), ("zb-v", 2, 4, 2), ("1f1b", 4, 4, 1), ("dualpipe", 4, 8, 1)])
def test_a_table_gives_the_program_of_the_schedule_that_it_lists(tmp_path: Path, name: str, pp: int, m: int, v: int) -> None:
    path = tmp_path / "orders.csv"
    path.write_text(write(schedule(name).orders(pp, m, v)))
    own, listed = found(schedule=str(path), dp=4 // pp, tp=1), found(schedule=name, pp=pp, dp=4 // pp, tp=1, mbs=16 // (m * 4 // pp))
    assert (own.schedule, own.num_microbatches) == ("table", m)
    assert orders_of(own) == orders_of(listed)
    assert own.predicted["step_s"] == pytest.approx(listed.predicted["step_s"], rel=1e-12)
    again = Plan.from_json(own.to_json())
    assert again == own
    assert lower(MODEL, again).orders == lower(MODEL, listed).orders


@pytest.mark.parametrize(
    ("table", "error", "says"),
    [
        ("", PlanError, "no action"),
        ("0F0,0X0\n1F0,1B0\n", PlanError, "line 1: `0X0` is no action"),
        ("0F0,0B0\n1F0\n", PlanError, "no rank runs 1B0"),
        ("0F0,0F0,0B0\n1F0,1B0\n", PlanError, "0F0 stands twice"),
        ("0B0,0F0\n1F0,1B0\n", Deadlock, "0B0"),
    ],
)
def test_a_table_that_cannot_run_is_refused(tmp_path: Path, table: str, error: type[HeadraceError], says: str) -> None:
    path = tmp_path / "orders.csv"
    path.write_text(table)
    with pytest.raises(error, match=says):
        found(schedule=str(path))


def test_a_table_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"nowhere\.csv: the table cannot be read"):
        found(schedule="nowhere.csv")


def test_auto_is_no_slower_than_the_schedules_it_starts_from() -> None:
    times = {name: found(schedule=name, pp=4, tp=1, mbs=1).predicted["step_s"] for name in ("1f1b", "zb-h1", "auto")}
    auto = found(schedule="auto", pp=4, tp=1, mbs=1)
    assert auto.schedule == "auto"
    assert auto.orders
    assert times["auto"] <= 1.02 * min(times.values())

"""`headrace validate` and `headrace calibrate`: their documents, their tables, their mistakes."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.calibration import halves
from headrace.cli import main
from headrace.timelines import write_timeline
from ir.errors import InputError
from ir.plan import Plan
from ir.timeline import Span, Timeline
from planner.recipes.study import class_level
from simulator.calibrate import Sample
from tests.planner.recipes.test_rows import HEAD, ROW


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    found = hr.plan("gpt2-tiny", "1x2xH100-SXM", batch=4, seq=64, fix={"tp": 2, "mbs": 4, "schedule": "1f1b", "recompute": "none"}, budget_s=20.0)
    path.write_text(json.dumps(found.plans[0].to_json()))
    return path


def test_a_table_of_ones_own_is_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, odd = (ROW.replace("a,mine", f"{name},mine") for name in ("good", "odd"))
    path = tmp_path / "runs.csv"
    path.write_text("\n".join((HEAD + ",iter_time_s", good + ",1.5", odd.replace("A100-SXM-80GB", "X9") + ",1.0")) + "\n")
    assert main(["validate", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    first, second = document["rows"]
    assert {"id", "family", "covered", "measured", "predicted", "error", "band", "memory_measured_gb", "memory_predicted_gb"} <= set(first)
    assert first["covered"]
    assert first["error"] == pytest.approx(first["predicted"] / 1.5 - 1)
    assert first["band"]["low_s"] < first["predicted"]
    assert not second["covered"]
    assert "X9" in second["reason"]
    assert second["predicted"] is None
    (family,) = document["families"]
    assert {"family", "n", "covered", "mape", "median_ape", "spearman", "memory_mape", "in_band"} <= set(family)
    assert (family["n"], family["covered"], family["spearman"]) == (2, 1, None)
    assert main(["validate", str(path)]) == 0
    assert "not covered: odd: " in capsys.readouterr().out


def test_a_table_of_something_else_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    assert main(["validate", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") <= 2


def test_a_measured_step_corrects_the_cluster(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cluster.json"
    assert main(["calibrate", "1x2xH100-SXM", "--plan", str(plan), "--step-s", "0.005", "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["error_before"] > 0.1 > 0.001 > document["error_train"]
    assert document["error_test"] is None
    assert main(["simulate", "gpt2-tiny", str(out), "--plan", str(plan), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["step_s"] == pytest.approx(0.005, rel=1e-3)
    assert simulated["band"]["low_s"] < simulated["step_s"] < simulated["band"]["high_s"]
    assert "fixing its level" in simulated["band"]["basis"]


def test_of_what_a_step_usually_differs_by_other_plans_take_a_part(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = hr.simulate(str(plan)).step_s
    out, band = tmp_path / "cluster.json", class_level("H100-SXM").band
    step_s = before * math.exp(band)
    assert main(["calibrate", "1x2xH100-SXM", "--plan", str(plan), "--step-s", str(step_s), "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["error_train"] < 0.001
    assert math.log(document["levels"]["compute"]) == pytest.approx(class_level("H100-SXM").shared * band, rel=1e-2)
    assert hr.simulate(str(plan), str(out)).step_s == pytest.approx(step_s, rel=1e-3)


def test_timelines_correct_the_cluster_and_their_later_steps_test_it(plan: Path, tmp_path: Path) -> None:
    made = Plan.from_json(json.loads(plan.read_text()))
    slow = hr.calibrate("1x2xH100-SXM", made, step_s=0.005).cluster
    seen = hr.simulate(made, slow, steps=6)
    path = tmp_path / "measured.json"
    write_timeline(str(path), Timeline("measured", seen.timeline.spans, seen.timeline.meta), seen.program)
    found = hr.calibrate("1x2xH100-SXM", made, measured=(path,))
    assert found.before > 0.1
    assert found.train < 0.01
    assert found.test is not None
    assert found.test < 0.01


def test_halves_share_no_step_that_counts() -> None:
    timeline = Timeline("measured", tuple(Span("F", k, 0, 0, "compute", 0.0, float(k), k + 0.5) for k in range(9)))
    early, late = halves(Sample(None, 1.0, timeline))  # type: ignore[arg-type]
    assert late is not None
    assert early.timeline is not None
    assert late.timeline is not None
    assert not set(early.timeline.steady_steps) & set(late.timeline.steady_steps)
    assert halves(Sample(None, 1.0, Timeline("measured", timeline.spans[:3])))[1] is None  # type: ignore[arg-type]


def test_calibrate_takes_one_or_the_other(plan: Path) -> None:
    with pytest.raises(InputError, match="either"):
        hr.calibrate("1x2xH100-SXM", plan)
    with pytest.raises(InputError, match="either"):
        hr.calibrate("1x2xH100-SXM", plan, step_s=1.0, measured=("x.json",))


BUNDLED = resources.files("simulator").joinpath("profiles", "published", "runs.csv")


def like(change: Callable[[dict[str, str]], Mapping[str, str]], path: Path) -> int:
    """Writes the first bundled row of each family, changed and under another name, as a table; how many there are."""
    rows = {row["family"]: row for row in reversed(list(csv.DictReader(BUNDLED.read_text("utf-8").splitlines())))}
    changed = [{**row, "id": f"of-my-own-{i}", **change(row)} for i, row in enumerate(rows.values())]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, tuple(changed[0]))
        writer.writeheader()
        writer.writerows(changed)
    return len(changed)


def told(path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The rows of `validate`; what people see names the basis of each band."""
    assert main(["validate", str(path)]) == 0
    shown = capsys.readouterr().out
    assert main(["validate", str(path), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    for row in rows:
        band = row["band"]
        assert row["covered"], row
        assert band["low_s"] < row["predicted"] < band["high_s"]
        assert band["basis"][:24] in shown
    return rows


def test_runs_of_other_sizes_keep_the_basis_of_their_gpu_release_and_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    n = like(lambda row: {"gbs": str(2 * int(row["gbs"])), "hidden": str(2 * int(row["hidden"])), "ffn": ""}, path)
    rows = told(path, capsys)
    assert len(rows) == n > 10
    own = [row["band"]["basis"].startswith("cross-validated") for row in rows]
    assert sum(own) == n - 2  # Korthikanti's five runs and the README's seven are too few


@pytest.mark.parametrize(
    ("column", "value", "basis"),
    [
        ("machine", "of my own", "no run of this GPU, release and machine: left-out families of class"),
        ("release", "Megatron-LM 2031", "no run of this GPU, release and machine: left-out families of class"),
        ("gpu", "L40S", "no run of this GPU, release and machine: left-out families of all GPUs, none of its class being measured"),
    ],
)
def test_runs_that_nobody_measured_have_the_band_of_families_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, value: str, basis: str
) -> None:
    path = tmp_path / "runs.csv"
    like(lambda row: {**row, "precision": "bf16", column: value} if column == "gpu" else {column: value}, path)
    for row in told(path, capsys):
        assert row["band"]["basis"].startswith(basis)


def test_rows_without_names_and_with_the_same_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    rows = (ROW.replace("a,mine", f"{name},mine") + f",{seconds}" for name, seconds in (("", 1), ("", 2), ("a", 3), ("a", 4)))
    path.write_text("\n".join((HEAD + ",iter_time_s", *rows)))
    found = told(path, capsys)
    assert [row["measured"] for row in found] == [1, 2, 3, 4]
    assert [row["id"] for row in found] == ["row 1", "row 2", "a", "a"]

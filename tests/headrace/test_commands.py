"""The commands on a small real model: the keys of their documents, their files, and that the parts fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace import planning
from headrace.cli import main
from headrace.timelines import read_timeline
from ir.plan import Plan
from ir.program import Program
from simulator.clusters import load_cluster

LAYOUT = {"dp", "tp", "pp", "cp", "ep", "vpp", "mbs", "num_microbatches", "schedule", "recompute", "zero", "sp"}
PLAN = {"rank", "step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "bubble", "peak_gib", "fits", "layout", "stages", "comm", "why"}
HEAD = ["schema_version", "kind", "model", "cluster"]
WORKLOAD = ["gpt2-tiny", "local", "--batch", "4", "--seq", "32"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(autouse=True)
def _here(made: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


@pytest.fixture
def plan(made: Path) -> Path:
    if not (made / "plan.json").exists():
        assert main(["plan", *WORKLOAD, "--fix", "dp=2,mbs=1", "-o", "plan.json"]) == 0
    return made / "plan.json"


def document(capsys: pytest.CaptureFixture[str], *argv: str, exit_code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == exit_code
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert next(iter(out)) == "schema_version"
    return out


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "plan", *WORKLOAD, "--top", "3", "-o", "best.json")
    assert list(found)[:4] == HEAD
    assert {"searched", "evaluated", "pruned", "seconds", "optimal", "gap"} <= set(found)
    assert 1 <= len(found["plans"]) <= 3
    assert [p["rank"] for p in found["plans"]] == list(range(1, len(found["plans"]) + 1))
    assert [p["step_s"] for p in found["plans"]] == sorted(p["step_s"] for p in found["plans"])
    for p in found["plans"]:
        assert set(p) >= PLAN
        assert set(p["layout"]) >= LAYOUT
        assert p["fits"] in ("yes", "tight", "no")
        assert all({"axis", "kind", "count", "nbytes", "time_s", "exposed_s"} <= set(c) for c in p["comm"])
    best = Plan.from_json(json.loads(Path("best.json").read_text()))
    assert dict(best.layout) == found["plans"][0]["layout"]
    assert best.cluster == "local"


def test_a_pipeline_in_both_directions(capsys: pytest.CaptureFixture[str]) -> None:
    """DualPipe from plan to run: each rank holds both ends of the pipeline, and the ledger counts them."""
    found = document(capsys, "plan", *WORKLOAD, "--fix", "pp=2,mbs=1,schedule=dualpipe", "--top", "1", "-o", "both.json")["plans"][0]
    assert (found["layout"]["vpp"], found["layout"]["num_microbatches"]) == (1, 4)
    assert [s["ranks"] for s in found["stages"]] == [[0], [1], [1], [0]]
    told = document(capsys, "simulate", "gpt2-tiny", "local", "--plan", "both.json")
    whole = sum(p.nbytes for p in hr.load("gpt2-tiny").graph(1, 32, "float32").params)
    assert [stage["by_class"]["parameter"] for stage in told["memory"]["by_stage"]] == [whole] * 4
    assert {(row["axis"], row["kind"]) for row in told["comm"]} >= {("copies", "all_reduce"), ("pp", "p2p")}
    ran = document(capsys, "run", "both.json", "--steps", "2", "--verify")
    assert max(ran["verified"]["loss_max_rel"], ran["verified"]["grad_max_rel"]) < 1e-5


def test_plan_keeps_what_is_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "plan", *WORKLOAD, "--fix", "tp=2,recompute=full")
    assert {(p["layout"]["tp"], p["layout"]["recompute"]) for p in found["plans"]} == {(2, "full")}


def test_plan_that_does_not_fit_says_so_and_writes_none(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "llama-3-8b", "1x1xH100-SXM", "--batch", "1", "--seq", "1024", "-o", "never.json"]
    assert main([*argv, "--json"]) == 4
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["kind"] == "plans"
    assert found["plans"]
    assert all(p["fits"] == "no" and set(p) >= PLAN for p in found["plans"])
    assert 1 <= len(found["ways_out"]) <= 3
    assert "does not fit" in err
    assert "are missing" in err
    assert not Path("never.json").exists()


def test_simulate_prints_its_document_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "simulate", "gpt2", "1x1xT4", "--dtype", "fp32", "--batch", "64", "--fix", "mbs=64,recompute=none", exit_code=4)
    assert (found["kind"], found["plans"][0]["layout"]["mbs"]) == ("simulation", 64)
    assert any(w.startswith("leave mbs=64 open") for w in found["ways_out"])


def test_strict_is_3_where_memory_is_tight(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peak = document(capsys, "check", "plan.json")["memory"]["peak_bytes"]
    small = json.loads(Path(hr_local()).read_text())
    for device in small["devices"]:
        device["usable_bytes"] = peak / 0.97
    Path("small.json").write_text(json.dumps(small))
    assert document(capsys, "check", "plan.json", "--cluster", "small.json")["fits"] == "tight"
    assert document(capsys, "check", "plan.json", "--cluster", "small.json", "--strict", exit_code=3)["fits"] == "tight"
    for device in small["devices"]:
        device["usable_bytes"] = peak / 1.5
    Path("small.json").write_text(json.dumps(small))
    assert document(capsys, "check", "plan.json", "--cluster", "small.json", exit_code=4)["fits"] == "no"


def hr_local() -> str:
    from headrace.local import local_path

    return str(local_path())


def test_simulate(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "simulate", "gpt2-tiny", "local", "--plan", "plan.json", "--trace", "trace.json", "--timeline", "predicted.json")
    assert list(found)[:4] == HEAD
    assert {"step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "bubble", "fits", "comm"} <= set(found)
    assert set(found["breakdown"]) == {"compute_s", "exposed_comm_s", "bubble_s", "optimizer_s", "other_s"}
    assert sum(found["breakdown"].values()) == pytest.approx(found["step_s"], rel=1e-9)
    memory = found["memory"]
    assert {"peak_bytes", "peak_rank", "peak_at", "usable_bytes", "by_class", "by_stage"} <= set(memory)
    assert sum(memory["by_class"].values()) == pytest.approx(memory["peak_bytes"])
    assert max(s["bytes"] for s in memory["by_stage"]) == memory["peak_bytes"]
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    timeline, program = read_timeline("predicted.json")
    assert timeline.kind == "predicted"
    assert program.ranks == (0, 1)


def test_explain(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "explain", "plan.json", "--why-not", "tp=2", "--about", "h.*.mlp.up", "--against", "plan.json")
    assert list(found)[:4] == HEAD
    assert {"binds", "breakdown", "why_not", "about", "reshards", "parameters"} <= set(found)
    assert found["against"]["differences"] == []


def test_run_verifies_against_one_device(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "run", "plan.json", "--steps", "6", "--lr", "0.001", "--verify", "--timeline", "measured.json")
    assert list(found)[:4] == HEAD
    assert {"steps", "loss", "step_s", "predicted_step_s", "verified", "overlap", "messages"} <= set(found)
    assert found["steps"] == len(found["loss"]) == 6
    assert found["loss"][-1] < found["loss"][0]
    assert found["verified"]["loss_max_rel"] <= 1e-5
    assert found["verified"]["grad_max_rel"] <= 1e-5
    assert found["verified"]["steps"] == 3
    assert read_timeline("measured.json")[0].kind == "measured"


def test_a_plan_that_computes_something_else_is_told(plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace import running

    monkeypatch.setattr(running.verify, "compare", lambda a, b: {"loss_max_rel": 0.1, "grad_max_rel": 0.2, "grad_worst": "d.wte"})
    found = document(capsys, "run", "plan.json", "--steps", "1", "--verify", exit_code=1)
    assert found["verified"]["grad_worst"] == "d.wte"


def test_an_interrupted_run_gives_what_was_done(plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.progress import Progress

    def interrupt(self: Progress, what: str, done: int = 0, of: int = 0) -> None:
        if "step 2" in what:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "__call__", interrupt)
    found = document(capsys, "run", "plan.json", "--steps", "50", exit_code=130)
    assert found["interrupted"]
    assert 2 <= found["steps"] < 50


def test_resume_goes_on_where_the_checkpoint_stopped(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = document(capsys, "run", "plan.json", "--steps", "4")
    document(capsys, "run", "plan.json", "--steps", "2", "--checkpoint", "state")
    rest = document(capsys, "run", "plan.json", "--steps", "2", "--resume", "state")
    assert rest["first_step"] == 2
    assert rest["loss"] == pytest.approx(whole["loss"][2:], rel=1e-6)


def test_diff(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "gpt2-tiny", "local", "--plan", "plan.json", "--timeline", "p.json"]) == 0
    assert main(["run", "plan.json", "--steps", "3", "--timeline", "m.json"]) == 0
    found = document(capsys, "diff", "p.json", "m.json", "--trace", "both.json")
    assert list(found)[:4] == HEAD
    assert found["num_joined"] > 0
    assert found["only_predicted"] == found["only_measured"] == 0
    names = {e["args"]["name"] for e in json.loads(Path("both.json").read_text())["traceEvents"] if e.get("ph") == "M" and e["name"] == "process_name"}
    assert any("predicted" in name for name in names)
    assert any("measured" in name for name in names)
    assert main(["diff", "m.json", "p.json"]) == 2
    assert "in this order" in capsys.readouterr().err


def test_lower_and_run_where_scipy_is_not(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "lower", "plan.json", "-o", "program.json")
    assert Program.from_json(json.loads(Path("program.json").read_text())).fingerprint == found["fingerprint"]
    code = (
        "import sys\n"
        "for name in ('scipy', 'rich', 'torch', 'pygments', 'plotly', 'streamlit'): sys.modules[name] = None\n"
        "from headrace.cli import main\n"
        "code = main(['run', 'program.json', '--steps', '2'])\n"
        "print(sorted(m.split('.')[0] for m in sys.modules if m.split('.')[0] in ('planner', 'simulator', 'networkx')))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "planner" not in done.stdout
    assert "simulator" not in done.stdout
    assert "loss" in done.stdout


def test_check_and_clusters(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "check", "plan.json")
    assert (found["legal"], found["live"], found["fits"]) == (True, True, "yes")
    known = document(capsys, "clusters")
    assert "H100-SXM" in [g["name"] for g in known["gpus"]]
    assert "dgx-h100" in [m["name"] for m in known["machines"]]


def test_local_is_measured_once_and_kept(made: Path, monkeypatch: pytest.MonkeyPatch, local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace import local as module
    from ir.errors import ExecutionError

    cluster = hr.load_cluster("local")
    calls = []

    def measure(progress: object, patient: bool) -> object:
        calls.append(patient)
        if not patient:
            raise ExecutionError("too busy")
        return cluster

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setenv("HEADRACE_LOCAL", str(made / "kept" / "local.json"))
    said: list[str] = []
    assert hr.load_cluster("local", said.append) == cluster
    assert hr.load_cluster("local", said.append) == cluster
    assert calls == [False, True]
    assert "not measured yet" in said[0]
    assert main(["measure"]) == 1
    assert "too busy" in capsys.readouterr().err


def test_python_verbs_take_values_and_files(plan: Path) -> None:
    made = Plan.from_json(json.loads(plan.read_text()))
    assert hr.lower(made) == hr.lower(plan) == hr.lower("plan.json", hr.load("gpt2-tiny"))
    outcome = hr.run(made, steps=2)
    prediction = hr.simulate(made)
    assert hr.diff(prediction.timeline, outcome.run.timeline, prediction.program).num_joined > 0
    assert prediction.step_s == pytest.approx(made.predicted["step_s"], rel=1e-6)


def test_a_card_without_bfloat16_computes_in_float16() -> None:
    assert [planning.default_dtype(load_cluster(text)) for text in ("8xA100", "8xV100", "2xT4")] == ["bfloat16", "float16", "float16"]


def test_devices_that_a_plan_leaves_idle_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = hr.plan("gpt2-tiny", "2xL4", batch=4, seq=32, fix={"dp": 2, "mbs": 2}, top=1).plans[0]
    Path("two.json").write_text(json.dumps(found.to_json()))
    assert main(["simulate", "gpt2-tiny", "2x2xL4", "--plan", "two.json"]) == 0
    assert "the plan uses 2 of the 4 devices" in capsys.readouterr().out

"""`python -m executor.cli`: one JSON document, exit codes, files whole or not at all; nothing but numpy and networkx is imported."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from executor.cli import main
from tests.executor.programs import Writer

ROOT = Path(__file__).parents[2]
VOCAB, SEQ, BATCH = 128, 8, 4


def lookup():
    """The smallest program that text can train: a table from a byte to a score, one score for each byte, and the loss their sum."""
    w = Writer(2)
    rows = BATCH // 2
    w.register("ids", 0, (rows, SEQ), "int64", credits=2)
    more = {"clock": "step", "initial": 1, "tensor": "table", "region": ((0, VOCAB), (0, 1)), "init": {"init": "ones"}}
    w.register("table", 0, (VOCAB, 1), memory="parameter", **more)
    w.register("m", 0, (VOCAB, 1), memory="optimizer", **{**more, "tensor": "table@m", "init": {}})
    for name, shape in {"x": (rows, SEQ, 1), "s": (rows, SEQ), "one": (), "ds": (rows, SEQ), "dx": (rows, SEQ, 1)}.items():
        w.register(name, 0, shape)
    for name in ("loss", "norm"):
        w.register(name, 0, (), clock="step")
    w.register("g", 0, (VOCAB, 1), clock="step", memory="gradient", tensor="d.table", region=more["region"])
    w.load("load", 0, "ids", ((0, rows), (0, SEQ)), "ids", rows)
    sizes = {"b": rows, "s": SEQ, "v": VOCAB, "h": 1, "n": 1}
    w.compute("embed", 0, "embedding", ["ids", "table"], ["x"], sizes=sizes, total=sizes)
    w.compute("flat", 0, "row_sum", ["x"], ["s"], sizes=sizes, total=sizes)
    w.compute("total", 0, "total", ["s"], ["loss"], sizes=sizes, attrs={"factor": 1 / (BATCH * SEQ)})
    w.compute("one", 0, "fill", (), ["one"], attrs={"value": 1.0})
    w.compute("ds", 0, "total.dx", ["one"], ["ds"], sizes=sizes, attrs={"factor": 1 / (BATCH * SEQ), "b": rows, "s": SEQ})
    w.compute("dx", 0, "row_sum.dx", ["ds"], ["dx"], sizes=sizes, attrs={"n": 1})
    w.compute("g", 0, "embedding.dtable", ["ids", "dx"], ["g"], sizes=sizes, total=sizes, attrs={"v": VOCAB})
    w.compute("norm", 0, "fill", (), ["norm"], clock="step", attrs={"value": 0.0})
    w.compute("step", 0, "sgd", ["g", "norm"], (), updates=("table", "m"), clock="step", attrs={"lr": 0.5, "momentum": 0.0})
    w.actor("report", 0, "out", _store(), "step", reads=("loss",))
    return w.program(seq=SEQ, batch=BATCH)


def _store():
    from ir.work import Work

    return Work("store", "loss", "float64")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "program.json"
    path.write_text(lookup().dumps())
    return path


def test_it_prints_one_document(saved, capsys, tmp_path):
    assert main([str(saved), "--steps", "4", "--json", "--timeline", str(tmp_path / "measured.json")]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert list(result)[:2] == ["schema_version", "kind"]
    assert result["steps"] == 4
    assert result["loss"][0] == 1.0
    assert all(a > b for a, b in zip(result["loss"], result["loss"][1:], strict=False))
    assert {"step_s", "predicted_step_s", "verified", "overlap", "messages"} <= set(result)
    assert "step 4/4" in err
    assert json.loads((tmp_path / "measured.json").read_text())["kind"] == "timeline"


def test_resuming_goes_on(saved, capsys, tmp_path):
    def losses(*more):
        assert main([str(saved), "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["loss"]

    whole = losses("--steps", "5")
    first = losses("--steps", "2", "--checkpoint", str(tmp_path / "state"))
    second = losses("--steps", "3", "--resume", str(tmp_path / "state"))
    assert np.allclose(first + second, whole, rtol=1e-14)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), ("", "is no JSON"), ('{"kind": "plan"}', "is no program"), ('{"kind": "program", "schema_version": 99}', "schema version 99")],
)
def test_bad_programs_are_refused_with_2(tmp_path, capsys, content, message):
    path = tmp_path / "program.json"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, message in err, "Traceback" in err) == ("", True, False)


def test_bad_options_are_refused_and_nothing_is_half_written(saved, capsys, tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\0" * 100)
    assert main([str(saved), "--data", str(binary)]) == 2
    (tmp_path / "latin").write_bytes(b"caf\xe9" * 10)
    assert main([str(saved), "--data", str(tmp_path / "latin")]) == 2
    assert "holds the byte 233, the model's vocabulary has 128 entries" in capsys.readouterr().err
    assert main([str(saved), "--steps", "0"]) == 2
    assert main([str(saved), "--steps", "1", "--timeline", str(tmp_path / "no" / "where.json")]) == 2
    assert main([str(saved), "--resume", str(tmp_path)]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["binary", "latin", "program.json"]
    assert "Traceback" not in capsys.readouterr().err


def test_only_numpy_and_networkx_are_needed(saved):
    """A process in which every other third party is missing performs the program."""
    code = f"""
import sys
allowed = set(sys.stdlib_module_names) | {{"executor", "ir", "numpy", "networkx"}}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed and not name.startswith("_"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from executor.cli import main
sys.exit(main([{str(saved)!r}, "--steps", "2", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2


def test_a_missing_gpu_is_told(saved, capsys):
    pytest.importorskip("cupy")
    from executor.backends import open_backend
    from ir.errors import ExecutionError

    try:
        open_backend("cupy")
    except ExecutionError:
        assert main([str(saved), "--backend", "cupy"]) == 1
        assert "found no GPU here" in capsys.readouterr().err


def test_ctrl_c_gives_a_valid_partial_result_and_130(saved):
    command = [sys.executable, "-m", "executor.cli", str(saved), "--steps", "10000000", "--json"]
    # where the tests themselves run in the background, children inherit that SIGINT is ignored
    heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    result = json.loads(out)
    assert result["interrupted"] is True
    assert result["steps"] == len(result["loss"]) >= 3
    assert "Traceback" not in err

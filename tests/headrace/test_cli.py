"""What the command does around a verb: where it prints, how it ends."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from headrace.answer import Answer
from headrace.cli import main
from headrace.progress import Progress
from headrace.tables import Table, draw_plain, render
from ir.errors import DoesNotFit, InputError

TABLE = Table("sizes [of things]", ("name", ">n"), (("[red]a[/red]", "1"), ("longer", "22")))


def pretend(monkeypatch: pytest.MonkeyPatch, do: object) -> None:
    """Lets `headrace models` do something else."""
    monkeypatch.setitem(sys.modules, "headrace.commands.models", types.SimpleNamespace(answer=do))


def test_json_is_one_document_and_progress_goes_to_standard_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def do(args: object, progress: Progress) -> Answer:
        progress("counting", 1, 2)
        return Answer({"schema_version": 1, "x": [1]}, (TABLE,), 4, "it does not fit")

    pretend(monkeypatch, do)
    assert main(["models", "--json"]) == 4
    out, err = capsys.readouterr()
    assert json.loads(out) == {"schema_version": 1, "x": [1]}
    assert err == "counting (1 of 2)\nheadrace: it does not fit\n"


def test_tables_go_to_standard_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, lambda args, progress: Answer({}, ("a line", TABLE)))
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "a line" in out
    assert "[red]a[/red]" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("error", "exit_code", "says"),
    [(InputError("no such thing"), 2, "no such thing"), (DoesNotFit("too big"), 4, "too big"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_an_error_is_one_sentence(
    error: BaseException, exit_code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    def do(args: object, progress: Progress) -> Answer:
        raise error

    pretend(monkeypatch, do)
    assert main(["models", "--json"]) == exit_code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"headrace: {says}\n")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def do(args: object, progress: Progress) -> Answer:
        raise ZeroDivisionError

    pretend(monkeypatch, do)
    with pytest.raises(ZeroDivisionError):
        main(["models"])


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_is_quiet(options: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "headrace", "models", *options], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("headrace 0.")


def test_a_table_without_rich_has_the_same_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rich = render([TABLE])
    monkeypatch.setitem(sys.modules, "rich.box", None)
    plain = render([TABLE])
    assert plain == draw_plain(TABLE)
    for text in (with_rich, plain):
        assert all(cell in text for row in (*TABLE.rows, (TABLE.title,)) for cell in row)


def test_a_narrow_terminal_folds_and_keeps_every_letter() -> None:
    text = render([Table("", ("what",), (("abcdefghij" * 3,),))], width=20)
    assert "".join(text.split()).removeprefix("what").strip("─") == "abcdefghij" * 3


def test_documents_start_with_their_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert next(iter(document)) == "schema_version"
    assert "gpt2" in [m["name"] for m in document["models"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_rewrites_its_line_on_a_terminal_and_leaves_nothing() -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    progress("one", 1, 2)
    progress("two")
    progress.close()
    assert terminal.getvalue() == "\r\x1b[2Kone (1 of 2)\r\x1b[2Ktwo\r\x1b[2K"


def test_progress_elsewhere_is_a_line_now_and_then() -> None:
    log = io.StringIO()
    progress = Progress(log, every_s=3600.0)
    for i in range(100):
        progress("step", i, 100)
    progress.close()
    assert log.getvalue() == "step (0 of 100)\n"

"""The README's commands and its Python are run."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from headrace.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def commands() -> list[str]:
    return [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]


def test_it_opens_with_the_two_commands() -> None:
    first = README.split("```")[1]
    assert [line.split("#")[0].strip() for line in first.strip().splitlines()] == ["make demo", "make test"]


def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(commands()) >= 7
    for command in commands():
        words = shlex.split(command)
        assert words[0] == "headrace"
        assert main(words[1:]) == 0, f"{command}\n{capsys.readouterr().err}"


def test_its_python_runs() -> None:
    for block in blocks("python"):
        test = doctest.DocTestParser().get_doctest(block, {}, "README.md", "README.md", 0)
        runner = doctest.DocTestRunner()
        runner.run(test)
        assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)\)", README))
def test_its_links_lead_somewhere(path: str) -> None:
    assert (Path(__file__).parent.parent / path).exists()


def test_its_table_names_the_folders() -> None:
    for name in re.findall(r"^\| `(\w+)/` \|", README, flags=re.M):
        assert (Path(__file__).parent.parent / name).is_dir(), name

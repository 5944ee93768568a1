"""Documents are read with clear errors and written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.documents import dumps, read_json, read_kind, write_json
from ir.errors import InputError


def test_what_is_written_is_read(tmp_path: Path) -> None:
    document = {"schema_version": 1, "kind": "plan", "x": [1.5, None, "ü"], "y": {"a": (1, 2)}}
    write_json(tmp_path / "d.json", document)
    assert read_kind(tmp_path / "d.json", "plan") == {**document, "y": {"a": [1, 2]}}
    assert os.listdir(tmp_path) == ["d.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "d.json", {"old": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        write_json(tmp_path / "d.json", {"new": 2})
    assert read_json(tmp_path / "d.json") == {"old": 1}
    assert os.listdir(tmp_path) == ["d.json"]


def test_a_failed_dump_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "d.json", {"a": object()})
    assert os.listdir(tmp_path) == []


def test_writing_keeps_to_the_umask(tmp_path: Path) -> None:
    write_json(tmp_path / "d.json", {})
    assert (tmp_path / "d.json").stat().st_mode & 0o777 == 0o644 or os.umask(os.umask(0)) != 0o022


def test_a_device_is_written_to() -> None:
    write_json("/dev/null", {"a": 1})
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b'{"a": 1', "cut off"),
        (b'{"a": [1, 2', "cut off"),
        (b'{"a": "b', "line 1"),
        (b'{"a": 1,}', "line 1, column 9"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"[1]", "JSON list"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": ' + b"[" * 100_000, "no usable JSON"),
    ],
)
def test_a_bad_document_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "d.json").write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        read_json(tmp_path / "d.json")
    assert "d.json" in str(caught.value)


def test_a_missing_file_offers_its_neighbours(tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", {})
    with pytest.raises(InputError, match=r"did you mean plan\.json\?"):
        read_json(tmp_path / "pln.json")
    with pytest.raises(InputError, match="folder"):
        read_json(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_json(tmp_path)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "c.json", {"kind": "cluster"})
    with pytest.raises(InputError, match="is a cluster; a plan or a program was expected"):
        read_kind(tmp_path / "c.json", "plan", "program")


@pytest.mark.parametrize("name", ["nowhere/d.json", ".", "/proc/nothing.json"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"cannot be written|is a folder"):
        write_json(tmp_path / name, {})
    assert os.listdir(tmp_path) == []


def test_numbers_that_are_not_finite_become_null() -> None:
    assert json.loads(dumps({"a": float("nan"), "b": [float("inf"), 1.0]})) == {"a": None, "b": [None, 1.0]}

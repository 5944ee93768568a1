"""Timelines on disk: each with its program, so that it can be read, compared and drawn without anything else."""

from __future__ import annotations

import os
from typing import Any

from headrace.documents import read_kind, write_json
from ir.errors import InputError
from ir.program import Program
from ir.timeline import Timeline


def write_timeline(path: str, timeline: Timeline, program: Program) -> None:
    """One file with both; about as large again as the timeline of two steps."""
    write_json(path, {**timeline.to_json(), "program": program.to_json()})


def read_timeline(path: str | os.PathLike[str]) -> tuple[Timeline, Program]:
    """Reads `write_timeline`; InputError or ProgramError where it is damaged."""
    data: dict[str, Any] = read_kind(path, "timeline")
    if "program" not in data:
        raise InputError(f"`{os.fspath(path)}` holds a timeline without its program; `headrace simulate --timeline` and `headrace run --timeline` write both")
    try:
        return Timeline.from_json(data), Program.from_json(data["program"])
    except InputError as error:
        raise InputError(f"`{os.fspath(path)}`: {error}") from error

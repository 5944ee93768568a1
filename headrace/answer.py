"""What a command found: the document for `--json`, the tables for people, the exit code, and what it has to complain about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.tables import Shown


@dataclass(frozen=True, slots=True)
class Answer:
    document: Mapping[str, Any]
    shown: tuple[Shown, ...]
    exit_code: int = 0
    complaint: str = ""

"""The verb `validate`: predictions against measured runs."""

from __future__ import annotations

import os
from typing import Any

from planner.recipes import validate as recipes
from planner.recipes.rows import read_runs


def validate(runs: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The keys `rows` and `families` of a table of measured runs, of the bundled ones where none is given. Raises InputError where it cannot be read."""
    return recipes.validate(read_runs(runs) if runs else recipes.bundled_entries())

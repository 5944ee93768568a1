"""What can be wrong, by the noun that is wrong.

Every message says what was asked, what was found and what to do, with names and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class HeadraceError(Exception):
    """Base of every error that a user can cause; the command prints it without a traceback."""

    exit_code = 2


class InputError(HeadraceError):
    """A file, an option or a name that cannot be used as given."""


class SbpError(HeadraceError):
    """A placement that does not parse, or that a tensor cannot take."""


class GraphError(HeadraceError):
    """A model graph that is not well formed."""


class ClusterError(HeadraceError):
    """A cluster that is not well formed, not connected or not big enough."""


class PlanError(HeadraceError):
    """A plan that does not belong to this graph and cluster, or a value in it that is not legal."""


class DoesNotFit(HeadraceError):
    """Nothing in the searched space fits into device memory. `nearest`: the plans that lack least; `ways_out`: sentences on what would make room."""

    exit_code = 4

    def __init__(self, message: str, nearest: Sequence[Any] = (), ways_out: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.nearest, self.ways_out = tuple(nearest), tuple(ways_out)


class ProgramError(HeadraceError):
    """A program that breaks its own rules: a register with two writers, an order that misses a firing."""


class Deadlock(ProgramError):
    """A program, or a run of one, in which nothing can ever run again; the message is the cycle."""


class ExecutionError(HeadraceError):
    """A run that cannot start here, or a rank that failed while running."""

    exit_code = 1

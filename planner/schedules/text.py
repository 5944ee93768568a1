"""Orders as text: PyTorch's CSV, one line a rank, one action a cell, with or without the messages between the ranks."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

from ir.errors import PlanError
from planner.schedules.slot import KINDS, Orders, Slot

MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""Send and receive of a stage's output, send and receive of the gradient of its input."""
OTHERS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""What PyTorch's runtime lists besides: parameters gathered, freed and their gradients reduced."""
_ACTION = re.compile(r"(\d+)(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B|[FIWB])(\d*)")
_PAIR = re.compile(r"\((.*)\)(OVERLAP_F_B|OV)")


class Message(NamedTuple):
    """A send or receive of a stage, or another action beside its passes; prints and reads back as `2SEND_F0`, `1UNSHARD` (`microbatch` is -1)."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"


Table = tuple[tuple[Slot | Message, ...], ...]
"""What every rank does, passes and messages, in its order."""


def parse(cell: str) -> tuple[Slot | Message, ...]:
    """The actions of one cell: one, none where it is empty, or a forward and a backward that run side by side.

    >>> parse("3RECV_F1"), parse(""), parse("(0F7;7B3)OVERLAP_F_B")
    ((Message(stage=3, kind='RECV_F', microbatch=1),), (), (Slot(stage=0, kind='F', microbatch=7), Slot(stage=7, kind='B', microbatch=3)))
    """
    cell = cell.strip()
    pair = _PAIR.fullmatch(cell)
    if pair:
        return tuple(action for part in pair[1].split(";") for action in parse(part))
    if not cell:
        return ()
    match = _ACTION.fullmatch(cell)
    if match is None or not (match[3] or match[2] in OTHERS):
        raise PlanError(f"`{cell}` is no action; write stage, one of {', '.join((*KINDS, *MESSAGES))}, and microbatch, as in 2F0")
    stage, microbatch = int(match[1]), int(match[3] or -1)
    return (Slot(stage, match[2], microbatch),) if match[2] in KINDS else (Message(stage, match[2], microbatch),)


def read(text: str) -> Table:
    """Reads a table; PlanError with line and cell where it cannot.

    >>> read("0F0,0B0\\n1F0,,1B0\\n")[1]
    (Slot(stage=1, kind='F', microbatch=0), Slot(stage=1, kind='B', microbatch=0))
    """
    rows = []
    for number, cells in enumerate(csv.reader(io.StringIO(text)), 1):
        try:
            rows.append(tuple(action for cell in cells for action in parse(cell)))
        except PlanError as error:
            raise PlanError(f"line {number}: {error}") from None
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise PlanError("the table has no action; give one line a rank, as in `0F0,0F1,0B0,0B1`")
    return tuple(rows)


def write(table: Sequence[Sequence[Slot | Message]]) -> str:
    """The table as text; `read` gives it back.

    >>> write(read("0F0,0B0\\n1F0,,1B0"))
    '0F0,0B0\\n1F0,1B0\\n'
    """
    return "".join(",".join(map(str, row)) + "\n" for row in table)


def passes(table: Table) -> Orders:
    """The table without its messages."""
    return tuple(tuple(a for a in row if isinstance(a, Slot)) for row in table)

"""What the command shows people: tables and lines, drawn by rich where it is installed and plainly where it is not."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under column heads; a head that starts with `>` is of a column of numbers, set flush right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Shown = Table | str


def render(items: Iterable[Shown], width: int = 100, colour: bool = False) -> str:
    """The text of all items, in order; ends with a line end."""
    return "".join(item.rstrip("\n") + "\n" if isinstance(item, str) else _draw(item, width, colour) for item in items)


def show(items: Iterable[Shown], file: TextIO | None = None) -> None:
    """Prints the items as wide as the terminal; a file or a pipe gets wide rows and no colour."""
    out = sys.stdout if file is None else file
    tty = out.isatty()
    out.write(render(items, shutil.get_terminal_size().columns if tty else 160, tty))
    out.flush()


def _draw(table: Table, width: int, colour: bool) -> str:
    try:
        import rich.box
        import rich.console
        import rich.table
        import rich.text
    except ImportError:
        return draw_plain(table)
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for head in table.columns:
        drawn.add_column(rich.text.Text(head.lstrip(">")), justify="right" if head.startswith(">") else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(rich.text.Text, row))
    text = io.StringIO()
    rich.console.Console(file=text, width=width, force_terminal=colour, color_system="auto" if colour else None).print(drawn)
    # rich would fold a title to the width of its table
    title = [table.title] if table.title else []
    return "\n".join(title + [line.rstrip() for line in text.getvalue().splitlines()]) + "\n"


def draw_plain(table: Table) -> str:
    """The table in columns, without rich.

    >>> print(draw_plain(Table("sizes", ("name", ">n"), (("a", "1"), ("longer", "22")))), end="")
    sizes
    name     n
    a        1
    longer  22
    """
    lines = [tuple(head.lstrip(">") for head in table.columns), *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    right = [head.startswith(">") for head in table.columns]
    body = ["  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)).rstrip() for line in lines]
    return "\n".join(([table.title] if table.title else []) + body) + "\n"

"""How a long command says on standard error where it is: a line that rewrites itself on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO


class Progress:
    """Called with (what is being done, how many are done, of how many); silent when `quiet`."""

    def __init__(self, file: TextIO | None = None, quiet: bool = False) -> None:
        self.file = sys.stderr if file is None else file
        self.quiet = quiet
        self.last = ""
        self.open = False

    def __call__(self, what: str, done: int = 0, of: int = 0) -> None:
        if self.quiet:
            return
        if self.file.isatty():
            count = f" {done}/{of}" if of else ""
            self.file.write(f"\r\x1b[2K{what}{count}")
            self.open = True
        elif what != self.last:
            self.file.write(f"{what}\n")
        self.last = what
        self.file.flush()

    def close(self) -> None:
        """Clears the line that rewrites itself, so that nothing of it stays on the terminal."""
        if self.open:
            self.file.write("\r\x1b[2K")
            self.file.flush()
            self.open = False

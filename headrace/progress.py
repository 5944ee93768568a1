"""How a long command says on standard error where it is: a line that rewrites itself on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Called with (what is being done, how many are done, of how many)."""

    def __init__(self, file: TextIO | None = None, every_s: float = 1.0) -> None:
        self.file = sys.stderr if file is None else file
        self.every_s = every_s
        self.next_s = 0.0
        self.open = False

    def __call__(self, what: str, done: int = 0, of: int = 0) -> None:
        line = f"{what} ({done} of {of})" if of else what
        if self.file.isatty():
            self.file.write(f"\r\x1b[2K{line}")
            self.open = True
        elif time.monotonic() >= self.next_s:
            self.file.write(f"{line}\n")
            self.next_s = time.monotonic() + self.every_s
        self.file.flush()

    def close(self) -> None:
        """Clears the line that rewrites itself, so that nothing of it stays on the terminal."""
        if self.open:
            self.file.write("\r\x1b[2K")
            self.file.flush()
            self.open = False

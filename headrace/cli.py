"""The command `headrace`: parses, runs one verb, prints its answer, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence

from headrace.answer import Answer
from headrace.documents import dumps
from headrace.options import parse
from headrace.progress import Progress
from headrace.tables import show
from ir.errors import HeadraceError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """One call of the command; returns its exit code: 0 done, 2 wrong input, 3 tight (`--strict`), 4 does not fit, 130 interrupted, 1 a run that failed."""
    progress = Progress()
    gc.set_threshold(100_000, 20, 20)  # a search holds many values that live long: looking at them all again and again takes a quarter of its time
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        # the verb's module is the first to import numpy and what lies above it: `--help` stays quick
        answer: Answer = importlib.import_module(f"headrace.commands.{args.verb}").answer(args, progress)
        progress.close()
        return _print(answer, args.json)
    except HeadraceError as error:
        progress.close()
        print(f"headrace: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        progress.close()
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED


def _print(answer: Answer, as_json: bool) -> int:
    try:
        if as_json:
            print(dumps(answer.document), flush=True)
        else:
            show(answer.shown)
    except BrokenPipeError:
        # the reader has enough; nothing may be flushed into the closed pipe at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if answer.complaint:
        print(f"headrace: {answer.complaint}", file=sys.stderr)
    return answer.exit_code


if __name__ == "__main__":
    sys.exit(main())

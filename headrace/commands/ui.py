"""`headrace ui`: the page in a browser."""

from __future__ import annotations

import importlib
from argparse import Namespace

from headrace.answer import Answer
from headrace.documents import SCHEMA_VERSION
from headrace.progress import Progress


def answer(args: Namespace, progress: Progress) -> Answer:
    url = f"http://127.0.0.1:{args.port}"
    progress(f"serving {url}; Ctrl-C ends it")
    progress.close()
    # by name: the page stands above the face, which therefore cannot import it
    exit_code = importlib.import_module("ui.launch").serve(args.port, args.headless)
    return Answer({"schema_version": SCHEMA_VERSION, "kind": "ui", "url": url}, (), exit_code)

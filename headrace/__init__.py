"""The face of headrace: `import headrace as hr; hr.plan("gpt2", "4x8xH100-SXM", batch=512, seq=1024)`.

The verbs: `load` a model, `load_cluster`, `plan`, `lower` a plan to a program, `simulate`, `explain`, `run`, `diff` two timelines, `measure` this machine,
`calibrate` a cluster, `validate` predictions by measured runs.
Each is imported when it is first used, so that `import headrace` costs nothing and a saved program runs where scipy is not installed.

In processing order: `options` (what the command takes), `progress`, `documents` and `timelines` (files), `local` (this machine), `planning`, `running`,
`calibration` and `validation` (the verbs), `prediction` (what a simulation foretells), `layouts` and `tables` (for people), `answer`, `commands/` (one a
verb), `cli`; `demo`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "load": "planning", "load_cluster": "planning", "plan": "planning", "lower": "planning", "simulate": "planning", "explain": "planning",
    "run": "running", "diff": "running", "measure": "running", "lower_single": "planning", "calibrate": "calibration", "validate": "validation",
}  # fmt: skip

__all__ = ["calibrate", "diff", "explain", "load", "load_cluster", "lower", "measure", "plan", "run", "simulate", "validate"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"headrace has no `{name}`; its verbs are {', '.join(__all__)}")
    return getattr(importlib.import_module(f"headrace.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

"""The bundled figures of GPUs, machines, NICs and collectives, each with its source: `simulator/profiles/*.json`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ir.errors import InputError


@lru_cache(maxsize=8)
def bundled(name: str) -> Mapping[str, Any]:
    """The document `simulator/profiles/NAME.json`.

    >>> bundled("nodes")["nodes"]["dgx-h100"]["gpu"]
    'H100-SXM'
    """
    document: Mapping[str, Any] = json.loads((files("simulator") / "profiles" / f"{name}.json").read_text("utf-8"))
    return document


def gpu_names() -> tuple[str, ...]:
    """The GPUs that a shorthand may name."""
    return tuple(bundled("gpus")["gpus"])


def machine_names() -> tuple[str, ...]:
    """The machines that a cluster may name."""
    return tuple(bundled("nodes")["nodes"])


def gpu_profile(name: str) -> tuple[str, Mapping[str, Any]]:
    """(canonical name, profile) of a GPU; InputError with near names where there is none.

    >>> gpu_profile("h100")[0], gpu_profile("A100-40GB")[0]
    ('H100-SXM', 'A100-SXM-40GB')
    """
    gpus = bundled("gpus")["gpus"]
    known = {alias.lower(): canonical for canonical, g in gpus.items() for alias in (canonical, *g["aliases"])}
    canonical = known.get(name.lower())
    if canonical is None:
        raise InputError(f"no GPU `{name}` is known{near(name, [a for c, g in gpus.items() for a in (c, *g['aliases'])])}; all: {', '.join(gpus)}")
    return canonical, gpus[canonical]


def curves(gpu: str, nic: tuple[str, float, int] | None = None) -> list[Mapping[str, Any]]:
    """Measured collective curves of a GPU: kind, group shape, rows of (nbytes, seconds). Those over nodes are of one kind, rate and number of NICs."""
    fitting = [c for c in bundled("collectives")["curves"] if gpu in c["gpus"] and (c["num_nodes"] == 1 or tuple(c["nic"]) == nic)]
    return [{k: v for k, v in curve.items() if k not in ("gpus", "nic")} for curve in fitting]


def near(name: str, names: Iterable[str]) -> str:
    """`; near: ...`, or nothing where no name is near."""
    spelled = {n.lower(): n for n in names}
    found = difflib.get_close_matches(name.lower(), spelled, n=3, cutoff=0.5)
    return f"; near: {', '.join(spelled[f] for f in found)}" if found else ""

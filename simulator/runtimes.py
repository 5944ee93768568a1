"""Runtime profiles as they are written: one file a framework's release in `profiles/runtimes`, some saying only in what they differ from another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

OWN = "headrace"
"""The profile of this project's own runtime, whose plans are simulated."""


@cache
def documents() -> Mapping[str, Mapping[str, Any]]:
    """Every bundled profile by the name of its file, in order of name."""
    folder = resources.files("simulator").joinpath("profiles", "runtimes")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return {f.name.removesuffix(".json"): json.loads(f.read_text("utf-8")) for f in files}


def facts(name: str) -> Mapping[str, Any]:
    """What a profile says, with what it takes over from the one that it is `like`; the tables `moved` and `slower` are taken over key by key.

    >>> facts("headrace")["slower"]["gemm"]
    1.76
    """
    own = dict(documents()[name])
    base = facts(own.pop("like")) if "like" in own else {}
    tables = {key: {**base.get(key, {}), **own.get(key, {})} for key in ("moved", "slower")}
    return {**base, **own, **tables}

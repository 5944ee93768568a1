"""Models by name. `zoo.json` holds for each where its figures come from and its config in the keys of Hugging Face, read as a user's config is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from planner.frontends.huggingface import changes, parse
from planner.frontends.model import Model


def zoo_names() -> tuple[str, ...]:
    """Every name that `load` knows, families together, small models before large ones.

    >>> "gpt2" in zoo_names(), "llama-3-8b" in zoo_names()
    (True, True)
    """
    return tuple(_entries())


def config_of(name: str) -> Mapping[str, Any]:
    """The config of a zoo model in the keys of Hugging Face; KeyError where there is none."""
    config: Mapping[str, Any] = _entries()[name]["config"]
    return config


def from_zoo(name: str, overrides: Mapping[str, Any] | None = None) -> Model:
    """The zoo's model of this name; KeyError where there is none. With `overrides` the name says which."""
    full = name + changes(overrides or {})
    return Model(full, parse(config_of(name), f"zoo model `{name}`", overrides), _entries()[name]["source"], full)


@cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    text = resources.files("planner.frontends").joinpath("zoo.json").read_text(encoding="utf-8")
    entries: dict[str, Mapping[str, Any]] = json.loads(text)
    return entries

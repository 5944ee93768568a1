"""Hugging Face configs, as `config.json` holds them, of the families whose graph headrace can build (`planner.frontends.families`).

Nothing is fetched and no code of a config is run. A key that changes the computation and that headrace does not build is refused by name; a size that is
missing is refused too, while other missing keys take the defaults of `transformers` (5.24, `configuration_<family>.py`).
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ir.errors import InputError
from planner.frontends.config import ModelConfig
from planner.frontends.families import FAMILIES
from planner.frontends.keys import Keys
from planner.frontends.model import Model

MAX_NBYTES = 1 << 22
"""A config is a few kilobytes; a longer file is something else."""

OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "DoubleHeadsModel")


def read(path: Path, overrides: Mapping[str, Any] | None = None) -> Model:
    """The model of a `config.json` or of the folder that holds one; its name is that of the folder, or of the file where it is called otherwise.

    Raises InputError when the file is missing, empty, not JSON, or describes what headrace does not build.
    """
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise InputError(f"folder `{path}` holds no config.json; a Hugging Face model folder has one: download it there, or name the config file itself")
    config = parse(load_json(file), f"`{file}`", overrides)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    suffix = changes(overrides or {})
    return Model(("_".join(name.split()) or "config") + suffix, config, str(file), str(file.resolve()) + suffix)


def load_json(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file; InputError naming the file and the place where it breaks."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_NBYTES + 1)
        text = raw.decode("utf-8-sig")
        data = json.loads(text) if text.strip() and len(raw) <= MAX_NBYTES else None
    except OSError as error:
        raise InputError(f"cannot read `{file}`: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"`{file}` is no text file (byte {error.start} is not UTF-8); give a Hugging Face config.json") from error
    except json.JSONDecodeError as error:
        raise InputError(f"`{file}` is no valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; is it cut off? Download it again") from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"`{file}` is no config.json: {error}") from error
    if len(raw) > MAX_NBYTES:
        raise InputError(f"`{file}` has more than {MAX_NBYTES} bytes; a config.json has a few thousand: give the config, not the weights")
    if not text.strip():
        raise InputError(f"`{file}` is empty; give a Hugging Face config.json")
    if not isinstance(data, dict):
        raise InputError(f"`{file}` holds a JSON {type(data).__name__}, not an object; a config.json starts with {{")
    return data


def parse(data: Mapping[str, Any], where: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config in a `config.json` object, with `overrides` of single values, named as ModelConfig or as the config names them.

    `where` names the origin in messages. Raises InputError; see the module.
    """
    family = data.get("model_type")
    try:
        _refuse_foreign(data)
        if not isinstance(family, str) or family not in FAMILIES:
            raise InputError(_unknown_family(family))
        of = FAMILIES[family]
        return of.read(Keys({**data, **_translated(overrides or {}, of.keys, data)}, family)).check()
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def changes(overrides: Mapping[str, Any]) -> str:
    """How overrides stand behind a model's name; `parse_changes` reads it back.

    >>> changes({"num_layers": 2, "tied": True}), parse_changes("num_layers=2,tied=true")
    ('[num_layers=2,tied=true]', {'num_layers': 2, 'tied': True})
    """
    return f"[{','.join(f'{k}={json.dumps(v)}' for k, v in overrides.items())}]" if overrides else ""


def parse_changes(text: str) -> dict[str, Any]:
    """The overrides in `num_layers=2,tied=true`; values are JSON, or plain words."""
    out: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not name or not value:
            raise InputError(f"`{part}` in `[{text}]` is no override; write [num_layers=2,hidden=256]")
        try:
            out[name] = json.loads(value)
        except json.JSONDecodeError:
            out[name] = value
    return out


def _unknown_family(family: Any) -> str:
    known = ", ".join(FAMILIES)
    if family is None:
        return f"no `model_type`; is this a model's config.json? Known types are {known}"
    near = difflib.get_close_matches(str(family), FAMILIES, n=1)
    return f"model_type {reprlib.repr(family)} is not known; known are {known}" + (f"; did you mean {near[0]}?" if near else "")


def _refuse_foreign(data: Mapping[str, Any]) -> None:
    """What makes the described model another one than its `model_type` says."""
    if data.get("auto_map"):
        raise InputError(
            "`auto_map` names code that comes with the model; headrace never runs code from a config, and cannot know what that code computes. "
            "Take the key out if the model is the plain one of its `model_type`"
        )
    if data.get("quantization_config"):
        raise InputError("`quantization_config` describes quantized weights, which are not trained as they are; take the key out to plan the unquantized model")
    kinds = data.get("layer_types") or []
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")] if isinstance(kinds, list) else [kinds]
    if unknown:
        raise InputError(
            f"`layer_types` has {reprlib.repr(unknown[0])}; headrace builds layers of full_attention, and of sliding_attention within their window"
        )
    architectures = data.get("architectures") or ()
    names = [a for a in architectures if isinstance(a, str)] if isinstance(architectures, list | tuple) else []
    foreign = [a for a in names if a.endswith(OTHER_HEADS)]
    if foreign:
        raise InputError(f"architecture {foreign[0]} ends in another head than the one that headrace builds: next or masked tokens, or the class of an image")


def _translated(overrides: Mapping[str, Any], keys: Mapping[str, str], data: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides under the names of the family's config."""
    out: dict[str, Any] = {}
    for name, value in overrides.items():
        key = keys.get(name, name)
        if name not in keys and key not in keys.values():
            near = difflib.get_close_matches(name, keys, n=3)
            raise InputError(f"`{name}` cannot be overridden" + (f"; near: {', '.join(near)}" if near else f"; these can: {', '.join(keys)}"))
        out[key] = value
    if "rope_theta" in out and isinstance(data.get("rope_parameters"), dict):
        out["rope_parameters"] = {**data["rope_parameters"], "rope_theta": out["rope_theta"]}
    return out

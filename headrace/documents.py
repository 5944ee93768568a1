"""The JSON documents that the command reads and writes: read with clear errors, written whole or not at all."""

from __future__ import annotations

import difflib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ir.errors import InputError

SCHEMA_VERSION = 1


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The document at `path`; raises InputError when it is missing, empty, no text, cut off, no JSON object, or holds NaN or Infinity."""
    name = os.fspath(path)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"`{name}` is not there{_near_files(name)}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"`{name}` is no JSON document: byte {error.start} is not UTF-8 text") from error
    except OSError as error:
        raise InputError(f"`{name}` cannot be read: {error.strerror}") from error
    if not text.strip():
        raise InputError(f"`{name}` is empty; a JSON document was expected")
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        cut = "; the file seems to be cut off" if error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated") else ""
        raise InputError(f"`{name}` is no JSON document: line {error.lineno}, column {error.colno}: {error.msg}{cut}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"`{name}` is no usable JSON document: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"`{name}` holds a JSON {type(data).__name__}; an object was expected")
    return data


def read_kind(path: str | os.PathLike[str], *kinds: str) -> dict[str, Any]:
    """The document at `path`, which must be of one of these kinds (`plan`, `program`, `cluster`, `timeline`)."""
    if "plan" in kinds and not Path(path).suffix and not Path(path).exists():
        raise InputError(f"`{os.fspath(path)}` is no file; the file of a plan is asked for, which `headrace plan MODEL CLUSTER -o plan.json` writes")
    data = read_json(path)
    if data.get("kind") not in kinds:
        found = f"a {data['kind']}" if isinstance(data.get("kind"), str) else "no document of headrace"
        raise InputError(f"`{os.fspath(path)}` is {found}; a {' or a '.join(kinds)} was expected")
    return data


def check_writable(path: str | os.PathLike[str] | None) -> None:
    """Raises InputError when nothing could be written to `path`; asked before long work, so that its result is not lost."""
    if path is None:
        return
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        raise InputError(f"`{target}` is a folder; give a file to write to")
    if not folder.is_dir():
        raise InputError(f"`{target}` cannot be written: the folder `{folder}` does not exist")
    if not os.access(target if target.exists() and not target.is_file() else folder, os.W_OK):
        raise InputError(f"`{target}` cannot be written: no permission in `{folder}`")
    if target.is_file() and not os.access(target, os.W_OK):
        raise InputError(f"`{target}` cannot be overwritten: no permission")


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Writes the whole document or leaves `path` as it was. One line a top-level key, so that plans can be compared with `diff`."""
    write_text(path, dumps(document) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file beside `path`, then renames it over `path`; a pipe or a device is written to directly."""
    check_writable(path)
    target = Path(path)
    scratch = ""
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        handle, scratch = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o666 & ~_umask())
        os.replace(scratch, target)
    except OSError as error:
        raise InputError(f"`{target}` cannot be written: {error.strerror}") from error
    finally:
        if scratch:
            Path(scratch).unlink(missing_ok=True)


def dumps(document: Mapping[str, Any]) -> str:
    """JSON text; the same document gives the same bytes. Not finite numbers are written as null.

    >>> print(dumps({"a": [1, 2], "b": {"c": float("inf")}}))
    {
      "a": [1, 2],
      "b": {"c": null}
    }
    """
    body = ",\n".join(f"  {json.dumps(key)}: {json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)}" for key, value in document.items())
    return "{\n" + body + "\n}"


def near(word: str, names: Any) -> str:
    """The sentence that offers the names nearest to a wrong word, or nothing.

    >>> near("gtp2", ["gpt2", "bert-base"])
    '; did you mean gpt2?'
    """
    found = difflib.get_close_matches(word, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _near_files(name: str) -> str:
    folder = Path(name).parent
    return near(Path(name).name, sorted(p.name for p in folder.iterdir())) if folder.is_dir() else f": the folder `{folder}` does not exist"


def _refuse_constant(text: str) -> float:
    raise ValueError(f"it holds {text}, which is no finite number")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

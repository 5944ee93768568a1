"""State on disk, one .npy a logical tensor and a manifest written last; it loads under any plan, since it knows no ranks.

DIR/manifest.json names the folder of the newest complete state (DIR/step-000020/) and the file, shape and dtype of every tensor in it. A state is written
into a folder of its own and the manifest is replaced by a rename at the end, so whoever stops the writer at any moment finds the state before or after, whole.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from executor.buffers import state_names
from executor.train import Run
from ir.errors import InputError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`tensors` by logical name, whole; `step`: how many steps they have seen; `meta`: what the program said of itself (model, batch, seed)."""

    step: int
    tensors: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]


def save(run: Run, folder: str | Path, **meta: Any) -> Path:
    """Writes the state at the end of a run; returns its folder. InputError when the run was stopped within a step, or nothing can be written."""
    if run.interrupted:
        raise InputError("the run was stopped within a step, its state belongs to none; the checkpoint before it stays")
    return write(folder, Checkpoint(run.first_step + run.steps, {name: run.tensor(name) for name in state_names(run.program)}, meta))


def write(folder: str | Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint, then removes the states that it replaces."""
    root = Path(folder)
    final = _free_name(root, checkpoint.step)
    draft = root / f".{final.name}.{os.getpid()}"
    try:
        draft.mkdir(parents=True)
        entries = {name: _write_tensor(draft, name, value) for name, value in checkpoint.tensors.items()}
        draft.rename(final)
        manifest = {
            "schema_version": SCHEMA_VERSION, "kind": "checkpoint", "step": checkpoint.step, "folder": final.name, "tensors": entries,
            "meta": dict(checkpoint.meta),
        }  # fmt: skip
        temporary = root / f".{MANIFEST}.{os.getpid()}"
        _write_whole(temporary, json.dumps(manifest, indent=1).encode())
        temporary.replace(root / MANIFEST)
    except OSError as error:
        raise InputError(f"cannot write a checkpoint to {root}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for old in root.glob("step-*"):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def load(folder: str | Path) -> Checkpoint:
    """The newest complete state in a folder. Raises InputError naming what is missing or damaged."""
    root = Path(folder)
    path = root / MANIFEST
    if not path.is_file():
        raise InputError(f"{root} holds no checkpoint (no {MANIFEST}); give the folder that --checkpoint wrote")
    try:
        manifest = json.loads(path.read_text())
        if manifest["kind"] != "checkpoint" or manifest["schema_version"] != SCHEMA_VERSION:
            found = f"{manifest['kind']} of version {manifest['schema_version']}"
            raise InputError(f"{path} is a {found}; this headrace reads checkpoints of version {SCHEMA_VERSION}")
        tensors = {name: _read_tensor(root / manifest["folder"] / entry["file"], entry, name) for name, entry in manifest["tensors"].items()}
        return Checkpoint(int(manifest["step"]), tensors, manifest["meta"])
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(f"the checkpoint in {root} is incomplete or damaged ({error}); use an older one") from error


def _write_tensor(folder: Path, name: str, value: np.ndarray) -> dict[str, Any]:
    file = quote(name, safe="") + ".npy"
    with (folder / file).open("wb") as out:
        np.save(out, value, allow_pickle=False)
        out.flush()
        os.fsync(out.fileno())
    return {"file": file, "shape": list(value.shape), "dtype": str(value.dtype)}


def _read_tensor(path: Path, entry: Mapping[str, Any], name: str) -> np.ndarray:
    value: np.ndarray = np.load(path, allow_pickle=False)
    if list(value.shape) != entry["shape"] or str(value.dtype) != entry["dtype"]:
        raise ValueError(f"tensor `{name}` is {value.dtype} {value.shape} in {path.name}, the manifest says {entry['dtype']} {entry['shape']}")
    return value


def _free_name(root: Path, step: int) -> Path:
    """A folder that does not exist yet, so that a state is never written over one that the manifest may name."""
    names = itertools.chain([f"step-{step:06d}"], (f"step-{step:06d}.{i}" for i in itertools.count(1)))
    return next(root / name for name in names if not (root / name).exists())


def _write_whole(path: Path, content: bytes) -> None:
    with path.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())

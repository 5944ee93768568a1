"""State on disk, one .npy a logical tensor and a manifest written last; it loads under any plan, since it knows no ranks.

DIR/manifest.json names the folder of the newest complete state (DIR/step-000020/) and the file, shape and dtype of every tensor in it. Folder and manifest are
written beside their final names and renamed, so whoever stops the writer at any moment finds the state before or the state after, whole.
"""

from __future__ import annotations

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
    """Writes the state at the end of a run; returns the folder that holds it. Raises InputError when the run was stopped within a step, or nothing can be written."""
    if run.interrupted:
        raise InputError("the run was stopped within a step, its state belongs to none; the checkpoint before it stays")
    return write(folder, Checkpoint(run.first_step + run.steps, {name: run.tensor(name) for name in state_names(run.program)}, meta))


def write(folder: str | Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint, then removes the states that it replaces."""
    root = Path(folder)
    final = root / f"step-{checkpoint.step:06d}"
    draft = root / f".{final.name}.{os.getpid()}"
    try:
        draft.mkdir(parents=True)
        entries = {name: _write_tensor(draft, name, value) for name, value in checkpoint.tensors.items()}
        _replace_folder(draft, final)
        manifest = {
            "schema_version": SCHEMA_VERSION, "kind": "checkpoint", "step": checkpoint.step, "folder": final.name, "tensors": entries, "meta": dict(checkpoint.meta),
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
            raise InputError(f"{path} is of kind {manifest['kind']}, version {manifest['schema_version']}; this headrace reads checkpoints of version {SCHEMA_VERSION}")
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
    value = np.load(path, allow_pickle=False)
    if list(value.shape) != entry["shape"] or str(value.dtype) != entry["dtype"]:
        raise ValueError(f"tensor `{name}` is {value.dtype} {value.shape} in {path.name}, the manifest says {entry['dtype']} {entry['shape']}")
    return value


def _replace_folder(draft: Path, final: Path) -> None:
    """A state of the same step that is there already steps aside first; a folder cannot be renamed onto one that holds files."""
    if final.exists():
        aside = final.with_name(f".{final.name}.old.{os.getpid()}")
        final.rename(aside)
        draft.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        draft.rename(final)


def _write_whole(path: Path, content: bytes) -> None:
    with path.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())

"""What somebody asks on the page, and what the verbs of headrace answer: no Streamlit here."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, TypeVar

import headrace as hr
from headrace.options import fix as parse_fix
from headrace.prediction import Prediction
from ir.cluster import Cluster
from ir.errors import HeadraceError, InputError
from ir.plan import Plan
from planner.frontends.model import Model
from planner.search import Result

Loaded = TypeVar("Loaded")

FEW_RANKS = 8
"""Up to so many ranks are simulated one by one: some seconds for a model of a hundred layers."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that was handed in: its name and its bytes."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Question:
    """Which plans for `model` on `cluster` (each as text, like on the command line, or as a file)? `fix` as `--fix` takes it; None means headrace's default."""

    model: str | Upload
    cluster: str | Upload
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    fix: str = ""
    top: int = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """The plans found, fastest first, with what they are for."""

    model: Model
    cluster: Cluster
    result: Result

    def foretell(self, index: int) -> Prediction:
        """The simulation of plan `index`: of every rank where they are few, else of the first of each stage, which stands for the others."""
        plan = self.result.plans[index]
        ranks = None if plan.num_ranks <= FEW_RANKS else [s.ranks[0] for s in plan.stages]
        told: Prediction = hr.simulate(plan, self.cluster, self.model, ranks=ranks)
        return told

    def entries(self) -> list[dict[str, Any]]:
        """The plans as `headrace plan --json` lists them."""
        return [{"rank": rank, **p.predicted, "layout": dict(p.layout)} for rank, p in enumerate(self.result.plans, 1)]


def answer(question: Question, progress: Callable[..., None]) -> Answer:
    """Loads, searches; raises HeadraceError (its message is for people) when the question has no answer."""
    fixed = _fixed(question.fix)
    model = _with_path(question.model, hr.load)
    cluster = _with_path(question.cluster, lambda text: hr.load_cluster(text, progress))
    result = hr.plan(model, cluster, batch=question.batch, seq=question.seq, dtype=question.dtype, fix=fixed, top=question.top, progress=progress)
    return Answer(model, cluster, replace(result, plans=tuple(_named(p, question) for p in result.plans)))


def _named(plan: Plan, question: Question) -> Plan:
    """The plan calling its model and cluster as the user does: what was handed in by the name of its file, not by where it lay for a moment."""
    model = _safe(question.model.name) if isinstance(question.model, Upload) else plan.model
    return replace(plan, model=model, cluster=_safe(question.cluster.name) if isinstance(question.cluster, Upload) else question.cluster)


def _fixed(text: str) -> Mapping[str, str | int]:
    if not text.strip():
        return {}
    try:
        return parse_fix(text)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"fixed axes: {error}") from error


def _with_path(given: str | Upload, load: Callable[[str], Loaded]) -> Loaded:
    """What `load` makes of the text, or of a file with the upload's name and bytes that lies there as long as it is read."""
    if isinstance(given, str):
        return load(given)
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        path = Path(folder) / _safe(given.name)
        path.write_bytes(given.content)
        try:
            return load(str(path))
        except HeadraceError as error:
            raise type(error)(str(error).replace(str(path), path.name)) from error


def _safe(name: str) -> str:
    return PurePath(name.replace("\\", "/")).name or "upload.json"

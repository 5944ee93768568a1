"""Predictions against measurements: every row of a table, its family's errors, how many lie in their band.

>>> report = validate(bundled_entries()[:3])
>>> len(report["rows"]), report["rows"][0]["id"], report["families"][0]["n"]
(3, 'vtrain-m-2', 3)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from ir.errors import HeadraceError
from ir.units import GIB
from planner.recipes import memory
from planner.recipes.estimate import Estimate, Estimator, Priced, told
from planner.recipes.rows import Entry, read_runs
from planner.recipes.run import Run
from planner.recipes.study import fits, fitted

TABLES = ("runs.csv", "one_node.csv", "frameworks.csv")
"""The bundled runs: `simulator/profiles/published`."""


def bundled_entries() -> tuple[Entry, ...]:
    """The rows of all bundled tables."""
    folder = resources.files("simulator").joinpath("profiles", "published")
    return tuple(e for name in TABLES for e in read_runs(str(folder.joinpath(name))))


def validate(entries: Sequence[Entry], estimator: Estimator | None = None) -> dict[str, Any]:
    """The keys `rows` and `families` of COMMAND `validate`."""
    priced = (estimator or Estimator()).price(entries)
    return report(entries, priced)


def report(entries: Sequence[Entry], priced: Priced) -> dict[str, Any]:
    """`validate` of rows that are priced already."""
    rows = [_row(e, priced, found) for e, found in zip(entries, priced.found, strict=True)]
    families = dict.fromkeys(row["family"] for row in rows)
    return {"rows": rows, "families": [_family(f, [row for row in rows if row["family"] == f]) for f in families]}


def estimates(priced: Priced, learned: Mapping[str, Any] | None = None) -> list[Estimate]:
    """Of every priced run; by what was `learned` in place of the bundled fits."""
    return [told(fitted(run, learned), priced.bill.take(np.array([i]))) for i, run in enumerate(priced.runs)]


def _row(e: Entry, priced: Priced, at: int | str) -> dict[str, Any]:
    nothing = {"measured": None, "predicted": None, "error": None, "band": None, "memory_measured_gb": None, "memory_predicted_gb": None}
    run = e.run
    known = {"measured": run.measured_s, "memory_measured_gb": run.memory_gib} | _memory(run) if run is not None else {}
    out = {"id": e.id, "family": e.family, "covered": isinstance(at, int), **nothing, **known}
    if isinstance(at, str) or run is None:
        return {**out, "reason": at}
    found = told(fitted(run), priced.bill.take(np.array([at])))
    error = found.step_s / run.measured_s - 1 if run.measured_s else None
    band = {"low_s": found.low_s, "high_s": found.high_s, "basis": found.basis}
    return {**out, "predicted": found.step_s, "error": error, "band": band, "assumed": list(run.assumed), "flag": run.flag}


def _memory(run: Run) -> dict[str, Any]:
    """The predicted peak in GiB and whether it fits; nothing where the ledger does not know the release, the GPU or the schedule."""
    try:
        found = memory.ledger(run)
    except HeadraceError:
        return {}
    return {"memory_predicted_gb": found.peak_bytes / GIB, "fits": found.fits, "memory_by_class": dict(found.by_class)}


def _family(family: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    told_rows = [r for r in rows if r["error"] is not None]
    off = np.abs([r["error"] for r in told_rows])
    inside = [r["band"]["low_s"] <= r["measured"] <= r["band"]["high_s"] for r in told_rows]
    held = [abs(r["memory_predicted_gb"] / r["memory_measured_gb"] - 1) for r in rows if r["memory_predicted_gb"] and r["memory_measured_gb"]]
    return {
        "family": family, "n": len(rows), "covered": sum(bool(r["covered"]) for r in rows), "mape": float(off.mean()) if len(off) else None,
        "median_ape": float(np.median(off)) if len(off) else None, "worst": max((r["error"] for r in told_rows), key=abs, default=None),
        "spearman": spearman([r["predicted"] for r in told_rows], [r["measured"] for r in told_rows]),
        "memory_mape": float(np.mean(held)) if held else None, "in_band": float(np.mean(inside)) if inside else None,
        "left_out": fits()["families"].get(family, {}).get("parts", {}).get("all"),
    }  # fmt: skip


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of ranks, ties sharing theirs; None for fewer than three pairs.

    >>> round(spearman([1.0, 2.0, 3.0, 4.0], [10.0, 30.0, 20.0, 40.0]), 3)
    0.8
    """
    if len(a) < 3:
        return None
    x, y = _ranks(np.asarray(a)), _ranks(np.asarray(b))
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum() / scale) if scale else None


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = ((ends - counts + ends - 1) / 2)[inverse]
    return ranks

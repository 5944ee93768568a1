"""The part of the accuracy page on memory: how near the ledgers come to measured peaks, and what was fitted for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ir.units import GIB
from planner.recipes.memory import ledger
from planner.recipes.run import Run
from planner.recipes.states import Holding, holding_of, holdings

SHORT = 0.9
"""A card with this share of the measured peak: what ran does not fit it."""

HEAD = """## Memory

A ledger counts what a rank holds, tensor by tensor (`planner/recipes/memory.py`): what its parameters need, what its layers keep for each microbatch in flight,
logits, what is gathered. The figures in *fitted* are all that was fitted to these peaks, at most four for a release; everything else is counted or from the
source. Errors in percent of the measured peak, mean / median / worst. *Left out*: mean / nine of ten / worst of rows that the fitted figures had not seen
(random thirds, five draws; `benchmarks/fit_ledgers.py`; without the row whose peak is a misprint and rows that do not say their microbatch). A run fits
(*yes*) where the peak and its band stay below what the GPU offers, *no* where they stay above, and is *tight* between; so also where the microbatch size had
to be assumed.
"""


def memory_part(runs: Sequence[Run]) -> str:
    """Tables of releases and of answers."""
    measured = [r for r in runs if r.memory_gib]
    rows = ["| release | rows | error | left out | band | bytes a parameter | fitted | source |", "|---|---|---|---|---|---|---|---|"]
    for h in holdings():
        mine = [r for r in measured if holding_of(r.release) is h]
        per_param = f"{h.param:g} + {h.grad:g} + {h.state:g}"
        told = ", ".join(f"{name} {getattr(h, name):g}" for name in h.fitted) or "-"
        errors, left = _three(_errors(mine, h)) if mine else "-", " / ".join(f"{x:g}" for x in h.left_out) or "-"
        rows.append(f"| {', '.join(h.releases)} | {len(mine)} | {errors} | {left} | {100 * h.band:.0f} | {per_param} | {told} | {h.source} |")
    return HEAD + "\n" + "\n".join(rows) + "\n\n" + _answers(measured)


def _errors(runs: Sequence[Run], held: Holding) -> list[float]:
    return [ledger(r, held).peak_bytes / GIB / (r.memory_gib or 1.0) - 1 for r in runs]


def _three(errors: Sequence[float]) -> str:
    off = 100 * np.abs(errors)
    return f"{off.mean():.1f} / {np.median(off):.1f} / {100 * max(errors, key=abs):+.0f}"


def _answers(runs: Sequence[Run]) -> str:
    rows = ["| card | yes | tight | no |", "|---|---|---|---|"]
    for what, share in (("as it was", 0.0), ("a tenth smaller than the measured peak", SHORT)):
        told = [ledger(r, usable_bytes=share * GIB * (r.memory_gib or 0.0) if share else None).fits for r in runs]
        rows.append(f"| {what} | {told.count('yes')} | {told.count('tight')} | {told.count('no')} |")
    return f"Whether each of {len(runs)} measured runs fits:\n\n" + "\n".join(rows)

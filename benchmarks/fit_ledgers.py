"""Fits the figures that `simulator/profiles/ledgers.json` calls fitted to the peaks of the bundled runs, and says how they carry over.

    python -m benchmarks.fit_ledgers

For each release: the fit (soft L1 of log errors), and errors of rows left out: random thirds, five draws, runs that differ in their batch alone together.
What it writes is `left_out` of each entry: [mean, 90 % quantile, worst] in percent; the figures themselves are printed, to be rounded by hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from ir.units import GIB
from planner.recipes.memory import ledger
from planner.recipes.run import Run
from planner.recipes.states import Holding, holding_of, holdings
from planner.recipes.validate import bundled_entries

PATH = Path(__file__).resolve().parents[1] / "simulator" / "profiles" / "ledgers.json"
MOST = 60.0
DRAWS = 5


def errors(runs: Sequence[Run], held: Holding) -> np.ndarray:
    return np.array([ledger(r, held).peak_bytes / GIB / (r.memory_gib or 1.0) - 1 for r in runs])


def fit(runs: Sequence[Run], held: Holding) -> Holding:
    """The fitted figures of an entry, fitted again to these runs, from where they are."""

    def of(x: np.ndarray) -> Holding:
        return replace(held, **dict(zip(held.fitted, map(float, x), strict=True)))

    start = np.array([getattr(held, name) for name in held.fitted])
    found = least_squares(lambda x: np.log1p(errors(runs, of(x))), start, bounds=(0.0, MOST), loss="soft_l1", f_scale=0.05)
    return of(found.x)


def left_out(runs: Sequence[Run], held: Holding) -> np.ndarray:
    """Errors of runs that the fit did not see."""
    same = [str((r.model, r.tp, r.pp, r.dp, r.cp, r.mbs, r.vpp, r.schedule, r.seq, r.memory_gib)) for r in runs]
    found: list[float] = []
    for draw in range(DRAWS):
        names = sorted(set(same))
        third = dict(zip(names, np.random.default_rng(draw).integers(0, 3, len(names)), strict=True))
        for k in range(3):
            seen = [r for r, key in zip(runs, same, strict=True) if third[key] != k]
            fresh = [r for r, key in zip(runs, same, strict=True) if third[key] == k]
            if seen and fresh:
                found += list(errors(fresh, fit(seen, held)))
    return np.abs(found)


def main() -> None:
    document = json.loads(PATH.read_text("utf-8"))
    measured = [e.run for e in bundled_entries() if e.run is not None and e.run.memory_gib]
    for held, entry in zip(holdings(), document["ledgers"], strict=True):
        runs = [r for r in measured if holding_of(r.release) is held and not r.flag.startswith("memory") and not any("microbatch size" in a for a in r.assumed)]
        entry.pop("left_out", None)
        if not held.fitted or not runs:
            continue
        again, off = fit(runs, held), 100 * left_out(runs, held)
        entry["left_out"] = [round(float(x), 1) for x in (off.mean(), np.quantile(off, 0.9), off.max())]
        print(held.releases, len(runs), {name: round(getattr(again, name), 2) for name in held.fitted}, "left out", entry["left_out"])
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in document["ledgers"])
    PATH.write_text(f'{{"schema_version": 1,\n "default": {json.dumps(document["default"])},\n "ledgers": [\n{lines}\n ]}}\n', "utf-8")


if __name__ == "__main__":
    main()

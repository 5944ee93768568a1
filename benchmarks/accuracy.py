"""Fits the shares of every GPU, release and machine to the bundled runs, and writes `simulator/profiles/fits.json` and `docs/accuracy.md`.

python -m benchmarks.accuracy [--fits-only | --thirds SEED...]

`--thirds` writes nothing: a third of every family is taken away, all is learned anew from the rest, and what was taken away is predicted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from planner.recipes.estimate import Estimator, Priced
from planner.recipes.learn import learn
from planner.recipes.study import fits
from planner.recipes.validate import bundled_entries, estimates

ROOT = Path(__file__).resolve().parents[1]


def third(priced: Priced, seed: int) -> None:
    """Prints the errors of a random third of each family by what was learned without it, and how many lie in their band."""
    rng, family = np.random.default_rng(seed), np.array([run.family for run in priced.runs])
    taken = np.concatenate([rng.permutation(np.flatnonzero(family == name))[: sum(family == name) // 3] for name in dict.fromkeys(family)])

    def some(which: np.ndarray) -> Priced:
        return Priced(tuple(priced.runs[i] for i in which), priced.bill.take(which), tuple(range(len(which))))

    learned, left = learn(some(np.setdiff1d(np.arange(len(family)), taken))), some(taken)
    measured = np.array([run.measured_s for run in left.runs], float)
    found = estimates(left, learned)
    off = np.array([e.step_s for e in found]) / measured - 1
    inside = np.array([e.low_s <= s <= e.high_s for e, s in zip(found, measured, strict=True)])
    own = np.array([e.basis.startswith("cross-validated") for e in found])
    width = np.array([0.5 * (e.high_s - e.low_s) / e.step_s for e in found])
    held = []
    for name in dict.fromkeys(family):
        mine = family[taken] == name
        held.append(inside[mine].mean())
        mean, median, worst = np.abs(off[mine]).mean(), np.median(np.abs(off[mine])), off[mine][np.abs(off[mine]).argmax()]
        print(f"  {name:24} {sum(mine):4} runs, off by {100 * mean:.1f} / {100 * median:.1f} / {100 * worst:+.0f} %, {100 * held[-1]:.0f} % in band")
    print(f"seed {seed}: {100 * np.mean(held):.0f} % in their band averaged over families, at least {100 * min(held):.0f} %; median half-width "
          f"{100 * np.median(width[own]):.1f} % by own runs, {100 * np.median(width[~own]):.1f} % by the class ({sum(~own)} runs)")  # fmt: skip


def main() -> None:
    began = time.process_time()
    priced = Estimator().price(bundled_entries())
    reasons = [why for why in priced.found if isinstance(why, str)]
    print(f"{len(priced.runs)} runs priced, {len(reasons)} left out: {time.process_time() - began:.1f} CPU seconds", *reasons[:5], sep="\n  ")
    if "--thirds" in sys.argv:
        for seed in sys.argv[sys.argv.index("--thirds") + 1 :]:
            third(priced, int(seed))
        return
    document = learn(priced, lambda what: print(f"  {what}: {time.process_time() - began:.1f} s", file=sys.stderr))
    (ROOT / "simulator" / "profiles" / "fits.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    fits.cache_clear()
    if "--fits-only" not in sys.argv:
        from planner.recipes.accuracy import write

        write(ROOT / "docs", priced)


if __name__ == "__main__":
    main()

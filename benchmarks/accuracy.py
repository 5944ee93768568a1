"""Fits the shares of every GPU, release and machine to the bundled runs, and writes `simulator/profiles/fits.json` and `docs/accuracy.md`.

python -m benchmarks.accuracy [--fits-only]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from planner.recipes.estimate import Estimator
from planner.recipes.learn import learn
from planner.recipes.study import fits
from planner.recipes.validate import bundled_entries

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    began = time.process_time()
    priced = Estimator().price(bundled_entries())
    print(f"{len(priced.runs)} runs priced, {len(priced.left_out)} left out: {time.process_time() - began:.1f} CPU seconds")
    for name, reason in list(priced.left_out.items())[:5]:
        print("  ", name, reason[:120])
    document = learn(priced, lambda what: print(f"  {what}: {time.process_time() - began:.1f} s", file=sys.stderr))
    (ROOT / "simulator" / "profiles" / "fits.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    fits.cache_clear()
    if "--fits-only" not in sys.argv:
        from planner.recipes.accuracy import write

        write(ROOT / "docs", priced)


if __name__ == "__main__":
    main()

"""Any plan = one device, over every legal combination of the layouts that the parity tests cover by pairs: float64, 1e-10 relative, dropout on.

Every schedule on 2 and 4 ranks with p - 1, p, 2p and 3p + 1 microbatches first, with a GPT of six layers; then two models under every other layout: about 1,830
runs of three steps, an hour. What is done is kept in `benchmarks/results/parity.partial.jsonl`, and a later call with the same sources
goes on from there; the end writes `benchmarks/results/DATE-parity.json` and exits with 1 where a combination differs or fails.
Usage: python benchmarks/parity.py [--most N], where N runs end the call early.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the tests are not installed

from ir.errors import HeadraceError  # noqa: E402
from tests.models import BATCH  # noqa: E402
from tests.parity import DEEP, LIMIT, MODELS, STEPS, VALUES, apart, apart_in_time, pipelines, same  # noqa: E402
from tests.plans import Layout, layouts  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PARTIAL = RESULTS / "parity.partial.jsonl"
SOURCES = ("ir", "simulator", "planner", "executor", "tests/models.py", "tests/parity.py", "tests/plans.py")


def combinations() -> Iterator[tuple[str, Layout]]:
    yield from ((DEEP, want) for want in pipelines())
    yield from ((family, want) for want in layouts(VALUES, BATCH) for family in MODELS)


def row_of(family: str, want: Layout) -> dict[str, Any]:
    """One combination: how far it lies apart, or the error that it ended with."""
    row: dict[str, Any] = {"family": family, "layout": asdict(want)}
    try:
        found = apart_in_time(want) if family == DEEP else apart(family, want)
    except HeadraceError as error:
        return row | {"same": False, "error": f"{type(error).__name__}: {error}"}
    return row | {"same": same(found), **{k: found[k] for k in ("loss_max_rel", "grad_max_rel", "grad_worst")}}


def sources() -> str:
    """A fingerprint of the files that the results depend on."""
    digest = hashlib.sha256()
    for path in sorted(p for s in SOURCES for p in ([ROOT / s] if s.endswith(".py") else (ROOT / s).rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def partial(fingerprint: str) -> list[dict[str, Any]]:
    """What an earlier call with the same sources has done; a line that was cut off is done again."""
    if not PARTIAL.exists():
        return []
    head, *lines = PARTIAL.read_text("utf-8").splitlines() or [""]
    if head != json.dumps({"sources": fingerprint}):
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def perform(most: int | None) -> tuple[list[dict[str, Any]], int]:
    """(the rows that are done, how many combinations there are), after at most `most` new ones."""
    fingerprint = sources()
    rows = partial(fingerprint)
    every = list(combinations())
    RESULTS.mkdir(exist_ok=True)
    began_s, new = time.perf_counter(), every[len(rows) :][:most]
    with PARTIAL.open("w", encoding="utf-8") as file:
        for line in ({"sources": fingerprint}, *rows):
            file.write(json.dumps(line) + "\n")
        for i, (family, want) in enumerate(new, 1):
            row = row_of(family, want)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if not row["same"]:
                print(f"DIFFERS: {json.dumps(row)}", flush=True)
            if i % 20 == 0 or i == len(new):
                left_s = (time.perf_counter() - began_s) / i * (len(every) - len(rows))
                print(f"{len(rows)} of {len(every)}, {sum(not r['same'] for r in rows)} differ, {left_s / 60:.0f} min left", flush=True)
    return rows, len(every)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The document: counts, the worst of each model, and every combination that is not the same."""
    told = [r for r in rows if "error" not in r]
    worst = {
        family: {what: max((r[what] for r in told if r["family"] == family), default=0.0) for what in ("loss_max_rel", "grad_max_rel")}
        for family in (*MODELS, DEEP)
    }
    return {
        "measured_on": datetime.date.today().isoformat(), "values": VALUES, "batch": BATCH, "steps": STEPS, "dtype": "float64", "limit": LIMIT,
        "num_combinations": len(rows), "num_same": sum(r["same"] for r in rows), "worst": worst, "failures": [r for r in rows if not r["same"]],
    }  # fmt: skip


def main(most: int | None) -> int:
    rows, num_combinations = perform(most)
    document = summary(rows)
    print(f"{document['num_same']} of {len(rows)} combinations are the same within {LIMIT:g}; worst {document['worst']}")
    if len(rows) == num_combinations:
        path = RESULTS / f"{document['measured_on']}-parity.json"
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        PARTIAL.unlink()
        print(f"wrote {path.relative_to(ROOT)}")
    else:
        print(f"{num_combinations - len(rows)} are left: call again")
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, help="end after so many runs")
    sys.exit(main(parser.parse_args().most))

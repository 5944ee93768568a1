"""Any plan = one device, over every legal combination of the layouts that the parity tests cover by pairs: float64, 1e-10 relative, dropout on.

Every schedule on 2 and 4 ranks with p - 1, p, 2p and 3p + 1 microbatches first, with a GPT of six layers; then two models under every other layout: 1,864
combinations of three steps. Layouts that lead to one plan (a sequence split that is left open, schedules of one microbatch) are run once. What is done is kept
in `benchmarks/results/parity.partial.jsonl`, and a later call with the same sources
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the tests are not installed

from ir.errors import HeadraceError  # noqa: E402
from ir.plan import Plan  # noqa: E402
from planner.lower import lower  # noqa: E402
from planner.orders import orders_of, rows_of  # noqa: E402
from tests.models import BATCH  # noqa: E402
from tests.parity import COMPARED, DEEP, LIMIT, MODELS, STEPS, VALUES, between, ended, model, on_one_device, pipelines, planned, same  # noqa: E402
from tests.plans import Layout, layouts  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PARTIAL = RESULTS / "parity.partial.jsonl"
SOURCES = ("ir", "simulator", "planner", "executor", "tests/models.py", "tests/parity.py", "tests/plans.py")


def combinations() -> Iterator[tuple[str, Layout]]:
    yield from ((DEEP, want) for want in pipelines())
    yield from ((family, want) for want in layouts(VALUES, BATCH) for family in MODELS)


def row_of(family: str, want: Layout, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One combination: how far it lies apart, or the error that it ended with. `known`: what was found of each plan before."""
    row: dict[str, Any] = {"family": family, "layout": asdict(want)}
    batch = want.dp * want.num_microbatches if family == DEEP else BATCH
    try:
        plan = planned(family, want, batch=batch)
        key = key_of(plan)
        if key not in known:
            found = between(ended(lower(model(family), plan)), on_one_device(family, "adamw", batch))
            known[key] = {"same": same(found), **found}
    except HeadraceError as error:
        return row | {"same": False, "error": f"{type(error).__name__}: {error}"}
    return row | {"plan": key, **known[key]}


def key_of(plan: Plan) -> str:
    """Equal for plans that differ in the name of their schedule alone."""
    document = replace(plan, schedule="table", orders=rows_of(orders_of(plan))).to_json()
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


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
    known = {r["plan"]: {k: v for k, v in r.items() if k not in ("family", "layout", "plan")} for r in rows if "plan" in r}
    with PARTIAL.open("w", encoding="utf-8") as file:
        for line in ({"sources": fingerprint}, *rows):
            file.write(json.dumps(line) + "\n")
        for i, (family, want) in enumerate(new, 1):
            row = row_of(family, want, known)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if not row["same"]:
                print(f"DIFFERS: {json.dumps(row)}", flush=True)
            if i % 20 == 0 or i == len(new):
                left_s = (time.perf_counter() - began_s) / i * (len(every) - len(rows))
                print(
                    f"{len(rows)} of {len(every)}, {sum(not r['same'] for r in rows)} differ, {left_s / 60:.0f} min left, {time.process_time():.0f} s of CPU",
                    flush=True,
                )
    return rows, len(every)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The document: counts, the worst of each model, and every combination that is not the same."""
    told = [r for r in rows if "error" not in r]
    worst = {family: {what: max((r[what] for r in told if r["family"] == family), default=0.0) for what in COMPARED} for family in (*MODELS, DEEP)}
    return {
        "measured_on": datetime.date.today().isoformat(), "values": VALUES, "batch": BATCH, "steps": STEPS, "dtype": "float64", "limit": LIMIT,
        "num_combinations": len(rows), "num_plans": len({r["plan"] for r in told}),
        "num_same": sum(r["same"] for r in rows), "worst": worst, "failures": [r for r in rows if not r["same"]],
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

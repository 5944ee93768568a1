"""`headrace validate`: predictions against measured runs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from headrace.answer import Answer
from headrace.documents import SCHEMA_VERSION
from headrace.progress import Progress
from headrace.tables import Shown, Table
from headrace.validation import validate

SHOWN = 20
"""Runs not covered in the table; the document has all."""


def answer(args: Namespace, progress: Progress) -> Answer:
    progress(f"predicting the runs of {args.runs}" if args.runs else "predicting the bundled runs")
    found = validate(args.runs)
    document = {"schema_version": SCHEMA_VERSION, "kind": "validation", "runs": args.runs or "bundled", **found}
    return Answer(document, _shown(found))


def _shown(found: Mapping[str, Any]) -> tuple[Shown, ...]:
    columns = ("family", ">runs", ">covered", ">mean %", ">median %", ">worst %", ">rank", ">memory %", ">in band %", ">mean % left out")
    rows = tuple(_row(f) for f in found["families"])
    missing = [r for r in found["rows"] if not r["covered"]]
    head = "error of a step's predicted seconds; `left out`: of bundled runs that were predicted without having been fitted"
    more = (f"and {len(missing) - SHOWN} more",) if len(missing) > SHOWN else ()
    return (Table(head, columns, rows), _bands(found["rows"]), *(f"not covered: {r['id']}: {r['reason']}" for r in missing[:SHOWN]), *more)


def _bands(rows: Sequence[Mapping[str, Any]]) -> Table:
    """How wide the bands of a family's runs are and what they hold, by what they are drawn from."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in (row for row in rows if row["covered"]):
        alike.setdefault((row["family"], row["band"]["basis"]), []).append(row)
    lines = []
    for (family, basis), mine in alike.items():
        width = median(50 * (row["band"]["high_s"] - row["band"]["low_s"]) / row["predicted"] for row in mine)
        inside = [row["band"]["low_s"] <= row["measured"] <= row["band"]["high_s"] for row in mine if row["measured"]]
        lines.append((family, str(len(mine)), f"{width:.0f}", _percent(sum(inside) / len(inside) if inside else None), basis))
    return Table("bands: half of what lies between their ends, over the prediction", ("family", ">runs", ">half-width %", ">in band %", "basis"), tuple(lines))


def _row(f: Mapping[str, Any]) -> tuple[str, ...]:
    left = (f["left_out"] or {}).get("thirds", {}).get("mape")
    errors = (_percent(f[key]) for key in ("mape", "median_ape", "worst"))
    rest = (_number(f["spearman"], 3), _percent(f["memory_mape"]), _percent(f["in_band"]), _number(left, 1))
    return f["family"], str(f["n"]), str(f["covered"]), *errors, *rest


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

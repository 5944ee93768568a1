"""`headrace diff`: a measured timeline laid on a predicted one."""

from __future__ import annotations

import math
from argparse import Namespace

from headrace import running
from headrace.answer import Answer
from headrace.documents import SCHEMA_VERSION, check_writable, write_json
from headrace.progress import Progress
from headrace.tables import Shown, Table
from ir.timeline import Diff, trace
from ir.units import seconds

PARTS = {"compute_s": "compute", "exposed_comm_s": "exposed communication", "bubble_s": "bubble", "optimizer_s": "optimizer", "other_s": "other"}
SHOWN = 20
"""Classes in the table; the document has all."""

PHASES = {"F": "forward", "R": "forward again", "I": "input gradient", "W": "weight gradient", "U": "update"}


def answer(args: Namespace, progress: Progress) -> Answer:
    check_writable(args.trace)
    pair = running.read_pair(args.predicted, args.measured)
    found = running.diff(*pair)
    if args.trace:
        write_json(args.trace, trace(pair[:2], pair[2]))
    meta = pair[2].meta
    document = {
        "schema_version": SCHEMA_VERSION, "kind": "diff", "model": {"name": meta.get("model"), "fingerprint": meta.get("model_fingerprint")},
        "cluster": {"name": meta.get("cluster"), "fingerprint": meta.get("cluster_fingerprint")}, **found.to_json(),
    }  # fmt: skip
    return Answer(document, (*_shown(found), *((f"wrote {args.trace}",) if args.trace else ())))


def _shown(found: Diff) -> tuple[Shown, ...]:
    step = found.step
    head = f"step: predicted {seconds(step.predicted_s)}, measured {seconds(step.measured_s)}, ratio {_ratio(step.ratio)}"
    parts = tuple((PARTS.get(key, key), seconds(p), seconds(m), _ratio(m / p if p > 0 else math.nan)) for key, (p, m) in found.breakdown.items())
    classes = tuple(_row(_class(r.name), r.num_firings, r.predicted_s, r.measured_s) for r in found.classes[:SHOWN])
    rest = found.classes[SHOWN:]
    others = (_row(f"{len(rest)} others", *(sum(getattr(r, k) for r in rest) for k in ("num_firings", "predicted_s", "measured_s"))),) if rest else ()
    unjoined = found.only_predicted + found.only_measured
    return (
        head,
        Table("a step, mean over ranks", ("part", ">predicted", ">measured", ">ratio"), parts),
        Table("by actor class, summed over ranks", ("class", ">firings", ">predicted", ">measured", ">ratio"), classes + others),
        *((f"{unjoined} firings are in one of the timelines only",) if unjoined else ()),
    )


def _row(name: str, num_firings: float, predicted_s: float, measured_s: float) -> tuple[str, ...]:
    return name, f"{num_firings:g}", seconds(predicted_s), seconds(measured_s), _ratio(measured_s / predicted_s if predicted_s > 0 else math.nan)


def _class(name: str) -> str:
    operator, _, phase = name.rpartition(" ")
    return f"{operator}, {PHASES[phase]}" if phase in PHASES else name


def _ratio(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"

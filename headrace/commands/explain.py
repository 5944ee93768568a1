"""`headrace explain`: what binds a plan, what its re-shards cost, why another layout or signature loses, how another plan differs."""

from __future__ import annotations

from argparse import Namespace

from headrace import planning
from headrace.answer import Answer
from headrace.documents import SCHEMA_VERSION
from headrace.progress import Progress


def answer(args: Namespace, progress: Progress) -> Answer:
    plan = planning.read_plan(args.plan)
    progress(f"explaining the plan of {plan.model}")
    found = planning.explain(plan, why_not=args.why_not, about=args.about, against=args.against)
    document = {
        "schema_version": SCHEMA_VERSION, "kind": "explanation", "model": {"name": plan.model, "fingerprint": plan.model_fingerprint},
        "cluster": {"name": plan.cluster, "fingerprint": plan.cluster_fingerprint}, **found.document,
    }  # fmt: skip
    return Answer(document, (str(found),))

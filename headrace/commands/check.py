"""`headrace check`: that a plan is legal, fits and cannot deadlock."""

from __future__ import annotations

from argparse import Namespace

from headrace import planning
from headrace.answer import Answer
from headrace.commands.plan import exit_code_of
from headrace.documents import SCHEMA_VERSION
from headrace.layouts import FITS, describe
from headrace.progress import Progress
from ir.units import nbytes


def answer(args: Namespace, progress: Progress) -> Answer:
    plan = planning.read_plan(args.plan)
    progress(f"lowering and simulating the plan of {plan.model}")
    prediction = planning.simulate(plan, args.cluster)
    found = prediction.document()
    memory = found["memory"]
    document = {
        "schema_version": SCHEMA_VERSION, "kind": "check", "model": found["model"], "cluster": found["cluster"], "legal": True, "live": True,
        "fits": found["fits"], "ranks": plan.num_ranks, "actors": len(prediction.program.actors), "memory": memory,
    }  # fmt: skip
    lines = (
        f"{args.plan}: {plan.model} on {prediction.cluster.name}, {plan.num_ranks} ranks, {describe(plan.layout)}",
        f"legal; {len(prediction.program.actors)} actors, proved free of deadlock",
        f"memory: {FITS[found['fits']]}; rank {memory['peak_rank']} needs {nbytes(memory['peak_bytes'])} of {nbytes(memory['usable_bytes'])}",
    )
    exit_code = exit_code_of(found["fits"], args.strict)
    return Answer(document, lines, exit_code, lines[2] if exit_code else "")

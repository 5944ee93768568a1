"""`headrace lower`: the program of a plan."""

from __future__ import annotations

from argparse import Namespace

from headrace import planning
from headrace.answer import Answer
from headrace.documents import SCHEMA_VERSION, check_writable, write_text
from headrace.progress import Progress
from ir.units import nbytes
from simulator.memory import ledger


def answer(args: Namespace, progress: Progress) -> Answer:
    check_writable(args.output)
    plan = planning.read_plan(args.plan)
    progress(f"lowering the plan of {plan.model}")
    program = planning.lower(plan).check()
    write_text(args.output, program.dumps() + "\n")
    memory = ledger(program)
    held = sum(memory.total(rank) for rank in memory.ranks)
    document = {
        "schema_version": SCHEMA_VERSION, "kind": "lowered", "model": {"name": plan.model, "fingerprint": plan.model_fingerprint},
        "cluster": {"name": plan.cluster, "fingerprint": plan.cluster_fingerprint}, "program": args.output, "fingerprint": program.fingerprint,
        "ranks": len(program.ranks), "actors": len(program.actors), "registers": len(program.registers), "register_bytes": held,
    }  # fmt: skip
    size = f"{len(program.actors)} actors and {len(program.registers)} registers ({nbytes(held)}) on {len(program.ranks)} ranks"
    return Answer(document, (f"{args.output}: {size}; proved free of deadlock",))

"""`headrace simulate`: a step of a plan, foretold."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from headrace import planning
from headrace.answer import Answer
from headrace.commands.plan import TOO_BIG, too_big
from headrace.documents import check_writable, write_json
from headrace.layouts import FITS, comm_table, describe, percent
from headrace.prediction import Prediction
from headrace.progress import Progress
from headrace.tables import Shown, Table
from headrace.timelines import write_timeline
from ir.cluster import Cluster
from ir.errors import DoesNotFit
from ir.plan import Plan
from ir.units import nbytes, seconds
from planner.frontends.model import Model

PARTS = {"compute_s": "compute", "exposed_comm_s": "exposed communication", "bubble_s": "bubble", "optimizer_s": "optimizer", "other_s": "other"}


def answer(args: Namespace, progress: Progress) -> Answer:
    check_writable(args.trace)
    check_writable(args.timeline)
    model = planning.load_tuned(args.model, args.lora, args.freeze, args.moe_imbalance)
    cluster = planning.load_cluster(args.cluster, progress)
    try:
        plan = planning.read_plan(args.plan) if args.plan else _searched(args, model, cluster, progress)
    except DoesNotFit as error:
        return too_big("simulation", model, cluster, error)
    progress(f"simulating {plan.model} on {cluster.name}")
    prediction = planning.simulate(plan, cluster, model)
    if args.timeline:
        write_timeline(args.timeline, prediction.timeline, prediction.program)
    if args.trace:
        write_json(args.trace, prediction.timeline.to_perfetto(prediction.program))
    found = prediction.document()
    exit_code = TOO_BIG if found["fits"] == "no" else 0
    memory = found["memory"]
    complaint = f"it does not fit: rank {memory['peak_rank']} needs {nbytes(memory['peak_bytes'])} of {nbytes(memory['usable_bytes'])}" if exit_code else ""
    return Answer(found, _shown(prediction, found, (args.timeline, args.trace)), exit_code, complaint)


def _searched(args: Namespace, model: Model, cluster: Cluster, progress: Progress) -> Plan:
    return planning.plan(
        model, cluster, batch=args.batch, seq=args.seq, dtype=args.dtype, optimizer=args.optimizer, top=1, fix=args.fix,
        memory_fraction=args.memory_fraction, budget_s=args.budget, progress=progress, stages=args.stages,
    ).plans[0]  # fmt: skip


def _shown(prediction: Prediction, found: Mapping[str, Any], files: tuple[str | None, ...]) -> tuple[Shown, ...]:
    plan, memory = prediction.plan, found["memory"]
    head = f"{plan.model} on {prediction.cluster.name}: {describe(plan.layout)}"
    rates = f"{found['tokens_per_s_per_gpu']:.0f} tokens/s and {found['tflops_per_gpu']:.3g} TFLOP/s a device, MFU {percent(found['mfu'])}"
    speed = f"step {seconds(found['step_s'])}: {rates}"
    rows = tuple((name, seconds(found["breakdown"][key]), percent(found["breakdown"][key] / found["step_s"])) for key, name in PARTS.items())
    where = Table("where the step goes", ("", ">time", ">share"), rows)
    classes = sorted(memory["by_class"].items(), key=lambda item: -item[1])
    title = f"memory of rank {memory['peak_rank']}: {nbytes(memory['peak_bytes'])} of {nbytes(memory['usable_bytes'])}, {FITS[found['fits']]}"
    holds = Table(title, ("class", ">bytes"), tuple((name, nbytes(size)) for name, size in classes if size))
    comm = (comm_table(found["comm"]),) if found["comm"] else ()
    assumed = tuple(f"assumed: {sentence}" for sentence in prediction.cluster.assumed)
    band = found["band"]
    trust = f"four of five lie between {seconds(band['low_s'])} and {seconds(band['high_s'])}: {band['basis']}"
    used, there = plan.num_ranks, prediction.cluster.num_devices
    idle = (f"the plan uses {used} of the {there} devices",) if used < there else ()
    wrote = (f"wrote {file}" for file in files if file)
    return (head, *assumed, *idle, speed, trust, *found["advice"], where, *comm, holds, f"live peak: {memory['peak_at']}", *wrote)

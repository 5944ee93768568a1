"""`headrace plan`: the best ways to train a model on a cluster."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from headrace import planning
from headrace.answer import Answer
from headrace.documents import SCHEMA_VERSION, check_writable, write_json
from headrace.layouts import FITS, comm_table, describe, percent
from headrace.progress import Progress
from headrace.tables import Shown, Table
from ir.cluster import Cluster
from ir.errors import DoesNotFit
from ir.plan import Plan
from ir.units import count, seconds
from planner.frontends.model import Model
from planner.search import Result

TIGHT, TOO_BIG, INTERRUPTED = 3, 4, 130


def answer(args: Namespace, progress: Progress) -> Answer:
    check_writable(args.output)
    model = planning.load_tuned(args.model, args.lora, args.freeze, args.moe_imbalance)
    cluster = planning.load_cluster(args.cluster, progress)
    try:
        found = planning.plan(
            model, cluster, batch=args.batch, seq=args.seq, dtype=args.dtype, optimizer=args.optimizer, top=args.top, fix=args.fix,
            memory_fraction=args.memory_fraction, budget_s=args.budget, progress=progress, cluster_name=args.cluster, stages=args.stages,
        )  # fmt: skip
    except DoesNotFit as error:
        return too_big("plans", model, cluster, error)
    best = found.plans[0]
    if args.output:
        write_json(args.output, best.to_json())
    exit_code = INTERRUPTED if found.interrupted else exit_code_of(best.predicted["fits"], args.strict)
    return Answer(document(model, cluster, found), _shown(model, cluster, found, args.output), exit_code, _complaint(best, exit_code))


def too_big(kind: str, model: Model, cluster: Cluster, error: DoesNotFit) -> Answer:
    """The answer where nothing fits: the nearest plans, what is missing and what would make room."""
    plans = [entry(rank, plan) for rank, plan in enumerate(error.nearest, 1)]
    document = {**head(model, cluster), "kind": kind, "plans": plans, "missing": str(error), "ways_out": list(error.ways_out)}
    return Answer(document, (_table([(p["layout"], p) for p in plans]),), TOO_BIG, str(error))


def exit_code_of(fits: str, strict: bool) -> int:
    return TOO_BIG if fits == "no" else TIGHT if fits == "tight" and strict else 0


def head(model: Model, cluster: Cluster) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION, "kind": "plans", "model": {"name": model.reference or model.name, "fingerprint": model.fingerprint},
        "cluster": {"name": cluster.name, "fingerprint": cluster.fingerprint, "assumed": list(cluster.assumed)},
    }  # fmt: skip


def document(model: Model, cluster: Cluster, found: Result) -> dict[str, Any]:
    best = found.plans[0]
    return {
        **head(model, cluster), "batch": best.batch, "seq": best.seq, "dtype": best.dtype, "optimizer": dict(best.optimizer),
        "plans": [entry(rank, plan) for rank, plan in enumerate(found.plans, 1)],
        "searched": found.searched, "evaluated": found.evaluated, "pruned": found.pruned, "seconds": found.seconds, "optimal": found.optimal, "gap": found.gap,
        "interrupted": found.interrupted,
    }  # fmt: skip


def entry(rank: int, plan: Plan) -> dict[str, Any]:
    """One of the "plans" of the document."""
    stages = [{"layers": [s.first, s.last], "ranks": list(s.ranks)} for s in plan.stages]
    return {**plan.predicted, "rank": rank, "layout": dict(plan.layout), "stages": stages}


def _shown(model: Model, cluster: Cluster, found: Result, output: str | None) -> tuple[Shown, ...]:
    best = found.plans[0]
    what = f"{model.name} ({count(model.num_params)} parameters) on {cluster.name}, {cluster.num_devices} devices"
    top = f"{what}: batch {best.batch}, {best.seq} tokens, {best.dtype}"
    assumed = tuple(f"assumed: {sentence}" for sentence in cluster.assumed)
    table = _table([(p.layout, p.predicted) for p in found.plans])
    proof = "optimal in the searched space" if found.optimal else f"not proved optimal, gap at most {percent(found.gap)}"
    tail = f"{found.searched} candidates, {found.evaluated} evaluated, {found.pruned} pruned in {seconds(found.seconds)}; {proof}"
    why = f"1: {best.predicted['why']}"
    wrote = (f"wrote {output}",) if output else ()
    return (top, *assumed, table, why, *best.predicted["advice"], *((comm_table(best.predicted["comm"]),) if best.predicted.get("comm") else ()), tail, *wrote)


def _table(plans: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    rows = tuple(_row(i, layout, predicted) for i, (layout, predicted) in enumerate(plans, 1))
    return Table("", ("", "layout", ">step", ">tokens/s/device", ">TFLOP/s/device", ">MFU", ">bubble", ">peak GiB", "memory"), rows)


def _row(rank: int, layout: Mapping[str, Any], p: Mapping[str, Any]) -> tuple[str, ...]:
    speed = (seconds(p["step_s"]), f"{p['tokens_per_s_per_gpu']:.0f}", f"{p['tflops_per_gpu']:.3g}", percent(p["mfu"]), percent(p["bubble"]))
    return (str(rank), describe(layout), *speed, f"{p['peak_gib']:.3g}", FITS[p["fits"]])


def _complaint(best: Plan, exit_code: int) -> str:
    if exit_code == INTERRUPTED:
        return "interrupted: these are the best plans until then"
    if exit_code == TOO_BIG:
        return f"nothing fits: the best plan needs {best.predicted['peak_gib']:.4g} GiB on a device. {best.predicted['why']}"
    return f"fits only within the risk band: {best.predicted['peak_gib']:.4g} GiB on a device" if exit_code == TIGHT else ""

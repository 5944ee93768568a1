"""The orders of a plan: those of its schedule, or its own: a user's table, or what the search for a schedule found for its times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ir.errors import InputError, PlanError
from ir.plan import Plan
from ir.program import Program
from planner.schedules import Orders, schedule
from planner.schedules.auto import Limits, StageTimes, search_orders
from planner.schedules.proof import check_orders
from planner.schedules.slot import Slot
from planner.schedules.text import passes, read
from simulator.cost import CostModel
from simulator.estimate import pass_seconds

OWN = ("auto", "table")
"""Names of schedules whose orders stand in the plan: found for its own times, or given by the user."""


def rows_of(orders: Orders) -> tuple[str, ...]:
    """Orders as a plan holds them, one line a pipeline rank."""
    return tuple(" ".join(map(str, order)) for order in orders)


def table_fix(path: str, num_pieces: int = 1) -> dict[str, Any]:
    """What a user's table decides: `schedule`, `pp`, `vpp`, `num_microbatches` and `orders`. InputError or PlanError where it cannot be read or run.

    With sequences cut into pieces the table counts pieces.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--fix schedule={path}: the table cannot be read ({error}); write one line a rank, as in `0F0,0F1,0B0,0B1`") from error
    orders = passes(read(text))
    num_microbatches, left = divmod(1 + max(slot.microbatch for order in orders for slot in order), num_pieces)
    if left:
        raise PlanError(f"--fix schedule={path}: the table runs {num_microbatches * num_pieces + left} pieces, no multiple of seq_chunks = {num_pieces}")
    check_orders(orders, None, num_microbatches * num_pieces, pieces=num_pieces)
    num_stages, num_ranks = 1 + max(slot.stage for order in orders for slot in order), len(orders)
    if num_stages % num_ranks:
        raise PlanError(f"--fix schedule={path}: {num_stages} stages on {num_ranks} ranks; give every rank the same number of stages")
    return {"schedule": "table", "pp": num_ranks, "vpp": num_stages // num_ranks, "num_microbatches": num_microbatches, "orders": rows_of(orders)}


def rank_of(name: str, rows: tuple[str, ...], stage: int, num_ranks: int) -> int:
    """The pipeline rank that runs a stage, under a schedule of the catalogue or under orders of one's own."""
    if name == "table":
        return next(r for r, row in enumerate(rows) if f"{stage}F0" in row.split())
    return stage if name == "auto" else schedule(name).rank_of(stage, num_ranks)


def is_plain(name: str, num_chunks: int) -> bool:
    """Whether ranks run one stage each and weight gradients follow their input gradients: what closed forms of time and memory hold for."""
    return num_chunks == 1 and name not in OWN and not schedule(name).splits and schedule(name).pieces == 1


def kept(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, num_pieces: int = 0) -> float:
    """Activations, in microbatches of its whole share, that the first rank keeps at most; with orders of one's own a guess, what 1F1B keeps."""
    if name in OWN:
        return schedule("1f1b").stash(0, num_ranks, num_microbatches)
    return schedule(name, num_pieces).stash(0, num_ranks, num_microbatches, num_chunks)


def auto_orders(plan: Plan, program: Program, cost: CostModel, spare: Mapping[int, float]) -> Orders:
    """The best orders found for the stage times of `program`, which runs `plan` by another schedule with one stage a rank.

    `spare`: by first rank of a stage, how many times over the activations of one microbatch fit into its memory.
    """
    times = [pass_seconds(program, cost, ranks[0]) for ranks in plan.sites]
    sent = [(a.rank, cost.work_s(a.work, a.rank)) for a in program.actors if a.work.kind == "send"]
    hops = tuple(max((s for rank, s in sent if rank == ranks[0]), default=0.0) for ranks in plan.sites[:-1])
    f, i, w = (tuple(part) for part in zip(*times, strict=True))
    stages = StageTimes(f, i, w, hops, tuple(range(len(times))))
    limits = Limits(tuple(max(1.0, spare[ranks[0]]) for ranks in plan.sites), (1.0,) * len(times))
    return search_orders(stages, plan.num_microbatches, limits).orders


def orders_of(plan: Plan) -> Orders:
    """What each pipeline rank runs, in order."""
    if plan.orders:
        return tuple(tuple(map(Slot.parse, row.split())) for row in plan.orders)
    return schedule(plan.schedule, len(plan.pieces)).orders(len(plan.sites), plan.num_microbatches, len(plan.stages) // len(plan.sites))


def splits(plan: Plan) -> bool:
    """Whether weight gradients are held back anywhere."""
    return any(slot.kind in "IW" for order in orders_of(plan) for slot in order)


def check_schedule(plan: Plan) -> None:
    """Whether the schedule takes these sizes, and every stage lies where it is run. PlanError or Deadlock with the sentence where not."""
    sites = plan.sites
    num_chunks, left = divmod(len(plan.stages), len(sites))
    if left:
        raise PlanError(f"{len(plan.stages)} stages on {len(sites)} pipeline ranks: give every rank the same number of stages")
    if plan.orders:
        if plan.schedule not in OWN:
            raise PlanError(f"schedule `{plan.schedule}` has orders of its own; a plan that brings orders calls its schedule {' or '.join(OWN)}")
        num_pieces = max(1, len(plan.pieces))
        check_orders(orders_of(plan), lambda stage: _site_of(plan, stage), plan.num_microbatches * num_pieces, pieces=num_pieces)
        return
    chosen = schedule(plan.schedule, len(plan.pieces))
    if chosen.pieces != max(1, len(plan.pieces)):
        raise PlanError(f"schedule `{plan.schedule}` cuts sequences, and the plan does not say where; give the tokens of its pieces")
    if chosen.copies > 1:
        raise PlanError(f"schedule `{plan.schedule}` keeps every parameter {chosen.copies} times; a plan holds one copy: choose dualpipe-v, its half")
    if chosen.num_chunks(num_chunks) != num_chunks:
        raise PlanError(f"schedule `{plan.schedule}` puts {chosen.num_chunks(num_chunks)} stages on a rank; the plan puts {num_chunks}")
    chosen.legal(len(sites), plan.num_microbatches, num_chunks)
    for i, stage in enumerate(plan.stages):
        wanted = chosen.rank_of(i, len(sites))
        if stage.ranks != sites[wanted]:
            raise PlanError(f"stage {i} lies on ranks {stage.ranks}; schedule `{plan.schedule}` runs it on pipeline rank {wanted}, ranks {sites[wanted]}")


def _site_of(plan: Plan, stage: int) -> int:
    if stage >= len(plan.stages):
        raise PlanError(f"the orders run stage {stage}; the plan has {len(plan.stages)} stages, 0 to {len(plan.stages) - 1}")
    return plan.sites.index(plan.stages[stage].ranks)

"""The orders of a plan: those of its schedule, or its own table."""

from __future__ import annotations

from ir.errors import PlanError
from ir.plan import Plan
from planner.schedules import Orders, schedule
from planner.schedules.proof import check_orders
from planner.schedules.slot import Slot

OWN = ("auto", "table")
"""Names of schedules whose orders stand in the plan: found for its own times, or given by the user."""


def orders_of(plan: Plan) -> Orders:
    """What each pipeline rank runs, in order."""
    if plan.orders:
        return tuple(tuple(map(Slot.parse, row.split())) for row in plan.orders)
    return schedule(plan.schedule).orders(len(plan.sites), plan.num_microbatches, len(plan.stages) // len(plan.sites))


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
        check_orders(orders_of(plan), lambda stage: _site_of(plan, stage), plan.num_microbatches)
        return
    chosen = schedule(plan.schedule)
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

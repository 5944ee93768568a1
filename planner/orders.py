"""The orders of a plan: those of its schedule, or its own: a user's table, or what the search for a schedule found for its times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ir.errors import InputError, PlanError
from ir.plan import Plan
from planner.schedules import Orders, Schedule, schedule
from planner.schedules.own import own_schedule, size_of
from planner.schedules.slot import Slot
from planner.schedules.text import passes, read

OWN = ("auto", "table")
"""Names of schedules whose orders stand in the plan: found for its own times, or given by the user."""

STAND_IN = "zb-h1"
"""What a plan runs by until the orders of `auto` are found: its stages lie where they will."""


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
    own = own_schedule("table", orders, num_pieces)
    num_ranks, num_pieces_in_all = size_of(orders)
    return {"schedule": own.name, "pp": num_ranks, "vpp": own.num_chunks(), "num_microbatches": num_pieces_in_all // num_pieces, "orders": rows_of(orders)}


def schedule_of(name: str, rows: tuple[str, ...] = (), num_pieces: int = 0) -> Schedule:
    """The schedule of a plan, sequences cut into so many pieces (0: none, or as many as it does by itself): of the catalogue, or what its own orders spell out.

    PlanError or Deadlock where they cannot run.
    """
    if rows:
        return own_schedule(name, tuple(tuple(map(Slot.parse, row.split())) for row in rows), max(1, num_pieces))
    return schedule(name, num_pieces)


def is_plain(name: str, num_chunks: int) -> bool:
    """Whether ranks run one stage each and weight gradients follow their input gradients: what closed forms of time and memory hold for."""
    return num_chunks == 1 and name not in OWN and not schedule(name).splits and schedule(name).pieces == 1


def kept(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, num_pieces: int = 0) -> float:
    """Activations, in microbatches of its whole share, that the first rank keeps at most; with orders of one's own a guess, what 1F1B keeps."""
    if name in OWN:
        return schedule("1f1b").stash(0, num_ranks, num_microbatches)
    return schedule(name, num_pieces).stash(0, num_ranks, num_microbatches, num_chunks)


def orders_of(plan: Plan) -> Orders:
    """What each pipeline rank runs, in order."""
    return schedule_of(plan.schedule, plan.orders, len(plan.pieces)).orders(len(plan.sites), plan.num_microbatches, _num_chunks(plan))


def _num_chunks(plan: Plan) -> int:
    """Stages of one copy of the pipeline that a rank holds."""
    return len(plan.stages) // (len(plan.sites) * plan.copies)


def splits(plan: Plan) -> bool:
    """Whether weight gradients are held back anywhere."""
    return any(slot.kind in "IW" for order in orders_of(plan) for slot in order)


def firings(plan: Plan) -> int:
    """Microbatches of one copy of the pipeline: so often a step fires each pass. Every copy counts its own from 0, and takes its own part of the batch."""
    return plan.num_microbatches // plan.copies


def in_its_copy(slots: Sequence[Slot], plan: Plan) -> tuple[Slot, ...]:
    """The slots with microbatches as their copy of the pipeline counts them."""
    return tuple(slot._replace(microbatch=slot.microbatch - plan.copy_of(slot.stage) * firings(plan)) for slot in slots)


def check_schedule(plan: Plan) -> None:
    """Whether the schedule takes these sizes, and every stage lies where it is run. PlanError or Deadlock with the sentence where not."""
    if plan.orders and plan.schedule not in OWN:
        raise PlanError(f"schedule `{plan.schedule}` has orders of its own; a plan that brings orders calls its schedule {' or '.join(OWN)}")
    chosen, sites, num_chunks = schedule_of(plan.schedule, plan.orders, len(plan.pieces)), plan.sites, _num_chunks(plan)
    if num_chunks * len(sites) * plan.copies != len(plan.stages):
        raise PlanError(f"{len(plan.stages)} stages on {len(sites)} pipeline ranks: give every rank the same number of stages")
    if chosen.pieces != max(1, len(plan.pieces)):
        raise PlanError(f"schedule `{plan.schedule}` cuts sequences, and the plan does not say where; give the tokens of its pieces")
    if plan.copies != chosen.copies:
        ours, theirs = _times(plan.copies), _times(chosen.copies)
        raise PlanError(f"schedule `{plan.schedule}` runs {theirs} through the layers; the stages of the plan go {ours} through them")
    if chosen.num_chunks(num_chunks) != num_chunks:
        raise PlanError(f"schedule `{plan.schedule}` puts {chosen.num_chunks(num_chunks)} stages on a rank; the plan puts {num_chunks}")
    chosen.legal(len(sites), plan.num_microbatches, num_chunks)
    for i, stage in enumerate(plan.stages):
        wanted = chosen.rank_of(i, len(sites))
        if stage.ranks != sites[wanted]:
            raise PlanError(f"stage {i} lies on ranks {stage.ranks}; schedule `{plan.schedule}` runs it on pipeline rank {wanted}, ranks {sites[wanted]}")
    _check_parts(plan)


def _times(copies: int) -> str:
    return "once" if copies == 1 else f"{copies} times"


def _check_parts(plan: Plan) -> None:
    """Whether every copy of the pipeline takes its part of the batch, in the order of the microbatches."""
    for slot in (slot for order in orders_of(plan) for slot in order) if plan.copies > 1 else ():
        first = plan.copy_of(slot.stage) * firings(plan)
        if not first <= slot.microbatch < first + firings(plan):
            raise PlanError(
                f"{slot} runs in copy {plan.copy_of(slot.stage)} of the pipeline; of {plan.num_microbatches} microbatches it takes {first} to "
                f"{first + firings(plan) - 1}: number them so"
            )

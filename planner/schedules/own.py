"""A user's own table as a Schedule, for the one size that it is written for."""

from __future__ import annotations

from functools import lru_cache

from ir.errors import PlanError
from planner.schedules.proof import check_orders
from planner.schedules.schedule import Schedule, peak
from planner.schedules.slot import Orders
from planner.schedules.text import Table, passes


def size_of(orders: Orders) -> tuple[int, int]:
    """(ranks, microbatches) that orders are written for."""
    return len(orders), 1 + max((slot.microbatch for order in orders for slot in order), default=0)


def copies_of(orders: Orders) -> int:
    """How many pipelines run the microbatches between them: all stages over those that one microbatch goes through."""
    through: dict[int, set[int]] = {}
    for slot in (slot for order in orders for slot in order):
        through.setdefault(slot.microbatch, set()).add(slot.stage)
    num_stages, longest = len(set().union(*through.values())), max(map(len, through.values()), default=1)
    return 1 if num_stages % longest else num_stages // longest


@lru_cache(maxsize=64)
def own_schedule(name: str, table: Table, pieces: int = 1) -> Schedule:
    """The schedule that `table` spells out, proved; PlanError or Deadlock with what is wrong with it.

    Its stages lie where the table runs them. It has no closed form of its time. With `pieces` it counts the pieces of sequences.

    >>> from planner.schedules.text import read
    >>> s = own_schedule("mine", read("0F0,0F1,0B0,0B1\\n1F0,1F1,1B0,1B1\\n"))
    >>> s.num_chunks(), s.rank_of(1, 2), len(s.orders(2, 2)[0])
    (1, 1, 4)
    >>> s.orders(2, 4)
    Traceback (most recent call last):
    ir.errors.PlanError: schedule `mine` cannot run 4 microbatches on pp = 2 ranks: its table is for 2 microbatches on 2 ranks; nearest legal are 2
    """
    slots = [(slot, rank) for rank, order in enumerate(passes(table)) for slot in order]
    (num_ranks, units), copies = size_of(passes(table)), copies_of(passes(table))
    size = num_ranks, units // pieces
    if units % pieces:
        raise PlanError(f"schedule `{name}` runs {units} pieces of sequences, no multiple of {pieces} a microbatch")
    home = {slot.stage: rank for slot, rank in reversed(slots)}
    found = check_orders(table, lambda stage: home[stage], units, copies=copies, pieces=pieces)
    held = {rank: sum(r == rank for r in home.values()) for rank in range(size[0])}
    if len(set(held.values())) > 1 or held[0] % copies:
        raise PlanError(f"schedule `{name}` gives the ranks {', '.join(f'{r}: {n}' for r, n in held.items())} stages; give each rank as many")
    chunks = held[0] // copies

    def refuse(p: int, m: int, v: int) -> str:
        return "" if (p, m) == size else f"its table is for {size[1]} microbatches on {size[0]} ranks"

    def memory(rank: int, p: int, m: int, v: int) -> float:
        return peak(found[rank]) / (chunks * pieces)

    def write(p: int, m: int, v: int) -> Orders:
        return found

    def place(stage: int, p: int) -> int:
        return home[stage]

    return Schedule(name, "a user's table", write, None, memory, place, chunks, refuse, any(slot.kind == "W" for slot, _ in slots), copies, pieces)

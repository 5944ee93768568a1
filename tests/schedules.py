"""How long given orders of a pipeline take: the slow and obvious twin of every faster way."""

from __future__ import annotations

from planner.schedules import Orders, Times
from planner.schedules.slot import gives, waits_for


def longest_path(
    orders: Orders, num_stages: int, v: int = 1, times: Times | None = None, hop: float = 0.0, pieces: int = 1
) -> tuple[float, float] | None:  # fmt: skip
    """(makespan, longest time between a rank's first start and its last end) of orders, or None when they stand still.

    `times` are of a rank with v stages and of a whole microbatch, whose pieces take equally long.
    """
    t, n = times or Times(), v * pieces
    cost = {"F": t.f / n, "I": t.i / n, "W": t.w / n, "B": (t.i + t.w) / n}
    made: dict[tuple[str, int, int], tuple[float, int]] = {}
    at, clock, begin = [0] * len(orders), [0.0] * len(orders), [-1.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and all(need in made for need in waits_for(order[at[rank]], num_stages, pieces)):
                slot = order[at[rank]]
                ready = [made[need][0] + (hop if made[need][1] != rank else 0.0) for need in waits_for(slot, num_stages, pieces)]
                start = max([clock[rank], *ready])
                begin[rank] = start if begin[rank] < 0 else begin[rank]
                clock[rank] = start + cost[slot.kind]
                gift = gives(slot)
                if gift is not None:
                    made[gift] = (clock[rank], rank)
                at[rank] += 1
                moved = True
    if any(i < len(order) for i, order in zip(at, orders, strict=True)):
        return None
    return max(clock), max(c - b for c, b in zip(clock, begin, strict=True))

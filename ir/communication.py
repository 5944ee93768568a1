"""What a step communicates: one row for each mesh axis and kind of collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ir.intervals import length, minus, union
from ir.program import Actor, Program
from ir.timed import Timed, timed

if TYPE_CHECKING:
    from ir.timeline import Timeline


@dataclass(frozen=True, slots=True)
class CommRow:
    """Of a step, on the rank that spends most on it: `count` transfers of `nbytes` together take `time_s`; during `exposed_s` of it the rank computes nothing.

    `axis` is the mesh axis, `pp` for p2p between stages; `kind` the collective, or `p2p`. Waiting for the slowest member does not count.
    """

    axis: str
    kind: str
    rank: int
    count: float
    nbytes: float
    time_s: float
    exposed_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def communication(timeline: Timeline, program: Program) -> tuple[CommRow, ...]:
    """The rows of the steady steps, the one with most seconds first."""
    steady = set(timeline.steady_steps)
    groups: dict[tuple[str, str], dict[int, list[Timed]]] = {}
    kernels: dict[int, list[tuple[float, float]]] = {}
    for t in timed(timeline, program):
        if t.span.step not in steady:
            continue
        if t.is_comm:
            groups.setdefault(_group(t.actor), {}).setdefault(t.actor.rank, []).append(t)
        elif t.actor.work.kind == "compute":
            kernels.setdefault(t.actor.rank, []).append((t.span.start_s, t.span.end_s))
    rows = []
    for (axis, kind), by_rank in groups.items():
        rank = max(by_rank, key=lambda r: (sum(t.busy_s for t in by_rank[r]), -r))
        rows.append(_row(axis, kind, rank, by_rank[rank], kernels.get(rank, []), len(steady)))
    return tuple(sorted(rows, key=lambda r: (-r.time_s, r.axis, r.kind)))


def _group(actor: Actor) -> tuple[str, str]:
    if actor.work.kind != "collective":
        return "pp", "p2p"
    return actor.queue.removeprefix("comm."), actor.work.op


def _row(axis: str, kind: str, rank: int, spans: Sequence[Timed], kernels: Sequence[tuple[float, float]], num_steps: int) -> CommRow:
    exposed = length(minus(union((t.begin_s, t.span.end_s) for t in spans), union(kernels)))
    nbytes = sum(t.actor.work.nbytes for t in spans)
    return CommRow(axis, kind, rank, len(spans) / num_steps, nbytes / num_steps, sum(t.busy_s for t in spans) / num_steps, exposed / num_steps)

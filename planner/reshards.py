"""What each re-shard of a plan costs: which tensor, from where to where, over which axis, how many bytes, how long and how often in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ir.program import Actor, Program
from ir.units import nbytes, seconds
from ir.work import Work
from planner.autodiff import RECOMPUTED
from planner.words import pattern

PASSES = {"F": "forward", "R": "again in the backward", "I": "backward", "W": "weight gradient", "U": "once a step"}


class Costs(Protocol):
    """The part of `simulator.CostModel` that is asked."""

    def work_s(self, work: Work, rank: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Reshard:
    """Of all tensors that match `tensor`, on the rank that spends most: `count` times a step `nbytes` move, each time in `each_s` if nothing else runs."""

    tensor: str
    during: str
    axis: str
    kind: str
    src: str
    dst: str
    count: int
    nbytes: float
    each_s: float

    @property
    def time_s(self) -> float:
        return self.count * self.each_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "time_s": self.time_s}


def reshards(program: Program, cost: Costs) -> tuple[Reshard, ...]:
    """Every collective and every send of a step, the one with most seconds first; equal layers are one row."""
    found: dict[int, dict[tuple[Any, ...], list[Actor]]] = {}
    for a in program.actors:
        if a.work.kind in ("collective", "send"):
            key = (_tensor(program, a), PASSES[a.phase], *_way(a), a.work.nbytes)
            found.setdefault(a.rank, {}).setdefault(key, []).append(a)
    rows: dict[tuple[Any, ...], Reshard] = {}
    for rank, groups in found.items():
        for key, actors in groups.items():
            count = sum(program.num_microbatches if a.clock == "microbatch" else 1 for a in actors)
            row = Reshard(*key[:-1], count, key[-1], cost.work_s(actors[0].work, rank))
            if key not in rows or row.time_s > rows[key].time_s:
                rows[key] = row
    return tuple(sorted(rows.values(), key=lambda r: (-r.time_s, r.tensor, r.axis, r.kind, r.during)))


def _tensor(program: Program, actor: Actor) -> str:
    """The tensor as the model knows it; contributions to one cotangent are the cotangent."""
    name = program.register[(actor.reads or actor.updates)[0]].tensor.removesuffix(RECOMPUTED)
    return pattern(name.partition("@")[0])


def _way(actor: Actor) -> tuple[str, str, str, str]:
    """(axis, kind, from, to)."""
    if actor.work.kind == "send":
        return "pp", "send", "stage", "stage"
    return actor.queue.removeprefix("comm."), actor.work.op, str(actor.work.attrs.get("src", "")), str(actor.work.attrs.get("dst", ""))


def as_lines(rows: Sequence[Reshard], most: int = 20) -> list[str]:
    """For people: the dearest, and what the rest comes to."""
    lines = []
    for r in rows[:most]:
        what = f"  {r.tensor:<30} {r.during:<21} {r.axis:<5} {f'{r.src} -> {r.dst}':<12} {r.kind:<14}"
        lines.append(f"{what} {nbytes(r.nbytes):>9} x {r.count:<4} {seconds(r.each_s):>8} each, {seconds(r.time_s):>8} a step")
    if len(rows) > most:
        lines.append(f"  and {len(rows) - most} more: {seconds(sum(r.time_s for r in rows[most:]))}")
    return lines

"""The figures of a step straight from the sweep's arrays: what a Timeline of the same simulation says of it, without a span for every firing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.communication import CommRow
from ir.program import Actor, Program
from ir.timed import COMM, UPDATE
from simulator.cost import CostModel
from simulator.engine import Prices, beside, price, simulate
from simulator.sweep import Floats, compile_sweep


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of a step, of its parts (as `ir.breakdown`), and its communication (as `ir.communication`)."""

    step_s: float
    parts: Mapping[str, float]
    comm: tuple[CommRow, ...]


def figures(program: Program, cost: CostModel) -> Figures:
    """Of the second of two steps, as the Timeline of `simulate(program, cost, steps=2)` has them; from that Timeline where durations are not fixed."""
    prices = price(program, cost)
    if prices.are_fixed:
        return _Swept(program, prices).figures()
    timeline = simulate(program, cost, steps=2)
    return Figures(timeline.step_s, timeline.breakdown(program), timeline.communication(program))


def _kind(actor: Actor) -> str:
    if actor.work.kind in COMM:
        return "exposed_comm_s"
    if actor.work.kind != "compute":
        return "other_s"
    return "optimizer_s" if actor.phase == UPDATE else "compute_s"


PARTS = ("compute_s", "optimizer_s", "exposed_comm_s", "other_s")
"""In the order in which they claim a moment; what none claims is the bubble."""


class _Swept:
    """Two steps of a program with fixed prices, as arrays by firing."""

    def __init__(self, program: Program, prices: Prices) -> None:
        self.program = program
        sweep = compile_sweep(program, 2)
        if any(prices.lost):
            prices = beside(program, prices, sweep)
        self.start, self.end = sweep.times(prices.seconds, prices.added or None)
        self.actor = np.array(program.net.actor, np.intp)
        self.rank = np.array([a.rank for a in program.actors], np.intp)[self.actor]
        self.part = np.array([PARTS.index(_kind(a)) for a in program.actors], np.intp)[self.actor]

    def figures(self) -> Figures:
        window = float(self.end[0].max()), float(self.end[1].max())
        parts = np.mean([self._parts(rank, window) for rank in self.program.ranks], axis=0)
        step_s = window[1] - window[0]
        named = dict(zip(PARTS, parts.tolist(), strict=True))
        return Figures(step_s, named | {"bubble_s": step_s - float(parts.sum())}, self._comm())

    def _parts(self, rank: int, window: tuple[float, float]) -> Floats:
        """Seconds of the window that each part claims and none before it."""
        claimed = []
        for last in range(len(PARTS)):
            mine = np.flatnonzero((self.rank == rank) & (self.part <= last))
            claimed.append(covered_s(self.start[:, mine].clip(*window), self.end[:, mine].clip(*window)))
        return np.diff([0.0, *claimed])

    def _comm(self) -> tuple[CommRow, ...]:
        """For each axis and kind the rank that spends most on it, in the second step."""
        groups: dict[tuple[str, str], list[int]] = {}
        for i, a in enumerate(self.program.actors):
            if a.work.kind in COMM:
                where = (a.queue.removeprefix("comm."), a.work.op) if a.work.kind == "collective" else ("pp", "p2p")
                groups.setdefault(where, []).append(i)
        group = np.full(len(self.program.actors), -1, np.intp)
        for number, members in enumerate(groups.values()):
            group[members] = number
        group = group[self.actor]
        start, end = self.start[1], self.end[1]
        nbytes = np.array([a.work.nbytes for a in self.program.actors])[self.actor]
        rows = []
        for number, (axis, kind) in enumerate(groups):
            here = group == number
            spent: dict[int, float] = {r: float((end - start)[here & (self.rank == r)].sum()) for r in np.unique(self.rank[here]).tolist()}
            rank = max(spent, key=lambda r: (spent[r], -r))
            mine = np.flatnonzero(here & (self.rank == rank))
            kernels = np.flatnonzero((self.rank == rank) & (self.part <= 1))
            both = np.concatenate([mine, kernels])
            exposed_s = covered_s(start[both], end[both]) - covered_s(start[kernels], end[kernels])
            rows.append(CommRow(axis, kind, rank, float(len(mine)), float(nbytes[mine].sum()), spent[rank], max(0.0, exposed_s)))
        return tuple(sorted(rows, key=lambda r: (-r.time_s, r.axis, r.kind)))


def covered_s(start: Any, end: Any) -> float:
    """Seconds in any of the intervals.

    >>> covered_s(np.array([3.0, 0.0, 0.5]), np.array([4.0, 1.0, 2.0]))
    3.0
    """
    starts, ends = np.ravel(start), np.ravel(end)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    return float(np.maximum(0.0, ends - np.maximum(starts, reached)).sum())

"""A Schedule: where the stages of a pipeline lie, in which order each rank runs them, for which sizes, and what that costs in time and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ir.errors import PlanError
from planner.schedules.slot import Orders, Slot


def loop(stage: int, num_ranks: int) -> int:
    """The rank of a stage that goes round: 0 1 2 3 0 1 2 3.

    >>> [loop(s, 4) for s in range(8)]
    [0, 1, 2, 3, 0, 1, 2, 3]
    """
    return stage % num_ranks


def vee(stage: int, num_ranks: int) -> int:
    """The rank of a stage that goes down and up again: 0 1 2 3 3 2 1 0; the first and the last stage share a rank.

    >>> [vee(s, 4) for s in range(8)]
    [0, 1, 2, 3, 3, 2, 1, 0]
    """
    return stage if stage < num_ranks else 2 * num_ranks - 1 - stage


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that one rank takes for all its stages on one microbatch: forward, gradient of the inputs, gradient of the weights."""

    f: float = 1.0
    i: float = 1.0
    w: float = 1.0

    @property
    def total(self) -> float:
        return self.f + self.i + self.w


def any_size(num_ranks: int, num_microbatches: int, num_chunks: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule. All its functions take (num_ranks, num_microbatches, num_chunks); a chunk is a stage that a rank holds.

    `write` gives the orders. `time` is the closed form of a step with equal stages and free hops, from 2 * num_ranks microbatches on, where there is one;
    `memory` that of the activations a rank (first argument) keeps at most, in microbatches of its whole share, freed by W. `refuse` says what is wrong with
    sizes, or nothing.
    `chunks` is the number of stages a rank holds, None where it is free. `copies`: how often each parameter is there. `pieces`: into how many pieces of its
    sequence each microbatch is cut; slots then count pieces (`Slot`), and `cut` gives the schedule with another number of them.
    """

    name: str
    source: str
    write: Callable[[int, int, int], Orders]
    time: Callable[[int, int, int, Times], float] | None
    memory: Callable[[int, int, int, int], float]
    place: Callable[[int, int], int] = loop
    chunks: int | None = 1
    refuse: Callable[[int, int, int], str] = any_size
    splits: bool = False
    copies: int = 1
    pieces: int = 1
    cut: Callable[[int], Schedule] | None = None

    def in_pieces(self, wanted: int) -> Schedule:
        """The schedule that cuts microbatches into so many pieces, 0: as many as it does by itself; PlanError where it cuts none."""
        if wanted in (0, self.pieces):
            return self
        if self.cut is None or wanted < 1:
            raise PlanError(f"schedule `{self.name}` runs whole sequences, not {wanted} pieces of them; leave seq_chunks out, or choose seq1f1b")
        return self.cut(wanted)

    def num_chunks(self, wanted: int = 1) -> int:
        """Stages that a rank holds when `wanted` are asked for, two where the number is free and 1 is; PlanError where the schedule has another number."""
        if self.chunks is not None and wanted not in (1, self.chunks):
            raise PlanError(f"schedule `{self.name}` puts {self.chunks} stages on a rank, not {wanted}; leave vpp out or give {self.chunks}")
        if self.chunks is None and wanted < 2:
            return 2
        return self.chunks or wanted

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """The pipeline rank that holds a stage."""
        return self.place(stage, num_ranks)

    def legal(self, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
        """Raises PlanError with the nearest legal numbers of microbatches where these sizes are not legal."""
        v = self.num_chunks(num_chunks)
        if num_ranks < 1 or num_microbatches < 1:
            raise PlanError(f"schedule `{self.name}` was asked for {num_microbatches} microbatches on {num_ranks} ranks; give 1 or more of both")
        wrong = self.refuse(num_ranks, num_microbatches, v)
        if wrong:
            legal = [m for m in range(1, num_microbatches + 4 * num_ranks + 1) if not self.refuse(num_ranks, m, v)]
            near = sorted(sorted(legal, key=lambda m: abs(m - num_microbatches))[:3])
            do = f"nearest legal are {', '.join(map(str, near))}" if near else "choose another number of ranks"
            raise PlanError(f"schedule `{self.name}` cannot run {num_microbatches} microbatches on pp = {num_ranks} ranks: {wrong}; {do}")

    def orders(self, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Orders:
        """The slots of every rank; PlanError where the sizes are not legal."""
        self.legal(num_ranks, num_microbatches, num_chunks)
        return self.write(num_ranks, num_microbatches, self.num_chunks(num_chunks))

    def time_s(self, num_ranks: int, num_microbatches: int, num_chunks: int = 1, times: Times | None = None) -> float:
        """Closed form of a step's seconds; PlanError where there is none."""
        if self.time is None:
            raise PlanError(f"schedule `{self.name}` has no closed form of its time; simulate its orders")
        return self.time(num_ranks, num_microbatches, self.num_chunks(num_chunks), times or Times())

    def bubble(self, num_ranks: int, num_microbatches: int, num_chunks: int = 1, times: Times | None = None) -> float:
        """Share of the step in which a rank does nothing, by the closed form."""
        used = num_microbatches * (times or Times()).total
        return 1.0 - used / self.time_s(num_ranks, num_microbatches, num_chunks, times)

    def stash(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> float:
        """Activations that a rank keeps at most, in microbatches of its whole share, counted over its order and freed by W."""
        return peak(self.orders(num_ranks, num_microbatches, num_chunks)[rank]) / (self.num_chunks(num_chunks) * self.pieces)


def peak(order: tuple[Slot, ...], freed: str = "W") -> int:
    """The most forwards that have run and not yet been freed, by `I` or by `W` (B frees in both cases), over a rank's order.

    >>> from planner.schedules.slot import spell
    >>> order = spell([("F", 0), ("I", 0), ("F", 0), ("W", 0), ("I", 0), ("W", 0)], 2)
    >>> peak(order), peak(order, "I")
    (2, 1)
    """
    live = most = 0
    for slot in order:
        live += slot.kind == "F"
        most = max(most, live)
        live -= slot.kind in ("B", freed)
    return most

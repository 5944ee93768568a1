"""A pipeline of priced stages: how long a step of it takes under a schedule, what every rank must hold, and a bound that no simulation goes below.

A schedule that repeats is timed with few microbatches: from four rounds on, each further round adds what the last did (law: short = long).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ir.cluster import Cluster
from planner.lower import in_flight, passes_of
from planner.orders import OWN
from planner.schedules import Orders, schedule
from planner.schedules.pipe import Pipe, StageTimes
from planner.schedules.retime import retime
from planner.schedules.slot import Slot
from planner.stage_costs import Busy, Held, Life, StageCost
from simulator.estimate import pipeline_lower_bound
from simulator.memory import Ledger

ROUNDS = 4
"""Rounds of as many microbatches as ranks after which a frozen order is taken to repeat."""


class Sizes(NamedTuple):
    """(microbatches that are looked at, and as many more as there are ranks, 0 where all are looked at)."""

    first: int
    more: int


def sizes(num_ranks: int, num_microbatches: int) -> Sizes:
    """How many microbatches are looked at instead of all.

    >>> sizes(4, 24), sizes(4, 129)
    (Sizes(first=24, more=0), Sizes(first=17, more=4))
    """
    if num_microbatches <= (ROUNDS + 2) * num_ranks:
        return Sizes(num_microbatches, 0)
    return Sizes(ROUNDS * num_ranks + num_microbatches % num_ranks, num_ranks)


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one step, a bound below which no simulation of it goes, and what the busiest rank takes without waiting; what every pipeline rank's first
    device holds.
    """

    step_s: float
    floor_s: float
    busy_s: float
    memory: Ledger


@dataclass(frozen=True)
class Pipeline:
    """Stages in order, each on a pipeline rank (`rank`), whose first devices are `devices`; `hop_s[s]` lies between stages s and s + 1.

    `meets`: whether all ranks meet before the update, to clip by the norm of all gradients.
    """

    stages: tuple[StageCost, ...]
    rank: tuple[int, ...]
    hop_s: tuple[float, ...]
    devices: tuple[int, ...]
    num_microbatches: int
    meets: bool
    cluster: Cluster

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    @property
    def num_chunks(self) -> int:
        return len(self.stages) // len(self.devices)

    def times(self, splits: bool) -> StageTimes:
        """Where weight gradients are not held back, a backward is one pass, of which the next stage gets the gradient at its end."""
        f = tuple(s["F"] for s in self.stages)
        back = tuple(s["I"] if splits else self._mean_s(s, "B") for s in self.stages)
        hop = tuple(
            h + 0.5 * (one["arrival I"] + other["arrival F"]) if a != b else 0.0
            for h, one, other, a, b in zip(self.hop_s, self.stages, self.stages[1:], self.rank, self.rank[1:], strict=False)
        )
        return StageTimes(f, back, tuple(self._mean_s(s, "W") if splits else 0.0 for s in self.stages), hop, self.rank)

    def _mean_s(self, stage: StageCost, key: str) -> float:
        """Seconds of a pass that accumulates, over the microbatches of a step."""
        return stage[key] - (stage[key] - stage[f"first {key}"]) / self.num_microbatches

    def step(self, name: str, orders: Orders | None = None) -> Step:
        """Under a schedule of the catalogue, or under orders of one's own."""
        splits = any(slot.kind in "IW" for row in orders for slot in row) if orders is not None else schedule(name).splits
        step_s = self._own_s(orders, splits) if orders is not None else self._step_s(name, splits)
        busy_s = self.num_microbatches * self._by_rank("F", "B") + self._by_rank("begin", "reduce", "update")
        return Step(step_s, min(step_s, self.floor_s(name, splits)), float(busy_s.max()), self.memory(name, orders))

    # ---- time --------------------------------------------------------------------------------------------------------------------------------------

    def _step_s(self, name: str, splits: bool) -> float:
        first, more = sizes(self.num_ranks, self.num_microbatches)
        here = self._spent(name, first, splits)
        if not more:
            return here
        return here + (self.num_microbatches - first) / more * (self._spent(name, first + more, splits) - here)

    def _spent(self, name: str, num_microbatches: int, splits: bool) -> float:
        pipe = Pipe(self.times(splits), num_microbatches)
        return self._period_s(pipe, _word(name, self.num_ranks, num_microbatches, self.num_chunks))

    def _own_s(self, orders: Orders, splits: bool) -> float:
        pipe = Pipe(self.times(splits), self.num_microbatches)
        return self._period_s(pipe, pipe.word(orders))

    def _period_s(self, pipe: Pipe, word: np.ndarray) -> float:
        """Seconds from one step to the next: a rank begins the next as soon as it has done with this one, and all meet before the update."""
        _, starts = retime(pipe, word[None])
        ranks = np.arange(pipe.p)
        ends = starts[0, :, -1] + pipe.seconds[ranks, word[:, -1]]
        begin, reduce_s, update = (self._by_rank(key) for key in ("begin", "reduce", "update"))
        if self.meets:
            return float((ends + reduce_s).max() + (update + begin - starts[0, :, 0]).max())
        return float((ends + reduce_s + update + begin - starts[0, :, 0]).max())

    def _by_rank(self, *keys: str) -> np.ndarray:
        """By pipeline rank the sum of these of its stages."""
        out = np.zeros(self.num_ranks)
        np.add.at(out, list(self.rank), [sum(s[key] for key in keys) for s in self.stages])
        return out

    def floor_s(self, name: str, splits: bool) -> float:
        """The bound of `simulator.estimate`."""
        m = self.num_microbatches
        once = self._by_rank("begin", "reduce", "update")
        passes = self._by_rank("F") + (self._by_rank("first B") if not splits else np.maximum(self._by_rank("I"), self._by_rank("W")))
        queues: dict[tuple[int, str], float] = {}
        for s, rank in zip(self.stages, self.rank, strict=True):
            for key, seconds in s.items():
                if isinstance(key, Busy):
                    queues[rank, key.queue] = queues.get((rank, key.queue), 0.0) + seconds * (m if key.clock == "microbatch" else 1)
        busy = max(max(queues.values(), default=0.0), *((m * passes + once) if not splits else [0.0]))
        if self.num_chunks > 1 or splits or name in OWN:
            return float(busy)
        f, back = ([s[key] for s in self.stages] for key in ("F", "first B"))
        return max(float(busy), pipeline_lower_bound(f, back, m, hop_s=self.hop_s, once_s=[float(once[0]), *[0.0] * (len(f) - 1)]))

    # ---- memory ------------------------------------------------------------------------------------------------------------------------------------

    def memory(self, name: str, orders: Orders | None = None) -> Ledger:
        """By class; values that live within one pass share the memory of the largest."""
        held: dict[int, dict[str, float]] = {d: {} for d in self.devices}
        for s, rank in zip(self.stages, self.rank, strict=True):
            mine = held[self.devices[rank]]
            mine["activation"] = max(mine.get("activation", 0.0), s["arena"])
        for number, (s, rank) in enumerate(zip(self.stages, self.rank, strict=True)):
            mine = held[self.devices[rank]]
            for key, nbytes in s.items():
                if isinstance(key, Life) and not self._is_stacked(key):
                    mine[key.memory] = mine.get(key.memory, 0.0) + nbytes * self._slots(key, number, name, orders)
                elif isinstance(key, Held):
                    mine[key.memory] = mine.get(key.memory, 0.0) + nbytes
        for rank, device in enumerate(self.devices):
            held[device]["saved"] = held[device].get("saved", 0.0) + self._stacked(rank, name, orders)
        return Ledger(held, {}, {d: self.cluster.devices[d].usable_bytes for d in self.devices})

    def room(self, memory_fraction: float) -> tuple[float, ...]:
        """By pipeline rank how many microbatches' activations fit beside all else, 1 or more."""
        saved, other = np.zeros(self.num_ranks), np.zeros(self.num_ranks)
        for s, rank in zip(self.stages, self.rank, strict=True):
            for key, nbytes in s.items():
                if isinstance(key, Life):
                    stays = any(p != key.written for p in key.read)
                    (saved if stays else other)[rank] += nbytes * (1 if stays else 1 + key.in_transit)
                elif isinstance(key, Held):
                    other[rank] += nbytes
            other[rank] += s["arena"]
        usable = np.array([self.cluster.devices[d].usable_bytes for d in self.devices])
        with np.errstate(divide="ignore"):
            return tuple(np.maximum(1.0, (memory_fraction * usable - other) / saved).tolist())

    def _is_stacked(self, life: Life) -> bool:
        """Whether it lies in the stack of its rank; see `planner.stack`."""
        return self.num_chunks > 1 and life.computed and bool(life.later)

    def _stacked(self, rank: int, name: str, orders: Orders | None) -> float:
        """Bytes of a rank's stack: the most that lives at once over its order, counted over few microbatches, and the rest as the last ones."""
        nbytes: dict[tuple[int, str, tuple[str, ...]], float] = {}
        for number, (s, where) in enumerate(zip(self.stages, self.rank, strict=True)):
            for key, size in s.items() if where == rank else ():
                if isinstance(key, Life) and self._is_stacked(key):
                    group = (number, key.written, key.read)
                    nbytes[group] = nbytes.get(group, 0.0) + size
        if not nbytes:
            return 0.0
        groups, weights = tuple(nbytes), np.array(list(nbytes.values()))
        if orders is not None:
            return float((weights @ _alive(orders[rank], groups)).max())
        first, more = sizes(self.num_ranks, self.num_microbatches)
        here, then = (float((weights @ _most_alive(name, self.num_ranks, m, self.num_chunks, rank, groups)).max()) for m in (first, first + more))
        return here + ((self.num_microbatches - first) / more * (then - here) if more else 0.0)

    def _slots(self, life: Life, stage: int, name: str, orders: Orders | None) -> float:
        """One; as many as the order keeps where a later pass reads it; one more where a transfer fills or empties it meanwhile."""
        later, kept = life.later, 1.0
        if later and orders is not None:
            kept = in_flight(orders[self.rank[stage]], (stage, life.written), [(stage, p) for p in life.read])
        elif later:
            kept = most_kept(name, self.num_ranks, self.num_microbatches, self.num_chunks, stage, life.written, life.read)
        return min(kept + life.in_transit, self.num_microbatches)


@lru_cache(maxsize=512)
def _orders(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Orders:
    return schedule(name).orders(num_ranks, num_microbatches, num_chunks)


@lru_cache(maxsize=512)
def _word(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> np.ndarray:
    rank = tuple(schedule(name).rank_of(s, num_ranks) for s in range(num_ranks * num_chunks))
    pipe = Pipe(StageTimes.equal(num_ranks, 1.0, 1.0, 1.0, rank=rank), num_microbatches)
    return pipe.word(_orders(name, num_ranks, num_microbatches, num_chunks))


@lru_cache(maxsize=65536)
def most_kept(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, stage: int, written: str, read: tuple[str, ...]) -> float:
    """Microbatches of a stage for which pass `written` has begun and not all of `read` have ended, at most; counted over few, and the rest as the last ones."""
    first, more = sizes(num_ranks, num_microbatches)
    rank = schedule(name).rank_of(stage, num_ranks)
    passes = [(stage, p) for p in read]
    here, then = (in_flight(_orders(name, num_ranks, m, num_chunks)[rank], (stage, written), passes) for m in (first, first + more))
    return here + ((num_microbatches - first) / more * (then - here) if more else 0.0)


Group = tuple[int, str, tuple[str, ...]]
"""Values of a stage that are written in one pass and read in others."""


@lru_cache(maxsize=1024)
def _most_alive(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, rank: int, groups: tuple[Group, ...]) -> np.ndarray:
    return _alive(_orders(name, num_ranks, num_microbatches, num_chunks)[rank], groups)


def _alive(order: Sequence[Slot], groups: Sequence[Group]) -> np.ndarray:
    """[group, place of the order] the microbatches whose values of the group live there, both ends included."""
    number = {(stage, p): i for i, (stage, p) in enumerate(sorted({(stage, p) for stage, written, read in groups for p in (written, *read)}))}
    num_microbatches = 1 + max(slot.microbatch for slot in order)
    at = np.zeros((len(number), num_microbatches), dtype=np.intp)
    for place, slot in enumerate(order):
        for p in passes_of(slot):
            if p in number:
                at[number[p], slot.microbatch] = place
    out = np.zeros((len(groups), len(order) + 1))
    for i, (stage, written, read) in enumerate(groups):
        np.add.at(out[i], at[number[stage, written]], 1.0)
        np.add.at(out[i], 1 + at[[number[stage, p] for p in read]].max(axis=0), -1.0)
    alive: np.ndarray = out.cumsum(axis=1)
    return alive


def repeats(name: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether few microbatches tell the time of so many: all are looked at, or the order of a schedule comes round after as many as there are ranks."""
    return not sizes(num_ranks, num_microbatches).more or not math.fmod(num_microbatches, num_ranks) or schedule(name).chunks is not None


__all__ = ["Pipeline", "Sizes", "Step", "most_kept", "repeats", "sizes"]

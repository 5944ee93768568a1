"""A Pipe, the scheduling problem of a pipeline: seconds of every stage's passes, hops between stages, activations and how many of them a rank may hold.

>>> times = StageTimes.equal(2, f=1.0, i=1.0, w=1.0)
>>> times.rank, times.hop, Limits.units(times, 2).memory
((0, 1), (0.0,), (2.0, 2.0))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ir.errors import PlanError
from planner.schedules.slot import Orders, Slot

F, I, W = 0, 1, 2  # noqa: E741
"""Kinds of a token; the token of a rank's chunk c is 3 c + kind."""
KINDS = "FIW"
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one microbatch: forward, gradient of the input and of the weights of each stage, and `hop[s]` between stages s and s + 1, either way.

    A hop is a latency: it occupies neither rank. `rank` says where each stage lies; every rank holds the same number of stages.
    """

    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    hop: tuple[float, ...]
    rank: tuple[int, ...]

    def __post_init__(self) -> None:
        n = len(self.f)
        found = {"f": n, "i": len(self.i), "w": len(self.w), "hop": len(self.hop) + 1, "rank": len(self.rank)}
        if not n or set(found.values()) != {n}:
            raise PlanError(f"stage times disagree on the number of stages: {found} (one hop less than stages); give every stage its own")
        if min(*self.f, *self.i, *self.w, *self.hop, 0.0) < 0.0 or not np.isfinite([*self.f, *self.i, *self.w, *self.hop]).all():
            raise PlanError("stage times hold a negative or unbounded number of seconds; give 0 or more")
        held = [self.rank.count(r) for r in range(max(self.rank) + 1)]
        if len(set(held)) != 1:
            raise PlanError(f"ranks 0..{len(held) - 1} hold {held} stages; give every rank the same number")

    @classmethod
    def equal(cls, num_ranks: int, f: float, i: float, w: float, hop: float = 0.0, rank: Sequence[int] = ()) -> StageTimes:
        """The same seconds for every stage; one stage a rank, or as `rank` says. A hop within a rank costs nothing."""
        where = tuple(rank) or tuple(range(num_ranks))
        n = len(where)
        return cls((f,) * n, (i,) * n, (w,) * n, tuple(hop * (a != b) for a, b in pairwise(where)), where)

    @property
    def num_stages(self) -> int:
        return len(self.f)

    @property
    def num_ranks(self) -> int:
        return max(self.rank) + 1

    @property
    def num_chunks(self) -> int:
        return len(self.rank) // self.num_ranks


@dataclass(frozen=True, slots=True)
class Limits:
    """Units of activations: `memory` is the most that each rank may hold, `activation` what a forward of each stage leaves there.

    Of it the gradient of the input frees the share `freed_at_i`, that of the weights the rest.
    """

    memory: tuple[float, ...]
    activation: tuple[float, ...]
    freed_at_i: float = 0.0

    @classmethod
    def units(cls, times: StageTimes, memory: float, freed_at_i: float = 0.0) -> Limits:
        """Every forward leaves one unit; every rank may hold `memory` of them."""
        return cls((float(memory),) * times.num_ranks, (1.0,) * times.num_stages, freed_at_i)


class Pipe:
    """StageTimes, Limits and a number of microbatches as arrays [rank, token]; words are int8 arrays [candidate, rank, place] of tokens.

    Microbatches are alike, so each kind of each stage takes them in turn: sorting the starts of a pass by time changes no other pass. A word without numbers is
    therefore a whole order.

    `rolling`: the next step begins on a rank while others drain this one, so that a step takes the longest time from a rank's first start to its last end; else
    it takes the makespan.
    """

    def __init__(self, times: StageTimes, num_microbatches: int, limits: Limits | None = None, rolling: bool = False) -> None:
        limits = limits or Limits.units(times, float("inf"))
        self.times, self.limits, self.m, self.rolling = times, limits, num_microbatches, rolling
        self.p, self.v, self.num_stages = times.num_ranks, times.num_chunks, times.num_stages
        self._refuse()
        self.stage = np.array([[s for s in range(self.num_stages) if times.rank[s] == r] for r in range(self.p)])
        self.chunk = {int(s): c for row in self.stage for c, s in enumerate(row)}
        self.length = 3 * self.v * self.m
        seconds, acts, share = np.array([times.f, times.i, times.w]), np.array(limits.activation), limits.freed_at_i
        self.seconds = self._by_token(seconds)
        self.delta = self._by_token(np.array([acts, -share * acts, -(1.0 - share) * acts]))
        self.limit = np.array(limits.memory)
        hop, zeros = np.array(times.hop), np.zeros(self.num_stages)
        self.lag = self._by_token(np.array([np.concatenate([[0.0], hop]), np.concatenate([hop, [0.0]]), zeros]))
        # Ends lie in one row: F of every stage and microbatch, then I, then a cell that is always 0, one that nobody reads, and one that stays inf.
        self.zero = 2 * self.num_stages * self.m
        s = np.arange(self.num_stages)
        f_at, i_at = s * self.m, (self.num_stages + s) * self.m
        self.makes = self._by_token(np.array([f_at, i_at, np.full_like(s, -1)]))
        before = np.concatenate([[-1], f_at[:-1]])
        after = np.concatenate([i_at[1:], [-1]])
        self.needs = self._by_token(np.array([before, after, np.full_like(s, -1)]))

    def _refuse(self) -> None:
        limits, times = self.limits, self.times
        if self.m < 1:
            raise PlanError(f"an order of {self.m} microbatches was asked for; give 1 or more")
        if len(limits.memory) != self.p or len(limits.activation) != self.num_stages or not 0.0 <= limits.freed_at_i <= 1.0:
            raise PlanError(
                f"limits hold {len(limits.memory)} ranks, {len(limits.activation)} stages and a freed share of {limits.freed_at_i}; "
                f"the times have {self.p} ranks and {self.num_stages} stages, and a share lies in 0..1"
            )
        for r in range(self.p):
            least = sum(a for a, held in zip(limits.activation, times.rank, strict=True) if held == r)
            if least > limits.memory[r] + TOLERANCE:
                raise PlanError(f"rank {r} may hold {limits.memory[r]:g} units, and one microbatch leaves {least:g} there; give it {least:g} or more")

    def _by_token(self, table: np.ndarray) -> np.ndarray:
        """[kind, stage] -> [rank, token]."""
        return np.ascontiguousarray(table[:, self.stage].transpose(1, 2, 0).reshape(self.p, 3 * self.v))

    def word(self, orders: Orders) -> np.ndarray:
        """[rank, place]: the tokens of orders; B is I, then W."""
        rows = [[3 * self.chunk[s.stage] + KINDS.index(k) for s in order for k in ("IW" if s.kind == "B" else s.kind)] for order in orders]
        return np.array(rows, dtype=np.int8)

    def orders(self, word: np.ndarray) -> Orders:
        """The slots of a word [rank, place]."""
        rows, seen = [], np.zeros((self.p, 3 * self.v), dtype=int)
        for r in range(self.p):
            row = []
            for token in map(int, word[r]):
                row.append(Slot(int(self.stage[r, token // 3]), KINDS[token % 3], int(seen[r, token])))
                seen[r, token] += 1
            rows.append(tuple(row))
        return tuple(rows)

    def legal(self, rows: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """[n] whether each row [n, place] of a rank [n] keeps F before I before W of a microbatch, and the rank's memory."""
        live = np.cumsum(self.delta[ranks[:, None], rows], axis=1).max(axis=1)
        good: np.ndarray = live <= self.limit[ranks] + TOLERANCE
        for c in range(self.v):
            count = [np.cumsum(rows == 3 * c + kind, axis=1, dtype=np.int32) for kind in (F, I, W)]
            good &= (count[F] >= count[I]).all(axis=1) & (count[I] >= count[W]).all(axis=1)
        return good

    def taken(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[candidate, rank] how long each rank's step takes that starts and ends then, [candidate, rank]."""
        return ends - starts if self.rolling else ends

    def fits(self, words: np.ndarray) -> np.ndarray:
        """[candidate] whether all ranks of a word are legal."""
        n = len(words)
        rows = self.legal(words.reshape(n * self.p, -1), np.tile(np.arange(self.p), n))
        return np.asarray(rows.reshape(n, self.p).all(axis=1))

    def microbatches(self, words: np.ndarray) -> np.ndarray:
        """[candidate, rank, place]: the microbatch of every token."""
        out = np.zeros(words.shape, dtype=np.int32)
        for token in range(3 * self.v):
            here = words == token
            np.copyto(out, np.cumsum(here, axis=2, dtype=np.int32) - 1, where=here)
        return out

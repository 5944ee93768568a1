"""The best order of a pipeline for its own stage times, hops and memory: never worse than a built-in schedule, proven where a bound or HiGHS meets it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ir.errors import PlanError
from planner.schedules import SCHEDULES, Schedule
from planner.schedules.bound import lower_bound
from planner.schedules.certificate import certify
from planner.schedules.climb import climb
from planner.schedules.dispatch import Breeder, dispatch
from planner.schedules.own import own_schedule
from planner.schedules.pipe import TOLERANCE, Limits, Pipe, StageTimes
from planner.schedules.retime import retime
from planner.schedules.slot import Orders

__all__ = ["Effort", "Found", "Limits", "StageTimes", "search_orders"]


@dataclass(frozen=True, slots=True)
class Found:
    """Orders, their seconds (of `rolling` steps a rank's own), a bound that no order beats, whether they are proven best, and which part of the search found
    them.
    """

    orders: Orders
    makespan_s: float
    bound_s: float
    optimal: bool
    method: str

    def schedule(self, name: str = "auto") -> Schedule:
        """The orders as a Schedule for this one size, proved to run."""
        return own_schedule(name, self.orders)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search, in counts and not in seconds, so that answers repeat.

    `generations` of `brood` rules, at most `patience` of them without gain; then `rounds` of `width` moves shared by the `starts` best words; all as far as
    `passes` timed passes pay for. Steps of at most `prove` passes are proved, within `nodes` nodes of HiGHS.
    """

    generations: int = 24
    patience: int = 6
    brood: int = 64
    rounds: int = 400
    width: int = 40
    passes: int = 10_000_000
    starts: int = 3
    prove: int = 80
    nodes: int = 150


def search_orders(
    times: StageTimes, num_microbatches: int, limits: Limits | None = None, *, effort: Effort | None = None, seed: int = 0, rolling: bool = False
) -> Found:  # fmt: skip
    """The best orders found for these stage times, within these limits (none: no limit); PlanError where one microbatch does not fit.

    `rolling`: the least time from a rank's first start to its last end, for steps that begin while others drain the one before; else the least makespan.

    Built-in schedules with the same ranks of stages that keep the limits are where the search starts from. HiGHS is asked where the step has no more than
    `effort.prove` passes of the ranks together and the bound is not met.

    >>> times = StageTimes((1.0, 1.0, 2.0), (1.0, 1.0, 2.0), (1.0, 1.0, 1.5), (0.1, 0.1), (0, 1, 2))
    >>> found = search_orders(times, 4, Limits.units(times, 3))
    >>> round(found.makespan_s, 3), found.optimal
    (24.2, True)
    """
    return _Search(Pipe(times, num_microbatches, limits, rolling), effort or Effort(), seed).run()


def seeds(pipe: Pipe) -> dict[str, np.ndarray]:
    """The words of the built-in schedules that are legal here, and of one microbatch after the other."""
    words = {"serial": np.array([_serial(pipe)] * pipe.p, dtype=np.int8)}
    for name, schedule in SCHEDULES.items():
        if schedule.chunks not in (pipe.v, None) or schedule.copies != 1 or schedule.pieces != 1:
            continue
        ranks = tuple(schedule.rank_of(s, pipe.p) for s in range(pipe.num_stages))
        if ranks != pipe.times.rank or (schedule.chunks is None and pipe.v < 2):
            continue
        try:
            orders = schedule.orders(pipe.p, pipe.m, pipe.v)
        except PlanError:
            continue  # not for these sizes: no seed
        word = pipe.word(orders)
        if pipe.fits(word[None])[0]:
            words[name] = word
    return words


def _serial(pipe: Pipe) -> list[int]:
    down = [3 * c for c in range(pipe.v)]
    up = [3 * c + k for c in reversed(range(pipe.v)) for k in (1, 2)]
    return (down + up) * pipe.m


class _Search:
    def __init__(self, pipe: Pipe, effort: Effort, seed: int) -> None:
        self.pipe, self.effort, self.rng = pipe, effort, np.random.default_rng(seed)
        self.bound = lower_bound(pipe)
        named = seeds(pipe)
        self.pool: list[tuple[float, str, np.ndarray]] = []
        self._add(np.stack(list(named.values())), list(named))

    @property
    def met(self) -> bool:
        return self.pool[0][0] <= self.bound * (1.0 + TOLERANCE)

    def _add(self, words: np.ndarray, names: list[str]) -> np.ndarray:
        """Keeps the best words, no two alike; returns the seconds of all."""
        makespans = retime(self.pipe, words)[0]
        held = {word.tobytes() for _, _, word in self.pool}
        for k in np.argsort(makespans, kind="stable")[: 4 * self.effort.starts]:
            if np.isfinite(makespans[k]) and words[k].tobytes() not in held:
                held.add(words[k].tobytes())
                self.pool.append((float(makespans[k]), names[k], words[k]))
        self.pool = sorted(self.pool, key=lambda entry: entry[0])[: 4 * self.effort.starts]
        return makespans

    def run(self) -> Found:
        if not self.met:
            self._breed()
        if not self.met:
            self._climb()
        optimal = self.met
        if not optimal and not self.pipe.rolling and self.pipe.length * self.pipe.p <= self.effort.prove:
            optimal = self._prove()
        makespan, method, word = self.pool[0]
        return Found(self.pipe.orders(word), makespan, makespan if optimal else min(self.bound, makespan), optimal, method)

    def _breed(self) -> None:
        breeder = Breeder(self.pipe, self.rng)
        rules, best, idle = breeder.first(), None, 0
        for _ in range(self._share(self.effort.generations, self.effort.brood, 0.5)):
            least = self.pool[0][0]
            words, kept = dispatch(self.pipe, rules)
            if len(words):
                makespans = self._add(words, ["dispatch"] * len(words))
                scored = (makespans, rules.take(kept))
                if best is not None:
                    scored = (np.concatenate([best[0], makespans]), type(rules).join([best[1], scored[1]]))
                top = np.argsort(scored[0], kind="stable")[: max(8, self.effort.brood // 6)]
                best = scored[0][top], scored[1].take(top)
            idle = 0 if self.pool[0][0] < least else idle + 1
            if self.met or idle >= self.effort.patience:
                return
            rules = breeder.change(best[1] if best else rules, self.effort.brood)

    def _share(self, most: int, width: int, share: float) -> int:
        """Rounds of so many candidates that this share of the passes pays for."""
        return max(3, min(most, int(share * self.effort.passes / (width * self.pipe.p * self.pipe.length))))

    def _climb(self) -> None:
        rounds = self._share(self.effort.rounds, self.effort.width, 0.5)
        for _, _, word in self.pool[: self.effort.starts]:
            done = climb(self.pipe, word, self.rng, max(3, rounds // self.effort.starts), self.effort.width, self.bound)
            if done.makespan_s < self.pool[0][0]:
                self.pool.insert(0, (done.makespan_s, "moves", done.word))
            if self.met:
                return

    def _prove(self) -> bool:
        """Asks HiGHS for less; takes over what it finds and, where it proves it, its bound."""
        asked = self.pool[0][0]
        done = certify(self.pipe, asked, self.effort.nodes)
        if done.word is not None and self.pipe.fits(done.word[None])[0]:
            self._add(done.word[None], ["highs"])
        self.bound = max(self.bound, min(done.bound_s, self.pool[0][0]))
        return done.proven and (done.word is None or self.pool[0][0] <= done.bound_s * (1.0 + 1e-6))

"""List scheduling of many candidates at once: each rank takes its next pass by rules of its own, the numbers of which are searched.

A rank weighs its next forward against its next input gradient by when they could start; a weight gradient fills the wait where it covers enough of it, and goes
first where too many are owed. That holds the rules of 1F1B, GPipe, ZB-H1, ZB-H2 and ZB-1p / 2p (Qi et al., 2023, arXiv:2401.10241) as special numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from planner.schedules.bound import arrivals
from planner.schedules.pipe import TOLERANCE, F, I, Pipe, W

NEVER = 1e30


@dataclass(frozen=True, slots=True)
class Rules:
    """Numbers of the rules, each [candidate, rank], `ahead` [candidate, rank, chunk].

    `ahead`: forwards whose input gradient has not run, at most. `favour`: a forward goes first where it can start so many seconds earlier than the input
    gradient; below 0 even where it starts later. `fill`: share of a weight gradient that a wait must cover to be filled. `owed`: the most weight gradients
    that are put off.
    """

    ahead: np.ndarray
    favour: np.ndarray
    fill: np.ndarray
    owed: np.ndarray

    def take(self, which: np.ndarray) -> Rules:
        return Rules(*(getattr(self, f.name)[which] for f in fields(self)))

    @classmethod
    def join(cls, parts: list[Rules]) -> Rules:
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))


def dispatch(pipe: Pipe, rules: Rules) -> tuple[np.ndarray, np.ndarray]:
    """Words [n, rank, place] of those candidates that do not block, and which [n] these are.

    Passes start in the order of time: a round starts those passes that nothing yet to be started can come before.
    """
    return _Floor(pipe, rules).run()


class _Floor:
    """What has run and where each rank stands, over all candidates."""

    def __init__(self, pipe: Pipe, rules: Rules) -> None:
        self.pipe, self.rules = pipe, rules
        n, p, v = rules.ahead.shape
        self.shape = n, p, v
        kind = [slice(k, None, 3) for k in (F, I, W)]
        self.seconds = [pipe.seconds[:, k] for k in kind]
        self.lag = [pipe.lag[:, k] for k in kind]
        self.delta = [pipe.delta[:, k] for k in kind]
        self.row = (np.arange(n) * (pipe.zero + 3))[:, None, None]
        self.makes = np.stack([np.where(pipe.makes[:, k] < 0, pipe.zero + 1, pipe.makes[:, k]) for k in kind])
        # a first pass looks at the cell that is always 0: it counts on from there with steps of no width
        self.needs = [np.where(pipe.needs[:, k] < 0, pipe.zero, pipe.needs[:, k]) for k in kind]
        self.step = [(pipe.needs[:, k] >= 0).astype(int) for k in kind]
        self.ends = np.full((n, pipe.zero + 3), np.inf)
        self.ends[:, pipe.zero] = 0.0
        self.count = np.zeros((3, n, p, v), dtype=int)
        self.free, self.live = np.zeros((2, n, p))
        self.place = np.zeros((n, p), dtype=int)
        self.words = np.zeros((n, p, pipe.length), dtype=np.int8)
        # a forward leaves room for one of each later chunk of its rank, or the rank could fill up with microbatches that wait for themselves
        acts = self.delta[F]
        self.room = pipe.limit[:, None] - (np.cumsum(acts[:, ::-1], axis=1)[:, ::-1]) + TOLERANCE
        timed = pipe.seconds[:, [k for k in range(3 * v) if k % 3 != W]]
        self.horizon = max(float(timed.min()), 0.3 * float(timed.mean()))

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        total = self.pipe.length * self.shape[1]
        while True:
            token, start = self._choose()
            now = np.where(self.place < self.pipe.length, start, np.inf)
            go = now < np.minimum(now.min(axis=1, keepdims=True) + self.horizon, NEVER)
            if not go.any():
                kept = np.nonzero(self.place.sum(axis=1) == total)[0]
                return self.words[kept], kept
            self._start(np.nonzero(go), token[go], start[go])

    def _choose(self) -> tuple[np.ndarray, np.ndarray]:
        """The token that each rank would run next and when, inf where it cannot yet know."""
        count, rules, free = self.count, self.rules, self.free
        ends = self.ends.ravel()
        arrive = [ends[self.needs[k] + self.step[k] * np.minimum(count[k], self.pipe.m - 1) + self.row] + self.lag[k] for k in (F, I)]
        may_f = (count[F] < self.pipe.m) & (count[F] - count[I] < rules.ahead) & (self.live[:, :, None] <= self.room)
        at_f = np.where(may_f, np.maximum(arrive[F], free[:, :, None]), np.inf)
        at_i = np.where(count[I] < count[F], np.maximum(arrive[I], free[:, :, None]), np.inf)
        debt = count[I] - count[W]
        if self.shape[2] == 1:
            best_f, best_i, oldest = 0, 0, 0
            start_f, start_i, owed = at_f[:, :, 0], at_i[:, :, 0], debt[:, :, 0]
            seconds_w = self.seconds[W][:, 0]
        else:
            best_f = self.shape[2] - 1 - np.argmin(at_f[:, :, ::-1], axis=2)
            best_i = np.argmin(at_i, axis=2)
            oldest = np.argmax(debt, axis=2)
            start_f, start_i, owed = at_f.min(axis=2), at_i.min(axis=2), debt.sum(axis=2)
            seconds_w = self.seconds[W][np.arange(self.shape[1]), oldest]
        forward = start_f + rules.favour < start_i
        start = np.where(forward, start_f, start_i)
        weight = (owed > 0) & ((owed > rules.owed) | (start - free >= rules.fill * seconds_w) & (start > free))
        token = np.where(weight, 3 * oldest + W, np.where(forward, 3 * best_f + F, 3 * best_i + I))
        return token, np.where(weight, free, start)

    def _start(self, where: tuple[np.ndarray, ...], token: np.ndarray, start: np.ndarray) -> None:
        n, r = where
        kind, chunk = token % 3, token // 3
        end = start + self.pipe.seconds[r, token]
        makes = self.makes[kind, r, chunk] + np.where(kind == W, 0, self.count[kind, n, r, chunk])
        self.ends[n, makes] = end
        self.count[kind, n, r, chunk] += 1
        self.live[n, r] += self.pipe.delta[r, token]
        self.words[n, r, self.place[n, r]] = token
        self.place[n, r] += 1
        self.free[n, r] = end


class Breeder:
    """Rules to try: first a grid of the known schedules' numbers, then changes of the best."""

    def __init__(self, pipe: Pipe, rng: np.random.Generator) -> None:
        self.pipe, self.rng = pipe, rng
        acts = pipe.delta[:, F::3]
        with np.errstate(invalid="ignore", divide="ignore"):
            fit = np.where(acts > 0, (pipe.limit[:, None] + TOLERANCE) / acts, np.inf)
        self.most = np.minimum(np.floor(np.minimum(fit, pipe.m)), pipe.m).astype(int)
        self.seconds = float(pipe.seconds[:, F::3].mean())

    def first(self) -> Rules:
        """[candidate]: forwards ahead as in 1F1B, eager, what covers the way there and back with whole microbatches or with forwards alone, and without limit;
        four favours, three fills, two debts.
        """
        p, m = self.pipe.p, self.pipe.m
        depth = self.pipe.num_stages - self.pipe.stage
        head, back, _ = arrivals(self.pipe)
        period = float(self.pipe.seconds.sum(axis=1).max())
        away = np.ceil((back - head)[self.pipe.stage] / max(period, 1e-30)).astype(int)
        until = ((back - head)[self.pipe.stage] / np.maximum(self.pipe.seconds[:, F::3], 1e-30) + TOLERANCE).clip(max=m).astype(int)
        aheads = [depth, depth + 1, 2 * depth - 1, away, away + 1, away + 2, until, until + 1, np.full_like(depth, m), np.full_like(depth, p)]
        big = 1e3 * max(self.seconds, 1e-30)
        grid = [(a, b, c, d) for a in aheads for b in (-big, 0.0, 0.5 * self.seconds, big) for c in (0.0, 0.5, 1.0) for d in (0, m)]
        ahead = np.maximum(np.minimum(np.array([g[0] for g in grid]), self.most), 1)
        flat = [np.repeat(np.array([g[k] for g in grid], dtype=float)[:, None], p, axis=1) for k in (1, 2, 3)]
        return Rules(ahead, *flat)

    def change(self, parents: Rules, num: int) -> Rules:
        """`num` candidates: two parents crossed by rank, then some numbers of some ranks changed."""
        rng, (n, p) = self.rng, parents.ahead.shape[:2]
        one, two = parents.take(rng.integers(0, n, num)), parents.take(rng.integers(0, n, num))
        from_two = np.arange(p) >= rng.integers(0, 2 * p, (num, 1))
        kid = Rules(
            np.where(from_two[:, :, None], two.ahead, one.ahead), *(np.where(from_two, getattr(two, f), getattr(one, f)) for f in ("favour", "fill", "owed"))
        )
        rate = rng.choice([1.0 / p, 0.3, 1.0], (num, 1))
        alike = rng.random((num, 1)) < 0.4

        def hit(share: float) -> np.ndarray:
            return rng.random((num, p)) < rate * share

        def draw(values: list[float]) -> np.ndarray:
            return np.where(alike, rng.choice(values, (num, 1)), rng.choice(values, (num, p)))

        ahead = np.clip(kid.ahead + np.where(hit(0.7), draw([-2, -1, -1, 1, 1, 2]), 0)[:, :, None].astype(int), 1, self.most)
        favour = np.where(hit(0.4), draw([-2.0, -1.0, -0.3, 0.0, 0.3, 1.0, 2.0, 1e3]) * self.seconds, kid.favour)
        fill = np.where(hit(0.4), draw([0.0, 0.25, 0.5, 0.75, 1.0, 1.5]), kid.fill)
        owed = np.where(hit(0.4), draw([0, 1, 2, 3, 4, 8, p, self.pipe.m]), kid.owed)
        return Rules(ahead, favour, fill, owed)

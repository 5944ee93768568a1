"""Local search over words: passes on the critical path move within their rank, all neighbours are timed at once, the best not seen before is next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.schedules.pipe import TOLERANCE, Pipe, W
from planner.schedules.retime import retime

Block = tuple[int, int, int]
"""(rank, first place, last place): passes of a critical path that follow one another without a break."""


@dataclass(frozen=True, slots=True)
class Climb:
    """The best word found, its seconds, and the rounds that were used."""

    word: np.ndarray
    makespan_s: float
    rounds: int


def climb(pipe: Pipe, word: np.ndarray, rng: np.random.Generator, rounds: int, width: int, bound_s: float, patience: int = 24) -> Climb:
    """The best word within `rounds` rounds of at most `width` neighbours from a legal word; ends early at the bound.

    After `patience` rounds without gain it starts again from the best, some random moves away.
    """
    makespans, starts = retime(pipe, word[None])
    best = here = word
    least, start = float(makespans[0]), starts[0]
    seen, idle = {word.tobytes()}, 0
    for used in range(rounds):
        if least <= bound_s * (1.0 + TOLERANCE):
            return Climb(best, least, used)
        moves = _moves(pipe, here, start, rng, width)
        near = _neighbours(pipe, here, moves)
        fresh = [k for k, w in enumerate(near) if w.tobytes() not in seen]
        if idle >= patience or not fresh:
            here, start = _kick(pipe, best, rng)
            idle = 0
            continue
        near = near[fresh]
        makespans, starts = retime(pipe, near)
        k = int(np.argmin(_score(pipe, makespans, near, starts)))
        if np.isinf(makespans[k]):
            idle = patience
            continue
        here, start = near[k], starts[k]
        seen.add(here.tobytes())
        idle += 1
        if makespans[k] < least * (1.0 - TOLERANCE):
            best, least, idle = here, float(makespans[k]), 0
    return Climb(best, least, rounds)


def _score(pipe: Pipe, makespans: np.ndarray, words: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Seconds, and a little of the mean over the ranks, so that words of equal seconds differ."""
    ends = starts[:, :, -1] + pipe.seconds[np.arange(pipe.p), words[:, :, -1]]
    return np.asarray(makespans + 0.02 * pipe.taken(starts[:, :, 0], ends).mean(axis=1))


def _kick(pipe: Pipe, best: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A word some random moves away that runs, and its starts."""
    word, start = best, retime(pipe, best[None])[1][0]
    for _ in range(int(rng.integers(2, 6))):
        moves = [_anywhere(pipe, rng) for _ in range(12)]
        near = _neighbours(pipe, word, moves)
        if len(near):
            makespans, starts = retime(pipe, near)
            runs = np.nonzero(np.isfinite(makespans))[0]
            if len(runs):
                k = int(runs[rng.integers(0, len(runs))])
                word, start = near[k], starts[k]
    return word, start


def _anywhere(pipe: Pipe, rng: np.random.Generator) -> Block:
    r, a = int(rng.integers(0, pipe.p)), int(rng.integers(0, pipe.length))
    return r, a, int(np.clip(a + rng.integers(-6, 7), 0, pipe.length - 1))


def critical_path(pipe: Pipe, word: np.ndarray, start: np.ndarray, rng: np.random.Generator) -> list[Block]:
    """Blocks of one critical path, last first; where a pass waited for two at once, chance decides."""
    p = pipe.p
    ends = start + pipe.seconds[np.arange(p)[:, None], word]
    slack = TOLERANCE * max(1e-300, float(ends[:, -1].max()))
    taken = pipe.taken(start[:, 0], ends[:, -1])
    micro = pipe.microbatches(word[None])[0]
    where = np.zeros((p, 3 * pipe.v, pipe.m), dtype=int)
    where[np.arange(p)[:, None], word, micro] = np.arange(pipe.length)
    rank_of = np.array(pipe.times.rank)
    rank = int(rng.choice(np.nonzero(taken >= taken.max() - slack)[0]))
    place = last = pipe.length - 1
    blocks: list[Block] = []
    while True:
        token = int(word[rank, place])
        stage = int(pipe.stage[rank, token // 3]) + (-1 if token % 3 == 0 else 1)
        crosses, here = token % 3 != W and 0 <= stage < pipe.num_stages, place > 0 and ends[rank, place - 1] >= start[rank, place] - slack
        if crosses:
            other = int(rank_of[stage])
            source = int(where[other, 3 * pipe.chunk[stage] + token % 3, micro[rank, place]])
            crosses = ends[other, source] + pipe.lag[rank, token] >= start[rank, place] - slack
        if here and not (crosses and rng.random() < 0.5):
            place -= 1
            continue
        blocks.append((rank, place, last))
        if not crosses:
            return blocks
        rank, place, last = other, source, source


def _moves(pipe: Pipe, word: np.ndarray, start: np.ndarray, rng: np.random.Generator, width: int) -> list[Block]:
    """(rank, from, to) of passes of a critical path: to the front or behind the end of their block, one place on, and weight gradients further off."""
    moves: dict[Block, None] = {}
    for rank, a, b in critical_path(pipe, word, start, rng):
        for j in range(a, b + 1):
            targets = [a, b, j + 1, j - 1]
            if int(word[rank, j]) % 3 == W:
                targets += [b + 1, b + 2, b + 4, b + 8, pipe.length - 1]
            if j == b:
                targets += range(max(a - 2, b - 12), b)
            if j == a:
                targets += range(a + 1, min(b + 3, a + 12))
            moves.update(dict.fromkeys((rank, j, t) for t in targets if t != j and 0 <= t < pipe.length))
    every = list(moves)
    return every if len(every) <= width else [every[k] for k in np.sort(rng.choice(len(every), width, replace=False))]


def _neighbours(pipe: Pipe, word: np.ndarray, moves: list[Block]) -> np.ndarray:
    """[n, rank, place] the legal ones of the words after one move each, equal ones once."""
    rows = np.stack([_moved(word[r], a, b) for r, a, b in moves]) if moves else np.zeros((0, pipe.length), dtype=np.int8)
    ranks = np.array([r for r, _, _ in moves], dtype=int)
    kept: dict[tuple[int, bytes], int] = {}
    for k in np.nonzero(pipe.legal(rows, ranks) & (rows != word[ranks]).any(axis=1))[0] if moves else ():
        kept.setdefault((int(ranks[k]), rows[k].tobytes()), int(k))
    chosen = np.array(list(kept.values()), dtype=int)
    near = np.repeat(word[None], len(chosen), axis=0)
    near[np.arange(len(chosen)), ranks[chosen]] = rows[chosen]
    return near


def _moved(row: np.ndarray, a: int, b: int) -> np.ndarray:
    out = row.copy()
    if a < b:
        out[a:b] = row[a + 1 : b + 1]
    else:
        out[b + 1 : a + 1] = row[b:a]
    out[b] = row[a]
    return out

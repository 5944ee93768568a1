"""Registers with disjoint lives share memory.

A compute queue runs its firings one after another, so lives can be told in positions of that queue. A value that a communication queue writes is taken to live
from just after the last compute firing that the communication waits for; one that it reads, until just before the first compute firing that waits for it (so
positions are even for firings, odd between two). The end of
a step is one such pass, and what one operator of an update hands to the next lives within it. What no compute firing bounds on both sides (a transfer that
runs ahead), what is kept from the forward to the backward and what is held for a step has memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ir.program import Actor, Program, Register

ALIGNMENT = 64
"""Bytes; a cache line, and the width that vector units load."""


class Life(NamedTuple):
    """First and last position on the compute queue, both included."""

    start: int
    end: int


Blocks = tuple[tuple[Life, int], ...]
"""(life, bytes) each."""


def share(program: Program, passes: Mapping[str, str]) -> Program:
    """The same program with `arena` and `offset` given to every register whose life is bounded.

    `passes` names for each actor the pass that it belongs to; the compute queue of a rank runs passes one after another, never mixed.
    """
    by_rank: dict[int, list[Register]] = {}
    for r in program.registers:
        by_rank.setdefault(r.rank, []).append(r)
    actors: dict[int, list[Actor]] = {}
    for a in program.actors:
        actors.setdefault(a.rank, []).append(a)
    known: dict[Blocks, tuple[int, ...]] = {}
    placed: dict[str, Register] = {}
    for rank, registers in by_rank.items():
        lives = register_lives(registers, actors.get(rank, ()), passes)
        shared = [r for r in registers if r.name in lives]
        key = tuple((lives[r.name], r.nbytes) for r in shared)
        if key not in known:
            known[key] = first_fit(key)
        for r, offset in zip(shared, known[key], strict=True):
            placed[r.name] = replace(r, arena=f"arena@{rank}", offset=offset)
    return replace(program, registers=tuple(placed.get(r.name, r) for r in program.registers))


def register_lives(registers: Iterable[Register], actors: Iterable[Actor], passes: Mapping[str, str]) -> Mapping[str, Life]:
    """The life of every register of one rank that is bounded by compute firings of one pass of a microbatch, or of the end of the step."""
    order = [a for a in actors if a.clock == "microbatch" or _is_end(passes[a.name])]
    position = {a.name: 2 * i for i, a in enumerate(order)}
    writer = {w: a for a in order for w in a.writes}
    readers: dict[str, list[Actor]] = {}
    for a in order:
        for name in a.takes:
            readers.setdefault(name, []).append(a)
    after: dict[str, int] = {}
    for a in order:
        if a.queue == "compute":
            after[a.name] = position[a.name]
        else:
            before = [after[writer[r].name] for r in a.takes if r in writer and passes[writer[r].name] == passes[a.name] and writer[r].name in after]
            if before:
                after[a.name] = max(before) | 1
    until: dict[str, int] = {}
    for a in reversed(order):
        if a.queue == "compute":
            until[a.name] = position[a.name]
        else:
            following = [until[b.name] for w in a.writes for b in readers.get(w, ()) if passes[a.name] == passes[b.name] and b.name in until]
            if following:
                until[a.name] = min(following) - 1 | 1
    lives: dict[str, Life] = {}
    for register in registers:
        source, users = writer.get(register.name), readers.get(register.name, [])
        if register.offsets or register.credits != 1 or register.memory == "input" or source is None or source.name not in after:
            continue
        if register.clock == "step" and not (register.memory == "buffer" and _is_end(passes[source.name])):
            continue
        ends = [source, *users]
        if all(passes[source.name] == passes[a.name] and a.name in until for a in ends):
            lives[register.name] = Life(after[source.name], max(until[a.name] for a in ends))
    return lives


def _is_end(name: str) -> bool:
    return name.endswith("end")


def first_fit(blocks: Blocks, order: Callable[[Life, int], tuple[int, ...]] = lambda life, nbytes: (-nbytes, *life)) -> tuple[int, ...]:
    """Offsets such that blocks whose lives overlap do not overlap in memory; they are placed in this order, the largest first, each as low as it fits.

    >>> first_fit(((Life(0, 1), 64), (Life(2, 3), 64), (Life(1, 2), 64)))
    (0, 0, 64)
    """
    starts, ends, lows, highs = np.zeros((4, len(blocks)), dtype=np.int64)
    offsets = [0] * len(blocks)
    for num_done, i in enumerate(sorted(range(len(blocks)), key=lambda i: (order(*blocks[i]), i))):
        life, nbytes = blocks[i]
        overlapping = np.flatnonzero((starts[:num_done] <= life.end) & (ends[:num_done] >= life.start))
        at = 0
        for start, stop in sorted(zip(lows[overlapping].tolist(), highs[overlapping].tolist(), strict=True)):
            if at + nbytes <= start:
                break
            at = max(at, -(-stop // ALIGNMENT) * ALIGNMENT)
        offsets[i] = at
        starts[num_done], ends[num_done], lows[num_done], highs[num_done] = life.start, life.end, at, at + nbytes
    return tuple(offsets)

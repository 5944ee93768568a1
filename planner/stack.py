"""What passes keep for their backwards shares memory across passes: places that follow each other in the frozen order, not slots of each pass by itself.

Where a rank runs several forwards that keep something (virtual stages, the pieces of a sequence), each has most of its items at another time than the
others, and so many slots for each would hold more than is ever kept at once. The compute queue's order is frozen, so the life of every item of a step is known:
from the place of its forward in the order to that of its last backward. Items of one layer that live equally long lie together, one block for each microbatch,
and every slot of a register gets an offset of its own. Layers are alike, so most blocks are of few sizes, and those of one size fill each other's places.
What lives short among what lives long (gradients of keys, cotangents that wait for their weight gradient) is placed in whichever order takes least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from ir.program import Register
from planner.arena import ALIGNMENT, Blocks, Life, first_fit


class Kept(NamedTuple):
    """The life of each item of a register, in the order in which they are written, in places of the rank's order of passes; the layer that writes them."""

    lives: tuple[Life, ...]
    layer: int


ORDERS: tuple[Callable[[Life, int], tuple[int, ...]], ...] = (
    lambda life, nbytes: (-nbytes, *life),
    lambda life, nbytes: (-nbytes * (life.end - life.start + 1), *life),
    lambda life, nbytes: (*life, -nbytes),
)
"""In which blocks are placed: the largest first, those that hold most for longest, as they come. None of them is best for every schedule."""

Known = dict[Blocks, tuple[int, ...]]
"""Offsets found before, for ranks that hold the same."""


def stack(registers: Sequence[Register], kept: Mapping[str, Kept], known: Known | None = None) -> list[Register]:
    """The registers of one rank, those in `kept` with a slot for each microbatch and an offset for each slot.

    All of these are touched by the compute queue alone.
    """
    bundles: dict[Kept, list[Register]] = {}
    for r in registers:
        if r.name in kept:
            bundles.setdefault(kept[r.name], []).append(r)
    blocks = tuple((life, sum(map(_aligned, held))) for bundle, held in bundles.items() for life in bundle.lives)
    known = {} if known is None else known
    if blocks not in known:
        known[blocks] = packed(blocks)
    starts = iter(known[blocks])
    placed: dict[str, Register] = {}
    for bundle, held in bundles.items():
        bases, at = [next(starts) for _ in bundle.lives], 0
        for r in held:
            placed[r.name] = replace(r, credits=len(bases), arena=f"saved@{r.rank}", offsets=tuple(base + at for base in bases))
            at += _aligned(r)
    return [placed.get(r.name, r) for r in registers]


def packed(blocks: Blocks) -> tuple[int, ...]:
    """Offsets in the least memory that one of the orders finds.

    >>> packed(((Life(0, 2), 64), (Life(1, 1), 128), (Life(2, 3), 64)))
    (128, 0, 0)
    """
    found: list[tuple[int, tuple[int, ...]]] = []
    for order in ORDERS:
        offsets = first_fit(blocks, order)
        found.append((max((at + nbytes for at, (_, nbytes) in zip(offsets, blocks, strict=True)), default=0), offsets))
        if found[-1][0] <= most_at_once(blocks):
            break
    return min(found, key=lambda f: f[0])[1]


def most_at_once(blocks: Blocks) -> int:
    """Bytes of the blocks that live at one position, at most: no packing takes less."""
    change: dict[int, int] = {}
    for life, nbytes in blocks:
        change[life.start] = change.get(life.start, 0) + nbytes
        change[life.end + 1] = change.get(life.end + 1, 0) - nbytes
    return max(accumulate(change[at] for at in sorted(change)), default=0)


def _aligned(register: Register) -> int:
    return -(-register.nbytes // ALIGNMENT) * ALIGNMENT


__all__ = ["Kept", "Known", "most_at_once", "packed", "stack"]

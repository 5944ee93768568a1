"""What passes keep for their backwards shares memory across passes: places that follow each other in the frozen order, not slots of each pass by itself.

Where a rank runs several forwards that keep something (virtual stages, the pieces of a sequence), each has most of its items at another time than the
others, and so many slots for each would hold more than is ever kept at once. The compute queue's order is frozen, so the life of every item of a step is known:
from the place of its forward in the order to that of its last backward. Items that live equally long lie together, one block for each microbatch, and every
slot of a register gets an offset of its own. Blocks of one size fill each other's places: such are those of equal pieces, or of single layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ir.program import Register
from planner.arena import ALIGNMENT, Life, first_fit


class Kept(NamedTuple):
    """The life of each item of a register, in the order in which they are written, in places of the rank's order of passes; the layer that writes them."""

    lives: tuple[Life, ...]
    layer: int


Blocks = tuple[tuple[Life, int], ...]

Known = dict[Blocks, tuple[int, ...]]
"""Offsets found before, for ranks that hold the same."""


def stack(registers: Sequence[Register], kept: Mapping[str, Kept], known: Known | None = None) -> list[Register]:
    """The registers of one rank, those in `kept` with a slot for each microbatch and an offset for each slot.

    All of these are touched by the compute queue alone. Blocks are of one layer, or of all that live equally long: whichever packs into less.
    """
    known = {} if known is None else known
    held = [r for r in registers if r.name in kept]
    ways = [_bundles(held, [(kept[r.name].lives, kept[r.name].layer) for r in held]), _bundles(held, [(kept[r.name].lives, 0) for r in held])]
    placed = min((_placed(way, known) for way in ways), key=_height)
    return [placed.get(r.name, r) for r in registers]


Bundles = Mapping[tuple[tuple[Life, ...], int], Sequence[Register]]
"""Registers whose items lie together, by their lives and what else tells them apart."""


def _bundles(held: Sequence[Register], keys: Sequence[tuple[tuple[Life, ...], int]]) -> Bundles:
    found: dict[tuple[tuple[Life, ...], int], list[Register]] = {}
    for r, key in zip(held, keys, strict=True):
        found.setdefault(key, []).append(r)
    return found


def _placed(bundles: Bundles, known: Known) -> dict[str, Register]:
    blocks = tuple((life, sum(map(_aligned, held))) for (lives, _), held in bundles.items() for life in lives)
    if blocks not in known:
        known[blocks] = first_fit(blocks)
    starts = iter(known[blocks])
    placed: dict[str, Register] = {}
    for (lives, _), held in bundles.items():
        bases, at = [next(starts) for _ in lives], 0
        for r in held:
            placed[r.name] = replace(r, credits=len(bases), arena=f"saved@{r.rank}", offsets=tuple(base + at for base in bases))
            at += _aligned(r)
    return placed


def _height(placed: Mapping[str, Register]) -> int:
    return max((max(r.offsets) + _aligned(r) for r in placed.values()), default=0)


def _aligned(register: Register) -> int:
    return -(-register.nbytes // ALIGNMENT) * ALIGNMENT


__all__ = ["Kept", "Known", "stack"]

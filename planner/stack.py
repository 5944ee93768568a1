"""What passes keep for their backwards shares memory across passes: places that follow each other in the frozen order, not slots of each pass by itself.

Where a rank runs several forwards that keep something (virtual stages, the pieces of a sequence), each has most of its items at another time than the others, and so many slots
for each would hold more than is ever kept at once. The compute queue's order is frozen, so the life of every item of a step is known: from the place of its
forward in the order to that of its last backward. Items of one pass that live equally long lie together, one block for each microbatch, and every slot of a
register gets an offset of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ir.program import Register
from planner.arena import ALIGNMENT, Life, first_fit


def stack(registers: Sequence[Register], lives: Mapping[str, tuple[Life, ...]]) -> list[Register]:
    """The registers of one rank, those in `lives` with a slot for each microbatch and an offset for each slot.

    `lives`: by register the life of each item, in the order in which they are written, in places of the rank's order of passes; all of these are touched by
    the compute queue alone.
    """
    bundles: dict[tuple[Life, ...], list[Register]] = {}
    for r in registers:
        if r.name in lives:
            bundles.setdefault(lives[r.name], []).append(r)
    blocks = tuple((life, sum(map(_aligned, held))) for times, held in bundles.items() for life in times)
    starts = iter(first_fit(blocks))
    placed: dict[str, Register] = {}
    for times, held in bundles.items():
        bases, at = [next(starts) for _ in times], 0
        for r in held:
            placed[r.name] = replace(r, credits=len(times), arena=f"saved@{r.rank}", offsets=tuple(base + at for base in bases))
            at += _aligned(r)
    return [placed.get(r.name, r) for r in registers]


def _aligned(register: Register) -> int:
    return -(-register.nbytes // ALIGNMENT) * ALIGNMENT


__all__ = ["stack"]

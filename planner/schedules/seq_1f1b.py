"""Seq1F1B: 1F1B over the k pieces into which each microbatch's causal sequence is cut (Sun et al., 2024, arXiv:2406.03488; the pieces are TeraPipe's,
Li et al., 2021, arXiv:2102.07988).

A piece reads the keys and values of the pieces before it, so forwards take the pieces in turn and backwards the last piece first. Rank r runs p - r - 1 + k - 1
forwards ahead, then one forward and one backward in turn. With equal stages and pieces that take equally long the step takes m(F + B) + (p - 1)(F + B) / k, and
rank r keeps min(p - r - 1 + k, mk) / k microbatches: with k = 1 it is 1F1B. Causal attention looks back further from every piece, so pieces that take equally
long grow shorter (`planner.pieces.balanced`). A slot counts pieces: with k = 2, 0F3 is the second half of microbatch 1.

>>> print(show(pieces(2).orders(2, 2)))
0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2
1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2
>>> pieces(4).bubble(8, 16), SCHEDULE.in_pieces(1).bubble(8, 16)
(0.09859154929577463, 0.30434782608695654)
"""

from __future__ import annotations

from planner.schedules.schedule import Schedule, Times
from planner.schedules.slot import Orders, Slot, show, spell, weave

__all__ = ["SCHEDULE", "pieces", "show"]

DEFAULT = 4
"""Pieces where nothing is asked for: a quarter of the bubble."""


def order(rank: int, p: int, units: int, k: int) -> tuple[Slot, ...]:
    """1F1B of so many pieces, each backward that of the piece that mirrors it in its microbatch."""
    slots = spell(weave([rank] * units, [rank] * units, min(p - 1 - rank + k - 1, units)), units)
    return tuple(s if s.kind == "F" else Slot(rank, "B", s.microbatch - s.microbatch % k + k - 1 - s.microbatch % k) for s in slots)


def pieces(k: int) -> Schedule:
    """The schedule with k pieces a microbatch."""

    def orders(p: int, m: int, v: int) -> Orders:
        return tuple(order(r, p, m * k, k) for r in range(p))

    def time(p: int, m: int, v: int, t: Times) -> float:
        return (m + (p - 1) / k) * t.total

    def memory(rank: int, p: int, m: int, v: int) -> float:
        return min(p - 1 - rank + k, m * k) / k

    return Schedule("seq1f1b", "arXiv:2406.03488", orders, time, memory, pieces=k, cut=pieces)


SCHEDULE = pieces(DEFAULT)

"""The zig-zag order of a sequence over n ranks: cut into 2n pieces, rank r holds pieces r and 2n - 1 - r, so that causal attention costs every rank the same.

The order is that of Megatron-LM's context parallelism and of Llama 3 (arXiv:2407.21783, section 3.3.2). A place is a token's number in that order, a position
its number in the text.
"""

from __future__ import annotations

from collections.abc import Sequence

Run = tuple[int, int]
"""Positions [first, stop)."""


def runs(first: int, stop: int, total: int, num_ranks: int) -> tuple[Run, ...]:
    """The positions of the places [first, stop) of a sequence of `total` tokens, as runs; of a sequence in its own order where `num_ranks` is 0.

    `2 num_ranks` divides `total`.

    >>> runs(0, 4, 8, 2), runs(4, 8, 8, 2), runs(1, 3, 8, 2), runs(1, 3, 8, 0)
    (((0, 2), (6, 8)), ((2, 6),), ((1, 2), (6, 7)), ((1, 3),))
    """
    if not num_ranks:
        return ((first, stop),)
    length, found = total // (2 * num_ranks), list[Run]()
    for i in range(first // length, -(-stop // length)):
        piece = 2 * num_ranks - 1 - i // 2 if i % 2 else i // 2
        begin, end = max(first, i * length), min(stop, (i + 1) * length)
        run = (piece * length + begin - i * length, piece * length + end - i * length)
        if found and found[-1][1] == run[0]:
            found[-1] = (found[-1][0], run[1])
        else:
            found.append(run)
    return tuple(found)


def joined(found: Sequence[Run]) -> tuple[Run, ...]:
    """The same positions in order, runs that touch as one.

    >>> joined([(6, 8), (0, 2), (2, 4)])
    ((0, 4), (6, 8))
    """
    out: list[Run] = []
    for first, stop in sorted(found):
        if out and out[-1][1] == first:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((first, stop))
    return tuple(out)


def pairs(queries: Sequence[Run], keys: Sequence[Run], causal: bool, window: int = 0) -> float:
    """Pairs of a query and a key that it looks at; half of a square under a causal mask.

    >>> pairs([(0, 4)], [(0, 4)], True), pairs([(4, 8)], [(0, 4)], True), pairs([(0, 4)], [(4, 8)], True), pairs([(4, 8)], [(0, 8)], True, 2)
    (8.0, 16.0, 0.0, 8.0)
    """
    if not causal:
        return float(sum(b - a for a, b in queries) * sum(b - a for a, b in keys))
    seen = sum(_behind(b - x, y - x) - _behind(a - x, y - x) for a, b in queries for x, y in keys)
    far = sum(_behind(b - window - x, y - x) - _behind(a - window - x, y - x) for a, b in queries for x, y in keys) if window else 0.0
    return seen - far


def _behind(last: int, length: int) -> float:
    """Pairs of the queries up to `last` behind the start of `length` keys."""
    n = min(max(last, 0), length)
    return n * n / 2.0 + max(0, last - length) * length


__all__ = ["Run", "joined", "pairs", "runs"]

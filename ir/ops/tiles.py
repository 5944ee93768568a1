"""Tiles: an array worked through in pieces that stay in a core's cache, so that a kernel of many passes reads memory once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from math import prod
from typing import Any

import numpy as np

from ir.op import Attrs, Context, Sizes

TILE_BYTES = 1 << 18
"""Three or four arrays of this size fit the second-level cache of one core."""


def tiles(c: Context, *arrays: Any) -> Iterator[tuple[Any, ...]]:
    """Slices along dim 0 of arrays of equal length, the widest of about `TILE_BYTES`; on a GPU one slice, the whole."""
    length = len(arrays[0])
    row_bytes = max(1, max(a.nbytes for a in arrays) // max(1, length))
    height = max(1, TILE_BYTES // row_bytes) if c.xp is np else max(1, length)
    for start in range(0, length, height):
        yield tuple(a[start : start + height] for a in arrays)


def flat(c: Context, *arrays: Any) -> Iterator[tuple[Any, ...]]:
    """Tiles of C-contiguous arrays of equal shape, as vectors."""
    return tiles(c, *(a.reshape(-1) for a in arrays))


def matrix(array: Any) -> Any:
    """A C-contiguous array as rows of its last dim; a view."""
    return array.reshape(-1, array.shape[-1])


def scratch(c: Context, like: Any, count: int) -> tuple[Any, ...]:
    """`count` arrays of the shape and dtype of `like`, with no defined content."""
    return tuple(c.xp.empty(like.shape, like.dtype) for _ in range(count))


def each(factor: float, without: Collection[str] = ()) -> Callable[[Sizes, Attrs], float]:
    """`factor` floating point operations for every point of the operator's labels, those in `without` left out.

    >>> each(2.0, without="v")({"b": 3, "v": 100}, {})
    6.0
    """

    def flops(sizes: Sizes, _: Attrs) -> float:
        return factor * prod(size for label, size in sizes.items() if label not in without)

    return flops

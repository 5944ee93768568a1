"""Local re-sharding: what a rank does to its shard where no data moves between ranks.

attrs: `src_region` and `dst_region`, ((start, stop), ...) in the whole tensor of what is read and written. The shapes differ, so a graph never holds these
operators: lowering makes their work directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ir.op import Context, op
from ir.ops.tiles import each


def within(inner: Sequence[Sequence[int]], outer: Sequence[Sequence[int]]) -> tuple[slice, ...]:
    """Where the region `inner` lies in an array that holds the region `outer`.

    >>> within(((3, 5), (0, 4)), ((2, 6), (0, 4)))
    (slice(1, 3, None), slice(0, 4, None))
    """
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(inner, outer, strict=True))


def take(c: Context, x: Any, out: Any) -> None:
    c.xp.copyto(out, x[within(c.attrs["dst_region"], c.attrs["src_region"])])


def zero(c: Context, x: Any, out: Any) -> None:
    if c.attrs.get("keep", True):
        c.xp.copyto(out, x)
    else:
        out[...] = 0


def pad(c: Context, x: Any, out: Any) -> None:
    out[...] = 0
    out[within(c.attrs["src_region"], c.attrs["dst_region"])] = x


OPS = (
    op("box.slice(x[...]) -> out[...]", take, linear=["x"], flops=each(0)),
    # B to P: one rank of the group keeps the value, the others (attrs keep=False) hold zeros; with keep=True also B to P(max)
    op("box.zero(x[...]) -> out[...]", zero, linear=["x"], flops=each(0)),
    op("box.pad(x[...]) -> out[...]", pad, linear=["x"], flops=each(0)),
)

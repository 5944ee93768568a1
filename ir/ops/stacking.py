"""Tensors of one shape as one tensor of one dim more, and back: `stack.of3` lays three in its slots, `unstack.of3` takes them out again.

There may be more slots than tensors (`k`; as many as ranks, say, of which each is to have one). Tensor i has slot `first` + i, counted round; what slots
without a tensor hold is zero where it is written, and is not looked at where it is read.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from ir.op import Context, Op, op
from ir.ops.tiles import each

_NAME = re.compile(r"(stack|unstack)\.of([1-9]\d*)")


def numbered(name: str) -> Op | None:
    """The operator of this name, if it is one of these.

    >>> numbered("stack.of2"), numbered("unstack.of2")
    (stack.of2(x0[...], x1[...]) -> out[k ...], unstack.of2(x[k ...]) -> out0[...], out1[...])
    """
    match = _NAME.fullmatch(name)
    return _made(match[1], int(match[2])) if match else None


@lru_cache(maxsize=256)
def _made(kind: str, num: int) -> Op:
    some = [f"{'x' if kind == 'stack' else 'out'}{i}" for i in range(num)]
    parts = ", ".join(f"{name}[...]" for name in some)
    if kind == "stack":
        return op(f"stack.of{num}({parts}) -> out[k ...]", stack, linear=[" ".join(some)], flops=each(0))
    return op(f"unstack.of{num}(x[k ...]) -> {parts}", unstack, sums="k", linear=["x"], flops=each(0))


def slot_of(c: Context, i: int, label: str = "k") -> int | None:
    """Where in this rank's slots tensor i lies, if it does."""
    here = (int(c.attrs.get("first", 0)) + i) % c.total[label] - c.at.get(label, 0)
    return here if 0 <= here < c.sizes[label] else None


def stack(c: Context, *arrays: Any) -> None:
    *parts, out = arrays
    out[...] = 0.0
    for i, part in enumerate(parts):
        here = slot_of(c, i)
        if here is not None:
            out[here] = part


def unstack(c: Context, x: Any, *outs: Any) -> None:
    for i, out in enumerate(outs):
        here = slot_of(c, i)
        out[...] = 0.0 if here is None else x[here]


__all__ = ["numbered", "slot_of", "stack", "unstack"]

"""AdamW whose two states are held in one byte an element (Dettmers et al., 2022, arXiv:2110.02861): a code for each element and a scale for each block.

A block is a run of neighbours in the last dim, so that whoever holds whole rows holds whole blocks; the last dim itself is split between blocks only, which the
sentence says: in `(q e)` only the outer label may be split, and evenly. The weights take the step of the new states before they are rounded.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.op import Context, op
from ir.ops.optimizer import clip_of, rate_of
from ir.ops.tiles import each, tiles

DECADES = 7
"""Powers of ten that the codes reach down over."""


@lru_cache(maxsize=2)
def codes(signed: bool) -> NDArray[np.float64]:
    """The 256 values of a code, ascending, between -1 (or 0) and 1: the dynamic tree quantization of the paper.

    Decade i of 7 is cut into 2^i equal parts between a tenth and the whole of it (2^(i+1) where nothing is negative), and the values are their middles;
    0 and 1 are the last two.

    >>> [len(codes(signed)) for signed in (True, False)]
    [256, 256]
    """
    values = [0.0, 1.0]
    for i in range(DECADES):
        edges = np.linspace(0.1, 1.0, 2 ** (i if signed else i + 1) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - DECADES + 1)
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values))


def _values(c: Context, code: Any, scale: Any, signed: bool, dtype: Any) -> Any:
    """What codes [blocks, elements] with scales [blocks] stand for."""
    return c.xp.asarray(codes(signed), dtype)[code] * scale[:, None]


def _round(c: Context, values: Any, signed: bool, code: Any, scale: Any) -> None:
    """Writes the nearest code of every element, in units of its block's largest."""
    table = c.xp.asarray(codes(signed), values.dtype)
    largest = c.xp.abs(values).max(axis=1)
    c.xp.copyto(scale, largest)
    unit = values / c.xp.where(largest > 0, largest, 1.0)[:, None]
    c.xp.copyto(code, c.xp.searchsorted((table[:-1] + table[1:]) / 2, unit.reshape(-1)).reshape(unit.shape), casting="unsafe")


def adamw8bit(
    c: Context, g: Any, norm2: Any, w: Any, m: Any, v: Any, ms: Any, vs: Any, w2: Any, m2: Any, v2: Any, ms2: Any, vs2: Any
) -> None:  # fmt: skip
    """AdamW's rule between reading and rounding the states."""
    beta1, beta2, eps = (float(c.attrs.get(name, default)) for name, default in (("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8)))
    rate, clip, t = rate_of(c), clip_of(c, norm2, g), c.step + 1
    decay, length, unbias2 = 1.0 - rate * float(c.attrs.get("weight_decay", 0.0)), rate / (1.0 - beta1**t), math.sqrt(1.0 - beta2**t)
    width = c.sizes["e"]
    blocks = [a.reshape(-1, width) for a in (g, w, m, v, w2, m2, v2)]
    scales = [a.reshape(-1) for a in (ms, vs, ms2, vs2)]
    for grad, weight, mean, square, into_w, into_m, into_v, *of_blocks in tiles(c, *blocks, *scales):
        part = grad * clip
        new_mean = _values(c, mean, of_blocks[0], True, part.dtype)
        new_mean *= beta1
        new_mean += part * (1.0 - beta1)
        new_square = _values(c, square, of_blocks[1], False, part.dtype)
        new_square *= beta2
        part *= part
        new_square += part * (1.0 - beta2)
        root = c.xp.sqrt(new_square)
        root *= 1.0 / unbias2
        root += eps
        c.xp.multiply(weight, decay, out=into_w)
        into_w -= new_mean / root * length
        _round(c, new_mean, True, into_m, of_blocks[2])
        _round(c, new_square, False, into_v, of_blocks[3])


OPS = (
    # attrs: as adamw, and e, the elements of a block
    op(
        "adamw8bit(g[... (q e)], norm2[], w[... (q e)], mc[... (q e)], vc[... (q e)], ms[... q], vs[... q]) "
        "-> w2[... (q e)], mc2[... (q e)], vc2[... (q e)], ms2[... q], vs2[... q]",
        adamw8bit, stepped=True, flops=each(30),
    ),
)  # fmt: skip

"""Attention with grouped queries, and rotary positions.

Attention goes through blocks of query rows of a few heads, so that what is as large as (rows, keys) stays small; under a causal mask a block sees only the keys
up to its last row. The backward computes the probabilities again from `lse`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ir.op import Attrs, Context, Sizes, op
from ir.ops.tiles import each
from ir.random import growth, kept, stream

BLOCK_ROWS = 64
BLOCK_ELEMENTS = 1 << 18
"""Scores in one block: with 4 bytes each, the second-level cache of a core."""


class _Block(NamedTuple):
    """Sample `sample`, key heads [head, head_stop), query rows [row, row_stop), keys [0, reach)."""

    sample: int
    head: int
    head_stop: int
    row: int
    row_stop: int
    reach: int


def _blocks(c: Context, samples: int, groups: int, length: int, keys: int) -> Iterator[_Block]:
    on_host = c.xp is np
    rows = min(length, BLOCK_ROWS) if on_host else length
    heads = max(1, BLOCK_ELEMENTS // (rows * keys * c.sizes["r"])) if on_host else groups
    past = c.at.get("s", 0) - c.at.get("z", 0) if c.attrs.get("causal", True) else keys
    for sample in range(samples):
        for head in range(0, groups, heads):
            for row in range(0, length, rows):
                stop = min(length, row + rows)
                reach = min(keys, past + stop)
                if reach > 0:
                    yield _Block(sample, head, min(groups, head + heads), row, stop, reach)


def _queries(array: Any, at: _Block) -> Any:
    """The block's rows of an array [b s g r d], the r query heads of a key head below each other: a copy [heads, r * rows, d]."""
    part = array[at.sample, at.row : at.row_stop, at.head : at.head_stop].transpose(1, 2, 0, 3)
    return part.reshape(part.shape[0], -1, part.shape[-1]).copy()


def _keys(array: Any, at: _Block) -> Any:
    """The block's keys or values of an array [b z g d]: a view [heads, reach, d]."""
    return array[at.sample, : at.reach, at.head : at.head_stop].swapaxes(0, 1)


def _put(array: Any, at: _Block, value: Any) -> None:
    """Writes [heads, r * rows, d] into the block's rows of an array [b s g r d]."""
    heads, rows, width = at.head_stop - at.head, at.row_stop - at.row, value.shape[-1]
    array[at.sample, at.row : at.row_stop, at.head : at.head_stop] = value.reshape(heads, -1, rows, width).transpose(2, 0, 1, 3)


def _scores(c: Context, queries: Any, keys: Any, at: _Block) -> Any:
    """[heads, r * rows, reach]: products of queries and keys, minus infinity where the mask hides a key."""
    xp = c.xp
    scores = xp.matmul(queries, keys.swapaxes(1, 2))
    if c.attrs.get("causal", True):
        ahead = c.at.get("s", 0) + at.row - c.at.get("z", 0)
        first = max(0, min(at.reach, ahead + 1))
        hidden = xp.arange(first, at.reach) > xp.arange(ahead, ahead + at.row_stop - at.row)[:, None]
        corner = scores.reshape(len(scores), -1, at.row_stop - at.row, at.reach)[..., first:]
        xp.copyto(corner, -math.inf, where=hidden)
    return scores


def _kept(c: Context, at: _Block) -> Any | None:
    """bool [heads, r * rows, reach]: which probabilities dropout keeps; None without dropout."""
    p = float(c.attrs.get("p", 0.0))
    if p <= 0.0:
        return None
    xp, r = c.xp, c.sizes["r"]
    sample = c.at.get("b", 0) + at.sample
    head = xp.arange((c.at.get("g", 0) + at.head) * r, (c.at.get("g", 0) + at.head_stop) * r)
    row = xp.arange(c.at.get("s", 0) + at.row, c.at.get("s", 0) + at.row_stop)
    index = ((sample * c.total["g"] * r + head)[:, None] * c.total["s"] + row).reshape(-1)
    first = c.at.get("z", 0)
    keep = kept(xp, stream(c.seed, c.step, c.attrs["salt"]), p, index, c.total["z"], first, first + at.reach)
    return keep.reshape(at.head_stop - at.head, -1, at.reach)


def _scale(c: Context) -> float:
    return float(c.attrs.get("scale") or c.sizes["d"] ** -0.5)


def attention(c: Context, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    b, s, z = q.shape[0], q.shape[1], k.shape[1]
    g, r, d = (c.sizes[label] for label in "grd")
    q, out, lse = q.reshape(b, s, g, r, d), out.reshape(b, s, g, r, d), lse.reshape(b, s, g, r, 1)
    k, v = k.reshape(b, z, g, d), v.reshape(b, z, g, d)
    for at in _blocks(c, b, g, s, z):
        queries = _queries(q, at)
        queries *= _scale(c)
        weights = _scores(c, queries, _keys(k, at), at)
        top = weights.max(axis=-1, keepdims=True)
        weights -= top
        c.xp.exp(weights, out=weights)
        norm = weights.sum(axis=-1, keepdims=True)
        _put(lse, at, c.xp.log(norm) + top)
        keep = _kept(c, at)
        if keep is not None:
            weights *= keep
            norm /= growth(c.attrs["p"])
        result = c.xp.matmul(weights, _keys(v, at))
        result /= norm
        _put(out, at, result)


def attention_grad(c: Context, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any) -> None:
    b, s, z = q.shape[0], q.shape[1], k.shape[1]
    g, r, d = (c.sizes[label] for label in "grd")
    q, out, dout, dq, lse = (a.reshape(b, s, g, r, -1) for a in (q, out, dout, dq, lse))
    k, v, dk, dv = (a.reshape(b, z, g, d) for a in (k, v, dk, dv))
    for zeroed in (dq, dk, dv):
        zeroed[...] = 0.0
    scale = _scale(c)
    for at in _blocks(c, b, g, s, z):
        queries, cotangents = _queries(q, at), _queries(dout, at)
        queries *= scale
        delta = c.xp.einsum("grd,grd->gr", cotangents, _queries(out, at))
        weights = _scores(c, queries, _keys(k, at), at)
        weights -= _queries(lse, at)
        c.xp.exp(weights, out=weights)
        keep = _kept(c, at)
        dweights = c.xp.matmul(cotangents, _keys(v, at).swapaxes(1, 2))
        if keep is not None:
            dweights *= keep
            dweights *= growth(c.attrs["p"])
        dweights -= delta[:, :, None]
        dweights *= weights
        if keep is not None:
            weights *= keep
            weights *= growth(c.attrs["p"])
        _keys(dv, at)[...] += c.xp.matmul(weights.swapaxes(1, 2), cotangents)
        _keys(dk, at)[...] += c.xp.matmul(dweights.swapaxes(1, 2), queries)
        dqueries = c.xp.matmul(dweights, _keys(k, at))
        dqueries *= scale
        _put(dq, at, dqueries)


def _pairs(sizes: Sizes, attrs: Attrs) -> float:
    """Pairs of a query and a key that a head of a sample looks at, on the rank that has most: half of a square under a causal mask."""
    few, many = sorted((sizes["s"], sizes["z"]))
    return few * (many - few / 2.0) if attrs.get("causal", True) else float(few * many)


def products(count: int) -> Any:
    """The flops of `count` matrix products of queries and keys; the mask's saving counted, the softmax not."""
    return lambda sizes, attrs: 2.0 * count * sizes["b"] * sizes["g"] * sizes["r"] * sizes["d"] * _pairs(sizes, attrs)


# ---- rotary positions ------------------------------------------------------------------------------------------------------------------------------


def frequencies(attrs: Attrs, d: int) -> Any:
    """float64 [d / 2]: radians a position turns each pair (x[i], x[i + d/2]); Su et al. (arXiv:2104.09864), as Hugging Face's Llama pairs them.

    `factor` alone slows them all (linear interpolation of positions, Chen et al., arXiv:2306.15595). With `original` only the slow ones are slowed, as
    Llama 3 does: wavelengths above original / low by `factor`, below original / high not at all, between them smoothly.
    """
    turn = float(attrs["theta"]) ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    if not attrs.get("factor"):
        return turn
    if "original" not in attrs:
        return turn / float(attrs["factor"])
    periods = float(attrs["original"]) * turn / (2.0 * math.pi)
    low, high = float(attrs["low"]), float(attrs["high"])
    share = np.clip((periods - low) / (high - low), 0.0, 1.0)
    return turn * (share + (1.0 - share) / float(attrs["factor"]))


def _rotate(c: Context, x: Any, out: Any, sign: float) -> None:
    xp, d = c.xp, c.sizes["d"]
    b, s, half = x.shape[0], x.shape[1], d // 2
    angle = np.arange(c.at.get("s", 0), c.at.get("s", 0) + s, dtype=np.float64)[:, None] * frequencies(c.attrs, d)
    cos, sin = (xp.asarray(a.astype(x.dtype))[:, None, :] for a in (np.cos(angle), sign * np.sin(angle)))
    for sample in range(b):
        source, target = x[sample].reshape(s, -1, 2, half), out[sample].reshape(s, -1, 2, half)
        left, right = source[:, :, 0], source[:, :, 1]
        xp.multiply(left, cos, out=target[:, :, 0])
        target[:, :, 0] -= right * sin
        xp.multiply(right, cos, out=target[:, :, 1])
        target[:, :, 1] += left * sin


def rope(c: Context, x: Any, out: Any) -> None:
    _rotate(c, x, out, 1.0)


def rope_dx(c: Context, dout: Any, dx: Any) -> None:
    _rotate(c, dout, dx, -1.0)


OPS = (
    # Query heads are (g r): g groups share one key and value head. attrs: r, d, causal (bool), scale (float; absent: d**-0.5),
    # and with dropout of the probabilities p and salt. lse is the log of the softmax's denominator.
    op(
        "attention(q[b s (g r d)], k[b z (g d)], v[b z (g d)]) -> out[b s (g r d)], lse[b s (g r)]",
        attention, whole="z r d", linear=["v -> out"], stop="lse", grads=("attention.grad",), flops=products(2), random=True, past="z",
    ),
    op(
        "attention.grad(dout[b s (g r d)], q[b s (g r d)], k[b z (g d)], v[b z (g d)], out[b s (g r d)], lse[b s (g r)])"
        " -> dq[b s (g r d)], dk[b z (g d)], dv[b z (g d)]",
        attention_grad, whole="r d", sums="s z", linear=["dout", "v out -> dq dk"], flops=products(5), random=True, past="z",
    ),
    # attrs: d, theta and, for linear scaling, factor, or for Llama 3's factor, low, high, original (Hugging Face's rope_scaling of type llama3)
    op("rope(x[b s (h d)]) -> out[b s (h d)]", rope, whole="d", linear=["x"], grads=("rope.dx",), flops=each(3)),
    op("rope.dx(dout[b s (h d)]) -> dx[b s (h d)]", rope_dx, whole="d", linear=["dout"], flops=each(3)),
)  # fmt: skip

"""Adafactor: of the mean square of a matrix's gradient only the means of rows and columns are kept (Shazeer and Stern, 2018, arXiv:1804.04235).

The rule is PyTorch's (`torch.optim.Adafactor`). A split of the rows leaves the rows' means whole and makes the columns' means sums of what the ranks have; a
split of the columns the other way round. The norms of the weights and of the step take one more sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ir.op import Context, op
from ir.ops.lamb import sums_of_squares
from ir.ops.optimizer import clip_of, rate_of
from ir.ops.tiles import each, flat, tiles


def _fresh(c: Context) -> float:
    """The weight of this step's squares in the running means."""
    return float((c.step + 1) ** float(c.attrs.get("beta2_decay", -0.8)))


def _eps(c: Context, like: Any) -> float:
    given = c.attrs.get("eps1")
    return float(np.finfo(like.dtype).eps if given is None else given)


def _matrices(array: Any, num_dims: int) -> Any:
    """The leading dims as one; a view."""
    return array.reshape(-1, *array.shape[array.ndim - num_dims :])


def adafactor_sums(c: Context, g: Any, norm2: Any, r1: Any, c1: Any) -> None:
    """Mean squares of rows and of columns; each mean is over the whole of the dim that vanishes."""
    clip, num_rows, num_columns = clip_of(c, norm2, g), c.total["n"], c.total["m"]
    for matrix, rows, columns in zip(_matrices(g, 2), _matrices(r1, 1), _matrices(c1, 1), strict=True):
        columns[...] = 0
        for part, into in tiles(c, matrix, rows):
            squares = part * clip
            squares *= squares
            c.xp.sum(squares, axis=1, out=into)
            columns += squares.sum(axis=0)
        rows *= 1.0 / num_columns
        columns *= 1.0 / num_rows


def adafactor_mean(c: Context, r1: Any, r: Any, mean: Any) -> None:
    """The mean of the rows' new means."""
    fresh = _fresh(c)
    total = (r1.sum(axis=-1) * fresh + r.sum(axis=-1) * (1.0 - fresh)) / c.total["n"]
    c.xp.copyto(mean, total.reshape(mean.shape))


def _steps(c: Context, g: Any, norm2: Any, r1: Any, c1: Any, mean: Any, r: Any, col: Any, *beside: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """(the step before it is scaled, the same rows of the matrices `beside`), piece by piece."""
    clip, eps, fresh = clip_of(c, norm2, g), _eps(c, g), _fresh(c)
    rows = _matrices(r * (1.0 - fresh) + r1 * fresh, 1)
    columns = _matrices(col * (1.0 - fresh) + c1 * fresh, 1)
    scale = c.xp.maximum(mean.reshape(-1), eps)
    for i, matrices in enumerate(zip(*(_matrices(a, 2) for a in (g, *beside)), strict=True)):
        for row, grad, *rest in tiles(c, rows[i], *matrices):
            yield _scaled(c, row[:, None] * (columns[i] / scale[i]), grad * clip, eps), tuple(rest)


def _scaled(c: Context, squares: Any, grad: Any, eps: float) -> Any:
    """The gradient over the root of its mean square."""
    c.xp.maximum(squares, eps * eps, out=squares)
    c.xp.sqrt(squares, out=squares)
    return c.xp.divide(grad, squares, out=squares)


def adafactor_norms(c: Context, g: Any, norm2: Any, r1: Any, c1: Any, mean: Any, w: Any, r: Any, col: Any, norms: Any) -> None:
    weights, steps = 0.0, 0.0
    for step, (weight,) in _steps(c, g, norm2, r1, c1, mean, r, col, w):
        weights, steps = weights + (weight * weight).sum(), steps + (step * step).sum()
    sums_of_squares(c, norms, weights, steps)


def _length(c: Context, norms: Any, num_elements: int) -> Any:
    """What the step is multiplied by: as long as the weights are, on average, times the rate; shorter where it is longer than `d`."""
    eps2, clip_at = float(c.attrs.get("eps2", 1e-3)), float(c.attrs.get("d", 1.0))
    weights, steps = (c.xp.sqrt(norms[i] / num_elements) for i in range(2))
    rate = min(rate_of(c), (c.step + 1) ** -0.5)
    return c.xp.maximum(eps2, weights) * rate / c.xp.maximum(1.0, steps / clip_at)


def _decay(c: Context) -> float:
    return 1.0 - rate_of(c) * float(c.attrs.get("weight_decay", 0.0))


def adafactor(c: Context, g: Any, norm2: Any, r1: Any, c1: Any, mean: Any, norms: Any, r: Any, col: Any, w: Any, w2: Any) -> None:
    decay = _decay(c)
    length = _length(c, norms, prod(n for label, n in c.total.items() if label != "pair")).astype(g.dtype)
    for step, (weight, into_w) in _steps(c, g, norm2, r1, c1, mean, r, col, w, w2):
        c.xp.multiply(weight, decay, out=into_w)
        step *= length
        into_w -= step


def running_mean(c: Context, seen: Any, old: Any, into: Any) -> None:
    fresh = _fresh(c)
    c.xp.multiply(old, 1.0 - fresh, out=into)
    into += seen * fresh


def adafactor_vector_norms(c: Context, g: Any, norm2: Any, w: Any, v: Any, norms: Any) -> None:
    weights, steps = 0.0, 0.0
    for weight, step, _ in _vector_steps(c, g, norm2, w, v):
        weights, steps = weights + (weight * weight).sum(), steps + (step * step).sum()
    sums_of_squares(c, norms, weights, steps)


def _vector_steps(c: Context, g: Any, norm2: Any, *arrays: Any) -> Iterator[tuple[Any, ...]]:
    """(pieces of `arrays` but the last two, step, new mean square); of the last two, the one is the old mean square."""
    clip, eps, fresh = clip_of(c, norm2, g), _eps(c, g), _fresh(c)
    for grad, *rest, square in flat(c, g, *arrays):
        part = grad * clip
        seen = square * (1.0 - fresh)
        seen += part * part * fresh
        yield (*rest, _scaled(c, seen.copy(), part, eps), seen)


def adafactor_vector(c: Context, g: Any, norm2: Any, norms: Any, w: Any, v: Any, w2: Any, v2: Any) -> None:
    """What has no rows keeps the mean square of every element."""
    decay = _decay(c)
    length = _length(c, norms, prod(n for label, n in c.total.items() if label != "pair")).astype(g.dtype)
    for weight, into_w, into_v, step, seen in _vector_steps(c, g, norm2, w, w2, v2, v):
        c.xp.multiply(weight, decay, out=into_w)
        step *= length
        into_w -= step
        c.xp.copyto(into_v, seen)


OPS = (
    # attrs: lr, beta2_decay, eps1 (None: the dtype's), eps2, d, weight_decay, max_norm; pair = 2: the squares of the weights and those of the steps
    op("adafactor_sums(g[... n m], norm2[]) -> r1[... n], c1[... m]", adafactor_sums, sums="n m", stepped=True, flops=each(4)),
    op("adafactor_mean(r1[... n], r[... n]) -> mean[...]", adafactor_mean, sums="n", linear=["r1 r"], stepped=True, flops=each(4)),
    op(
        "adafactor_norms(g[... n m], norm2[], r1[... n], c1[... m], mean[...], w[... n m], r[... n], c[... m]) -> norms[pair]", adafactor_norms, sums="... n m",
        stepped=True, flops=each(4.5),
    ),
    op(
        "adafactor(g[... n m], norm2[], r1[... n], c1[... m], mean[...], norms[pair], r[... n], c[... m], w[... n m]) -> w2[... n m]", adafactor,
        whole="pair", linear=["g w"], stepped=True, flops=each(9, without=("pair",)),
    ),
    op("adafactor_rows(r1[... n], r[... n]) -> r2[... n]", running_mean, linear=["r1 r"], stepped=True, flops=each(3)),
    op("adafactor_columns(c1[... m], c[... m]) -> c2[... m]", running_mean, linear=["c1 c"], stepped=True, flops=each(3)),
    op("adafactor_vector_norms(g[...], norm2[], w[...], v[...]) -> norms[pair]", adafactor_vector_norms, sums="...", stepped=True,
       flops=each(5.5)),
    op("adafactor_vector(g[...], norm2[], norms[pair], w[...], v[...]) -> w2[...], v2[...]", adafactor_vector, whole="pair", stepped=True,
       flops=each(10, without=("pair",))),
)  # fmt: skip

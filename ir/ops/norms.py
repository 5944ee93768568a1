"""Normalisations over the last dim, and softmax."""

from __future__ import annotations

from typing import Any

from ir.op import Context, op
from ir.ops.tiles import each, matrix, tiles


def _mean_product(c: Context, x: Any, y: Any) -> Any:
    """The mean over the last dim of x * y, one number a row."""
    out = c.xp.einsum("rh,rh->r", x, y)
    out /= x.shape[-1]
    return out


def _root(c: Context, variance: Any, rstd: Any) -> None:
    variance += c.attrs.get("eps", 1e-5)
    c.xp.sqrt(variance, out=variance)
    c.xp.divide(1.0, variance, out=rstd)


def _norm_dx(c: Context, scaled: Any, normal: Any, rstd: Any, dx: Any, mean: Any | None) -> None:
    """rstd (scaled - mean(scaled) - normal mean(scaled normal)), without the first mean where `mean` is None; overwrites `normal`."""
    normal *= _mean_product(c, scaled, normal)[:, None]
    c.xp.subtract(scaled, normal, out=dx)
    if mean is not None:
        dx -= mean[:, None]
    dx *= rstd[:, None]


# ---- layer norm ------------------------------------------------------------------------------------------------------------------------------------


def layer_norm(c: Context, x: Any, g: Any, shift: Any, out: Any, mean: Any, rstd: Any) -> None:
    for rows, result, m, r in tiles(c, matrix(x), matrix(out), mean.reshape(-1), rstd.reshape(-1)):
        c.xp.mean(rows, axis=-1, out=m)
        c.xp.subtract(rows, m[:, None], out=result)
        _root(c, _mean_product(c, result, result), r)
        result *= r[:, None]
        result *= g
        result += shift


def layer_norm_dx(c: Context, dout: Any, x: Any, g: Any, mean: Any, rstd: Any, dx: Any) -> None:
    for cotangent, rows, result, m, r in tiles(c, matrix(dout), matrix(x), matrix(dx), mean.reshape(-1), rstd.reshape(-1)):
        normal = rows - m[:, None]
        normal *= r[:, None]
        scaled = cotangent * g
        _norm_dx(c, scaled, normal, r, result, c.xp.mean(scaled, axis=-1))


def layer_norm_dgc(c: Context, dout: Any, x: Any, mean: Any, rstd: Any, dg: Any, dshift: Any) -> None:
    dg[...] = 0.0
    dshift[...] = 0.0
    for cotangent, rows, m, r in tiles(c, matrix(dout), matrix(x), mean.reshape(-1), rstd.reshape(-1)):
        normal = rows - m[:, None]
        normal *= r[:, None]
        normal *= cotangent
        ones = c.xp.ones(len(rows), x.dtype)
        dg += ones @ normal
        dshift += ones @ cotangent


# ---- root mean square norm, of rows and of heads ---------------------------------------------------------------------------------------------------


def rms_norm(c: Context, x: Any, g: Any, out: Any, rstd: Any) -> None:
    width = g.shape[0]
    for rows, result, r in tiles(c, x.reshape(-1, width), out.reshape(-1, width), rstd.reshape(-1)):
        _root(c, _mean_product(c, rows, rows), r)
        c.xp.multiply(rows, r[:, None], out=result)
        result *= g


def rms_norm_dx(c: Context, dout: Any, x: Any, g: Any, rstd: Any, dx: Any) -> None:
    width = g.shape[0]
    for cotangent, rows, result, r in tiles(c, dout.reshape(-1, width), x.reshape(-1, width), dx.reshape(-1, width), rstd.reshape(-1)):
        normal = rows * r[:, None]
        _norm_dx(c, cotangent * g, normal, r, result, None)


def rms_norm_dg(c: Context, dout: Any, x: Any, rstd: Any, dg: Any) -> None:
    width = dg.shape[0]
    dg[...] = 0.0
    for cotangent, rows, r in tiles(c, dout.reshape(-1, width), x.reshape(-1, width), rstd.reshape(-1)):
        dg += r @ (cotangent * rows)


# ---- softmax ---------------------------------------------------------------------------------------------------------------------------------------


def softmax(c: Context, x: Any, out: Any) -> None:
    for rows, result in tiles(c, matrix(x), matrix(out)):
        c.xp.subtract(rows, rows.max(axis=-1, keepdims=True), out=result)
        c.xp.exp(result, out=result)
        result /= result.sum(axis=-1, keepdims=True)


def softmax_dx(c: Context, dout: Any, out: Any, dx: Any) -> None:
    for cotangent, rows, result in tiles(c, matrix(dout), matrix(out), matrix(dx)):
        inner = c.xp.einsum("rn,rn->r", cotangent, rows)
        c.xp.subtract(cotangent, inner[:, None], out=result)
        result *= rows


def shares(c: Context, x: Any, out: Any) -> None:
    rows, result = matrix(x), matrix(out)
    c.xp.divide(rows, rows.sum(axis=-1, keepdims=True) + c.attrs.get("eps", 0.0), out=result)


def shares_dx(c: Context, dout: Any, x: Any, out: Any, dx: Any) -> None:
    rows = matrix(x)
    cotangent = matrix(dout)
    inner = c.xp.einsum("rn,rn->r", cotangent, matrix(out))
    c.xp.divide(cotangent - inner[:, None], rows.sum(axis=-1, keepdims=True) + c.attrs.get("eps", 0.0), out=matrix(dx))


OPS = (
    # attrs: eps
    op(
        "layer_norm(x[... h], g[h], c[h]) -> out[... h], mean[...], rstd[...]", layer_norm, whole="h", linear=["g c -> out"], stop="mean rstd",
        grads=("layer_norm.dx", "layer_norm.dgc"), flops=each(8),
    ),
    op("layer_norm.dx(dout[... h], x[... h], g[h], mean[...], rstd[...]) -> dx[... h]", layer_norm_dx, whole="h", linear=["dout", "g"], flops=each(10)),
    op(
        "layer_norm.dgc(dout[... h], x[... h], mean[...], rstd[...]) -> dg[h], dc[h]", layer_norm_dgc, sums="...",
        linear=["dout", "x mean -> dg", "rstd -> dg"], flops=each(5),
    ),
    op("rms_norm(x[... h], g[h]) -> out[... h], rstd[...]", rms_norm, whole="h", linear=["g -> out"], stop="rstd",
       grads=("rms_norm.dx", "rms_norm.dg"), flops=each(4)),
    op("rms_norm.dx(dout[... h], x[... h], g[h], rstd[...]) -> dx[... h]", rms_norm_dx, whole="h", linear=["dout", "g"], flops=each(7)),
    op("rms_norm.dg(dout[... h], x[... h], rstd[...]) -> dg[h]", rms_norm_dg, sums="...", linear=["dout", "x", "rstd"], flops=each(3)),
    # the norm of each head (Qwen3); attrs: eps, d
    op("head_norm(x[b s (h d)], g[d]) -> out[b s (h d)], rstd[b s h]", rms_norm, whole="d", linear=["g -> out"], stop="rstd",
       grads=("head_norm.dx", "head_norm.dg"), flops=each(4)),
    op("head_norm.dx(dout[b s (h d)], x[b s (h d)], g[d], rstd[b s h]) -> dx[b s (h d)]", rms_norm_dx, whole="d", linear=["dout", "g"], flops=each(7)),
    op("head_norm.dg(dout[b s (h d)], x[b s (h d)], rstd[b s h]) -> dg[d]", rms_norm_dg, whole="d", sums="b s h", linear=["dout", "x", "rstd"], flops=each(3)),
    op("softmax(x[... n]) -> out[... n]", softmax, whole="n", grads=("softmax.dx",), flops=each(4)),
    op("softmax.dx(dout[... n], out[... n]) -> dx[... n]", softmax_dx, whole="n", linear=["dout"], flops=each(4)),
    # x / (the sum of the row + eps); attrs: eps (absent: 0)
    op("shares(x[... n]) -> out[... n]", shares, whole="n", grads=("shares.dx",), flops=each(2)),
    op("shares.dx(dout[... n], x[... n], out[... n]) -> dx[... n]", shares_dx, whole="n", linear=["dout"], flops=each(5)),
)  # fmt: skip

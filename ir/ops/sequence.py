"""What stands before, beside or along a sequence: patches of images, a class token, one position picked out, a part that all heads share."""

from __future__ import annotations

from typing import Any

from ir.op import Context, op
from ir.ops.elementwise import copy
from ir.ops.tiles import each


def patches(c: Context, pixels: Any, out: Any) -> None:
    n = c.sizes
    tiled = pixels.reshape(n["b"], n["c"], n["y"], n["i"], n["x"], n["j"]).transpose(0, 2, 4, 1, 3, 5)
    c.xp.copyto(out, tiled.reshape(out.shape))


def prepend(c: Context, x: Any, token: Any, out: Any) -> None:
    out[:, :1] = token
    out[:, 1:] = x


def prepend_dx(c: Context, dout: Any, dx: Any) -> None:
    c.xp.copyto(dx, dout[:, 1:])


def prepend_dtoken(c: Context, dout: Any, dtoken: Any) -> None:
    c.xp.sum(dout[:, 0], axis=0, out=dtoken)


def pick(c: Context, x: Any, out: Any) -> None:
    c.xp.copyto(out, x[:, :1])


def pick_dx(c: Context, dout: Any, dx: Any) -> None:
    dx[...] = 0.0
    dx[:, :1] = dout


def append_to_heads(c: Context, x: Any, y: Any, out: Any) -> None:
    m = c.sizes["m"]
    heads = out.reshape(*x.shape[:2], -1, c.sizes["n"])
    heads[..., :m] = x.reshape(*heads.shape[:3], m)
    heads[..., m:] = y[:, :, None]


def append_to_heads_dx(c: Context, dout: Any, dx: Any) -> None:
    heads = dout.reshape(*dout.shape[:2], -1, c.sizes["n"])
    dx.reshape(*heads.shape[:3], -1)[...] = heads[..., : c.sizes["m"]]


def append_to_heads_dy(c: Context, dout: Any, dy: Any) -> None:
    heads = dout.reshape(*dout.shape[:2], -1, c.sizes["n"])
    c.xp.sum(heads[..., c.sizes["n"] - dy.shape[-1] :], axis=2, out=dy)


OPS = (
    # Images cut into squares of i rows and j columns, one square after the other; attrs: i, j
    op("patches(pixels[b c (y i) (x j)]) -> out[b (y x) (c i j)]", patches, linear=["pixels"], flops=each(0)),
    # A learned token before the sequence; attrs: t = s + 1
    op("prepend(x[b s h], token[h]) -> out[b t h]", prepend, whole="s t", linear=["x token"], grads=("prepend.dx", "prepend.dtoken"), flops=each(0)),
    op("prepend.dx(dout[b t h]) -> dx[b s h]", prepend_dx, whole="s t", linear=["dout"], flops=each(0)),  # attrs: s
    op("prepend.dtoken(dout[b t h]) -> dtoken[h]", prepend_dtoken, whole="t", sums="b", linear=["dout"], flops=each(0)),
    # The first position alone; attrs: t = 1
    op("pick(x[b s h]) -> out[b t h]", pick, whole="s t", linear=["x"], grads=("pick.dx",), flops=each(0)),
    op("pick.dx(dout[b t h]) -> dx[b s h]", pick_dx, whole="s t", linear=["dout"], flops=each(0)),  # attrs: s
    # The same y behind every head of x; attrs: m, n = m + k
    op("append_to_heads(x[b s (h m)], y[b s k]) -> out[b s (h n)]", append_to_heads, whole="k m n", linear=["x y"],
       grads=("append_to_heads.dx", "append_to_heads.dy"), flops=each(0)),
    op("append_to_heads.dx(dout[b s (h n)]) -> dx[b s (h m)]", append_to_heads_dx, whole="m n", linear=["dout"], flops=each(0)),
    op("append_to_heads.dy(dout[b s (h n)]) -> dy[b s k]", append_to_heads_dy, whole="k n", sums="h", linear=["dout"], flops=each(1)),
    # The same value for the next layer, so that whatever cuts the chain of layers cuts it too
    op("carry(x[...]) -> out[...]", copy, linear=["x"], grads=("carry.dx",), flops=each(0), copies=True),
    op("carry.dx(dout[...]) -> dx[...]", copy, linear=["dout"], flops=each(0), copies=True),
)  # fmt: skip

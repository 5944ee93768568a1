"""Normalisations over the last dim, and softmax."""

from __future__ import annotations

from typing import Any

from ir.op import op


def todo(*_: Any) -> None:
    raise NotImplementedError


OPS = (
    # attrs: eps
    op("layer_norm(x[... h], g[h], c[h]) -> out[... h], mean[...], rstd[...]", todo, whole="h", stop="mean rstd", grads=("layer_norm.dx", "layer_norm.dgc")),
    op("layer_norm.dx(dout[... h], x[... h], g[h], mean[...], rstd[...]) -> dx[... h]", todo, whole="h", linear=["dout"]),
    op("layer_norm.dgc(dout[... h], x[... h], mean[...], rstd[...]) -> dg[h], dc[h]", todo, sums="...", linear=["dout"]),
    op("rms_norm(x[... h], g[h]) -> out[... h], rstd[...]", todo, whole="h", stop="rstd", grads=("rms_norm.dx", "rms_norm.dg")),
    op("rms_norm.dx(dout[... h], x[... h], g[h], rstd[...]) -> dx[... h]", todo, whole="h", linear=["dout"]),
    op("rms_norm.dg(dout[... h], x[... h], rstd[...]) -> dg[h]", todo, sums="...", linear=["dout"]),
    # the norm of each head (Qwen3); attrs: eps, d
    op("head_norm(x[b s (h d)], g[d]) -> out[b s (h d)], rstd[b s h]", todo, whole="d", stop="rstd", grads=("head_norm.dx", "head_norm.dg")),
    op("head_norm.dx(dout[b s (h d)], x[b s (h d)], g[d], rstd[b s h]) -> dx[b s (h d)]", todo, whole="d", linear=["dout"]),
    op("head_norm.dg(dout[b s (h d)], x[b s (h d)], rstd[b s h]) -> dg[d]", todo, sums="b s h", linear=["dout"]),
    op("softmax(x[... n]) -> out[... n]", todo, whole="n", grads=("softmax.dx",)),
    op("softmax.dx(dout[... n], out[... n]) -> dx[... n]", todo, whole="n", linear=["dout"]),
)

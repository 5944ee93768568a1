"""Attention with grouped queries, and rotary positions."""

from __future__ import annotations

from typing import Any

from ir.op import op


def todo(*_: Any) -> None:
    raise NotImplementedError


OPS = (
    # Query heads are (g r): g groups share one key and value head. attrs: r, d, causal (bool), scale (float; absent: d**-0.5),
    # and with dropout of the probabilities p and salt. lse is the log of the softmax's denominator.
    op(
        "attention(q[b s (g r d)], k[b z (g d)], v[b z (g d)]) -> out[b s (g r d)], lse[b s (g r)]",
        todo, whole="s z r d", linear=["v"], stop="lse", grads=("attention.grad",), random=True,
    ),
    op(
        "attention.grad(dout[b s (g r d)], q[b s (g r d)], k[b z (g d)], v[b z (g d)], out[b s (g r d)], lse[b s (g r)])"
        " -> dq[b s (g r d)], dk[b z (g d)], dv[b z (g d)]",
        todo, whole="s z r d", linear=["dout"], random=True,
    ),
    # attrs: d, theta and, for Llama 3, factor, low, high, original (Hugging Face's rope_scaling of type llama3)
    op("rope(x[b s (h d)]) -> out[b s (h d)]", todo, whole="d", linear=["x"], grads=("rope.dx",)),
    op("rope.dx(dout[b s (h d)]) -> dx[b s (h d)]", todo, whole="d", linear=["dout"]),
)  # fmt: skip

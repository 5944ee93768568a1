"""Cross-entropy, whole and split over the vocabulary, and reductions."""

from __future__ import annotations

from typing import Any

from ir.op import op


def todo(*_: Any) -> None:
    raise NotImplementedError


OPS = (
    op(
        "cross_entropy(logits[... v], labels[...]) -> loss[...], lse[...]", todo, whole="v", stop="labels lse", grads=("cross_entropy.dlogits",),
        forms={"v": "top = last_max(logits); z, t = exp_sum(logits, labels, top); loss = log_loss(z, t)"},
    ),
    op("cross_entropy.dlogits(dloss[...], logits[... v], labels[...], lse[...]) -> dlogits[... v]", todo, linear=["dloss"], stop="labels lse"),
    # the form whose vocabulary can be split: top is a maximum and carries no cotangent; z = sum exp(logits - top), t = logit of the label - top where it is here
    op("last_max(logits[... v]) -> top[...]", todo, maxes="v", stop="logits top"),
    op("exp_sum(logits[... v], labels[...], top[...]) -> z[...], t[...]", todo, sums="v", stop="labels top", grads=("exp_sum.dlogits",)),
    op("exp_sum.dlogits(dz[...], dt[...], logits[... v], labels[...], top[...]) -> dlogits[... v]", todo, linear=["dz dt"], stop="labels top"),
    op("log_loss(z[...], t[...]) -> loss[...]", todo, grads=("log_loss.dz", "log_loss.dt")),  # log z - t
    op("log_loss.dz(dloss[...], z[...]) -> dz[...]", todo, linear=["dloss"]),
    op("log_loss.dt(dloss[...]) -> dt[...]", todo, linear=["dloss"]),
    # attrs: factor; the loss of a step is the sum over its tokens times 1 / tokens
    op("total(x[b s]) -> out[]", todo, sums="b s", linear=["x"], grads=("total.dx",)),
    op("total.dx(dout[]) -> dx[b s]", todo, linear=["dout"]),  # attrs: factor, b, s
    op("fill() -> out[]", todo),  # attrs: value; the seed of the backward
    op("row_sum(x[... n]) -> out[...]", todo, sums="n", linear=["x"], grads=("row_sum.dx",)),
    op("row_sum.dx(dout[...]) -> dx[... n]", todo, linear=["dout"]),  # attrs: n
    op("row_max(x[... n]) -> out[...]", todo, maxes="n", stop="x out"),
    op("sum_squares(x[...]) -> out[]", todo, sums="..."),
)

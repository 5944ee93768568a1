"""Cross-entropy, whole and split over the vocabulary, and reductions."""

from __future__ import annotations

from typing import Any

from ir.op import Context, op
from ir.ops.tiles import each, flat, matrix, tiles


def _label_here(c: Context, labels: Any) -> tuple[Any, Any, Any]:
    """For each row: its number, the column of its label in this rank's part of the vocabulary, and whether the column is here (else column 0 stands in)."""
    local = labels - c.at.get("v", 0)
    here = (local >= 0) & (local < c.sizes["v"])
    return c.xp.arange(len(labels)), local * here, here


# ---- whole vocabulary ------------------------------------------------------------------------------------------------------------------------------


def cross_entropy(c: Context, logits: Any, labels: Any, loss: Any, lse: Any) -> None:
    for rows, label, result, r in tiles(c, matrix(logits), labels.reshape(-1), loss.reshape(-1), lse.reshape(-1)):
        top = rows.max(axis=-1)
        shifted = rows - top[:, None]
        c.xp.exp(shifted, out=shifted)
        c.xp.log(shifted.sum(axis=-1), out=r)
        r += top
        c.xp.subtract(r, rows[c.xp.arange(len(rows)), label], out=result)


def cross_entropy_dlogits(c: Context, dloss: Any, logits: Any, labels: Any, lse: Any, dlogits: Any) -> None:
    _softmax_dlogits(c, dloss, -dloss, logits, labels, lse, dlogits)


def _softmax_dlogits(c: Context, of_sum: Any, of_label: Any, logits: Any, labels: Any, top: Any, dlogits: Any) -> None:
    """of_sum exp(logits - top), plus of_label where the label is."""
    rows_of = (matrix(logits), matrix(dlogits), *(a.reshape(-1) for a in (labels, top, of_sum, of_label)))
    for rows, result, label, t, s, extra in tiles(c, *rows_of):
        c.xp.subtract(rows, t[:, None], out=result)
        c.xp.exp(result, out=result)
        result *= s[:, None]
        number, column, here = _label_here(c, label)
        result[number, column] += extra * here


# ---- split vocabulary ------------------------------------------------------------------------------------------------------------------------------


def row_max(c: Context, x: Any, top: Any) -> None:
    c.xp.max(x, axis=-1, out=top)


def exp_sum(c: Context, logits: Any, labels: Any, top: Any, z: Any, t: Any) -> None:
    for rows, label, peak, into_z, into_t in tiles(c, matrix(logits), *(a.reshape(-1) for a in (labels, top, z, t))):
        shifted = rows - peak[:, None]
        number, column, here = _label_here(c, label)
        c.xp.multiply(shifted[number, column], here, out=into_t)
        c.xp.exp(shifted, out=shifted)
        c.xp.sum(shifted, axis=-1, out=into_z)


def exp_sum_dlogits(c: Context, dz: Any, dt: Any, logits: Any, labels: Any, top: Any, dlogits: Any) -> None:
    _softmax_dlogits(c, dz, dt, logits, labels, top, dlogits)


def log_loss(c: Context, z: Any, t: Any, loss: Any) -> None:
    c.xp.subtract(c.xp.log(z), t, out=loss)


def log_loss_dz(c: Context, dloss: Any, z: Any, dz: Any) -> None:
    c.xp.divide(dloss, z, out=dz)


def log_loss_dt(c: Context, dloss: Any, dt: Any) -> None:
    c.xp.negative(dloss, out=dt)


# ---- reductions ------------------------------------------------------------------------------------------------------------------------------------


def total(c: Context, x: Any, out: Any) -> None:
    out[...] = x.sum(dtype="float64") * c.attrs["factor"]


def total_dx(c: Context, dout: Any, dx: Any) -> None:
    c.xp.multiply(dout, c.attrs["factor"], out=dx)


def fill(c: Context, out: Any) -> None:
    out[...] = c.attrs["value"]


def row_sum(c: Context, x: Any, out: Any) -> None:
    c.xp.sum(x, axis=-1, out=out)


def row_sum_dx(c: Context, dout: Any, dx: Any) -> None:
    dx[...] = dout[..., None]


def sum_squares(c: Context, x: Any, out: Any) -> None:
    """Each tile in x's dtype, the sum of tiles in float64: a norm over millions of elements keeps its digits."""
    out[...] = sum(c.xp.dot(part, part).astype("float64") for (part,) in flat(c, x))


OPS = (
    op(
        "cross_entropy(logits[... v], labels[...]) -> loss[...], lse[...]", cross_entropy, whole="v", stop="labels lse", grads=("cross_entropy.dlogits",),
        flops=each(4), forms={"v": "top = last_max(logits); z, t = exp_sum(logits, labels, top); loss = log_loss(z, t)"},
    ),
    op("cross_entropy.dlogits(dloss[...], logits[... v], labels[...], lse[...]) -> dlogits[... v]", cross_entropy_dlogits, linear=["dloss"],
       stop="labels lse", flops=each(3)),
    # the form whose vocabulary can be split: top is a maximum and carries no cotangent; z = sum exp(logits - top), t = logit of the label - top if it is here
    op("last_max(logits[... v]) -> top[...]", row_max, maxes="v", stop="logits top", flops=each(1)),
    op("exp_sum(logits[... v], labels[...], top[...]) -> z[...], t[...]", exp_sum, sums="v", stop="labels top", grads=("exp_sum.dlogits",), flops=each(3)),
    op("exp_sum.dlogits(dz[...], dt[...], logits[... v], labels[...], top[...]) -> dlogits[... v]", exp_sum_dlogits, linear=["dz dt"],
       stop="labels top", flops=each(3)),
    op("log_loss(z[...], t[...]) -> loss[...]", log_loss, grads=("log_loss.dz", "log_loss.dt"), flops=each(2)),  # log z - t
    op("log_loss.dz(dloss[...], z[...]) -> dz[...]", log_loss_dz, linear=["dloss"], flops=each(1)),
    op("log_loss.dt(dloss[...]) -> dt[...]", log_loss_dt, linear=["dloss"], flops=each(1)),
    # attrs: factor; the loss of a step is the sum over its tokens times 1 / tokens
    op("total(x[b s]) -> out[]", total, sums="b s", linear=["x"], grads=("total.dx",), flops=each(1)),
    op("total.dx(dout[]) -> dx[b s]", total_dx, linear=["dout"], flops=each(1)),  # attrs: factor, b, s
    op("fill() -> out[]", fill, flops=each(0)),  # attrs: value; the seed of the backward
    op("row_sum(x[... n]) -> out[...]", row_sum, sums="n", linear=["x"], grads=("row_sum.dx",), flops=each(1)),
    op("row_sum.dx(dout[...]) -> dx[... n]", row_sum_dx, linear=["dout"], flops=each(0)),  # attrs: n
    op("row_max(x[... n]) -> out[...]", row_max, maxes="n", stop="x out", flops=each(1)),
    op("sum_squares(x[...]) -> out[]", sum_squares, sums="...", flops=each(2)),
)  # fmt: skip

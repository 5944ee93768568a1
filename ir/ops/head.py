"""The head and its loss over chunks of tokens: logits exist for one chunk at a time, and their gradients are used up as they are made.

`head_lse` takes each chunk through the product with the table and the logarithm of its sum of exponentials; the gradient makes a chunk's logits once more. The
table's rows are in `p` equal parts, each with a logarithm of its own: so a vocabulary that lies on several ranks needs no word between them while the chunks
go by, and `lse_loss` joins the parts. Attributes: `p`, `chunks` (of the tokens that a rank has), `cap` (soft cap of the logits, 0 for none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

from ir.op import Attrs, Context, Op, Sizes, op
from ir.ops.tiles import each, matrix, tiles

LEAST_ROWS = 512
"""Rows of the table whose gradient is made at a time, at least: products of fewer are slow."""


def _tokens(sizes: Sizes) -> int:
    return prod(size for label, size in sizes.items() if label not in "pehv")


def _height(sizes: Sizes, attrs: Attrs) -> int:
    """Tokens of a chunk."""
    return max(1, -(-_tokens(sizes) // int(attrs["chunks"])))


def _width(sizes: Sizes) -> int:
    return sizes["p"] * sizes["e"]


def _block(sizes: Sizes, attrs: Attrs) -> int:
    return min(_width(sizes), max(LEAST_ROWS, _height(sizes, attrs)))


# ---- work ------------------------------------------------------------------------------------------------------------------------------------------


def _room(sizes: Sizes, attrs: Attrs) -> int:
    return _height(sizes, attrs) * _width(sizes)


def _room_of_grad(is_trained: bool) -> Callable[[Sizes, Attrs], int]:
    """A chunk's logits, the slope of their cap, and the gradient of some rows of the table."""

    def room(sizes: Sizes, attrs: Attrs) -> int:
        return _room(sizes, attrs) * (2 if attrs.get("cap", 0.0) else 1) + is_trained * _block(sizes, attrs) * sizes["h"]

    return room


def _product(sizes: Sizes, attrs: Attrs, times: int) -> tuple[int, ...]:
    height = _height(sizes, attrs)
    return times * -(-_tokens(sizes) // height), height, _width(sizes), sizes["h"]


def _moved(sizes: Sizes, attrs: Attrs, times: int, passes: int) -> float:
    """Elements of so many products a chunk, and of passes over its logits beside them."""
    batch, m, n, k = _product(sizes, attrs, times)
    return float(batch * (m * k + n * k + m * n) + passes * _tokens(sizes) * n)


def _flops(times: int, beside: int) -> Any:
    return lambda sizes, attrs: _tokens(sizes) * _width(sizes) * (2.0 * times * sizes["h"] + beside + 8 * bool(attrs.get("cap", 0.0)))


def _gemm(times: int) -> Any:
    return lambda sizes, attrs: _product(sizes, attrs, times)


def _moves(sizes: Sizes, attrs: Attrs) -> float:
    return _moved(sizes, attrs, 1, 4 if attrs.get("cap", 0.0) else 2)


def _moves_of_grad(is_trained: bool) -> Callable[[Sizes, Attrs], float]:
    """A chunk's part of the table's gradient is added to what there is: two reads and a write, the first but written."""

    def moves(sizes: Sizes, attrs: Attrs) -> float:
        chunks = -(-_tokens(sizes) // _height(sizes, attrs))
        added = 3.0 * is_trained * (chunks - 1) * _width(sizes) * sizes["h"]
        return _moved(sizes, attrs, 2 + is_trained, 8 if attrs.get("cap", 0.0) else 2) + added

    return moves


# ---- kernels ---------------------------------------------------------------------------------------------------------------------------------------


def _chunks(c: Context, *arrays: Any) -> Iterator[tuple[Any, ...]]:
    height = _height(c.sizes, c.attrs)
    for start in range(0, len(arrays[0]), height):
        yield tuple(a[start : start + height] for a in arrays)


def _logits(c: Context, x: Any, w: Any, bias: Sequence[Any], room: Any) -> Any:
    """A chunk's logits [rows, (p e)], in `room`."""
    logits = room[: len(x) * len(w)].reshape(len(x), len(w))
    c.xp.matmul(x, w.T, out=logits)
    for b in bias:
        logits += b
    if cap := c.attrs.get("cap", 0.0):
        logits *= 1.0 / cap
        c.xp.tanh(logits, out=logits)
        logits *= cap
    return logits


def _labels_here(c: Context, labels: Any) -> tuple[Any, Any, Any]:
    """For each row its number, the column of its label in this rank's part of the vocabulary (0 where it is elsewhere), and whether it is here."""
    width = _width(c.sizes)
    local = labels - c.at.get("p", 0) * c.sizes["e"]
    here = (local >= 0) & (local < width)
    return c.xp.arange(len(labels)), local * here, here


def _parted(c: Context, rows: Any) -> Any:
    return rows.reshape(len(rows), c.sizes["p"], c.sizes["e"])


def head_lse(c: Context, x: Any, w: Any, *rest: Any) -> None:
    """`rest`: the bias, where there is one, labels, both outputs and the room."""
    *bias, labels, lse, t, room = rest
    for x_c, labels_c, lse_c, t_c in _chunks(c, matrix(x), labels.reshape(-1), matrix(lse), t.reshape(-1)):
        for rows, label, into_lse, into_t in tiles(c, _logits(c, x_c, w, bias, room), labels_c, lse_c, t_c):
            number, column, here = _labels_here(c, label)
            c.xp.multiply(rows[number, column], here, out=into_t)
            parts = _parted(c, rows)
            top = parts.max(axis=-1)
            parts -= top[..., None]
            c.xp.exp(parts, out=parts)
            c.xp.log(parts.sum(axis=-1), out=into_lse)
            into_lse += top


def _dlogits(c: Context, logits: Any, dlse: Any, dt: Any, labels: Any, lse: Any, spare: Any) -> None:
    """A chunk's logits become their gradients: dlse exp(logits - lse), plus dt where the label is, times the slope of the cap."""
    cap = c.attrs.get("cap", 0.0)
    slopes = spare[: logits.size].reshape(logits.shape) if cap else logits
    for rows, slope, of_sum, of_label, label, norm in tiles(c, logits, slopes, dlse, dt, labels, lse):
        if cap:
            c.xp.multiply(rows, rows, out=slope)
            slope *= -1.0 / cap**2
            slope += 1.0
        parts = _parted(c, rows)
        parts -= norm[..., None]
        c.xp.exp(parts, out=parts)
        parts *= of_sum[..., None]
        number, column, here = _labels_here(c, label)
        rows[number, column] += of_label * here
        if cap:
            rows *= slope


def _head_lse_grad(c: Context, *arrays: Any, has_bias: bool, is_trained: bool) -> None:
    dlse, dt, x, w, *bias, labels, lse = arrays[: 6 + has_bias]
    dx, *made, room = arrays[6 + has_bias :]
    spare = room[_room(c.sizes, c.attrs) :]
    flat = (matrix(dlse), dt.reshape(-1), matrix(x), labels.reshape(-1), matrix(lse), matrix(dx))
    for i, (dlse_c, dt_c, x_c, labels_c, lse_c, dx_c) in enumerate(_chunks(c, *flat)):
        logits = _logits(c, x_c, w, bias, room)
        _dlogits(c, logits, dlse_c, dt_c, labels_c, lse_c, spare)
        c.xp.matmul(logits, w, out=dx_c)
        if is_trained:
            _add_product(c, logits, x_c, made[0], i == 0, room)
        for dbias in made[1:]:
            dbias[...] = logits.sum(axis=0) + (dbias if i else 0.0)


def _add_product(c: Context, dlogits: Any, x: Any, dw: Any, is_first: bool, room: Any) -> None:
    """Adds a chunk's gradient of the table to those of the chunks before, some rows at a time, at the end of `room`."""
    if is_first:
        c.xp.matmul(dlogits.T, x, out=dw)
        return
    block = _block(c.sizes, c.attrs)
    made = room[len(room) - block * dw.shape[1] :].reshape(block, dw.shape[1])
    for a in range(0, len(dw), block):
        part = made[: len(dw[a : a + block])]
        c.xp.matmul(dlogits[:, a : a + block].T, x, out=part)
        dw[a : a + block] += part


def lse_loss(c: Context, lse: Any, t: Any, loss: Any, norm: Any) -> None:
    top = lse.max(axis=-1)
    c.xp.log(c.xp.exp(lse - top[..., None]).sum(axis=-1), out=norm)
    norm += top
    c.xp.subtract(norm, t, out=loss)


def lse_loss_dlse(c: Context, dloss: Any, lse: Any, norm: Any, dlse: Any) -> None:
    c.xp.subtract(lse, norm[..., None], out=dlse)
    c.xp.exp(dlse, out=dlse)
    dlse *= dloss[..., None]


def lse_loss_dt(c: Context, dloss: Any, dt: Any) -> None:
    c.xp.negative(dloss, out=dt)


def _head(name: str, has_bias: bool, is_trained: bool) -> tuple[Op, Op]:
    """The operator and its gradient. lse: of each part of the vocabulary the logarithm of the sum of exponentials; t: the logit of the label if it is here."""
    table = "w[(p e) h]" + ", c[(p e)]" * has_bias
    made = ", dw[(p e) h]" * is_trained + ", dc[(p e)]" * (is_trained and has_bias)
    forward = op(
        f"{name}(x[... h], {table}, labels[...]) -> lse[... p], t[...]", head_lse, sums="p", stop="labels" if is_trained else "w c labels",
        grads=(f"{name}.grad",), flops=_flops(1, 4 + has_bias), gemm=_gemm(1), room=_room, moves=_moves,
    )  # fmt: skip
    grad = op(
        f"{name}.grad(dlse[... p], dt[...], x[... h], {table}, labels[...], lse[... p]) -> dx[... h]{made}",
        partial(_head_lse_grad, has_bias=has_bias, is_trained=is_trained), sums="... p", whole="h", linear=["dlse dt"], stop="labels lse",
        flops=_flops(2 + is_trained, 5 + 2 * has_bias), gemm=_gemm(2 + is_trained), room=_room_of_grad(is_trained), moves=_moves_of_grad(is_trained),
    )  # fmt: skip
    return forward, grad


OPS = (
    *_head("head_lse", False, True), *_head("head_lse_bias", True, True),
    *_head("head_lse_frozen", False, False), *_head("head_lse_bias_frozen", True, False),
    op("lse_loss(lse[... p], t[...]) -> loss[...], norm[...]", lse_loss, whole="p", stop="norm", grads=("lse_loss.dlse", "lse_loss.dt"), flops=each(4)),
    op("lse_loss.dlse(dloss[...], lse[... p], norm[...]) -> dlse[... p]", lse_loss_dlse, linear=["dloss"], flops=each(3)),
    op("lse_loss.dt(dloss[...]) -> dt[...]", lse_loss_dt, linear=["dloss"], flops=each(1)),
)  # fmt: skip

"""Attention on a ring: queries stay, keys and values go round in as many turns as there are parts of the sequence, and what each turn gives is joined.

Said of whole tensors: a `shift` moves a sequence on by one part, the last to the front, so that a rank that holds a part gets that of its neighbour; in turn t
the keys have been shifted t times, and the queries of part i see those that stand at part i, those of part i - t (Liu et al., arXiv:2310.01889). Parts
may lie in equal blocks of `inner`: keys then go round in their block, and after each such round every part moves on to the same place of the next block. In its
gradient `out` and `lse` are those of all turns, so that each turn's contribution is exact by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ir.op import Attrs, Context, Sizes, op
from ir.ops.attention import attend_runs, attend_runs_grad, join, of_heads
from ir.ops.tiles import each
from ir.zigzag import Run, pairs, runs

Turn = tuple[slice, tuple[Run, ...], tuple[Run, ...]]
"""Tokens that are here, the positions of their queries, the positions of their keys."""


def source(part: int, turn: int, parts: int, inner: int) -> int:
    """The part whose keys stand at `part` in this turn.

    >>> [source(0, turn, 6, 6) for turn in range(6)], [source(0, turn, 6, 3) for turn in range(6)]
    ([0, 5, 4, 3, 2, 1], [0, 2, 1, 3, 5, 4])
    """
    (block, place), (rounds, steps) = divmod(part, inner), divmod(turn, inner)
    return (block - rounds) % (parts // inner) * inner + (place - steps) % inner


def _turns(sizes: Sizes, attrs: Attrs, at: Sizes, total: Sizes) -> Iterator[Turn]:
    """The parts of the sequence that are here."""
    n, whole, zigzag = attrs["parts"], total["s"], attrs.get("zigzag", 0)
    length, first = whole // n, at.get("s", 0)
    for i in range(first // length, (first + sizes["s"]) // length):
        j = source(i, attrs["turn"], n, attrs.get("inner", n))
        yield (
            slice(i * length - first, (i + 1) * length - first),
            runs(i * length, (i + 1) * length, whole, zigzag), runs(j * length, (j + 1) * length, whole, zigzag),
        )  # fmt: skip


def attention_part(c: Context, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    for here, queries, keys in _turns(c.sizes, c.attrs, c.at, c.total):
        attend_runs(c, queries, keys, *(x[:, here] for x in (q, k, v, out, lse)))


def attention_part_grad(c: Context, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any) -> None:
    for here, queries, keys in _turns(c.sizes, c.attrs, c.at, c.total):
        attend_runs_grad(c, queries, keys, *(x[:, here] for x in (dout, q, k, v, out, lse, dq, dk, dv)))


def shift(c: Context, x: Any, out: Any) -> None:
    parts = c.attrs["parts"]
    inner, (b, s, h) = c.attrs.get("inner", parts), x.shape
    blocks, moved = (a.reshape(b, parts // inner, inner, s // parts * h) for a in (x, out))
    if c.attrs.get("of_blocks", False):
        moved[:, 1:], moved[:, 0] = blocks[:, :-1], blocks[:, -1]
    else:
        moved[:, :, 1:], moved[:, :, 0] = blocks[:, :, :-1], blocks[:, :, -1]


def _products(of_keys: int, of_values: int) -> Callable[[Sizes, Attrs], float]:
    """Of the rank that has most: under a causal mask half of a square at home and all of it elsewhere, in zig-zag order always half."""

    def flops(sizes: Sizes, attrs: Attrs) -> float:
        n, causal = sizes["s"], attrs.get("causal", True)
        seen = n * n / 2.0 if causal and (attrs.get("zigzag", 0) or attrs["turn"] == 0) else float(n * n)
        return of_heads(sizes, of_keys, of_values) * min(seen, float(n * (attrs.get("window") or n)))

    return flops


def _products_at(of_keys: int, of_values: int) -> Callable[[Sizes, Attrs, Sizes, Sizes], float]:
    def flops(sizes: Sizes, attrs: Attrs, at: Sizes, total: Sizes) -> float:
        seen = (pairs(q, k, attrs.get("causal", True), attrs.get("window") or 0) for _, q, k in _turns(sizes, attrs, at, total))
        return of_heads(sizes, of_keys, of_values) * sum(seen)

    return flops


_OPERANDS = "q[b s (g r d)], k[b s (g d)], v[b s (g w)]"
_ROWS = "out[b s (g r w)], lse[b s (g r)]"

OPS = (
    # attrs: those of attention, parts (of the sequence), turn, inner (all); parts are split over ranks whole
    op(f"attention_part({_OPERANDS}) -> {_ROWS}", attention_part, whole="r d w", linear=["v -> out"], stop="lse", grads=("attention_part.grad",),
       flops=_products(1, 1), flops_at=_products_at(1, 1), random=True),
    op(f"attention_part.grad(dout[b s (g r w)], {_OPERANDS}, {_ROWS}) -> dq[b s (g r d)], dk[b s (g d)], dv[b s (g w)]", attention_part_grad,
       whole="r d w", linear=["dout", "v out -> dq dk"], flops=_products(3, 2), flops_at=_products_at(3, 2), random=True),
    # What two sets of keys give, joined by the logs of their denominators
    op("join_parts(x[b s (g r w)], a[b s (g r)], y[b s (g r w)], e[b s (g r)]) -> out[b s (g r w)], lse[b s (g r)]", join, whole="r w",
       linear=["x y -> out"], flops=each(6)),
    # attrs: parts, inner (all), of_blocks (False: inside them). Where s is split over as many ranks it is a message to the neighbour.
    op("shift(x[b s h]) -> out[b s h]", shift, whole="s", linear=["x"], flops=each(0), forms={"s": "each rank sends its part to the next one"}),
)  # fmt: skip

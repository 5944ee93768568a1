"""Attention with grouped queries.

One operator in four sentences: plain, with sinks (an extra score of each head that takes a share of the softmax and gives nothing), with a mask of the keys
(padding), with scores moved by a learned table of relative positions (T5). Attributes say the rest: causal, window, softcap, scale, dropout. Queries and keys
count positions of their own (`s`, `z`), each from its shard's offset.

It goes through blocks of query rows of a few heads, so that what is as large as (rows, keys) stays small; under a causal mask a block sees only the keys up to
its last row, under a window only those from its first row's reach. The backward computes the probabilities again from `lse`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ir.op import Attrs, Context, Kernel, Sizes, op
from ir.ops.tiles import each
from ir.random import growth, kept, stream
from ir.zigzag import Run, joined, pairs, runs

BLOCK_ROWS = 64
BLOCK_ELEMENTS = 1 << 18
"""Scores in one block: with 4 bytes each, the second-level cache of a core."""


class _Block(NamedTuple):
    """Sample `sample`, key heads [head, head_stop), query rows [row, row_stop), keys [first, reach)."""

    sample: int
    head: int
    head_stop: int
    row: int
    row_stop: int
    first: int
    reach: int


def _blocks(c: Context, samples: int, groups: int, length: int, keys: int) -> Iterator[_Block]:
    on_host = c.xp is np
    rows = min(length, BLOCK_ROWS) if on_host else length
    heads = max(1, BLOCK_ELEMENTS // (rows * keys * c.sizes["r"])) if on_host else groups
    past, window = c.at.get("s", 0) - c.at.get("z", 0), c.attrs.get("window", 0)
    for sample in range(samples):
        for head in range(0, groups, heads):
            for row in range(0, length, rows):
                stop = min(length, row + rows)
                reach = min(keys, past + stop) if _causal(c) else keys
                first = max(0, past + row - window + 1) if window else 0
                if reach > first:
                    yield _Block(sample, head, min(groups, head + heads), row, stop, first, reach)


def _causal(c: Context) -> bool:
    return bool(c.attrs.get("causal", True))


def _queries(array: Any, at: _Block) -> Any:
    """The block's rows of an array [b s g r d], the r query heads of a key head below each other: a copy [heads, r * rows, d]."""
    part = array[at.sample, at.row : at.row_stop, at.head : at.head_stop].transpose(1, 2, 0, 3)
    return part.reshape(part.shape[0], -1, part.shape[-1]).copy()


def _keys(array: Any, at: _Block) -> Any:
    """The block's keys or values of an array [b z g d]: a view [heads, keys, d]."""
    return array[at.sample, at.first : at.reach, at.head : at.head_stop].swapaxes(0, 1)


def _put(array: Any, at: _Block, value: Any) -> None:
    """Writes [heads, r * rows, d] into the block's rows of an array [b s g r d]."""
    heads, rows, width = at.head_stop - at.head, at.row_stop - at.row, value.shape[-1]
    array[at.sample, at.row : at.row_stop, at.head : at.head_stop] = value.reshape(heads, -1, rows, width).transpose(2, 0, 1, 3)


class _Scores(NamedTuple):
    """What stands between the products of queries and keys and their softmax. `mask` [b z] is 0 where a key is hidden, `table` [n (g r)] moves scores."""

    c: Context
    mask: Any = None
    table: Any = None

    def __call__(self, queries: Any, keys: Any, at: _Block) -> tuple[Any, Any]:
        """(scores [heads, r * rows, keys], minus infinity where a key is hidden; their derivative by the products, None where it is 1)."""
        xp, cap = self.c.xp, float(self.c.attrs.get("softcap", 0.0))
        scores, slope = xp.matmul(queries, keys.swapaxes(1, 2)), None
        if cap:
            scores *= 1.0 / cap
            xp.tanh(scores, out=scores)
            slope = 1.0 - scores * scores
            scores *= cap
        rows = at.row_stop - at.row
        by_row = scores.reshape(len(scores), -1, rows, at.reach - at.first)
        if self.table is not None:
            by_row += self._heads(at)[:, self.buckets(at)].reshape(by_row.shape)
        hidden = self._hidden(at)
        if hidden is not None:
            xp.copyto(by_row, -math.inf, where=hidden)
        return scores, slope

    def _heads(self, at: _Block) -> Any:
        """The table's columns of the block's query heads, as rows."""
        r = self.c.sizes["r"]
        return self.table[:, at.head * r : at.head_stop * r].T

    def _distance(self, at: _Block) -> Any:
        """[rows, keys]: by how many positions the key stands behind the query."""
        xp, s, z = self.c.xp, self.c.at.get("s", 0), self.c.at.get("z", 0)
        return xp.arange(s + at.row, s + at.row_stop)[:, None] - xp.arange(z + at.first, z + at.reach)

    def _hidden(self, at: _Block) -> Any:
        """bool [rows, keys] or [keys]; None where the block sees all."""
        window, hidden = self.c.attrs.get("window", 0), None
        if _causal(self.c) or window:
            distance = self._distance(at)
            hidden = distance < 0 if _causal(self.c) else None
            if window:
                far = distance >= window
                hidden = far if hidden is None else hidden | far
        if self.mask is not None:
            padding = self.mask[at.sample, at.first : at.reach] == 0
            hidden = padding if hidden is None else hidden | padding
        return hidden

    def buckets(self, at: _Block) -> Any:
        """int [rows, keys]: the table's row for each pair.

        Half of the buckets count single positions, the others grow logarithmically up to `max_distance` (Raffel et al., arXiv:1910.10683, section 2.1);
        where the attention is not causal, half of all are for keys ahead.
        """
        xp, n = self.c.xp, self.c.sizes["n"]
        distance, ahead = self._distance(at), 0
        if _causal(self.c):
            distance = xp.maximum(distance, 0)
        else:
            n = max(1, n // 2)
            ahead = (distance < 0) * n
            distance = xp.abs(distance)
        exact = max(1, n // 2)
        growing = xp.log(xp.maximum(distance, 1) / exact) / math.log(self.c.attrs["max_distance"] / exact) * (n - exact)
        return xp.where(distance < exact, distance, xp.minimum(exact + growing.astype("int64"), n - 1)) + ahead


def _kept(c: Context, at: _Block) -> Any | None:
    """bool [heads, r * rows, keys]: which probabilities dropout keeps; None without dropout."""
    p = float(c.attrs.get("p", 0.0))
    if p <= 0.0:
        return None
    xp, r = c.xp, c.sizes["r"]
    sample = c.at.get("b", 0) + at.sample
    head = xp.arange((c.at.get("g", 0) + at.head) * r, (c.at.get("g", 0) + at.head_stop) * r)
    row = xp.arange(c.at.get("s", 0) + at.row, c.at.get("s", 0) + at.row_stop)
    index = ((sample * c.total["g"] * r + head)[:, None] * c.total["s"] + row).reshape(-1)
    z = c.at.get("z", 0)
    keep = kept(xp, stream(c.seed, c.step, c.attrs["salt"]), p, index, c.total["z"], z + at.first, z + at.reach)
    return keep.reshape(at.head_stop - at.head, -1, at.reach - at.first)


def _scale(c: Context) -> float:
    return float(c.attrs.get("scale") or c.sizes["d"] ** -0.5)


def _attend(c: Context, scores: _Scores, sinks: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    b, s, z = q.shape[0], q.shape[1], k.shape[1]
    g, r = c.sizes["g"], c.sizes["r"]
    q, out, lse = q.reshape(b, s, g, r, -1), out.reshape(b, s, g, r, -1), lse.reshape(b, s, g, r, 1)
    k, v = k.reshape(b, z, g, -1), v.reshape(b, z, g, -1)
    blind = scores.mask is not None or c.attrs.get("window", 0) > 0
    for at in _blocks(c, b, g, s, z):
        queries = _queries(q, at)
        queries *= _scale(c)
        weights, _ = scores(queries, _keys(k, at), at)
        top = weights.max(axis=-1, keepdims=True)
        if sinks is not None:
            extra = _of_rows(c, sinks, at)
            top = c.xp.maximum(top, extra)
        if blind:
            top = c.xp.maximum(top, LOWEST)  # a row that sees no key
        weights -= top
        c.xp.exp(weights, out=weights)
        norm = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            norm += c.xp.exp(extra - top)
        if blind:
            norm += norm == 0.0
        _put(lse, at, c.xp.log(norm) + top)
        keep = _kept(c, at)
        if keep is not None:
            weights *= keep
            norm /= growth(c.attrs["p"])
        result = c.xp.matmul(weights, _keys(v, at))
        result /= norm
        _put(out, at, result)


LOWEST = -1e30
"""Below every score, and finite in every dtype that computes."""


def _of_rows(c: Context, of_heads: Any, at: _Block) -> Any:
    """One number a query head [(g r)], as [heads, r * rows, 1]."""
    r, rows = c.sizes["r"], at.row_stop - at.row
    return c.xp.repeat(of_heads[at.head * r : at.head_stop * r].reshape(-1, r), rows, axis=1)[:, :, None]


def _attend_grad(c: Context, scores: _Scores, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, dtable: Any = None) -> None:
    b, s, z = q.shape[0], q.shape[1], k.shape[1]
    g, r = c.sizes["g"], c.sizes["r"]
    q, out, dout, dq, lse = (a.reshape(b, s, g, r, -1) for a in (q, out, dout, dq, lse))
    k, v, dk, dv = (a.reshape(b, z, g, -1) for a in (k, v, dk, dv))
    for zeroed in (dq, dk, dv, *(() if dtable is None else (dtable,))):
        zeroed[...] = 0.0
    scale = _scale(c)
    for at in _blocks(c, b, g, s, z):
        queries, cotangents = _queries(q, at), _queries(dout, at)
        queries *= scale
        delta = c.xp.einsum("grd,grd->gr", cotangents, _queries(out, at))
        weights, slope = scores(queries, _keys(k, at), at)
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
        if dtable is not None:
            _add_to_table(c, scores, dtable, dweights, at)
        if slope is not None:
            dweights *= slope
        _keys(dv, at)[...] += c.xp.matmul(weights.swapaxes(1, 2), cotangents)
        _keys(dk, at)[...] += c.xp.matmul(dweights.swapaxes(1, 2), queries)
        dqueries = c.xp.matmul(dweights, _keys(k, at))
        dqueries *= scale
        _put(dq, at, dqueries)


def _add_to_table(c: Context, scores: _Scores, dtable: Any, dscores: Any, at: _Block) -> None:
    """Adds the cotangents of a block's scores to the rows of the table that moved them."""
    bucket, n = scores.buckets(at).reshape(-1), c.sizes["n"]
    by_head = dscores.reshape(-1, len(bucket))
    for i, row in enumerate(by_head, at.head * c.sizes["r"]):
        dtable[:, i] += c.xp.bincount(bucket, weights=row, minlength=n).astype(dtable.dtype)


# ---- positions out of order ------------------------------------------------------------------------------------------------------------------------


def attend_runs(c: Context, queries: Sequence[Run], keys: Sequence[Run], q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    """Plain attention of queries and keys that lie at runs of positions, one run behind the other: what each run of keys gives is joined exactly."""
    out[...], lse[...] = 0.0, LOWEST
    for row, here in _places(queries):
        for column, there in _places(keys):
            if _sees(c, here, there):
                part, norm = (c.xp.empty(x[:, row].shape, x.dtype) for x in (out, lse))
                part[...], norm[...] = 0.0, LOWEST
                inner = _at(c, here, there)
                _attend(inner, _Scores(inner), None, q[:, row], k[:, column], v[:, column], part, norm)
                join(c, out[:, row], lse[:, row], part, norm, out[:, row], lse[:, row])


def attend_runs_grad(
    c: Context, queries: Sequence[Run], keys: Sequence[Run], dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any
) -> None:
    """What these keys give to the gradient of attention, of which `out` and `lse` are the whole result: those of all keys."""
    for zeroed in (dq, dk, dv):
        zeroed[...] = 0.0
    for row, here in _places(queries):
        for column, there in _places(keys):
            if _sees(c, here, there):
                inner, parts = _at(c, here, there), (dq[:, row], dk[:, column], dv[:, column])
                found = [c.xp.empty(x.shape, x.dtype) for x in parts]
                _attend_grad(inner, _Scores(inner), dout[:, row], q[:, row], k[:, column], v[:, column], out[:, row], lse[:, row], *found)
                for whole, part in zip(parts, found, strict=True):
                    whole += part


def join(c: Context, x: Any, a: Any, y: Any, b: Any, out: Any, lse: Any) -> None:
    """Attention to two sets of keys from that to each, `x` and `y` with the logs of their denominators `a` and `b`; may write where it reads."""
    top = c.xp.maximum(a, b)
    of_x, of_y = c.xp.exp(a - top), c.xp.exp(b - top)
    norm = of_x + of_y
    heads = a.shape[-1]

    def weighted(part: Any, weight: Any) -> Any:
        return part.reshape(*part.shape[:2], heads, -1) * (weight / norm)[..., None]

    total = weighted(x, of_x) + weighted(y, of_y)
    out[...] = total.reshape(out.shape)
    lse[...] = c.xp.log(norm) + top


def _places(found: Sequence[Run]) -> Iterator[tuple[slice, Run]]:
    """Where each run lies among the tokens that are here."""
    at = 0
    for run in found:
        yield slice(at, at + run[1] - run[0]), run
        at += run[1] - run[0]


def _sees(c: Context, queries: Run, keys: Run) -> bool:
    return pairs([queries], [keys], _causal(c), c.attrs.get("window", 0)) > 0


def _at(c: Context, queries: Run, keys: Run) -> Context:
    """Of a kernel that sees one run of each, in the order of the text."""
    attrs = {**c.attrs, "zigzag": 0}
    return replace(c, attrs=attrs, at={**c.at, "s": queries[0], "z": keys[0]}, total={**c.total, "z": c.total["s"]})


def _in_order(c: Context, *arrays: Any) -> list[Any]:
    """Keys and values that lie in zig-zag order, in the order of the text."""
    places = c.xp.argsort(c.positions("z"))
    return [x[:, places] for x in arrays]


def _forward(extra: str) -> Kernel:
    """The kernel whose fourth operand is `extra`: sinks, mask, table, or none."""

    def plain(c: Context, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        if c.attrs.get("zigzag", 0):
            k, v = _in_order(c, k, v)
            attend_runs(c, c.runs(), joined(c.runs("z")), q, k, v, out, lse)
        else:
            _attend(c, _Scores(c), None, q, k, v, out, lse)

    def with_extra(c: Context, q: Any, k: Any, v: Any, given: Any, out: Any, lse: Any) -> None:
        _attend(c, _Scores(c) if extra == "sinks" else _Scores(c, **{extra: given}), given if extra == "sinks" else None, q, k, v, out, lse)

    return with_extra if extra else plain


def attention_grad(c: Context, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any) -> None:
    if c.attrs.get("zigzag", 0):
        k, v = _in_order(c, k, v)
        found = [c.xp.empty(x.shape, x.dtype) for x in (dk, dv)]
        attend_runs_grad(c, c.runs(), joined(c.runs("z")), dout, q, k, v, out, lse, dq, *found)
        for given, x in zip((dk, dv), found, strict=True):
            given[:, c.xp.argsort(c.positions("z"))] = x
    else:
        _attend_grad(c, _Scores(c), dout, q, k, v, out, lse, dq, dk, dv)


def attention_masked_grad(c: Context, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, mask: Any, dq: Any, dk: Any, dv: Any) -> None:
    _attend_grad(c, _Scores(c, mask=mask), dout, q, k, v, out, lse, dq, dk, dv)


def attention_relative_grad(c: Context, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, table: Any, dq: Any, dk: Any, dv: Any, dtable: Any) -> None:
    _attend_grad(c, _Scores(c, table=table), dout, q, k, v, out, lse, dq, dk, dv, dtable)


def attention_dsinks(c: Context, dout: Any, out: Any, lse: Any, sinks: Any, dsinks: Any) -> None:
    """A sink takes exp(sink - lse) of each row, and what it takes is lost to the row's output."""
    heads = len(sinks)
    rows, cotangents = (a.reshape(-1, heads, a.shape[-1] // heads) for a in (out, dout))
    taken = c.xp.exp(sinks - lse.reshape(-1, heads)) * c.xp.einsum("nhw,nhw->nh", rows, cotangents)
    c.xp.negative(taken.sum(axis=0), out=dsinks)


def _pairs(sizes: Sizes, attrs: Attrs) -> float:
    """Pairs of a query and a key that a head of a sample looks at, on the rank that has most: half of a square under a causal mask, a band under a window."""
    few, many = sorted((sizes["s"], sizes["z"]))
    if attrs.get("zigzag", 0):
        return few * many / 2.0  # of every rank
    seen = few * (many - few / 2.0) if attrs.get("causal", True) else float(few * many)
    window = min(attrs.get("window") or many, many)
    band = window * (few - window / 2.0) if few == many else float(few * window)
    return min(seen, band) if attrs.get("window") else seen


def _pairs_at(sizes: Sizes, attrs: Attrs, at: Sizes, total: Sizes) -> float:
    """The same on this rank."""
    queries, keys = (runs(at.get(x, 0), at.get(x, 0) + sizes[x], total[x], attrs.get("zigzag", 0)) for x in "sz")
    return pairs(queries, keys, attrs.get("causal", True), attrs.get("window") or 0)


def of_heads(sizes: Sizes, of_keys: int, of_values: int) -> float:
    """The flops of matrix products of one query with one key and its value in all heads of all samples."""
    return 2.0 * sizes["b"] * sizes["g"] * sizes["r"] * (of_keys * sizes["d"] + of_values * sizes["w"])


def _work(of_keys: int, of_values: int) -> Any:
    """Products of queries with keys and with values, on the rank that has most and on a given one; what a mask saves is counted, the softmax not."""
    return {
        "flops": lambda sizes, attrs: of_heads(sizes, of_keys, of_values) * _pairs(sizes, attrs),
        "flops_at": lambda sizes, attrs, at, total: of_heads(sizes, of_keys, of_values) * _pairs_at(sizes, attrs, at, total),
        "random": True,
    }


_OPERANDS = "q[b s (g r d)], k[b z (g d)], v[b z (g w)]"
_GIVEN_BACK = "dq[b s (g r d)], dk[b z (g d)], dv[b z (g w)]"
_ROWS = "out[b s (g r w)], lse[b s (g r)]"


def _attention(name: str, extra: str, grads: tuple[str, ...], stop: str = "lse") -> Any:
    return op(
        f"{name}({_OPERANDS}{', ' + extra if extra else ''}) -> {_ROWS}", _forward(extra.partition("[")[0]), whole="z r d w n", linear=["v -> out"], stop=stop,
        grads=grads, **_work(1, 1), past="" if stop != "lse" or "table" in extra else "z",
    )  # fmt: skip


OPS = (
    # Query heads are (g r): g groups share one key and value head. attrs: r, d, causal (bool), scale (float; absent: d**-0.5), window (a query sees so many
    # keys back, itself counted; absent: all), softcap (scores become softcap tanh(scores / softcap)), and with dropout of the probabilities p and salt.
    # lse is the log of the softmax's denominator.
    _attention("attention", "", ("attention.grad",)),
    _attention("attention_sinks", "sinks[(g r)]", ("attention.grad", "attention_sinks.dsinks")),
    _attention("attention_masked", "mask[b z]", ("attention_masked.grad",), stop="lse mask"),  # mask: 0 hides a key from all queries of its sample
    _attention("attention_relative", "table[n (g r)]", ("attention_relative.grad",)),  # attrs also: max_distance
    op(f"attention.grad(dout[b s (g r w)], {_OPERANDS}, {_ROWS}) -> {_GIVEN_BACK}",
       attention_grad, whole="r d w", sums="s z", linear=["dout", "v out -> dq dk"], **_work(3, 2), past="z"),
    op("attention_sinks.dsinks(dout[b s (g r w)], out[b s (g r w)], lse[b s (g r)], sinks[(g r)]) -> dsinks[(g r)]",
       attention_dsinks, whole="r w", sums="b s", linear=["dout", "out"], flops=each(2), past="z"),
    op(f"attention_masked.grad(dout[b s (g r w)], {_OPERANDS}, {_ROWS}, mask[b z]) -> {_GIVEN_BACK}",
       attention_masked_grad, whole="r d w", sums="s z", linear=["dout", "v out -> dq dk"], stop="mask", **_work(3, 2)),
    op(f"attention_relative.grad(dout[b s (g r w)], {_OPERANDS}, {_ROWS}, table[n (g r)]) -> {_GIVEN_BACK}, dtable[n (g r)]",
       attention_relative_grad, whole="r d w n", sums="b s z", linear=["dout", "v out -> dq dk dtable"], **_work(3, 2)),
)  # fmt: skip

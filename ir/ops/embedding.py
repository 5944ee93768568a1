"""Tables looked up by index or by position; a split vocabulary gives P, each rank adding the rows it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ir.op import Context, op
from ir.ops.tiles import each, matrix


def embedding(c: Context, ids: Any, table: Any, out: Any) -> None:
    if c.sizes["v"] == c.total["v"]:
        c.xp.take(table, ids, axis=0, out=out)
        return
    local, here = _local(c, ids)
    c.xp.take(table, local, axis=0, out=out)
    out *= here[..., None]


def embedding_dtable(c: Context, ids: Any, dout: Any, dtable: Any) -> None:
    dtable[...] = 0.0
    index, rows = ids.reshape(-1), matrix(dout)
    if c.sizes["v"] != c.total["v"]:
        local, here = _local(c, index)
        found = c.xp.flatnonzero(here)
        index, rows = local[found], rows[found]
    add_rows(c, dtable, index, rows)


def _local(c: Context, ids: Any) -> tuple[Any, Any]:
    """Indices into this rank's rows of the vocabulary, and whether the row is here; elsewhere the index is a row that exists."""
    local = ids - c.at.get("v", 0)
    here = (local >= 0) & (local < c.sizes["v"])
    return local * here, here


def add_rows(c: Context, table: Any, index: Any, rows: Any) -> None:
    """table[index[i]] += rows[i] for every i; `table` is zero before. Equal indices are added in order, on a GPU in any."""
    if c.xp is not np:
        c.xp.add.at(table, index, rows)
    elif len(index):
        # sorted and summed run by run: a quarter of the time of numpy's `add.at`
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        table[ordered[starts]] = np.add.reduceat(rows[order], starts, axis=0)


def positions(c: Context, table: Any, out: Any) -> None:
    out[...] = 0.0
    for here, there in _overlaps(c):
        out[here] = table[there]


def positions_dtable(c: Context, dout: Any, dtable: Any) -> None:
    dtable[...] = 0.0
    for here, there in _overlaps(c):
        dtable[there] = dout[here]


def _overlaps(c: Context) -> Iterator[tuple[slice, slice]]:
    """Where positions that lie both in this rank's sequence and in its rows of the table are in either."""
    rows, place = c.at.get("p", 0), 0
    for a, b in c.runs():
        first = max(a, rows)
        stop = max(first, min(b, rows + c.sizes["p"]))
        yield slice(place + first - a, place + stop - a), slice(first - rows, stop - rows)
        place += b - a


OPS = (
    op("embedding(ids[...], table[v h]) -> out[... h]", embedding, sums="v", linear=["table"], stop="ids", grads=("embedding.dtable",),
       flops=each(0), gathered="table"),
    # attrs: v
    op("embedding.dtable(ids[...], dout[... h]) -> dtable[v h]", embedding_dtable, sums="...", linear=["dout"], stop="ids", flops=each(1, without="v")),
    # the first s rows of a table of p positions; attrs: s
    op("positions(table[p h]) -> out[s h]", positions, sums="p", linear=["table"], grads=("positions.dtable",), flops=each(0), gathered="table"),
    # attrs: p
    op("positions.dtable(dout[s h]) -> dtable[p h]", positions_dtable, sums="s", linear=["dout"], flops=each(0)),
)  # fmt: skip

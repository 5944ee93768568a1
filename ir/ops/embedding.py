"""Tables looked up by index or by position; a split vocabulary gives P, each rank adding the rows it holds."""

from __future__ import annotations

from typing import Any

from ir.op import op


def todo(*_: Any) -> None:
    raise NotImplementedError


OPS = (
    op("embedding(ids[...], table[v h]) -> out[... h]", todo, sums="v", linear=["table"], stop="ids", grads=("embedding.dtable",)),
    # attrs: v
    op("embedding.dtable(ids[...], dout[... h]) -> dtable[v h]", todo, sums="...", linear=["dout"], stop="ids"),
    # the first s rows of a table of p positions; attrs: s
    op("positions(table[p h]) -> out[s h]", todo, sums="p", linear=["table"], grads=("positions.dtable",)),
    # attrs: p
    op("positions.dtable(dout[s h]) -> dtable[p h]", todo, sums="s", linear=["dout"]),
)

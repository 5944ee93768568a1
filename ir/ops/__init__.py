"""The catalogue: every operator headrace knows, one sentence each.

`algebra` (contractions), `elementwise`, `norms`, `attention`, `ring`, `rotary`, `embedding`, `sequence`, `experts`, `loss`, `head`, `optimizer`
(AdamW, SGD) and the other rules by their names (`lamb`, `adafactor`, `muon`, `adamw8bit`), `boxing` (local re-sharding);
`over` makes of a causal operator that over the pieces of a cut sequence, `stacking` lays so many tensors into one (`stack.of3`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ir.errors import GraphError
from ir.op import Op
from ir.ops import (
    adafactor,
    adamw8bit,
    algebra,
    attention,
    boxing,
    elementwise,
    embedding,
    experts,
    head,
    lamb,
    loss,
    muon,
    norms,
    optimizer,
    ring,
    rotary,
    sequence,
)  # fmt: skip
from ir.ops.over import over_pieces, parted
from ir.ops.stacking import numbered

_MODULES = (algebra, elementwise, norms, attention, ring, rotary, embedding, sequence, experts, loss, head, optimizer, lamb, adafactor, muon, adamw8bit, boxing)

CATALOGUE: Mapping[str, Op] = {op.name: op for module in _MODULES for op in module.OPS}


def catalogue(name: str) -> Op:
    """The operator of this name; GraphError with near names where there is none."""
    found = CATALOGUE.get(name) or numbered(name)
    if found is None:
        whole, num_pieces = parted(name)
        if num_pieces > 1 and whole in CATALOGUE and CATALOGUE[whole].past:
            return over_pieces(CATALOGUE[whole], num_pieces)
        near = difflib.get_close_matches(name, CATALOGUE, n=3)
        raise GraphError(f"no operator `{name}` in the catalogue" + (f"; near: {', '.join(near)}" if near else ""))
    return found

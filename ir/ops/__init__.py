"""The catalogue: every operator headrace knows, one sentence each.

`algebra` (contractions), `elementwise`, `norms`, `attention`, `embedding`, `sequence`, `experts`, `loss`, `optimizer`, `boxing` (local re-sharding).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ir.errors import GraphError
from ir.op import Op
from ir.ops import algebra, attention, boxing, elementwise, embedding, experts, loss, norms, optimizer, sequence

MODULES = (algebra, elementwise, norms, attention, embedding, sequence, experts, loss, optimizer, boxing)

CATALOGUE: Mapping[str, Op] = {op.name: op for module in MODULES for op in module.OPS}


def catalogue(name: str) -> Op:
    """The operator of this name; GraphError with near names where there is none."""
    found = CATALOGUE.get(name)
    if found is None:
        near = difflib.get_close_matches(name, CATALOGUE, n=3)
        raise GraphError(f"no operator `{name}` in the catalogue" + (f"; near: {', '.join(near)}" if near else ""))
    return found

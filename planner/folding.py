"""Equal blocks of a factor graph (the layers of a model), folded: the inside of a block is eliminated to a table over its boundary, once for all equal blocks.

L blocks then cost one block and L small (min,+) products, and need not take equal states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.factors import Scope, Table
from planner.reductions import Factors, Undo

Folded = tuple[list[Undo], Scope]
"""The way back into one block, and its variables by local number."""


def fold(factors: Factors, blocks: Sequence[Sequence[int]]) -> list[Folded]:
    """Replaces the inside of each block by a table over its boundary. Returns the way back into each."""
    done: dict[Any, tuple[list[Undo], Mapping[Scope, Table]] | None] = {}
    digests: dict[int, tuple[Table, bytes]] = {}
    out = []
    for inside in blocks:
        boundary = tuple(sorted({u for v in inside for u in factors.neighbours(v)} - set(inside)))
        names = (*inside, *boundary)
        place = {v: i for i, v in enumerate(names)}
        scopes = sorted({s for v in inside for s in factors.touching[v]}, key=lambda s: tuple(place[v] for v in s))
        local = [(tuple(place[v] for v in s), factors.tables[s]) for s in scopes]
        key = (tuple(factors.size[v] for v in names), len(inside), tuple((s, _digest(t, digests)) for s, t in local))
        if key not in done:
            done[key] = _eliminate_inside(key[0], len(inside), local)
        found = done[key]
        if found is None:
            continue
        for s in scopes:
            factors.pop(s)
        for v in inside:
            del factors.size[v], factors.touching[v]
        for s, table in found[1].items():
            factors.add(tuple(names[i] for i in s), table)
        out.append((found[0], names))
    return out


def _digest(table: Table, known: dict[int, tuple[Table, bytes]]) -> bytes:
    """Of the contents; `known` keeps each table that it has seen alive, so that its id stays its own."""
    found = known.get(id(table))
    if found is None:
        found = known[id(table)] = (table, hashlib.blake2b(np.ascontiguousarray(table).tobytes(), digest_size=16).digest() + str(table.shape).encode())
    return found[1]


def _eliminate_inside(sizes: Scope, num_inside: int, local: Sequence[tuple[Scope, Table]]) -> tuple[list[Undo], Mapping[Scope, Table]] | None:
    """Tables over the boundary and the way back; None where the tables would grow beyond the limit."""
    factors = Factors(dict(enumerate(sizes)), keep=frozenset(range(num_inside, len(sizes))))
    factors.touching = {v: {} for v in factors.size}
    for scope, table in local:
        factors.add(scope, table)
    factors.eliminate_all(degree=2)
    if not factors.treewidth_affordable():
        return None
    factors.eliminate_all()
    if factors.infeasible:
        return None
    return factors.trail, factors.tables

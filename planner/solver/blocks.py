"""Equal blocks of a factor graph (the layers of a model), folded: the inside of a block is eliminated to a table over its boundary, once for all equal blocks.

L blocks then cost one block and some small (min,+) products, and need not take equal states.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.solver.chain import Chain
from planner.solver.factors import Scope
from planner.solver.gathered import Gathered, Table
from planner.solver.reductions import HEAVY, Factors, Undo, substitute_back

LARGE = 1 << 20
"""Entries of a table from which what surrounds a block had better be known before it is eliminated."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Block `block` stands for `count` >= 2 in a row; `before` and `after` are the variables at its two ends.

    It touches nothing else outside. The two, and the variables between its copies, have equal states and equal costs of their own.
    """

    block: int
    count: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Folded:
    """A block whose inside is gone: the way back, its variables by local number (inside first), and the chain where it stands for several."""

    trail: list[Undo]
    names: Scope
    chain: Chain | None = None

    def inside(self, at: Mapping[int, int]) -> list[int]:
        """The states of all of `names`, given those of the boundary."""
        local = [at.get(v, 0) for v in self.names]
        substitute_back(self.trail, local)
        return local


class CannotFold(Exception):
    """A block that stands for several has too large a table, or touches more than its two ends."""


def fold(factors: Factors, blocks: Sequence[Sequence[int]], repeats: Sequence[Repeated] = ()) -> dict[int, Folded]:
    """Replaces the inside of each block by a table over its boundary, of several blocks for each of `repeats`. Returns what was folded, by number.

    A block with large tables that is like no other and stands for itself alone is left: the reductions of the whole graph know more of what surrounds it.
    Raises CannotFold where one of `repeats` cannot be.
    """
    done: dict[Any, tuple[list[Undo], Mapping[Scope, Gathered]] | None] = {}
    digests: dict[tuple[int, ...], tuple[Gathered, bytes]] = {}
    repeated = {r.block: (r, factors.tables[(r.before,)].dense()) for r in repeats}
    found_blocks = [_block(factors, inside, digests) for inside in blocks]
    num_alike = Counter(block.key for block in found_blocks)
    out = {}
    for number, (inside, block) in enumerate(zip(blocks, found_blocks, strict=True)):
        names, scopes = block.names, block.scopes
        if num_alike[block.key] == 1 and number not in repeated and max((math.prod(t.shape) for _, t in block.local), default=0) > LARGE:
            continue
        if block.key not in done:
            done[block.key] = _eliminate_inside(block.key[0], len(inside), block.local)
        found = done[block.key]
        if found is None and number in repeated:
            raise CannotFold
        if found is None:
            continue
        for s in scopes:
            factors.pop(s)
        for v in inside:
            del factors.size[v], factors.touching[v]
        tables = {tuple(names[i] for i in s): table for s, table in found[1].items()}
        chain = None
        if number in repeated:
            r, between = repeated[number]
            chain = Chain(_between_ends(tables, (r.before, r.after)), between, r.count)
            tables = {(r.before, r.after): Gathered.of(chain.table)}
        for s, table in tables.items():
            factors.add(s, table)
        out[number] = Folded(found[0], names, chain)
    return out


@dataclass(frozen=True, slots=True)
class _Block:
    """Its variables, inside first; the tables that touch the inside, and the same by local number; `key` is equal for equal blocks."""

    names: Scope
    scopes: tuple[Scope, ...]
    local: tuple[tuple[Scope, Gathered], ...]
    key: Any


def _block(factors: Factors, inside: Sequence[int], digests: dict[tuple[int, ...], tuple[Gathered, bytes]]) -> _Block:
    boundary = tuple(sorted({u for v in inside for u in factors.neighbours(v)} - set(inside)))
    names = (*inside, *boundary)
    place = {v: i for i, v in enumerate(names)}
    scopes = tuple(sorted({s for v in inside for s in factors.touching[v]}, key=lambda s: tuple(place[v] for v in s)))
    local = tuple((tuple(place[v] for v in s), factors.tables[s]) for s in scopes)
    return _Block(names, scopes, local, (tuple(factors.size[v] for v in names), len(inside), tuple((s, _digest(t, digests)) for s, t in local)))


def _between_ends(tables: Mapping[Scope, Gathered], ends: tuple[int, int]) -> Table:
    """What a block costs by the states at its two ends."""
    out: Any = 0.0
    for scope, found in tables.items():
        if not set(scope) <= set(ends):
            raise CannotFold
        table = found.dense()
        if scope == ends[::-1]:
            table = table.T
        elif len(scope) == 1:
            table = table[:, None] if scope[0] == ends[0] else table[None, :]
        out = out + table
    if np.ndim(out) != 2:
        raise CannotFold
    return np.asarray(out)


def _digest(table: Gathered, known: dict[tuple[int, ...], tuple[Gathered, bytes]]) -> bytes:
    """Of the contents; `known` keeps the arrays that it has seen alive, so that their ids stay their own."""
    parts = (table.base, *table.classes)
    key = tuple(map(id, parts))
    if key not in known:
        digest = hashlib.blake2b(str(table.base.shape).encode(), digest_size=16)
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
        known[key] = (table, digest.digest())
    return known[key][1]


def _eliminate_inside(sizes: Scope, num_inside: int, local: Sequence[tuple[Scope, Gathered]]) -> tuple[list[Undo], Mapping[Scope, Gathered]] | None:
    """Tables over the boundary and the way back; None where the tables would grow beyond the limit."""
    factors = Factors(dict(enumerate(sizes)), keep=frozenset(range(num_inside, len(sizes))))
    factors.touching = {v: {} for v in factors.size}
    for scope, table in local:
        factors.add(scope, table)
    factors.eliminate_all(degree=2, most=HEAVY)
    if any(len(factors.neighbours(v)) <= 2 for v in range(num_inside) if v in factors.size):
        factors.reduce(most=HEAVY)
    factors.eliminate_all(degree=2)
    if not factors.treewidth_affordable():
        factors.reduce()
        if factors.infeasible or not factors.treewidth_affordable():
            return None
    factors.eliminate_all()
    if factors.infeasible:
        return None
    return factors.trail, factors.tables

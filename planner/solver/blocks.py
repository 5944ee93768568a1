"""Equal blocks of a factor graph (the layers of a model), folded: the inside of a block is eliminated to a table over its boundary, once for all equal blocks.

L blocks then cost one block and some small (min,+) products, and need not take equal states.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
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
    """A block whose inside is gone: the way back, its variables by local number, those inside, and the chain where it stands for several."""

    trail: list[Undo]
    names: Scope
    inside: Scope
    chain: Chain | None = None

    def states(self, at: Mapping[int, int]) -> dict[int, int]:
        """The states of all of `names`, given those of the boundary."""
        local = [at.get(v, 0) for v in self.names]
        substitute_back(self.trail, local)
        return dict(zip(self.names, local, strict=True))

    def undo(self, states: list[int]) -> None:
        """Of a block that stands for itself alone."""
        if self.chain is None:
            found = self.states({v: states[v] for v in self.names})
            for v in self.inside:
                states[v] = found[v]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of blocks by their keys, however often they occur: the way back and the tables over the boundary; and digests of tables by their ids."""

    eliminated: dict[Any, tuple[list[Undo], Mapping[Scope, Gathered]] | None] = field(default_factory=dict)
    digests: dict[tuple[int, ...], tuple[Gathered, bytes]] = field(default_factory=dict)


class CannotFold(Exception):
    """A block that stands for several has too large a table, or touches more than its two ends."""


def fold(factors: Factors, blocks: Sequence[Sequence[int]], repeats: Sequence[Repeated] = ()) -> dict[int, Folded]:
    """Replaces the inside of each block by a table over its boundary, of several blocks for each of `repeats`. Returns what was folded, by number.

    Of a block with large tables that is like no other and stands for itself alone only parts are folded: the reductions of the whole graph know more of what
    surrounds it. Raises CannotFold where one of `repeats` cannot be.
    """
    known = Known()
    repeated = {r.block: (r, factors.tables[(r.before,)].dense()) for r in repeats}
    found_blocks = [_block(factors, inside, known) for inside in blocks]
    num_alike = Counter(block.key for block in found_blocks)
    out = {}
    for number, block in enumerate(found_blocks):
        if num_alike[block.key] == 1 and number not in repeated and max((math.prod(t.shape) for _, t in block.local), default=0) > LARGE:
            _fold_parts(factors, block.inside, known)
            continue
        found = _fold(factors, block, known, *repeated.get(number, ()))
        if found is not None:
            out[number] = found
        elif number in repeated:
            raise CannotFold
    return out


def _fold(factors: Factors, block: _Block, known: Known, repeat: Repeated | None = None, between: Table | None = None) -> Folded | None:
    """Replaces the inside of a block; None, and all is as it was, where the tables would grow beyond the limit."""
    if block.key not in known.eliminated:
        known.eliminated[block.key] = _eliminate_inside(block, known)
    found = known.eliminated[block.key]
    if found is None:
        return None
    for s in block.scopes:
        factors.pop(s)
    for v in block.inside:
        del factors.size[v], factors.touching[v]
    tables = {tuple(block.names[i] for i in s): table for s, table in found[1].items()}
    chain = None
    if repeat is not None and between is not None:
        chain = Chain(_between_ends(tables, (repeat.before, repeat.after)), between, repeat.count)
        tables = {(repeat.before, repeat.after): Gathered.of(chain.table)}
    for s, table in tables.items():
        factors.add(s, table)
    folded = Folded(found[0], block.names, block.inside, chain)
    factors.trail.append(folded)
    return folded


def _fold_parts(factors: Factors, inside: Sequence[int], known: Known) -> None:
    """Folds the parts of a block that hang on the rest by two variables, such as attention between two points of the stream: alike where whole blocks are not.

    A part is what holds cycles and no single variable cuts, with the trees that hang on it. A block of one part is left as it is.
    """
    net: nx.Graph[int] = nx.Graph((v, u) for v in inside for u in factors.neighbours(v))
    rings: list[list[int]] = sorted(sorted(ring) for ring in nx.biconnected_components(net) if len(ring) > 2)  # type: ignore[arg-type]
    if len(rings) < 2:
        return
    in_rings = Counter(v for ring in rings for v in ring)
    rest = net.subgraph([v for v in net if v not in in_rings])
    own = frozenset(inside)
    for ring in rings:
        hanging = {v: found for v in ring if in_rings[v] == 1 and (found := _hanging(net, rest, v)) is not None and own >= {v, *found}}
        part = sorted({*hanging, *(u for found in hanging.values() for u in found)})
        block = _block(factors, part, known)
        if len(part) > 1 and len(block.names) - len(part) <= 2:
            _fold(factors, block, known)


def _hanging(net: nx.Graph[int], rest: nx.Graph[int], v: int) -> frozenset[int] | None:
    """Those of `rest` that hang on `v`; None where they touch something else too."""
    found: frozenset[int] = frozenset().union(*(nx.node_connected_component(rest, u) for u in net[v] if u in rest))
    return found if all(w == v or w in found for u in found for w in net[u]) else None


@dataclass(frozen=True, slots=True)
class _Block:
    """Its variables in order, those inside; the tables that touch the inside, and the same by local number; `key` is equal for equal blocks."""

    names: Scope
    inside: Scope
    scopes: tuple[Scope, ...]
    local: tuple[tuple[Scope, Gathered], ...]
    key: Any

    @property
    def keep(self) -> frozenset[int]:
        """The boundary, by local number."""
        return frozenset(i for i, v in enumerate(self.names) if v not in self.inside)


def _block(factors: Factors, inside: Sequence[int], known: Known) -> _Block:
    names = tuple(sorted({u for v in inside for u in factors.neighbours(v)} | set(inside)))
    place = {v: i for i, v in enumerate(names)}
    scopes = tuple(sorted({s for v in inside for s in factors.touching[v]}))
    local = tuple((tuple(place[v] for v in s), factors.tables[s]) for s in scopes)
    key = (tuple(factors.size[v] for v in names), tuple(place[v] for v in inside), tuple((s, _digest(t, known.digests)) for s, t in local))
    return _Block(names, tuple(inside), scopes, local, key)


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


def _eliminate_inside(block: _Block, known: Known) -> tuple[list[Undo], Mapping[Scope, Gathered]] | None:
    """Tables over the boundary and the way back; None where the tables would grow beyond the limit."""
    factors = Factors(dict(enumerate(block.key[0])), keep=block.keep)
    factors.touching = {v: {} for v in factors.size}
    for scope, table in block.local:
        factors.add(scope, table)
    _fold_parts(factors, block.key[1], known)
    factors.eliminate_all(degree=2, most=HEAVY)
    if any(len(factors.neighbours(v)) <= 2 for v in factors.size if v not in factors.keep):
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

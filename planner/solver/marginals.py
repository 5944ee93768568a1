"""Min-marginals of a factor graph: of every state, and of the states of variables that a table has together, the least cost of all assignments that have them.

Elimination goes up; on the way down every eliminated variable learns what its neighbours cost with the rest of the graph, so that two passes find all. Down,
only joint states are followed that are within a slack of the least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.solver.factors import FactorGraph, Scope
from planner.solver.gathered import Table
from planner.solver.reductions import Best, Factors

Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Near:
    """Joint states of the variables `names` that are within the slack, in order (`states[row, variable]`), and what each costs with all else at its best."""

    names: Scope
    states: Index
    cost: Table


@dataclass(frozen=True)
class Marginals:
    """`least`: the minimum. `cliques[v]`, in order of elimination: of the neighbours of v when it was eliminated, and of v, which is the last of them."""

    least: float
    num_states: tuple[int, ...]
    cliques: Mapping[int, Near]

    @classmethod
    def of(cls, graph: FactorGraph, last: Sequence[int] = (), slack: float = math.inf) -> Marginals:
        """Exact, without any reduction; `last`: variables that are eliminated last.

        >>> import numpy as np
        >>> flip = FactorGraph((2, 2), (np.array([0.0, 1.0]), np.array([3.0, 0.0])), ((0, 1),), (np.array([[0.0, 9.0], [9.0, 0.0]]),))
        >>> Marginals.of(flip).near((0,)).cost.tolist()
        [3.0, 1.0]
        """
        factors = Factors.of(graph)
        factors.keep = frozenset(last)
        factors.eliminate_all()
        factors.keep = frozenset()
        factors.eliminate_all()
        trail = [undo for undo in factors.trail if isinstance(undo, Best)]
        most = factors.constant + 1e-12 * abs(factors.constant) + slack
        found: dict[int, Near] = {}
        below = cls(factors.constant, graph.num_states, found)
        place = {undo.var: k for k, undo in enumerate(trail)}
        for undo in reversed(trail):
            around = tuple(sorted({v for scope in undo.scopes for v in scope}))
            rest = below._near(around, place) if around else Near((), np.zeros((1, 0), dtype=np.intp), np.array([factors.constant]))
            found[undo.var] = _widened(undo, rest, most)
        return cls(factors.constant, graph.num_states, dict(reversed(found.items())))

    @cached_property
    def _place(self) -> dict[int, int]:
        return {v: k for k, v in enumerate(self.cliques)}

    def near(self, scope: Scope) -> Near:
        """Of one variable, or of those of one table of the graph."""
        return self._near(scope, self._place)

    def table(self, scope: Scope) -> Table:
        """[a state of each of `scope`] the same, inf where it is not within the slack."""
        found = self.near(scope)
        out = np.full(tuple(self.num_states[v] for v in scope), np.inf)
        out[tuple(found.states.T)] = found.cost
        return out

    def _near(self, scope: Scope, place: Mapping[int, int]) -> Near:
        """Out of the clique of the first of them to be eliminated, where all of them meet."""
        clique = self.cliques[min(scope, key=place.__getitem__)]
        if clique.names == scope:
            return clique
        states = clique.states[:, [clique.names.index(v) for v in scope]]
        sizes = tuple(self.num_states[v] for v in scope)
        flat, row = np.unique(np.ravel_multi_index(tuple(states.T), sizes), return_inverse=True)
        cost = np.full(len(flat), np.inf)
        np.minimum.at(cost, row.reshape(-1), clique.cost)
        return Near(scope, np.stack(np.unravel_index(flat, sizes), axis=1), cost)


def _widened(undo: Best, rest: Near, most: float) -> Near:
    """With the states of the eliminated variable: those that cost `most` at most with what `rest` says of its neighbours."""
    total = np.zeros((len(rest.cost), undo.tables[0].shape[-1]))
    for scope, table in zip(undo.scopes, undo.tables, strict=True):
        *around, own = table.classes
        total += table.base[tuple(c[rest.states[:, rest.names.index(v)]] for c, v in zip(around, scope, strict=True))][..., own]
    total += (rest.cost - total.min(axis=1))[:, None]
    row, state = np.nonzero(total <= most)
    return Near((*rest.names, undo.var), np.column_stack((rest.states[row], state)), total[row, state])

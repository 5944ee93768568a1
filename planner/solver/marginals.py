"""Min-marginals of a factor graph: of every state, and of the states of variables that a table has together, the least cost of all assignments that have them.

Elimination goes up; on the way down every eliminated variable learns what its neighbours cost with the rest of the graph, so that two passes find all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.solver.factors import FactorGraph, Scope, Table
from planner.solver.reductions import Best, Factors


@dataclass(frozen=True)
class Marginals:
    """`least`: the minimum. `cliques[v]`, in order of elimination: the neighbours of v when it was eliminated, then v, and what their joint states cost."""

    least: float
    cliques: dict[int, tuple[Scope, Table]]

    @classmethod
    def of(cls, graph: FactorGraph, last: Sequence[int] = ()) -> Marginals:
        """Exact, without any reduction; `last`: variables that are eliminated last. What nothing finite has costs inf.

        >>> import numpy as np
        >>> flip = FactorGraph((2, 2), (np.array([0.0, 1.0]), np.array([3.0, 0.0])), ((0, 1),), (np.array([[0.0, 9.0], [9.0, 0.0]]),))
        >>> Marginals.of(flip).of_states((0,)).tolist()
        [3.0, 1.0]
        """
        factors = Factors.of(graph)
        factors.keep = frozenset(last)
        factors.eliminate_all()
        factors.keep = frozenset()
        factors.eliminate_all()
        trail = [undo for undo in factors.trail if isinstance(undo, Best)]
        below = cls(factors.constant, {})
        place = {undo.var: k for k, undo in enumerate(trail)}
        for undo in reversed(trail):
            around = tuple(sorted({v for scope in undo.scopes for v in scope}))
            total = _spread_out(undo, around, graph.num_states)
            least = total.min(axis=-1)
            rest = below._joint(around, place) if around else np.asarray(factors.constant)
            above = np.where(np.isfinite(least), rest - np.where(np.isfinite(least), least, 0.0), np.inf)
            below.cliques[undo.var] = (*around, undo.var), total + above[..., None]
        return cls(factors.constant, dict(reversed(below.cliques.items())))

    @cached_property
    def _place(self) -> dict[int, int]:
        return {v: k for k, v in enumerate(self.cliques)}

    def of_states(self, scope: Scope) -> Table:
        """[a state of each of `scope`]: of one variable, or of those of one table of the graph."""
        return self._joint(scope, self._place)

    def _joint(self, scope: Scope, place: dict[int, int]) -> Table:
        """Out of the clique of the first of them to be eliminated, where all of them meet."""
        names, table = self.cliques[min(scope, key=place.__getitem__)]
        table = np.asarray(table.min(axis=tuple(i for i, v in enumerate(names) if v not in scope)))
        left = [v for v in names if v in scope]
        return table.transpose([left.index(v) for v in scope])


def _spread_out(undo: Best, around: Scope, num_states: Sequence[int]) -> Table:
    """The sum of the tables of an eliminated variable, [a state of each of `around`, its own]."""
    shapes = [[t.shape[s.index(v)] if v in s else 1 for v in around] + [t.shape[-1]] for s, t in zip(undo.scopes, undo.tables, strict=True)]
    total = np.zeros((*(num_states[v] for v in around), num_states[undo.var]))
    for table, shape in zip(undo.tables, shapes, strict=True):
        total += table.reshape(shape)
    return total

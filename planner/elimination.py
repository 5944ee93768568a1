"""The exact minimum of a factor graph: folding and reductions first, a linear program over the local polytope for what they leave.

Everything here is exact or says that it is not: `Solution.bound` is what nothing costs less than.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.factors import FactorGraph, Solution
from planner.folding import Folded, fold
from planner.polytope import linear_program
from planner.reductions import Factors, substitute_back


def solve(graph: FactorGraph, blocks: Sequence[Sequence[int]] = ()) -> Solution:
    """The cheapest assignment; ties go to the first state.

    `blocks`: disjoint sets of variables to be folded, each in an order that equal blocks share.

    >>> import numpy as np
    >>> flip = FactorGraph((2, 2), (np.array([0.0, 1.0]), np.array([3.0, 0.0])), ((0, 1),), (np.array([[0.0, 9.0], [9.0, 0.0]]),))
    >>> solve(flip)
    Solution(states=(1, 1), cost=1.0, bound=1.0, exact=True, method='elimination')
    """
    factors = Factors.of(graph)
    folded = fold(factors, blocks)
    factors.reduce()
    gap, method = 0.0, "elimination"
    states = [0] * len(graph.num_states)
    if factors.alive and not factors.infeasible:
        if factors.treewidth_affordable():
            factors.eliminate_all()
        elif any(len(scope) > 2 for scope in factors.tables):
            return solve(graph)  # a block with a boundary of three or more leaves no pairwise core: the whole graph has one
        else:
            chosen = linear_program(factors.as_graph())
            method = chosen.method
            gap = chosen.cost - chosen.bound if chosen.states else 0.0
            factors.infeasible |= not chosen.states
            for v, s in zip(factors.alive, chosen.states, strict=False):
                states[v] = s
    if factors.infeasible:
        return Solution((), math.inf, math.inf, True, method)
    _undo(factors, folded, states)
    cost = graph.cost(states)
    if not math.isfinite(cost):
        return Solution((), math.inf, math.inf, True, method)
    return Solution(tuple(states), cost, cost - gap, gap <= 1e-9 * max(1.0, abs(cost)), method)


def _undo(factors: Factors, folded: Sequence[Folded], states: list[int]) -> None:
    """Completes `states`, in which those of the core stand: variables eliminated outside of the blocks, then those inside."""
    substitute_back(factors.trail, states)
    for trail, names in folded:
        local = [states[v] for v in names]
        substitute_back(trail, local)
        for v, s in zip(names, local, strict=True):
            states[v] = s

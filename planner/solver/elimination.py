"""The exact minimum of a factor graph: folding and reductions first, a linear program over the local polytope for what they leave.

Everything here is exact or says that it is not: `Solution.bound` is what nothing costs less than.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from planner.solver.blocks import CannotFold, Folded, Repeated, fold
from planner.solver.diffusion import diffuse
from planner.solver.factors import FactorGraph, Solution
from planner.solver.polytope import linear_program
from planner.solver.reductions import HEAVY, Factors, substitute_back


def solve(graph: FactorGraph, blocks: Sequence[Sequence[int]] = (), repeats: Sequence[Repeated] = ()) -> Solution:
    """The cheapest assignment; ties go to the first state.

    `blocks`: disjoint sets of variables to be folded, each in an order that equal blocks share. `repeats`: blocks that stand for several; CannotFold is raised
    where one cannot.

    >>> import numpy as np
    >>> flip = FactorGraph((2, 2), (np.array([0.0, 1.0]), np.array([3.0, 0.0])), ((0, 1),), (np.array([[0.0, 9.0], [9.0, 0.0]]),))
    >>> found = solve(flip)
    >>> found.states, found.cost, found.bound, found.exact, found.method
    ((1, 1), 1.0, 1.0, True, 'elimination')
    """
    factors = Factors.of(graph)
    folded = fold(factors, blocks, repeats)
    factors.reduce(most=HEAVY)
    factors.reduce()
    gap, method = 0.0, "elimination"
    states = [0] * len(graph.num_states)
    if factors.alive and not factors.infeasible:
        if factors.treewidth_affordable():
            factors.eliminate_all()
        elif any(len(scope) > 2 for scope in factors.tables):
            if repeats:
                raise CannotFold
            return solve(graph)  # a block with a boundary of three or more leaves no pairwise core: the whole graph has one
        else:
            core, bound = diffuse(factors.as_graph())
            chosen = linear_program(core, presolve=False) if math.isfinite(bound) else Solution((), math.inf, math.inf, True, "bound")
            method = chosen.method
            gap = chosen.cost - chosen.bound if chosen.states else 0.0
            factors.infeasible |= not chosen.states
            for v, s in zip(factors.alive, chosen.states, strict=False):
                states[v] = s
    if factors.infeasible:
        return Solution((), math.inf, math.inf, True, method)
    substitute_back(factors.trail, states)
    copies = tuple(_copies(folded[r.block], r, states) for r in repeats)
    for r, of_block in zip(repeats, copies, strict=True):
        for v, s in zip(blocks[r.block], of_block[0], strict=False):
            states[v] = s
    cost = _cost(graph, states, {v for r in repeats for v in blocks[r.block]})
    cost += sum(float(block.chain.table[states[r.before], states[r.after]]) for r in repeats if (block := folded[r.block]).chain is not None)
    if not math.isfinite(cost):
        return Solution((), math.inf, math.inf, True, method)
    return Solution(tuple(states), cost, cost - gap, gap <= 1e-9 * max(1.0, abs(cost)), method, copies)


def _copies(block: Folded, repeated: Repeated, states: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each block of a chain the states of its inside, of the variable before and of the one after it."""
    assert block.chain is not None
    before, after = states[repeated.before], states[repeated.after]
    way = (before, *block.chain.between_states(before, after), after)
    known: dict[tuple[int, int], tuple[int, ...]] = {}
    for ends in itertools.pairwise(way):
        if ends not in known:
            found = block.states({repeated.before: ends[0], repeated.after: ends[1]})
            known[ends] = (*(found[v] for v in block.inside), *ends)
    return tuple(known[ends] for ends in itertools.pairwise(way))


def _cost(graph: FactorGraph, states: Sequence[int], without: Collection[int]) -> float:
    """The cost of an assignment but for all that touches some variables."""
    if not without:
        return graph.cost(states)
    total = sum(float(table[states[v]]) for v, table in enumerate(graph.unary) if v not in without)
    edges = zip(graph.edges, graph.pairwise, strict=True)
    return total + sum(float(t[states[a], states[b]]) for (a, b), t in edges if a not in without and b not in without)

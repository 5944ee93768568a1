"""The linear program over the local polytope of a factor graph (HiGHS, dual simplex), and the integer program on the same rows.

An integral solution of the linear program is a certificate; else the integer program finds the optimum and the linear program its lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import LinearConstraint, linprog, milp
from scipy.sparse import coo_array

from ir.errors import PlanError
from planner.solver.factors import FactorGraph, Solution
from planner.solver.gathered import Table


def linear_program(graph: FactorGraph, presolve: bool = True) -> Solution:
    """The LP over the local polytope; where its solution is not integral, the integer program with the LP's bound. `presolve`: HiGHS's own reductions."""
    program = _polytope(graph)
    found = linprog(program.cost, A_eq=program.rows, b_eq=program.rhs, bounds=(0, None), method="highs-ds", options={"presolve": presolve})
    if found.status == 2:
        return Solution((), math.inf, math.inf, True, "lp")
    if found.status != 0:
        raise PlanError(f"HiGHS could not solve the linear program of {len(program.cost)} columns: {found.message}")
    marginals = program.marginals(np.asarray(found.x))
    if all(m.max() > 1 - 1e-6 for m in marginals):
        states = tuple(int(m.argmax()) for m in marginals)
        return Solution(states, graph.cost(states), graph.cost(states), True, "lp")
    exact = integer_program(graph)
    return Solution(exact.states, exact.cost, min(exact.cost, max(float(found.fun or 0.0), exact.bound)), exact.exact, "milp")


def integer_program(graph: FactorGraph) -> Solution:
    """All rows and columns given to HiGHS's branch and bound: the slow twin of `solve`."""
    program = _polytope(graph)
    integral = np.zeros(len(program.cost), dtype=np.int64)
    integral[: sum(graph.num_states)] = 1
    found = milp(program.cost, constraints=LinearConstraint(program.rows, program.rhs, program.rhs), integrality=integral, options={"mip_rel_gap": 0.0})
    if found.status == 2:
        return Solution((), math.inf, math.inf, True, "milp")
    if found.x is None:
        raise PlanError(f"HiGHS could not solve the integer program of {len(program.cost)} columns: {found.message}")
    states = tuple(int(m.argmax()) for m in program.marginals(found.x))
    cost = graph.cost(states)
    bound = min(cost, float(found.mip_dual_bound)) if found.status != 0 else cost
    return Solution(states, cost, bound, found.status == 0, "milp")


@dataclass(frozen=True, slots=True)
class _Polytope:
    """Minimise `cost @ x` where `rows @ x == rhs`, x >= 0; the first columns are the marginals of the variables in turn."""

    cost: Table
    rows: Any
    rhs: Table
    num_states: tuple[int, ...]

    def marginals(self, x: Table) -> list[Table]:
        return np.split(x[: sum(self.num_states)], np.cumsum(self.num_states)[:-1])


def _polytope(graph: FactorGraph) -> _Polytope:
    """One column for every state and every finite entry of a pairwise table; a forbidden state has its marginal fixed at 0 by a row."""
    start = np.concatenate([[0], np.cumsum(graph.num_states)])
    num_columns = int(start[-1])
    unary = np.concatenate(graph.unary)
    costs = [np.where(np.isfinite(unary), unary, 0.0)]
    ones = np.ones(num_columns)
    row = [np.repeat(np.arange(len(graph.num_states)), graph.num_states)]
    col, val = [np.arange(num_columns)], [ones]
    num_rows = len(graph.num_states)
    forbidden = np.flatnonzero(~np.isfinite(unary))
    row, col, val = [*row, num_rows + np.arange(len(forbidden))], [*col, forbidden], [*val, np.ones(len(forbidden))]
    num_rows += len(forbidden)
    rhs = [np.ones(len(graph.num_states)), np.zeros(len(forbidden))]
    for (a, b), table in zip(graph.edges, map(np.asarray, graph.pairwise), strict=True):
        i, j = np.nonzero(np.isfinite(table))
        columns = num_columns + np.arange(len(i))
        costs.append(table[i, j])
        for v, at in ((a, i), (b, j)):
            n = graph.num_states[v]
            row += [num_rows + at, num_rows + np.arange(n)]
            col += [columns, start[v] + np.arange(n)]
            val += [np.ones(len(i)), -np.ones(n)]
            rhs.append(np.zeros(n))
            num_rows += n
        num_columns += len(i)
    rows = coo_array((np.concatenate(val), (np.concatenate(row), np.concatenate(col))), shape=(num_rows, num_columns)).tocsr()
    return _Polytope(np.concatenate(costs), rows, np.concatenate(rhs), graph.num_states)

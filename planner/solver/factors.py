"""A pairwise factor graph and what its solvers answer.

The problem: choose one state for every variable so that the sum of the unary and pairwise costs is least; `inf` forbids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ir.errors import PlanError
from planner.solver.gathered import Gathered, Table

Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FactorGraph:
    """Variable `v` has `num_states[v]` states with costs `unary[v]`; `pairwise[e]` has shape (num_states[a], num_states[b]) for `edges[e]` = (a, b).

    Parallel edges add up. Raises PlanError where shapes disagree.
    """

    num_states: tuple[int, ...]
    unary: tuple[Table, ...]
    edges: tuple[tuple[int, int], ...] = ()
    pairwise: tuple[Table | Gathered, ...] = ()

    def __post_init__(self) -> None:
        if len(self.unary) != len(self.num_states) or len(self.edges) != len(self.pairwise):
            raise PlanError(f"{len(self.num_states)} variables with {len(self.unary)} unary tables, {len(self.edges)} edges with {len(self.pairwise)} tables")
        for v, (n, costs) in enumerate(zip(self.num_states, self.unary, strict=True)):
            if n < 1 or costs.shape != (n,):
                raise PlanError(f"variable {v} has {n} states and unary costs of shape {costs.shape}")
        for (a, b), table in zip(self.edges, self.pairwise, strict=True):
            if a == b or table.shape != (self.num_states[a], self.num_states[b]):
                raise PlanError(f"edge ({a}, {b}) has a table of shape {table.shape}, its variables {self.num_states[a]} and {self.num_states[b]} states")

    def cost(self, states: Sequence[int]) -> float:
        """The cost of one assignment."""
        total = sum(float(table[states[v]]) for v, table in enumerate(self.unary))
        return total + sum(float(t[states[a], states[b]]) for (a, b), t in zip(self.edges, self.pairwise, strict=True))


@dataclass(frozen=True, slots=True)
class Solution:
    """`states` cost `cost`, nothing costs less than `bound`; `exact` where the two are equal but for rounding. `method` is what decided the core.

    An infeasible graph has no states and costs inf. `repeated`: for each block that stands for several, and for each of these, the states of its inside and
    of the variables before and after it; what `states` says of such a block is its first copy.
    """

    states: tuple[int, ...]
    cost: float
    bound: float
    exact: bool
    method: str = "elimination"
    repeated: tuple[tuple[tuple[int, ...], ...], ...] = ()

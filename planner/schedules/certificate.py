"""The shortest order of a small Pipe by HiGHS: a start of every pass, and of two passes of a rank which comes first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations, product

import networkx as nx
import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from planner.schedules.bound import lower_bound
from planner.schedules.pipe import TOLERANCE, F, I, Pipe, W

Pass = tuple[int, int, int]
"""(stage, kind, microbatch)"""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What HiGHS found: a word, or none below the seconds given; a bound; and whether that is proven within the nodes allowed."""

    word: np.ndarray | None
    bound_s: float
    proven: bool


def certify(pipe: Pipe, at_most_s: float, max_nodes: int = 20000) -> Certificate:
    """The shortest order that takes at most these seconds. A limit of nodes, not of time, so that the answer is the same on every machine."""
    return _Model(pipe, at_most_s).solve(max_nodes)


class _Model:
    """Variables: the step's seconds, a start of every pass, and a binary for each two passes of a rank that nothing orders."""

    def __init__(self, pipe: Pipe, at_most_s: float) -> None:
        self.pipe, self.horizon = pipe, at_most_s
        self.graph = self._precedence()
        self.passes = list(nx.lexicographical_topological_sort(self.graph))
        self.at = {x: 1 + k for k, x in enumerate(self.passes)}
        self.after = {x: nx.descendants(self.graph, x) for x in self.passes}
        self.early, self.late = self._windows()
        self.rows: list[tuple[dict[int, float], float]] = []
        self.free: dict[tuple[Pass, Pass], int] = {}
        for r in range(pipe.p):
            here = [x for x in self.passes if pipe.times.rank[x[0]] == r]
            for a, b in combinations(here, 2):
                if b not in self.after[a] and a not in self.after[b]:
                    self.free[a, b] = 1 + len(self.passes) + len(self.free)

    def seconds(self, x: Pass) -> float:
        return (self.pipe.times.f, self.pipe.times.i, self.pipe.times.w)[x[1]][x[0]]

    def _precedence(self) -> nx.DiGraph[Pass]:
        graph: nx.DiGraph[Pass] = nx.DiGraph()
        last = self.pipe.num_stages - 1
        hop = self.pipe.times.hop
        for s, k in product(range(last + 1), range(self.pipe.m)):
            graph.add_edge((s, F, k), (s, I, k), lag=0.0)
            graph.add_edge((s, I, k), (s, W, k), lag=0.0)
            if s < last:
                graph.add_edge((s, F, k), (s + 1, F, k), lag=hop[s])
                graph.add_edge((s + 1, I, k), (s, I, k), lag=hop[s])
            if k:
                for kind in (F, I, W):
                    graph.add_edge((s, kind, k - 1), (s, kind, k), lag=0.0)
        return graph

    def _windows(self) -> tuple[dict[Pass, float], dict[Pass, float]]:
        early: dict[Pass, float] = {}
        late: dict[Pass, float] = {}
        for x in self.passes:
            early[x] = max((early[y] + self.seconds(y) + self.graph.edges[y, x]["lag"] for y in self.graph.predecessors(x)), default=0.0)
        for x in reversed(self.passes):
            late[x] = min((late[y] - self.graph.edges[x, y]["lag"] for y in self.graph.successors(x)), default=self.horizon) - self.seconds(x)
        return early, late

    def first(self, a: Pass, b: Pass) -> tuple[dict[int, float], float]:
        """(terms, constant) of 1 where a runs before b."""
        if b in self.after[a]:
            return {}, 1.0
        if a in self.after[b]:
            return {}, 0.0
        return ({self.free[a, b]: 1.0}, 0.0) if (a, b) in self.free else ({self.free[b, a]: -1.0}, 1.0)

    def _order_rows(self) -> None:
        """Rows sum(terms) >= floor."""
        for x in self.passes:
            self.rows.append(({0: 1.0, self.at[x]: -1.0}, self.seconds(x)))
        for a, b in self.graph.edges:
            self.rows.append(({self.at[b]: 1.0, self.at[a]: -1.0}, self.seconds(a) + self.graph.edges[a, b]["lag"]))
        for (a, b), y in self.free.items():
            for one, two, sign, shift in ((a, b, -1.0, 0.0), (b, a, 1.0, 1.0)):
                # start[two] >= start[one] + seconds[one] unless the other order is chosen, which the windows then allow for
                big = max(0.0, self.late[one] + self.seconds(one) - self.early[two])
                self.rows.append(({self.at[two]: 1.0, self.at[one]: -1.0, y: sign * big}, self.seconds(one) - big * (1.0 - shift)))

    def _monotone_rows(self) -> None:
        """A later microbatch of b is no earlier, a later one of a no later: before(a, b) <= before(a, b + 1), before(a + 1, b) <= before(a, b)."""
        for a, b in self.free:
            for one, two in ((a, b), (b, a)):
                here, base = self.first(one, two)
                then = (two[0], two[1], two[2] + 1)
                if then in self.at:
                    terms, constant = self.first(one, then)
                    self._differ(terms, constant, here, base)

    def _differ(self, big: dict[int, float], big_constant: float, small: dict[int, float], small_constant: float) -> None:
        terms = Counter(big)
        terms.subtract(small)
        if any(terms.values()):
            self.rows.append((dict(terms), small_constant - big_constant))

    def _memory_rows(self) -> None:
        pipe = self.pipe
        share = pipe.limits.freed_at_i
        for x in self.passes:
            if x[1] != F or np.isinf(pipe.limit[pipe.times.rank[x[0]]]):
                continue
            r, live = pipe.times.rank[x[0]], pipe.limits.activation[x[0]]
            terms: dict[int, float] = {}
            for y in self.passes:
                if pipe.times.rank[y[0]] == r and y != x:
                    units = pipe.limits.activation[y[0]] * {F: 1.0, I: -share, W: share - 1.0}[y[1]]
                    part, constant = self.first(y, x)
                    live += units * constant
                    for k, c in part.items():
                        terms[k] = terms.get(k, 0.0) - units * c
            self.rows.append((terms, live - float(pipe.limit[r]) - TOLERANCE))

    def solve(self, max_nodes: int) -> Certificate:
        self._order_rows()
        self._monotone_rows()
        self._memory_rows()
        size = 1 + len(self.passes) + len(self.free)
        lower, upper, cost, whole = np.zeros(size), np.ones(size), np.zeros(size), np.zeros(size, dtype=int)
        cost[0], whole[1 + len(self.passes) :] = 1.0, 1
        lower[0], upper[0] = lower_bound(self.pipe) * (1.0 - TOLERANCE), self.horizon
        for x in self.passes:
            lower[self.at[x]], upper[self.at[x]] = self.early[x], max(self.late[x], self.early[x])
        matrix = sparse.lil_matrix((len(self.rows), size))
        for k, (terms, _) in enumerate(self.rows):
            for column, value in terms.items():
                matrix[k, column] = value
        rows = LinearConstraint(matrix.tocsr(), np.array([floor for _, floor in self.rows]), np.inf)
        done = milp(cost, constraints=rows, bounds=Bounds(lower, upper), integrality=whole, options={"node_limit": max_nodes, "mip_rel_gap": 1e-9})
        if done.status == 2:
            return Certificate(None, self.horizon, True)
        bound = float(done.mip_dual_bound) if done.mip_dual_bound is not None else float(lower[0])
        return Certificate(self._word(done.x) if done.x is not None else None, bound, done.status == 0)

    def _word(self, x: np.ndarray) -> np.ndarray:
        """By starts, and where those are equal by what must come first."""
        rows = []
        for r in range(self.pipe.p):
            here = [(round(float(x[self.at[y]]), 9), k, y) for k, y in enumerate(self.passes) if self.pipe.times.rank[y[0]] == r]
            rows.append([3 * self.pipe.chunk[y[0]] + y[1] for _, _, y in sorted(here)])
        return np.array(rows, dtype=np.int8)

"""Elimination = HiGHS on all rows = brute force, on small random factor graphs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from planner.solver.chain import Chain
from planner.solver.diffusion import diffuse
from planner.solver.elimination import solve
from planner.solver.factors import FactorGraph
from planner.solver.polytope import integer_program, linear_program


def random_graph(seed: int) -> FactorGraph:
    """Up to 6 variables of up to 5 states; some entries forbidden, some edges bijections, some parallel."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    sizes = tuple(int(s) for s in rng.integers(1, 6, n))
    unary = [rng.integers(0, 20, s).astype(float) for s in sizes]
    edges, tables = [], []
    for a, b in itertools.permutations(range(n), 2):
        if rng.random() < 0.4:
            table = rng.integers(0, 20, (sizes[a], sizes[b])).astype(float) + rng.random((sizes[a], sizes[b]))
            table[rng.random(table.shape) < 0.15] = np.inf
            if sizes[a] == sizes[b] and rng.random() < 0.3:
                table = np.where(np.eye(sizes[a])[rng.permutation(sizes[a])] > 0, table, np.inf)
            edges.append((a, b))
            tables.append(table)
    for table in unary:
        table[rng.random(len(table)) < 0.05] = np.inf
    return FactorGraph(sizes, tuple(unary), tuple(edges), tuple(tables))


def brute_force(graph: FactorGraph) -> float:
    return min(graph.cost(states) for states in itertools.product(*map(range, graph.num_states)))


@pytest.mark.parametrize("chunk", range(10))
def test_three_ways_to_the_same_optimum(chunk: int) -> None:
    for seed in range(20 * chunk, 20 * chunk + 20):
        graph = random_graph(seed)
        truth = brute_force(graph)
        found, twin = solve(graph), integer_program(graph)
        assert found.exact
        if math.isinf(truth):
            assert found.states == twin.states == ()
            assert math.isinf(found.cost)
            continue
        assert found.cost == pytest.approx(truth, abs=1e-9)
        assert graph.cost(found.states) == found.cost
        assert twin.cost == pytest.approx(truth, abs=1e-6)
        assert found.bound == pytest.approx(truth, abs=1e-9)


def test_some_random_graphs_are_feasible_and_some_are_not() -> None:
    costs = [brute_force(random_graph(seed)) for seed in range(40)]
    assert 20 < sum(map(math.isfinite, costs)) < 40


def test_linear_program_with_its_fallback_finds_the_optimum_of_the_whole_graph() -> None:
    for seed in range(30):
        graph = random_graph(seed)
        truth, found = brute_force(graph), linear_program(graph)
        assert found.cost == pytest.approx(truth, abs=1e-6)
        assert found.bound <= found.cost


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16, 29])
def test_a_chain_is_its_blocks_one_by_one(count: int) -> None:
    """Least costs and the states on the way; some entries forbidden, some states never better than others."""
    for seed in range(5):
        rng = np.random.default_rng(100 * count + seed)
        n = int(rng.integers(1, 7))
        block, between = rng.integers(0, 9, (n, n)) + rng.random((n, n)), rng.random(n)
        block[rng.random((n, n)) < 0.2] = np.inf
        chain = Chain(block, between, count)
        slow = block
        for _ in range(count - 1):
            slow = np.min(slow[:, :, None] + between[None, :, None] + block[None, :, :], axis=1)
        assert chain.table == pytest.approx(slow)
        for a, c in itertools.product(range(n), repeat=2):
            if np.isfinite(slow[a, c]):
                way = (a, *chain.between_states(a, c), c)
                assert len(way) == count + 1
                total = sum(block[i, j] for i, j in itertools.pairwise(way)) + sum(between[i] for i in way[1:-1])
                assert total == pytest.approx(slow[a, c])


def test_diffused_costs_are_the_same_but_for_a_constant_that_nothing_costs_less_than() -> None:
    for seed in range(40):
        graph = random_graph(seed)
        moved, bound = diffuse(graph)
        truth = brute_force(graph)
        if math.isinf(bound):
            assert math.isinf(truth)
            continue
        assert bound <= truth + 1e-9
        rng = np.random.default_rng(seed)
        for _ in range(20):
            states = [int(rng.integers(n)) for n in graph.num_states]
            assert moved.cost(states) + bound == pytest.approx(graph.cost(states))

"""Reductions, folding, certificates and ties of the factor-graph solver."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ir.errors import PlanError
from planner.solver import blocks as folding
from planner.solver import dominance, reductions
from planner.solver.elimination import solve
from planner.solver.factors import FactorGraph
from planner.solver.gathered import Gathered
from planner.solver.polytope import integer_program, linear_program


def grid(side: int, states: int, seed: int) -> FactorGraph:
    """A square grid: treewidth `side`."""
    rng = np.random.default_rng(seed)
    edges = [(r * side + c, r * side + c + 1) for r in range(side) for c in range(side - 1)]
    edges += [(r * side + c, (r + 1) * side + c) for r in range(side - 1) for c in range(side)]
    unary = tuple(rng.random(states) for _ in range(side * side))
    return FactorGraph((states,) * side * side, unary, tuple(edges), tuple(rng.random((states, states)) for _ in edges))


def layers(count: int, seed: int, equal: bool) -> tuple[FactorGraph, list[list[int]]]:
    """A chain of `count` blocks: boundary variables 0, 4, 8, ..., the three inside each joined to both boundaries and to each other."""
    rng = np.random.default_rng(seed)
    inner_tables = [rng.random((4, 4)) for _ in range(9)]
    inner_unary = [rng.random(4) for _ in range(3)]
    unary, edges, tables, blocks = [rng.random(4)], [], [], []
    for k in range(count):
        a, i, j, m, b = range(4 * k, 4 * k + 5)
        if not equal:
            inner_tables = [rng.random((4, 4)) for _ in range(9)]
        unary += [*inner_unary, rng.random(4)]
        edges += [(a, i), (a, j), (a, m), (i, j), (j, m), (i, m), (i, b), (j, b), (m, b)]
        tables += inner_tables
        blocks.append([i, j, m])
    return FactorGraph((4,) * len(unary), tuple(unary), tuple(edges), tuple(tables)), blocks


@pytest.mark.parametrize("equal", [True, False])
def test_folded_blocks_cost_what_the_whole_graph_costs_and_need_not_be_equal(equal: bool) -> None:
    graph, blocks = layers(6, 3, equal)
    plain, folded = solve(graph), solve(graph, blocks)
    assert folded.exact
    assert folded.cost == pytest.approx(plain.cost, abs=1e-12)
    assert graph.cost(folded.states) == pytest.approx(integer_program(graph).cost, abs=1e-9)
    if equal:
        assert len({tuple(folded.states[v] for v in block) for block in blocks}) > 1


def test_equal_blocks_are_eliminated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, blocks = layers(6, 3, equal=True)
    calls = []
    inside = folding._eliminate_inside
    monkeypatch.setattr(folding, "_eliminate_inside", lambda *args: calls.append(args) or inside(*args))
    solve(graph, blocks)
    assert len(calls) == 1


def two_rings(count: int, seed: int) -> tuple[FactorGraph, list[list[int]]]:
    """A chain of blocks of two rings each, with a leaf on either: the first rings are equal in all blocks, of the second two kinds alternate."""
    rng = np.random.default_rng(seed)
    kinds = [[rng.random((4, 4)) for _ in range(6)] for _ in range(3)]
    unary, edges, tables, blocks = [rng.random(4)], [], [], []
    own = [rng.random(4) for _ in range(4)]
    for k in range(count):
        stream = len(unary) - 1
        blocks.append([])
        for kind in (kinds[0], kinds[1 + k % 2]):
            i, j, leaf, after = range(len(unary), len(unary) + 4)
            unary += own
            edges += [(stream, i), (stream, j), (i, j), (j, leaf), (i, after), (j, after)]
            tables += kind
            blocks[-1] += [i, j, leaf, after]
            stream = after
        blocks[-1].pop()
    return FactorGraph((4,) * len(unary), tuple(unary), tuple(edges), tuple(tables)), blocks


def test_parts_that_blocks_have_in_common_are_eliminated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, blocks = two_rings(5, 2)
    plain, truth = solve(graph), integer_program(graph).cost
    calls = []
    inside = folding._eliminate_inside
    monkeypatch.setattr(folding, "_eliminate_inside", lambda *args: calls.append(args) or inside(*args))
    found = solve(graph, blocks)
    assert found.cost == pytest.approx(plain.cost, abs=1e-12)
    assert graph.cost(found.states) == pytest.approx(truth, abs=1e-9)
    assert len(calls) == 2 + 1 + 2  # two blocks, the ring that they share, and the other ring of each

    calls.clear()
    monkeypatch.setattr(folding, "LARGE", 0)
    alone = solve(graph, [blocks[0], blocks[1]])
    assert alone.cost == pytest.approx(truth, abs=1e-9)
    assert graph.cost(alone.states) == pytest.approx(truth, abs=1e-9)
    assert len(calls) == 1 + 2  # blocks that are like no other are left, their parts are not


def test_a_grid_is_eliminated_within_the_table_limit_and_certified_or_closed_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = grid(5, 3, 1)
    within = solve(graph)
    assert within.method == "elimination"
    monkeypatch.setattr(reductions, "TABLE_LIMIT", 8)
    beyond = solve(graph)
    assert beyond.method in ("lp", "milp")
    assert beyond.exact
    assert beyond.cost == pytest.approx(within.cost, abs=1e-6)


def test_a_frustrated_cycle_is_not_integral_and_goes_to_the_integer_program() -> None:
    """Antiferromagnetic triangle: the LP pays nothing with every marginal one half, the truth is one violated edge."""
    unlike = np.eye(2)
    graph = FactorGraph((2, 2, 2), (np.zeros(2),) * 3, ((0, 1), (1, 2), (0, 2)), (unlike,) * 3)
    found = linear_program(graph)
    assert found.method == "milp"
    assert found.cost == pytest.approx(1.0)
    assert solve(graph).cost == pytest.approx(1.0)


def test_ties_go_to_the_first_state() -> None:
    graph = FactorGraph((3, 3), (np.zeros(3), np.zeros(3)), ((0, 1),), (np.zeros((3, 3)),))
    assert solve(graph).states == (0, 0)


def test_infeasible_graph_costs_infinity_and_has_no_states() -> None:
    never = np.full((2, 2), np.inf)
    found = solve(FactorGraph((2, 2), (np.zeros(2),) * 2, ((0, 1),), (never,)))
    assert found.states == ()
    assert math.isinf(found.cost)


def test_tables_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(PlanError, match=r"edge \(0, 1\) has a table of shape \(2, 2\)"):
        FactorGraph((2, 3), (np.zeros(2), np.zeros(3)), ((0, 1),), (np.zeros((2, 2)),))


def test_dominance_formed_in_pieces_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = grid(4, 4, 7)
    monkeypatch.setattr(reductions, "TABLE_LIMIT", 8)
    whole = solve(graph)
    monkeypatch.setattr(dominance, "CHUNK", 16)
    assert solve(graph) == whole


@pytest.mark.parametrize("limit", [8, 64, 1 << 20])
def test_a_block_that_is_too_wide_is_reduced_first_or_left_as_it_is(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """The variables at the ends of a block keep their states whatever is dominated inside."""
    graph, blocks = layers(4, 11, equal=True)
    truth = integer_program(graph).cost
    monkeypatch.setattr(reductions, "TABLE_LIMIT", limit)
    found = solve(graph, blocks)
    assert found.cost == pytest.approx(truth, abs=1e-6)
    assert graph.cost(found.states) == pytest.approx(truth, abs=1e-6)


def dominated(seed: int) -> list[np.ndarray]:
    """Tables of up to 150 states of which many are dominated, some equal, some impossible in places."""
    rng = np.random.default_rng(seed)
    n, rank = int(rng.integers(2, 150)), int(rng.integers(1, 3))
    base = rng.integers(0, 4, (n, rank)).astype(float)
    tables = []
    for _ in range(int(rng.integers(1, 4))):
        m = int(rng.integers(1, 90))
        table = base @ rng.integers(0, 3, (rank, m)) + (rng.random((n, m)) < 0.05)
        table[rng.random((n, m)) < 0.02] = np.inf
        table[rng.random(n) < 0.3] += 3 * (seed % 3 == 0)
        tables.append(table)
    return tables


def dominated_by_definition(tables: list[np.ndarray]) -> list[bool]:
    """Of each state whether another is at least as good whatever happens in every table; of equal ones all but the first."""

    def beats(j: int, i: int) -> bool:
        with np.errstate(invalid="ignore"):
            worst = [np.where(np.isinf(t[i]), -np.inf, t[j] - t[i]).max() for t in tables]
        return sum(worst) <= 0

    states = range(len(tables[0]))
    return [any(beats(j, i) and (j < i or not beats(i, j)) for j in states if j != i) for i in states]


@pytest.mark.parametrize("seed", range(20))
def test_dominance_is_that_of_all_pairs_over_all_columns(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = dominated(seed)
    truth = np.logical_not(dominated_by_definition(tables))
    given = [Gathered.of(t) for t in tables]
    assert (dominance.undominated(given) == truth).all()
    monkeypatch.setattr(dominance, "FEW", 0)
    assert (dominance.undominated(given) == truth).all()
    monkeypatch.setattr(dominance, "CHUNK", 64)
    assert (dominance.undominated(given) == truth).all()
    monkeypatch.setattr(dominance, "MANY_STATES", 1)
    assert (dominance.undominated(given) >= truth).all()


def test_dominance_of_the_rows_of_a_gathered_table_is_that_of_its_states() -> None:
    tables = dominated(3)
    twice = np.repeat(np.arange(len(tables[0])), 2)
    found = dominance.undominated([Gathered(t, (twice, np.arange(t.shape[1]))) for t in tables])
    once = dominance.undominated([Gathered.of(t) for t in tables])
    assert (found[::2] == once).all()
    assert not found[1::2].any()


def test_dominance_that_ends_early_still_finds_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dominance, "MANY_STATES", 1)
    monkeypatch.setattr(dominance, "FEW", 0)
    tables = [Gathered.of(np.add.outer(np.arange(400.0), np.random.default_rng(0).random(50)))] * 2
    assert np.flatnonzero(dominance.undominated(tables)).tolist() == [0]


def test_heavy_eliminations_wait_for_dominance(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, blocks = layers(4, 11, equal=True)
    truth = integer_program(graph).cost
    monkeypatch.setattr(folding, "HEAVY", 8)
    monkeypatch.setattr(reductions, "MANY_STATES", 1)
    monkeypatch.setattr(dominance, "MANY_STATES", 1)
    monkeypatch.setattr(dominance, "FEW", 0)
    assert solve(graph, blocks).cost == pytest.approx(truth, abs=1e-6)


def test_the_work_of_an_elimination_is_limited_apart_from_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = grid(5, 3, 1)
    least = solve(graph).cost
    monkeypatch.setattr(reductions, "WORK_LIMIT", 8)
    beyond = solve(graph)
    assert beyond.method in ("lp", "milp")
    assert beyond.cost == pytest.approx(least, abs=1e-6)

"""The least time within a number of bytes = HiGHS's branch and bound on the unreduced problem = brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from ir.errors import PlanError
from ir.graph import Graph
from ir.mesh import Mesh
from planner.frontends import load
from planner.placement import new_tables, search
from planner.placement import problem as problem_of
from planner.pricing import MeshPricing
from planner.solver.elimination import solve
from planner.solver.marginals import Marginals
from planner.trade import Trade, integer_within, solve_within
from planner.within import search_within
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from tests.laws.test_placement_twin import SMALL as TINY
from tests.laws.test_placement_twin import Twin
from tests.planner.blocks import AlphaBeta, Llama, model

SMALL = Llama(batch=8, seq=512, hidden=1024, heads=16, groups=4, d=64, inner=2816, vocab=32000, layers=1)


def random_trade(seed: int) -> Trade:
    """Up to 4 variables of up to 3 states; a second way for some tables, forbidden in some entries."""
    rng = np.random.default_rng(seed)
    sizes = tuple(int(n) for n in rng.integers(1, 4, rng.integers(2, 5)))

    def options(shape: tuple[int, ...]) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        one = (rng.integers(0, 9, shape) + rng.random(shape), rng.integers(0, 9, shape).astype(float))
        if rng.random() < 0.5:
            return (one,)
        other = one[0] + rng.random(shape) * 4
        other[rng.random(shape) < 0.3] = np.inf
        return one, (other, np.floor(one[1] / 2))

    edges = tuple(e for e in itertools.combinations(range(len(sizes)), 2) if rng.random() < 0.7)
    return Trade(sizes, tuple(options((n,)) for n in sizes), edges, tuple(options((sizes[a], sizes[b])) for a, b in edges))


def brute_force(trade: Trade, limit: float) -> float:
    best = math.inf
    for states in itertools.product(*map(range, trade.num_states)):
        ways = [[(t[states[v]], n[states[v]]) for t, n in o] for v, o in enumerate(trade.unary)]
        ways += [[(t[states[a], states[b]], n[states[a], states[b]]) for t, n in o] for (a, b), o in zip(trade.edges, trade.pairwise, strict=True)]
        for chosen in itertools.product(*ways):
            if sum(n for _, n in chosen) <= limit:
                best = min(best, sum(t for t, _ in chosen))
    return float(best)


@pytest.mark.parametrize("seed", range(25))
def test_three_ways_to_the_same_optimum(seed: int) -> None:
    trade = random_trade(seed)
    for limit in (2.0, 5.0, 9.0, 14.0, 20.0):
        truth = brute_force(trade, limit)
        if math.isinf(truth):
            assert integer_within(trade, limit) is None
            with pytest.raises(PlanError, match="nothing fits within"):
                solve_within(trade, limit)
            continue
        found, twin = solve_within(trade, limit), integer_within(trade, limit)
        assert twin is not None
        assert found.time_s == pytest.approx(truth)
        assert twin.time_s == pytest.approx(truth)
        assert found.nbytes <= limit
        assert found.bound <= truth + 1e-9
        assert found.gap <= 1e-9


def test_min_marginals_are_the_least_of_all_that_take_the_state() -> None:
    for seed in range(10):
        graph = random_trade(seed).at(0.3)
        found = Marginals.of(graph)
        costs = {states: graph.cost(states) for states in itertools.product(*map(range, graph.num_states))}
        assert found.least == pytest.approx(min(costs.values()))
        for scope in (*((v,) for v in range(len(graph.num_states))), *graph.edges):
            table = found.table(scope)
            for at in np.ndindex(table.shape):
                assert table[at] == pytest.approx(min(c for states, c in costs.items() if tuple(states[v] for v in scope) == at))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return model(SMALL)


def test_a_real_block_within_limits_is_the_integer_program_on_the_unreduced_problem(graph: Graph) -> None:
    trade = problem_of(graph, ("tp",), (8,), AlphaBeta({"tp": 8}), num_microbatches=2, in_flight=2).trade()
    free, least = (trade.read(solve(trade.at(p)).states, p)[1] for p in (0.0, 1e3))
    for share in (0.03, 0.4, 0.9):
        limit = least + share * (free - least)
        found, twin = solve_within(trade, limit), integer_within(trade, limit)
        assert twin is not None
        assert found.time_s == pytest.approx(twin.time_s, rel=1e-9)
        assert found.nbytes <= limit


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "mixtral-tiny", "deepseek-tiny"])
def test_a_block_of_a_family_within_limits_is_the_integer_program(name: str) -> None:
    """`benchmarks/placement.py --blocks` does it for models of all families at their sizes."""
    block = load(name, num_layers=1).graph(4, 64, "bfloat16")
    trade = problem_of(block, ("tp",), (2,), AlphaBeta({"tp": 2}), num_microbatches=2, in_flight=2).trade()
    free, least = (trade.read(solve(trade.at(p)).states, p)[1] for p in (0.0, 1e3))
    for share in (0.1, 0.5):
        limit = least + share * (free - least)
        found, twin = solve_within(trade, limit), integer_within(trade, limit)
        assert twin is not None
        assert found.time_s == pytest.approx(twin.time_s, rel=1e-6)
        assert found.nbytes <= limit


def test_the_trade_at_a_price_is_the_problem_at_that_price(graph: Graph) -> None:
    args = (graph, ("tp",), (8,), AlphaBeta({"tp": 8}))
    free = problem_of(*args, num_microbatches=2, in_flight=2).trade()
    for price in (0.0, 1e-11, 1e-9):
        placed = search(*args, num_microbatches=2, in_flight=2, memory_price=price)
        found = solve(free.at(price))
        assert found.cost == pytest.approx(placed.cost_s, rel=1e-12)
        assert free.read(found.states, price) == pytest.approx((placed.time_s, sum(placed.nbytes.values())), rel=1e-9)


def test_a_model_within_limits_mixes_layers_and_states_its_gap() -> None:
    graph = model(Llama(batch=8, seq=512, hidden=1024, heads=16, groups=4, d=64, inner=2816, vocab=32000, layers=24))
    args = (graph, ("tp",), (8,), AlphaBeta({"tp": 8}))
    tables = new_tables(*args[1:])
    same = {"num_microbatches": 2, "in_flight": 2, "tables": tables}
    free, least = search(*args, **same), search(*args, memory_price=1e-3, **same)
    high, low = (sum(p.nbytes.values()) for p in (free, least))
    times = []
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        limit = low + share * (high - low)
        found = search_within(*args, limit, **same)
        assert found.nbytes <= limit
        assert found.bound_s <= found.placed.time_s
        assert found.gap <= 1e-3
        times.append(found.placed.time_s)
    assert times == sorted(times, reverse=True)
    assert times[-1] >= free.time_s
    assert search_within(*args, high, **same).placed.time_s == pytest.approx(free.time_s)
    with pytest.raises(PlanError, match="nothing fits within"):
        search_within(*args, 0.9 * low, **same)


def test_layers_on_two_axes_are_mixed_to_a_tenth_of_a_percent() -> None:
    """On 2x4 a change of what the outer axis splits has to be paid wherever layers make it."""
    axes, mesh = ("dp", "tp"), (2, 4)
    graph = load("gpt2", num_layers=32).graph(8, 1024, "bfloat16")
    pricing = MeshPricing(CostModel(load_cluster("1x8xH100-SXM")), Mesh(axes, mesh, tuple(range(8))))
    more = {"num_microbatches": 4, "in_flight": 2, "tables": new_tables(axes, mesh, pricing)}
    high, low = (sum(search(graph, axes, mesh, pricing, memory_price=p, **more).nbytes.values()) for p in (0.0, 1e-3))
    for share in (0.1, 0.5):
        found = search_within(graph, axes, mesh, pricing, low + share * (high - low), **more)
        assert found.nbytes <= low + share * (high - low)
        assert found.gap <= 1e-3
        held = {tuple(found.placed.params[t] for n in graph.nodes if n.layer == k for t in n.inputs if t in found.placed.params) for k in range(2, 32)}
        assert len(held) > 1


def test_a_single_layer_within_limits_is_the_integer_program() -> None:
    """What no price reaches is bounded all the same."""
    graph, args = model(TINY), (("tp",), (4,), AlphaBeta({"tp": 4}))
    more = {"num_microbatches": 2, "in_flight": 3}
    trade = problem_of(graph, *args, **more).trade()
    free, least = (trade.read(solve(trade.at(p)).states, p)[1] for p in (0.0, 1e3))
    for share in (0.3, 0.7):
        limit = least + share * (free - least)
        found, twin = search_within(graph, *args, limit, **more), integer_within(trade, limit)
        assert twin is not None
        assert found.nbytes <= limit
        assert found.bound_s <= twin.time_s * (1 + 1e-6)
        assert found.gap <= 1e-3


@pytest.mark.parametrize("layers", [2, 5, 9])
def test_what_is_mixed_costs_the_sum_over_everything_that_is_derived(layers: int) -> None:
    graph, args = model(replace(TINY, layers=layers)), (("tp",), (4,), AlphaBeta({"tp": 4}))
    more = {"num_microbatches": 2, "in_flight": 3, "tables": new_tables(*args)}
    free, least = (sum(search(graph, *args, memory_price=p, **more).nbytes.values()) for p in (0.0, 1e-3))
    for share in (0.15, 0.6):
        found = search_within(graph, *args, least + share * (free - least), **more)
        assert found.gap <= 1e-3
        assert found.placed.time_s == pytest.approx(Twin(graph, *args, found.placed, 2, ()).seconds(), rel=1e-9)


def test_operators_that_run_again_are_mixed_too() -> None:
    graph, axes, mesh = model(replace(TINY, layers=8)), ("tp",), (2,)
    pricing = AlphaBeta({"tp": 2})
    more = {"num_microbatches": 2, "in_flight": 3, "selective": True}
    low, high = (search(graph, axes, mesh, pricing, memory_price=p, **more) for p in (1e-3, 0.0))
    limit = 0.6 * sum(low.nbytes.values()) + 0.4 * sum(high.nbytes.values())
    found = search_within(graph, axes, mesh, pricing, limit, **more)
    assert found.gap <= 1e-3
    by_layer = {tuple(name.split(".", 2)[-1] for name in found.placed.recompute if graph.node[name].layer == k) for k in range(2, 8)}
    assert len(by_layer) > 1
    assert found.placed.time_s == pytest.approx(Twin(graph, axes, mesh, pricing, found.placed, 2, found.placed.recompute).seconds(), rel=1e-9)

"""Which operators run again in the backward: the search = the best of all subsets; its time and bytes = those of what is derived and lowered."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations

import pytest

from ir.graph import Builder, Graph
from ir.mesh import Mesh
from planner.facts import analyse
from planner.foretell import foretell
from planner.frontends import load
from planner.lower import lower
from planner.placement import new_tables, problem, search
from planner.pricing import MeshPricing
from planner.solver.elimination import solve
from planner.space import layout_space
from planner.trade import integer_within
from simulator.cost import CostModel
from simulator.memory import ledger
from tests.families import of_kind
from tests.laws.test_placement_twin import PRICINGS, SMALL, Twin
from tests.models import BATCH, SEQ
from tests.parity import model as family_model
from tests.planner.blocks import AlphaBeta, model
from tests.plans import Layout, cluster, plan_for

PRICES = (0.0, 1e-9, 1e-8, 1e-7, 1e-5)


def gated() -> Graph:
    """Embedding, one gated block, head and loss."""
    g = Builder("gated")

    def weight(name: str, *shape: int) -> str:
        return g.tensor(name, shape, "float32", "param", {"init": "normal", "std": 0.02})

    ids, labels = (g.tensor(name, (4, 8), "int64", "input") for name in ("ids", "labels"))
    x = g.node("embedding", [ids, weight("table", 32, 16)], name="embed", layer=0)[0]
    a = g.node("rms_norm", [x, weight("gain", 16)], name="norm", attrs={"eps": 1e-5}, layer=1)[0]
    gate, up = (g.node("linear_t", [a, weight(f"{name}.w", 32, 16)], name=name, layer=1)[0] for name in ("gate", "up"))
    b = g.node("swiglu", [gate, up], name="swiglu", layer=1)[0]
    x = g.node("add", [x, g.node("linear_t", [b, weight("down.w", 16, 32)], name="down", layer=1)[0]], name="add", layer=1)[0]
    top = g.node("last_max", [x], name="top", layer=2)[0]
    z, t = g.node("exp_sum", [x, labels, top], name="sum", layer=2)
    losses = g.node("log_loss", [z, t], name="losses", layer=2)[0]
    return g.graph(g.node("total", [losses], name="loss", attrs={"factor": 1 / 32}, layer=2))


def priced(mesh: tuple[int, ...], pricing: str) -> tuple[tuple[str, ...], tuple[int, ...], AlphaBeta]:
    axes = ("dp", "tp")[: len(mesh)]
    return axes, mesh, AlphaBeta(dict(zip(axes, mesh, strict=True)), **PRICINGS[pricing])


def may_rerun(graph: Graph) -> list[str]:
    free = analyse(graph, selective=True).open
    return [n.name for n in graph.nodes if n.name in free]


def subsets(names: list[str]) -> list[tuple[str, ...]]:
    return list(chain.from_iterable(combinations(names, k) for k in range(len(names) + 1)))


@pytest.mark.parametrize(("mesh", "pricing"), [((), "even"), ((2,), "latency"), ((2,), "slow links"), ((2, 2), "even")], ids=str)
def test_search_is_the_best_of_all_subsets(mesh: tuple[int, ...], pricing: str) -> None:
    graph, args = gated(), priced(mesh, pricing)
    tables, chosen = new_tables(*args), set()
    every = subsets(may_rerun(graph)) if len(mesh) < 2 else subsets(may_rerun(graph))[::3]
    for memory_price in PRICES:
        more = {"num_microbatches": 2, "memory_price": memory_price, "in_flight": 3, "tables": tables}
        found = search(graph, *args, selective=True, **more)
        best = min(search(graph, *args, recompute=names, **more).cost_s for names in every)
        assert found.cost_s <= best * (1 + 1e-9)
        assert found.cost_s == pytest.approx(search(graph, *args, recompute=found.recompute, **more).cost_s, rel=1e-9)
        if len(every) == 2 ** len(may_rerun(graph)):
            assert found.cost_s == pytest.approx(best, rel=1e-9)
        chosen.add(found.recompute)
    assert len(chosen) > 1


@pytest.mark.parametrize("pricing", PRICINGS)
@pytest.mark.parametrize("mesh", [(), (4,), (2, 2)], ids=str)
def test_time_is_the_sum_over_everything_that_is_derived(mesh: tuple[int, ...], pricing: str) -> None:
    graph, args, rng = model(SMALL), priced(mesh, pricing), random.Random(len(mesh))
    names = may_rerun(graph)
    for share in (0.3, 0.7, 1.0):
        chosen = tuple(name for name in names if rng.random() < share)
        placed = search(graph, *args, num_microbatches=2, recompute=chosen, memory_price=1e-9)
        assert placed.time_s == pytest.approx(Twin(graph, *args, placed, 2, placed.recompute).seconds(), rel=1e-9)
    placed = search(graph, *args, num_microbatches=2, selective=True, memory_price=1e-8, in_flight=4)
    assert placed.recompute
    assert placed.time_s == pytest.approx(Twin(graph, *args, placed, 2, placed.recompute).seconds(), rel=1e-9)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("family", ["gpt", "llama", "mixtral"])
def test_what_the_tables_keep_the_program_saves(family: str, mesh: tuple[int, int]) -> None:
    """On two axes data-parallel, ZeRO-2, and the stream split along the sequence: every tensor is cut, and some are boxed again."""
    whole = of_kind(family) if family == "mixtral" else family_model(family)
    plan, rng = plan_for(whole, Layout(*mesh), batch=BATCH, seq=SEQ), random.Random(1)
    graph = whole.graph(BATCH, SEQ, plan.dtype)
    args = (graph, plan.axes, plan.mesh_shape, MeshPricing(CostModel(cluster()), plan.mesh(0)))
    space = layout_space(graph, plan.axes, zero=2, sp=True) if mesh != (1, 1) else None
    names = may_rerun(graph)
    some = [tuple(name for name in names if rng.random() < share) for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    most = 0.0
    for chosen in some if space is None else some[::2]:
        placed = search(*args, num_microbatches=1, recompute=chosen, memory_price=1e-9 if space else 0.0, space=space)
        decided = replace(
            plan, recompute=chosen, rules=placed.rules, hubs=placed.hubs, params=placed.params, reboxed=placed.reboxed, links=placed.links,
        )  # fmt: skip
        held = ledger(lower(whole, decided)).ranks
        assert max(mine["saved"] + mine["input"] for mine in held.values()) == placed.nbytes["activations"]
        most = max(most, placed.nbytes["activations"])
    assert space is None or most < 0.3 * search(*args, num_microbatches=1).nbytes["activations"]


def test_what_is_dear_to_keep_and_cheap_to_make_runs_again_first() -> None:
    """Of GPT-3's layers on 8 ranks: activation functions, then norms, then attention; products when memory is dearest."""
    graph = load("gpt3-175b[num_layers=4]").graph(1, 2048, "bfloat16")
    args = (graph, ("tp",), (8,), MeshPricing(CostModel(cluster()), Mesh(("tp",), (8,), tuple(range(8)))))
    more = {"num_microbatches": 16, "in_flight": 8, "state_price": 0.0, "tables": new_tables(*args[1:]), "space": layout_space(graph, ("tp",))}
    full, last = search(*args, recompute=(1, 2, 3, 4), **more), search(*args, **more)
    ops = []
    for memory_price in (3e-12, 8.5e-12, 3e-11, 1e-9):
        found = search(*args, selective=True, memory_price=memory_price, **more)
        assert found.time_s > last.time_s
        assert found.nbytes["activations"] < last.nbytes["activations"]
        ops.append({graph.node[name].op for name in found.recompute if graph.node[name].layer == 2})
        last = found
    assert ops[:3] == [{"gelu"}, {"gelu", "layer_norm"}, {"gelu", "layer_norm", "attention"}]
    assert "linear" in ops[3]
    assert last.nbytes["activations"] <= full.nbytes["activations"]


def test_a_simulated_step_lies_between_nothing_and_whole_layers() -> None:
    whole, cost = load("llama-3-8b[num_layers=4]"), CostModel(cluster())
    plan = plan_for(whole, Layout(1, 2, 2, 8), batch=16, seq=2048, dtype="bfloat16")
    graph = whole.graph(plan.microbatch, plan.seq, plan.dtype)
    functions = tuple(n.name for n in graph.nodes if n.op in ("rms_norm", "swiglu") and 0 < n.layer < graph.num_layers - 1)
    none, selective, full = (foretell(whole, cost, replace(plan, recompute=r)) for r in ((), functions, (1, 2, 3, 4)))
    assert none["step_s"] < selective["step_s"] < full["step_s"]
    assert none["peak_gib"] > selective["peak_gib"] > full["peak_gib"]


def test_folded_layers_choose_what_separate_layers_choose() -> None:
    graph, args = model(replace(SMALL, layers=5)), priced((2,), "even")
    for memory_price in (1e-9, 1e-8):
        more = {"num_microbatches": 2, "memory_price": memory_price, "in_flight": 2, "selective": True}
        folded, flat = search(graph, *args, **more), search(graph, *args, solver=lambda g, _: solve(g), **more)
        assert folded.cost_s == pytest.approx(flat.cost_s, rel=1e-12)
        assert folded.recompute
        assert folded.exact
        assert flat.exact


def test_a_limit_of_bytes_is_met_by_the_best_choice_of_all() -> None:
    """Every choice stands in the trade of time for memory: HiGHS on all rows, and the price, agree."""
    graph, args = gated(), priced((2,), "even")
    more = {"num_microbatches": 2, "in_flight": 3, "selective": True}
    whole = problem(graph, *args, **more)
    dear = search(graph, *args, memory_price=1e-9, **more)
    answer = integer_within(whole.trade(), sum(dear.nbytes.values()))
    assert answer is not None
    assert answer.time_s == pytest.approx(dear.time_s, rel=1e-7)

"""Runs of equal layers, and the short graph that stands for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ir.graph import Builder, Graph
from planner.placement import new_tables, price, search
from planner.runs import Short, layer_keys, shorten
from planner.solver.elimination import solve
from planner.solver.factors import FactorGraph, Solution
from planner.space import Limit, Space
from tests.planner.blocks import AlphaBeta, Llama, block, model

SMALL = Llama(batch=4, seq=16, hidden=32, heads=8, groups=4, d=4, inner=64, vocab=50, dtype="float32")
PRICES = AlphaBeta({"tp": 4}, latency_s=5e-6, bytes_per_s=1e9, flops_per_s=1e12, memory_bytes_per_s=1e10, launch_s=1e-6)
ARGS = (("tp",), (4,), PRICES)


def short_of(graph: Graph) -> Short:
    return shorten(graph, layer_keys(graph))


def unfolded(graph: FactorGraph, _: Sequence[Sequence[int]]) -> Solution:
    return solve(graph)


def alternating(layers: int) -> Graph:
    """Blocks of two widths in turn."""
    g = Builder("alternating")
    ids = g.tensor("ids", (SMALL.batch, SMALL.seq), "int64", "input")
    x = g.node("embedding", [ids, g.tensor("embed.w", (SMALL.vocab, SMALL.hidden), "float32", "param")], name="embed", layer=0)[0]
    for layer in range(1, layers + 1):
        x = block(g, x, replace(SMALL, inner=64 if layer % 2 else 128), layer)
    total = g.node("rms_norm", [x, g.tensor("norm.g", (SMALL.hidden,), "float32", "param")], name="norm", attrs={"eps": 1e-5}, layer=layers + 1)[0]
    top = g.node("last_max", [total], name="top", layer=layers + 1)[0]
    labels = g.tensor("labels", (SMALL.batch, SMALL.seq), "int64", "input")
    z, t = g.node("exp_sum", [total, labels, top], name="sum", layer=layers + 1)
    losses = g.node("log_loss", [z, t], name="losses", layer=layers + 1)[0]
    return g.graph((g.node("total", [losses], name="loss", attrs={"factor": 0.01}, layer=layers + 1)[0],))


def test_the_second_of_equal_layers_stands_for_all_but_the_outer_ones() -> None:
    graph = model(replace(SMALL, layers=9))
    short = short_of(graph)
    assert [r.copies for r in short.repeats] == [((3,), (4,), (5,), (6,), (7,), (8,))], "the first layer reads the embedding, which is none of its like"
    assert sorted({n.layer for n in short.graph.nodes}) == [0, 1, 2, 3, 9, 10]
    assert short.graph.node["h.8.norm1"].inputs[0] == "h.2.add2"
    assert short.graph.check() == short.graph


def test_layers_that_alternate_are_blocks_of_two() -> None:
    assert [r.copies for r in short_of(alternating(11)).repeats] == [((4, 5), (6, 7), (8, 9))]


def test_few_layers_and_shared_parameters_are_left_alone() -> None:
    graph = model(replace(SMALL, layers=4))
    assert short_of(graph).graph is graph
    whole = model(replace(SMALL, layers=8))
    names = {f"h.{i}.q.w": "h.0.q.w" for i in range(1, 8)}
    nodes = tuple(replace(n, inputs=tuple(names.get(t, t) for t in n.inputs)) for n in whole.nodes)
    shared = replace(whole, nodes=nodes, tensors={k: t for k, t in whole.tensors.items() if k not in names})
    assert short_of(shared).graph is shared


def test_a_layer_that_something_else_reads_is_not_dropped() -> None:
    graph = model(replace(SMALL, layers=8))
    nodes = tuple(replace(n, inputs=("h.3.add2", *n.inputs[1:])) if n.name == "norm" else n for n in graph.nodes)
    skipping = replace(graph, nodes=nodes)
    assert short_of(skipping).graph is skipping


@pytest.mark.parametrize("layers", [5, 6, 7, 12])
@pytest.mark.parametrize("memory_price", [0.0, 1e-9])
def test_the_short_graph_costs_what_the_whole_costs(layers: int, memory_price: float) -> None:
    for graph in (model(replace(SMALL, layers=layers)), alternating(layers + 1)):
        same = {"num_microbatches": 2, "memory_price": memory_price, "in_flight": 2}
        found = search(graph, *ARGS, **same)
        flat = search(graph, *ARGS, **same, solver=unfolded)
        assert found.cost_s == pytest.approx(flat.cost_s, rel=1e-12)
        assert found.nbytes == pytest.approx(flat.nbytes, rel=1e-12)
        assert (found.num_variables, set(found.rules), set(found.hubs), set(found.params)) == (
            flat.num_variables, set(flat.rules), set(flat.hubs), set(flat.params),
        )  # fmt: skip
        assert found.log10_space == pytest.approx(flat.log10_space)
        again = price(graph, *ARGS, rules=found.rules, hubs=found.hubs, params=found.params, **same)
        assert again.cost_s == pytest.approx(found.cost_s, rel=1e-12), "every layer costs what its copy was told"


def test_what_is_asked_of_one_layer_alone_sets_it_apart() -> None:
    graph = model(replace(SMALL, layers=12))
    tables = new_tables(*ARGS)
    usual = search(graph, *ARGS, num_microbatches=2, tables=tables).rules["h.6.up"][0]
    space = Space(rules=(Limit("h.6.up", "tp", lambda rule: rule != usual),))
    found = search(graph, *ARGS, num_microbatches=2, space=space, tables=tables)
    flat = search(graph, *ARGS, num_microbatches=2, space=space, tables=tables, solver=unfolded)
    assert found.cost_s == pytest.approx(flat.cost_s, rel=1e-12)
    assert found.rules["h.6.up"][0] != usual
    assert found.rules["h.3.up"][0] == found.rules["h.10.up"][0] == usual
    deep = {layer: 1.0 + (layer > 6) for layer in range(14)}
    both = [
        search(graph, *ARGS, num_microbatches=2, memory_price=1e-8, in_flight=deep, recompute=(3, 4), tables=tables, **s) for s in ({}, {"solver": unfolded})
    ]
    assert both[0].cost_s == pytest.approx(both[1].cost_s, rel=1e-12)
    assert both[0].nbytes == pytest.approx(both[1].nbytes, rel=1e-12)

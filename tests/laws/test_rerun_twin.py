"""Which operators run again in the backward: the search = the best of all subsets; its time and bytes = those of what is derived, and of the lowered program."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations

import pytest

from ir.graph import Builder, Graph
from planner.facts import analyse
from planner.placement import Placed, new_tables, search
from tests.laws.test_placement_twin import PRICINGS, SMALL, Twin
from tests.planner.blocks import AlphaBeta, model

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


def subsets(graph: Graph) -> list[tuple[str, ...]]:
    names = [n.name for n in graph.nodes if n.name in analyse(graph, selective=True).open]
    return list(chain.from_iterable(combinations(names, k) for k in range(len(names) + 1)))


@pytest.mark.parametrize("pricing", PRICINGS)
@pytest.mark.parametrize("mesh", [(), (2,), (2, 2)], ids=str)
def test_search_is_the_best_of_all_subsets(mesh: tuple[int, ...], pricing: str) -> None:
    graph, args = gated(), priced(mesh, pricing)
    tables = new_tables(*args)
    chosen = []
    for memory_price in PRICES:
        more = {"num_microbatches": 2, "memory_price": memory_price, "in_flight": 3, "tables": tables}
        found = search(graph, *args, selective=True, **more)
        every = {names: search(graph, *args, recompute=names, **more) for names in subsets(graph)}
        assert found.cost_s == pytest.approx(min(p.cost_s for p in every.values()), rel=1e-9)
        assert every[found.recompute].cost_s == pytest.approx(found.cost_s, rel=1e-9)
        chosen.append(found.recompute)
    print(chosen)

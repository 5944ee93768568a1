"""Context parallelism: both ways through attention are the one-device result under cp x dp x tp, and cost what they say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ir.errors import PlanError
from ir.mesh import Mesh
from ir.op import Rule
from ir.plan import Plan, Stage
from planner.context import context_space
from planner.frontends.model import Model
from planner.lower import lower
from planner.optimizers import with_defaults
from planner.placement import search
from planner.pricing import MeshPricing
from planner.single import single_device
from planner.space import layout_space
from simulator.cost import CostModel
from tests.models import BATCH, SEQ, gpt, llama
from tests.parity import Ended, between, ended, same
from tests.plans import cluster

AXES = ("dp", "cp", "tp")
MODELS = {"gpt": gpt(num_layers=2), "llama": llama(num_layers=2)}


def plan_of(model: Model, sizes: tuple[int, int, int], form: str | None, zero: int | None = None, pp: int = 1) -> Plan:
    """The cheapest placement on a dp x cp x tp mesh."""
    devices = cluster()
    graph = model.graph(BATCH // pp, SEQ, "float64")
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    mesh = Mesh(AXES, sizes, tuple(range(num_ranks)))
    space = layout_space(graph, AXES, zero=zero) & context_space(graph, "cp", sizes[1], form)
    placed = search(graph, AXES, sizes, MeshPricing(CostModel(devices), mesh), num_microbatches=pp, space=space)
    base = single_device(model, devices, batch=BATCH, seq=SEQ, dtype="float64", optimizer=with_defaults("adamw"), num_microbatches=pp)
    cuts = ((0, 2), (2, graph.num_layers)) if pp == 2 else ((0, graph.num_layers),)
    stages = tuple(Stage(a, b, tuple(range(i * num_ranks, (i + 1) * num_ranks))) for i, (a, b) in enumerate(cuts))
    return replace(
        base, axes=AXES, mesh_shape=sizes, stages=stages, rules=placed.rules, hubs=placed.hubs, params=placed.params, reboxed=placed.reboxed
    )  # fmt: skip


@cache
def alone(family: str) -> Ended:
    plan = single_device(MODELS[family], cluster(), batch=BATCH, seq=SEQ, dtype="float64", optimizer=with_defaults("adamw"))
    return ended(lower(MODELS[family], plan))


CASES: tuple[tuple[str, str | None, tuple[int, int, int], dict[str, Any]], ...] = (
    ("llama", "gather", (1, 4, 1), {}), ("llama", "exchange", (1, 4, 1), {}), ("llama", "gather", (2, 2, 2), {}), ("llama", "exchange", (2, 2, 2), {"zero": 1}),
    ("gpt", "gather", (1, 2, 1), {"pp": 2}), ("gpt", "exchange", (2, 2, 1), {"zero": 3}),
)  # fmt: skip


@pytest.mark.parametrize(("family", "form", "sizes", "more"), CASES, ids=str)
def test_any_way_gives_what_one_device_gives(family: str, form: str | None, sizes: tuple[int, int, int], more: dict[str, Any]) -> None:
    program = lower(MODELS[family], plan_of(MODELS[family], sizes, form, **more))
    found = between(ended(program), alone(family))
    assert same(found), found


def _comm(form: str) -> dict[str, int]:
    """Collectives of one layer's attention on axis cp, by kind, forward and backward."""
    program = lower(MODELS["llama"], plan_of(MODELS["llama"], (1, 2, 1), form))
    kinds: dict[str, int] = {}
    for a in program.actors:
        if a.rank == 0 and a.queue == "comm.cp" and a.layer == 1 and a.phase in ("F", "I"):
            kinds[a.work.op] = kinds.get(a.work.op, 0) + 1
    return kinds


def test_what_each_way_moves() -> None:
    """Gathering: keys and values forward, their gradients scattered; exchanging: three tensors there and one back, in both directions."""
    gathered, exchanged = _comm("gather"), _comm("exchange")
    assert gathered == {"all_gather": 2, "reduce_scatter": 2}
    assert exchanged == {"all_to_all": 8}


def test_the_sequence_is_split_everywhere_and_attention_as_asked() -> None:
    graph = MODELS["llama"].graph(BATCH, SEQ, "float64")
    for form, rule in (("gather", Rule("split", "s")), ("exchange", Rule("split", "g"))):
        plan = plan_of(MODELS["llama"], (1, 2, 2), form)
        assert {plan.rules[n.name][1] for n in graph.nodes if n.op == "attention"} == {rule}
        assert {plan.rules[n.name][1] for n in graph.nodes if n.op in ("linear", "rms_norm", "swiglu", "rope", "add")} == {Rule("split", "s")}


def test_what_does_not_divide_is_refused() -> None:
    graph = MODELS["llama"].graph(BATCH, SEQ, "float64")
    for num_ranks, form, told in ((5, None, "sequence of 12 tokens"), (6, "exchange", "4 key heads"), (2, "ring", "forms gather, exchange")):
        with pytest.raises(PlanError, match=told):
            context_space(graph, "cp", num_ranks, form)

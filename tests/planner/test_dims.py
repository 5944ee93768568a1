"""Batch, sequence and experts are followed through a model, whatever operators call them."""

from __future__ import annotations

import pytest

from planner.dims import dims_of
from planner.placement import search
from planner.space import layout_space
from tests.families import of_kind
from tests.planner.blocks import AlphaBeta

GRAPH = of_kind("mixtral").graph(8, 12, "float32")
DIMS = dims_of(GRAPH)


def test_an_experts_batch_is_its_second_dim() -> None:
    act, down = GRAPH.node["h.0.mlp.experts.act"], GRAPH.node["h.0.mlp.experts.down"]
    assert (DIMS.label(act, "batch"), DIMS.label(act, "experts")) == ("s", "b")
    assert (DIMS.label(down, "batch"), DIMS.label(down, "experts")) == ("b", "e")
    assert DIMS.dim("h.0.mlp.experts.down", "batch") == 1
    assert DIMS.dim("h.0.mlp.experts.down.weight", "experts") == 0
    assert DIMS.dim("h.0.attn.q", "sequence") == 1
    assert DIMS.label(GRAPH.node["h.0.mlp.residual"], "experts") is None


@pytest.mark.parametrize("kind", ["t5", "bert", "vit", "deepseek_v3"])
def test_every_value_of_a_sample_has_a_batch(kind: str) -> None:
    model = of_kind(kind)
    graph = model.graph(6, model.max_seq if kind == "vit" else 10, "float32")
    dims = dims_of(graph)
    values = [t for n in graph.nodes for t in n.outputs if t != "loss" and n.op != "positions"]
    assert [t for t in values if dims.dim(t, "batch") is None] == []
    assert all(graph.tensors[t].shape[dims.dim(t, "batch") or 0] == 6 for t in values)


def test_an_axis_of_experts_splits_them_and_is_data_parallel_for_the_rest() -> None:
    axes = ("ep",)
    found = search(GRAPH, axes, (2,), AlphaBeta({"ep": 2}), num_microbatches=1, space=layout_space(GRAPH, axes, zero=0))
    rules = {name: repr(nd[0]) for name, nd in found.rules.items()}
    assert {rules[f"h.{i}.mlp.experts.{name}"] for i in (0, 1) for name in ("gate", "up", "down")} == {"split e"}
    assert rules["h.0.attn.attend"] == rules["h.1.mlp.residual"] == rules["lm_head"] == "split b"
    assert {rules[name] for name in ("h.0.mlp.dispatch", "h.0.mlp.combine")} <= {"split e", "split b"}
    for name, place in found.params.items():
        expert = ".experts." in name
        assert [repr(nd[0]) for nd in place] == (["S(0)"] * 3 if expert else ["B", "B", repr(place.grad[0])]), name

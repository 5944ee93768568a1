"""Layouts and plans of others: a Mesh-TensorFlow layout as placements, the tensor-parallel plans of `transformers` matched or beaten."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from ir.errors import InputError, PlanError
from ir.op import Rule
from ir.sbp import B, S
from planner.frontends import load
from planner.imports import layout_limits, named_dims, parse_layout, read_tp_plan, tp_plan_limits
from planner.placement import new_tables, search
from planner.search import plan
from planner.space import Space
from simulator.clusters import load_cluster
from tests.models import SEQ, gpt, llama
from tests.planner.blocks import AlphaBeta

MODEL = llama(num_layers=2, hidden=64, num_heads=8, num_kv_heads=8, head_dim=8, mlp_hidden=128, vocab=256)
GRAPH = MODEL.graph(4, SEQ, "float32")
AXES, MESH = ("dp", "tp"), (2, 4)
PRICES = AlphaBeta({"dp": 2, "tp": 4})


def test_dims_have_the_names_of_the_config() -> None:
    for model in (MODEL, gpt(num_layers=1)):
        graph = model.graph(4, SEQ, "float32")
        dims = named_dims(graph)
        assert set(dims.names) == {"batch", "seq", "vocab", "hidden", "heads", "mlp_hidden"}
        size = {"batch": 4, "seq": SEQ, "vocab": model.config.vocab, "hidden": model.config.hidden}
        for t, found in dims.tensors.items():
            assert len(set(found.values())) == len(found), t
            for d, name in found.items():
                assert t.startswith("wpe") or graph.tensors[t].shape[d] == size.get(name, graph.tensors[t].shape[d]), (t, d, name)
        assert all(set(dims.tensors.get(p.name, {})) == set(range(len(p.shape))) for p in graph.params if not p.name.startswith("wpe"))


def test_a_layout_splits_what_it_names_and_nothing_else() -> None:
    space = layout_limits(GRAPH, AXES, MESH, parse_layout("batch:dp;d_ff:tp;heads:tp;vocab:tp"))
    found = search(GRAPH, AXES, MESH, PRICES, num_microbatches=2, space=space)
    assert {rules[0] for name, rules in found.rules.items()} == {Rule("split", "b")}
    assert found.params["h.0.mlp.up.weight"].held == (B, S(1))
    assert found.params["h.1.mlp.down.weight"].held == (B, S(0))
    assert found.params["h.1.attn.q.weight"].held == (B, S(1))
    assert found.params["lm_head.weight"].held == found.params["wte.weight"].held == (B, S(0))
    assert found.params["h.0.ln_1.weight"].held == (B, B)
    assert found.hubs["h.0.mlp.act"].value == (S(0), S(2))
    assert found.hubs["h.0.ln_1"].value == (S(0), B)
    assert found.rules["h.0.mlp.down"][1] == Rule("split", "k")
    assert found.cost_s >= search(GRAPH, AXES, MESH, PRICES, num_microbatches=2).cost_s


@pytest.mark.parametrize(
    ("layout", "error", "sentence"),
    [
        ("batch:dp;hiden:tp", InputError, "has no dim `hiden`; it has batch, seq, vocab, hidden, heads, mlp_hidden"),
        ("batch:dq", InputError, "the mesh has no axis `dq`; its axes are dp, tp"),
        ("batch", InputError, "`batch` in layout `batch` is no `dim:axis`"),
        ("d_ff:tp;mlp_hidden:dp", InputError, "gives `mlp_hidden` twice"),
        ("", InputError, "names no dim"),
        ("hidden:tp;mlp_hidden:tp", PlanError, "of shape (64, 128) has both dims, and one axis splits one dim; leave one out"),
        ("batch:tp;seq:tp", PlanError, "`ids` of shape (4, 11) has both dims"),
        ("seq:tp;vocab:dp", PlanError, "dim 1 of `wte` is 11, which tp = 4 does not divide"),
    ],
)
def test_what_a_layout_cannot_say_is_named(layout: str, error: type[Exception], sentence: str) -> None:
    graph = MODEL.graph(4, 11, "float32")
    with pytest.raises(error) as told:
        layout_limits(graph, AXES, MESH, parse_layout(layout))
    assert sentence in str(told.value)


HF = {
    "llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "gemma2": "Gemma2Config", "phi": "PhiConfig",
}  # fmt: skip


@pytest.mark.parametrize("module", HF)
def test_the_plans_of_transformers_are_matched_or_beaten(module: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = getattr(importlib.import_module(f"transformers.models.{module}.configuration_{module}"), HF[module])
    config(num_hidden_layers=2).to_json_file(tmp_path / "config.json")
    model = load(tmp_path)
    graph = model.graph(8, 1024, "bfloat16")
    axes, mesh = ("dp", "tp"), (2, 4)
    pricing = AlphaBeta(dict(zip(axes, mesh, strict=True)))
    tables = new_tables(axes, mesh, pricing)
    given = search(graph, axes, mesh, pricing, num_microbatches=4, tables=tables, space=tp_plan_limits(model, graph, config.base_model_tp_plan))
    best = search(graph, axes, mesh, pricing, num_microbatches=4, tables=tables)
    assert given.rules["h.1.mlp.up"][-1] == given.rules["h.1.attn.q"][-1] == Rule("split", "n")
    assert given.rules["h.1.mlp.down"][-1] == given.rules["h.1.attn.out"][-1] == Rule("split", "k")
    assert given.rules["h.1.attn.attend"][-1] == Rule("split", "g"), "what follows a column split is cut as it is"
    assert best.exact
    assert best.cost_s <= given.cost_s * (1 + 1e-12)


def test_styles_and_modules_that_are_not_known_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="style `diagonal` of the tensor-parallel plan is not known; known are colwise"):
        tp_plan_limits(MODEL, GRAPH, {"layers.*.mlp.up_proj": "diagonal"})
    with pytest.raises(InputError, match=r"names `layers\.\*\.mlp\.sideways`.*its modules are .*layers\.\*\.mlp\.up_proj"):
        tp_plan_limits(MODEL, GRAPH, {"layers.*.mlp.sideways": "colwise"})
    (tmp_path / "plan.json").write_text(json.dumps({"base_model_tp_plan": {"layers.*.mlp.up_proj": "colwise"}}))
    assert read_tp_plan(str(tmp_path / "plan.json")) == {"layers.*.mlp.up_proj": "colwise"}
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(InputError, match="holds no tensor-parallel plan"):
        read_tp_plan(str(tmp_path / "none.json"))
    with pytest.raises(InputError, match="cannot be read"):
        read_tp_plan(str(tmp_path / "absent.json"))


def test_the_whole_search_keeps_a_layout_and_a_plan_of_modules(tmp_path: Path) -> None:
    cluster = load_cluster("1x4xH100-SXM")
    best = plan(MODEL, cluster, batch=8, seq=SEQ, top=1, fix={"tp": 2, "dp": 2, "layout": "batch:dp;mlp_hidden:tp"}).plans[0]
    assert best.params["h.0.mlp.up.weight"].held[-1] == S(1)
    assert best.params["h.0.attn.q.weight"].held[-1] == B
    file = tmp_path / "tp.json"
    file.write_text(json.dumps({"layers.*.self_attn.o_proj": "rowwise", "layers.*.self_attn.q_proj": "colwise"}))
    best = plan(MODEL, cluster, batch=8, seq=SEQ, top=1, fix={"tp": 2, "dp": 2, "tp_plan": str(file)}).plans[0]
    assert best.rules["h.1.attn.out"][-1] == Rule("split", "k")
    with pytest.raises(PlanError, match=r"seq:tp leaves nothing|cannot|does not divide"):
        plan(llama(num_layers=2), cluster, batch=8, seq=SEQ - 1, top=1, fix={"tp": 2, "dp": 2, "layout": "batch:dp;seq:tp"})


def test_an_empty_plan_leaves_the_residual_stream_repeated() -> None:
    space = tp_plan_limits(MODEL, GRAPH, {"layers.*.mlp.up_proj": "replicate"})
    assert isinstance(space, Space)
    found = search(GRAPH, ("tp",), (4,), AlphaBeta({"tp": 4}), num_microbatches=1, space=space)
    assert found.rules["h.0.ln_1"][0].kind != "split"

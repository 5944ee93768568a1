"""Frozen parameters and adapters: what is trained, that it is right under every plan and in PyTorch, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from executor.data import ArrayData
from executor.train import run
from ir.errors import GraphError, InputError
from ir.graph import Graph
from planner.autodiff import backward
from planner.facts import analyse
from planner.frontends import Lora, Model, Tuning, load
from planner.frontends.huggingface import parse
from planner.frontends.weights import from_torch
from planner.lower import lower
from planner.optimizers import with_defaults
from planner.single import single_device
from planner.summary import model_flops
from simulator.memory import ledger
from tests.models import BATCH, SEQ, gpt, llama
from tests.parity import OPTIONS, Ended, between, ended, same
from tests.plans import Layout, cluster, plan_for

TUNED: dict[str, str] = {
    "adapters": "+lora(rank=4,alpha=8,targets=q+v,dropout=0.1)",
    "everywhere": "+lora(rank=4,targets=all-linear)",
    "upper half": "+freeze(w*,h.0.*,h.1.*,h.2.attn.*)",
    "no norms": "+lora(rank=2,targets=up)+freeze(h.3.mlp.up.lora.a.*)",
}
LAYOUTS = (
    ("adapters", Layout(2, 2, 2, 2, zero=1)), ("adapters", Layout(4, 1, 1, 1, zero=3)), ("adapters", Layout(1, 1, 4, 4, recompute=True)),
    ("everywhere", Layout(2, 2, 1, 1, zero=2, recompute=True)), ("everywhere", Layout(1, 4, 1, 2)), ("upper half", Layout(2, 1, 4, 4, schedule="zb-h1")),
    ("upper half", Layout(2, 2, 2, 2, zero=3)), ("no norms", Layout(2, 1, 2, 2, recompute=True)),
)  # fmt: skip


@cache
def model(case: str) -> Model:
    base = llama() if case == "everywhere" else gpt()
    return base.tuned(Tuning.split(f"x{TUNED[case]}")[1])


@cache
def alone(case: str) -> Ended:
    plan = single_device(model(case), cluster(), batch=BATCH, seq=SEQ, dtype="float64", optimizer=with_defaults("adamw"))
    return ended(lower(model(case), plan))


@pytest.mark.parametrize(("case", "want"), LAYOUTS, ids=str)
def test_any_plan_gives_what_one_device_gives(case: str, want: Layout) -> None:
    program = lower(model(case), plan_for(model(case), want, batch=BATCH, seq=SEQ))
    found = between(ended(program), alone(case))
    assert same(found), found


def test_only_what_is_trained_has_a_gradient_or_a_state() -> None:
    for case in TUNED:
        graph = model(case).graph(2, SEQ)
        trained = {p.name for p in graph.trained}
        program = lower(model(case), plan_for(model(case), Layout(2, zero=1), batch=BATCH, seq=SEQ))
        tensors = {r.tensor for r in program.registers}
        assert {p.name for p in graph.params if f"d.{p.name}" in tensors} == trained
        assert {t.partition("@")[0] for t in tensors if t.endswith(("@m", "@v"))} == trained
        products = {a.origin for a in program.actors if a.phase == "W" and a.work.op == "linear.dw"}
        assert products == {n.name for n in graph.nodes if n.op == "linear" and n.inputs[1] in trained}


def test_no_cotangent_flows_below_the_first_trained_layer() -> None:
    joint = backward(model("upper half").graph(2, SEQ))
    assert min(n.layer for n in joint.graph.nodes if n.phase in ("I", "W")) == 3
    below = backward(model("adapters").graph(2, SEQ))
    assert not [n for n in below.graph.nodes if n.layer == 0 and n.phase in ("I", "W")]


def test_the_facts_of_the_search_are_those_of_the_backward() -> None:
    for case in TUNED:
        graph = model(case).graph(2, SEQ)
        facts, joint = analyse(graph), backward(graph)
        run_ = sorted((n.origin, n.op) for n in joint.graph.nodes if n.origin in graph.node and n.phase in ("I", "W") and n.op not in ("fill", "add"))
        assert run_ == sorted((name, op.name) for name, f in facts.node.items() for op in f.grads)


def test_memory_of_adapters() -> None:
    """Llama-3-8B on 8 H100: everything trained needs 16 bytes a parameter, beside adapters 2."""
    base = load("llama-3-8b", num_layers=4)
    held = {}
    for name, this in (("full", base), ("lora", base.tuned(Tuning.split("x+lora(rank=16,targets=q+v)")[1]))):
        plan = plan_for(this, Layout(8, zero=0), batch=8, seq=64, dtype="bfloat16")
        found = ledger(lower(this, plan, ranks=(0,)), cluster=cluster()).by_class
        held[name] = {c: found.get(c, 0.0) for c in ("parameter", "gradient", "optimizer")}
    num_adapters = 4 * 16 * ((4096 + 4096) + (4096 + 1024))
    assert held["lora"]["parameter"] == pytest.approx(2 * (base.num_params + num_adapters), rel=1e-6)
    assert held["lora"]["optimizer"] == 12 * num_adapters
    assert held["lora"]["gradient"] <= 8 * num_adapters
    assert held["full"]["optimizer"] == 12 * base.num_params


def test_flops_of_what_is_not_trained_are_not_counted() -> None:
    base = gpt(num_layers=2, vocab=32)
    plans = {name: plan_for(this, Layout(), batch=BATCH, seq=SEQ) for name, this in (("all", base), ("lora", model("adapters")))}
    assert model_flops(model("adapters"), plans["lora"]) < 0.75 * model_flops(gpt(), plans["lora"])
    forward = sum(
        g.op(n).flops_of(g.sizes(n), n.attrs) for g in (base.graph(1, SEQ),) for n in g.nodes if g.op(n).is_contraction or n.op == "attention"
    )  # fmt: skip
    assert model_flops(base, plans["all"]) == 3 * forward * BATCH


def test_the_text_of_a_graph_keeps_what_is_frozen() -> None:
    graph = model("adapters").graph(2, SEQ)
    assert "frozen wte.weight" in str(graph)
    assert Graph.parse(str(graph)) == graph


# ---- words ---------------------------------------------------------------------------------------------------------------------------------------------


def test_a_tuned_model_is_found_again_by_its_reference() -> None:
    for case in TUNED:
        again = load(model(case).reference)
        assert again == model(case)
        assert again.fingerprint == model(case).fingerprint != gpt().fingerprint
    assert load("gpt2+freeze(wte*)").name == "gpt2+freeze(wte*)"
    assert load("gpt2-tiny+lora(r=4,lora_alpha=8,target_modules=q_proj,v_proj)") == load("gpt2-tiny+lora(rank=4,alpha=8,targets=q+v)")


def test_adapters_start_at_the_model_itself() -> None:
    base, tuned = gpt(embed_dropout=0.0), gpt(embed_dropout=0.0).tuned(Tuning(lora=Lora(4)))
    first = [
        run(lower(m, single_device(m, cluster(), batch=BATCH, seq=SEQ, dtype="float64", optimizer=with_defaults("adamw"))), steps=1, **OPTIONS).loss
        for m in (base, tuned)
    ]
    assert first[0] == first[1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("+freeze(nothing*)", "no parameter"), ("+freeze(*)", "nothing of"), ("+lora(targets=qkv)", "no product called qkv; it has"),
        ("+lora(rank=0)", "1 or more"), ("+lora(rank=100)", "smallest matrix"), ("+lora(rnk=4)", "did you mean"), ("+lora(alpha=x)", "above 0"),
        ("+lora(dropout=1)", "up to"), ("+lora(rank=4,rank=8)", "twice"), ("+lora(use_rslora=2)", "true or false"),
    ],
)  # fmt: skip
def test_what_names_nothing_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        load(f"gpt2-tiny[hidden=64,mlp_hidden=96]{text}")


def test_nothing_to_train_is_refused_by_the_backward_too() -> None:
    graph = gpt().graph(2, SEQ)
    with pytest.raises(GraphError, match="depends on no parameter"):
        backward(replace(graph, tensors={k: replace(t, frozen=True) for k, t in graph.tensors.items()}))


def test_alpha_and_rank() -> None:
    assert Lora(16, 32.0).factor == 2.0
    assert Lora(16, 32.0, stabilized=True).factor == 8.0
    assert Lora.parse("rank=16,alpha=32,targets=q,v,dropout=0.1") == Lora.parse(repr(Lora(16, 32.0, ("q", "v"), 0.1)))


# ---- PyTorch -------------------------------------------------------------------------------------------------------------------------------------------


def test_gradients_of_adapters_are_pytorchs() -> None:
    """The same weights in `transformers`, the adapters' products added to its matrices, all differentiated by PyTorch."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = {
        "model_type": "gpt2", "vocab_size": 53, "n_positions": 17, "n_embd": 24, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }  # fmt: skip
    base = Model("gpt2", parse(config, "gpt2"))
    tuned = base.tuned(Tuning(lora=Lora(3, 6.0)))
    torch.manual_seed(7)
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config), attn_implementation="eager").to(torch.float64)
    rng = np.random.default_rng(1)
    adapters = {p.name: rng.normal(size=p.shape) * 0.1 for p in tuned.graph(2, 13, "float64").trained}
    tokens = rng.integers(0, 53, (2, 14))
    ids, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in adapters.items()}
    changed = {}
    for i in range(2):
        key = f"transformer.h.{i}.attn.c_attn.weight"
        parts = [2.0 * leaves[f"h.{i}.attn.{n}.lora.a.weight"] @ leaves[f"h.{i}.attn.{n}.lora.b.weight"] for n in "qv"]
        changed[key] = module.state_dict()[key].detach() + torch.cat([parts[0], torch.zeros(24, 24, dtype=torch.float64), parts[1]], dim=1)
    logits = torch.func.functional_call(module, changed, (torch.from_numpy(ids),), {"use_cache": False}).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 53), torch.from_numpy(labels).reshape(-1))
    loss.backward()
    plan = single_device(tuned, cluster(), batch=2, seq=13, dtype="float64", optimizer=with_defaults("sgd"))
    weights = {**from_torch(base, module.state_dict()), **adapters}
    done = run(lower(tuned, plan), steps=1, data=ArrayData({"ids": ids[None], "labels": labels[None]}), initial=weights)
    assert done.loss[0] == pytest.approx(loss.item(), rel=1e-12)
    for name, leaf in leaves.items():
        np.testing.assert_allclose(done.tensor(f"d.{name}"), leaf.grad.numpy(), rtol=1e-9, atol=1e-13, err_msg=name)

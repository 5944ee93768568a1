"""What experts would choose, found by a search that is told nothing of it: experts split inside the node, long sequences split along the sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from ir.mesh import Mesh
from ir.op import Rule
from planner.context import context_space
from planner.dims import EXPERT_PRODUCTS
from planner.frontends import load
from planner.frontends.model import Model
from planner.imports import tp_plan_limits
from planner.placed import Placed
from planner.placement import search
from planner.pricing import MeshPricing
from planner.space import Space, layout_space, no_batch, split_experts
from simulator.clusters import load_cluster
from simulator.cost import CostModel

SPLIT_B, SPLIT_E, SPLIT_S, SPLIT_N, SPLIT_K = (Rule("split", label) for label in "besnk")


def placed(model: Model, cluster: str, axes: Sequence[str], shape: Sequence[int], batch: int, seq: int, **more: Any) -> Placed:
    mesh = Mesh(tuple(axes), tuple(shape), tuple(range(math.prod(shape))))
    return search(model.graph(batch, seq, "bfloat16"), axes, shape, MeshPricing(CostModel(load_cluster(cluster)), mesh), num_microbatches=8, **more)


# ---- experts -----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layers"), [("mixtral-8x7b", 2), ("deepseek-v3", 5)])
def test_experts_are_split_inside_the_node_and_their_tokens_sent(name: str, layers: int) -> None:
    """Four nodes of eight, no axis has a meaning: attention is data-parallel on both, experts lie in parts on the fast one and are repeated on the slow one.

    Memory has a price: free of charge all ranks would keep all experts, whose gradients are reduced once a step over both axes at once.
    """
    model = load(name, num_layers=layers)
    batch = 32 if name == "mixtral-8x7b" else 128
    found = placed(model, "4x8xH100-SXM", ("outer", "inner"), (4, 8), batch, 4096, memory_price=1e-11)
    graph = model.graph(batch, 4096, "bfloat16")
    products = [n for n in graph.nodes if n.op in EXPERT_PRODUCTS]
    assert found.exact
    assert {found.rules[n.name] for n in products} == {(SPLIT_B, SPLIT_E)}
    assert {found.params[f"{n.name}.weight"].held[1].is_split for n in products} == {True}
    assert {found.rules[n.name] for n in graph.nodes if n.op in ("dispatch", "combine", "attention")} == {(SPLIT_B, SPLIT_B)}


def test_few_copies_are_sent_and_many_are_gathered() -> None:
    """A token goes to `top_k` experts: its copies cross by all-to-all while they are fewer than the ranks, else all ranks gather it once."""
    found = {}
    for top_k, ep in ((1, 4), (2, 8), (4, 8), (4, 2), (8, 2), (8, 4)):
        model = load("mixtral-8x7b", num_layers=1, top_k=top_k)
        graph = model.graph(ep, 4096, "bfloat16")
        rules = placed(model, "1x8xH100-SXM", ("ep",), (ep,), ep, 4096, space=layout_space(graph, ("ep",))).rules
        found[top_k, ep] = rules["h.0.mlp.dispatch"][0], rules["h.0.mlp.combine"][0]
    for (top_k, ep), rules in found.items():
        assert rules == ((SPLIT_B, SPLIT_B) if top_k < ep else (SPLIT_E, SPLIT_E)), (top_k, ep)


# ---- long sequences --------------------------------------------------------------------------------------------------------------------------------------

LINEAR = ("q", "k", "v", "out", "gate", "up", "down")
LLAMA = load("llama-3.1-8b", num_layers=4)


def on_eight(seq: int, space: Space) -> Placed:
    return placed(LLAMA, "1x8xH100-SXM", ("x",), (8,), 1, seq, space=space)


def rules_of(found: Placed) -> set[Rule]:
    """Of all products of the blocks."""
    return {rule for name, (rule, *_) in found.rules.items() if name.startswith("h.") and name.rpartition(".")[2] in LINEAR}


def tensor_parallel(seq: int) -> float:
    """Seconds of columns and rows, as transformers' own plan for the family has them, vocabulary split."""
    columns = {f"layers.*.self_attn.{p}_proj": "colwise" for p in "qkv"} | {f"layers.*.mlp.{p}_proj": "colwise" for p in ("gate", "up")}
    rows = {"layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise"}
    graph = LLAMA.graph(1, seq, "bfloat16")
    return on_eight(seq, no_batch(graph, "x") & tp_plan_limits(LLAMA, graph, columns | rows, "x")).cost_s


def context_parallel(seq: int) -> float:
    return on_eight(seq, context_space(LLAMA.graph(1, seq, "bfloat16"), "x", 8)).cost_s


def test_long_sequences_are_split_along_the_sequence() -> None:
    """One sequence on eight GPUs, nothing asked for: columns and rows while it is short, the sequence everywhere when it is long."""
    lengths = (512, 65536)
    short, long = (on_eight(seq, no_batch(LLAMA.graph(1, seq, "bfloat16"), "x")) for seq in lengths)
    assert rules_of(short) == {SPLIT_N, SPLIT_K}
    assert rules_of(long) == {SPLIT_S}
    assert short.cost_s <= tensor_parallel(512)
    assert long.cost_s <= context_parallel(65536)


def test_the_length_from_which_context_parallelism_is_cheaper() -> None:
    """Both ways on the same eight GPUs, priced alike: one crossing, between the lengths at which the free search changes its mind."""
    lengths = [512 << i for i in range(9)]
    ahead = [context_parallel(seq) < tensor_parallel(seq) for seq in lengths]
    assert ahead == sorted(ahead), "once ahead, always ahead"
    assert not ahead[0]
    assert ahead[-1]
    print("context parallelism is cheaper from", lengths[ahead.index(True)], "tokens")


# ---- published layouts -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers", "cluster", "dp", "tp", "ep", "sp", "seq"),
    [
        ("qwen3-30b-a3b", 2, "2x8xH100-SXM", 16, 1, 16, False, 4096),  # 16 GPUs
        ("gpt-oss-120b", 2, "2x8xH100-SXM", 8, 2, 16, True, 4096),  # one of four stages of 64 GPUs, experts over both axes
        ("deepseek-v3", 4, "8x8xH100-SXM", 32, 2, 64, True, 4096),  # one of sixteen stages of 1,024 GPUs
        ("qwen2-72b", 2, "1x8xH100-SXM", 1, 8, 1, True, 4096),  # one of four stages of 32 GPUs
    ],
)
def test_no_published_layout_is_cheaper(name: str, layers: int, cluster: str, dp: int, tp: int, ep: int, sp: bool, seq: int) -> None:
    """Layouts of NVIDIA-NeMo/Megatron-Bridge's recipes, on the ranks of one stage, against the optimum of the same problem without them."""
    model = load(name, num_layers=layers)
    graph = model.graph(dp, seq, "bfloat16")
    folded = ep > dp
    axes, shape = ("dp", "ep", "tp"), (dp // (ep // tp if folded else ep), ep // tp if folded else ep, tp)
    experts = layout_space(graph, axes, zero=1, sp=sp if tp > 1 else None) & split_experts(graph, "tp", folded)
    given = placed(model, cluster, axes, shape, dp, seq, space=experts)
    best = placed(model, cluster, axes, shape, dp, seq)
    assert best.exact
    assert best.cost_s <= given.cost_s * (1 + 1e-12)

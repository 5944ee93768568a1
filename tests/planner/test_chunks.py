"""Head and loss over chunks of tokens: as whole under any plan, as in PyTorch, in the memory of one chunk, tried where nothing fits otherwise."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from executor.data import text_data
from ir.cluster import Cluster
from ir.errors import DoesNotFit, PlanError
from ir.graph import Builder
from ir.op import Context, Rule
from ir.ops import catalogue
from ir.plan import Plan
from planner.check import check_plan
from planner.chunks import in_chunks, usual_chunks
from planner.frontends import Tuning
from planner.frontends.huggingface import parse
from planner.frontends.model import Model
from planner.lower import lower
from planner.optimizers import OPTIMIZERS
from planner.search import plan as search
from planner.single import single_device
from planner.space import Limit, Space
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.estimate import estimate
from simulator.memory import ledger
from tests.families import CONFIGS
from tests.models import BATCH, SEQ, gpt, llama
from tests.parity import Ended, between, ended, same
from tests.plans import Layout, cluster, plan_for


def wide(kind: str) -> Model:
    """A small model of this kind with a vocabulary that 2 and 4 divide."""
    return Model(kind, parse({**CONFIGS[kind], "vocab_size": 264}, kind))


MODELS = {
    "tied": gpt(vocab=264), "untied": llama(vocab=264), "nothing divides it": llama(), "capped": wide("gemma2"), "predicts twice": wide("deepseek_v3"),
    "with a bias": wide("bert"), "tied and frozen": gpt(vocab=264, num_layers=2).tuned(Tuning(("wte*",))),
}  # fmt: skip
LARGE = llama(vocab=4096, num_layers=1, hidden=16, mlp_hidden=16)
DIVIDES = {kind: kind != "nothing divides it" for kind in MODELS}
OVER_RANKS = Limit("*lm_head", "tp", Rule("split", "p").__eq__)
"""What large models choose by themselves: the vocabulary on the tensor-parallel ranks."""
DATA = text_data(None, SEQ, vocab=259)


# ---- the kernels ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cap", "has_bias", "parts", "num_chunks"), [(0.0, False, 1, 1), (0.0, True, 3, 4), (1.7, True, 2, 30), (0.9, False, 6, 7)])
def test_loss_and_gradients_are_those_of_pytorch(cap: float, has_bias: bool, parts: int, num_chunks: int) -> None:
    """Of logits made at once by PyTorch's automatic differentiation, in float64."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    rng = np.random.default_rng(4)
    x, w, bias, dloss = (rng.normal(size=shape) for shape in ((3, 5, 8), (24, 8), (24,), (3, 5)))
    labels = rng.integers(0, 24, (3, 5))
    given = [torch.tensor(a, requires_grad=True) for a in (x, w, *([bias] if has_bias else []))]
    logits = given[0] @ given[1].T + (given[2] if has_bias else 0.0)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    theirs = torch.nn.functional.cross_entropy(logits.reshape(15, 24), torch.tensor(labels).reshape(15), reduction="none").reshape(3, 5)
    theirs.backward(torch.tensor(dloss))
    name, attrs = "head_lse_bias" if has_bias else "head_lse", {"p": parts, "chunks": num_chunks, "cap": cap}
    table = (w, bias) if has_bias else (w,)
    lse, t = calculated(name, attrs, x, *table, labels)
    loss, norm = calculated("lse_loss", {}, lse, t)
    (dlse,), (dt,) = calculated("lse_loss.dlse", {}, dloss, lse, norm), calculated("lse_loss.dt", {}, dloss)
    np.testing.assert_allclose(loss, theirs.detach().numpy(), rtol=1e-12)
    for mine, tensor in zip(calculated(f"{name}.grad", attrs, dlse, dt, x, *table, labels, lse), given, strict=True):
        np.testing.assert_allclose(mine, tensor.grad.numpy(), rtol=1e-11, atol=1e-13)


def calculated(name: str, attrs: dict[str, Any], *ins: np.ndarray) -> list[np.ndarray]:
    """The outputs of an operator of the catalogue."""
    op = catalogue(name).for_ranks([a.ndim for a in ins])
    sizes = op.bind([a.shape for a in ins], attrs)
    outs = [np.full(o.shape(sizes), np.nan) for o in op.outputs]
    room = [np.full(op.room(sizes, attrs), np.nan)] if op.room else []
    op.kernel(Context(np, attrs, sizes, sizes, {}), *ins, *outs, *room)
    return outs


def test_large_logits_do_not_overflow() -> None:
    x, w, labels = np.full((1, 4, 2), 300.0), np.array([[5.0, 5.0], [-5.0, 5.0], [5.0, 5.0], [0.0, 1.0]]), np.array([[0, 1, 2, 3]])
    lse, t = calculated("head_lse", {"p": 2, "chunks": 2}, x, w, labels)
    loss, _ = calculated("lse_loss", {}, lse, t)
    np.testing.assert_allclose(loss, [[np.log(2), 3000 + np.log(2), np.log(2), 2700 + np.log(2)]])


# ---- any plan ------------------------------------------------------------------------------------------------------------------------------------------


@cache
def whole(kind: str) -> Ended:
    """One device, all logits at once."""
    single = single_device(MODELS[kind], cluster(), batch=BATCH, seq=SEQ, dtype="float64", optimizer=OPTIMIZERS["adamw"])
    return ended(lower(MODELS[kind], single), data=DATA)


LAYOUTS = {
    "tied": (Layout(loss_chunks=5), Layout(2, 2, loss_chunks=3), Layout(1, 4, loss_chunks=2), Layout(1, 2, 2, 2, sp=True, loss_chunks=7, recompute=True),
             Layout(pp=2, num_microbatches=4, schedule="seq1f1b", pieces=(5, 4, 3), loss_chunks=2), Layout(pp=2, num_microbatches=4, schedule="zb-h1",
             loss_chunks=3)),
    "untied": (Layout(4, 1, loss_chunks=96, zero=3), Layout(2, 4, loss_chunks=200), Layout(1, 4, sp=True, loss_chunks=3)),
    "nothing divides it": (Layout(2, 2, loss_chunks=4), Layout(1, 2, sp=True, loss_chunks=3)),
    "capped": (Layout(2, 2, loss_chunks=3),), "with a bias": (Layout(2, 2, loss_chunks=3),),
    "predicts twice": (Layout(2, 2, ep=2, loss_chunks=3),), "tied and frozen": (Layout(2, 2, loss_chunks=4),),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "want"), [(kind, want) for kind, wanted in LAYOUTS.items() for want in wanted], ids=str)
def test_any_plan_in_chunks_is_one_device_without(kind: str, want: Layout) -> None:
    """Losses, gradients and states of three steps; float64, 1e-10 relative."""
    plan = plan_for(MODELS[kind], want, batch=BATCH, seq=SEQ, space=Space(rules=(OVER_RANKS,)) if want.tp > 1 and DIVIDES[kind] else None)
    assert (Rule("split", "p") in plan.rules["lm_head"]) == (want.tp > 1 and DIVIDES[kind])
    found = between(ended(lower(MODELS[kind], plan), data=DATA), whole(kind))
    assert same(found), found


# ---- memory and time -----------------------------------------------------------------------------------------------------------------------------------


def on_one(kind: str, num_chunks: int) -> Plan:
    return plan_for(MODELS[kind], Layout(loss_chunks=num_chunks), batch=BATCH, seq=SEQ)


@pytest.mark.parametrize(("kind", "copies"), [("untied", 1), ("capped", 2)])
def test_one_chunk_of_logits_has_memory(kind: str, copies: int) -> None:
    """8 x 12 tokens in 4 chunks, 264 words of 8 bytes; in the backward some rows of the table's gradient beside them, and what a cap needs."""
    program = lower(MODELS[kind], on_one(kind, 4))
    rooms = {r.name: r for r in program.registers if r.name.endswith(".room@0")}
    assert {name: (r.nbytes, r.memory) for name, r in rooms.items()} == {
        "lm_head.room@0": (24 * 264 * 8, "logits"), "lm_head.grad.room@0": ((copies * 24 * 264 + 264 * 32) * 8, "logits"),
    }  # fmt: skip
    assert all(r.arena for r in rooms.values())
    assert max(r.nbytes for r in program.registers if r.clock == "microbatch") < 96 * 264 * 8


def test_more_chunks_take_less_memory_and_more_time() -> None:
    cost = CostModel(cluster())
    programs = [lower(LARGE, plan_for(LARGE, Layout(loss_chunks=n), batch=8, seq=128)) for n in (2, 8, 64)]
    peaks, times = [ledger(p).peak_bytes for p in programs], [simulate(p, cost).step_s for p in programs]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)
    assert all(estimate(p, cost) <= s * (1 + 1e-9) for p, s in zip(programs, times, strict=True))


def test_what_a_chunk_moves_besides_its_products_takes_its_time() -> None:
    """Passes over the logits: a product that moves as much as its operands has its own time, and every byte more that of the memory."""
    cost, device = CostModel(cluster()), cluster().devices[0]
    own = 2.0 * 3 * 1024**2
    alone_s = cost.compute_s("head_lse", "bfloat16", 2.0 * 1024**3, own, (1, 1024, 1024, 1024))
    more_s = cost.compute_s("head_lse", "bfloat16", 2.0 * 1024**3, own + 1e9, (1, 1024, 1024, 1024))
    assert more_s - alone_s == pytest.approx(1e9 / device.bytes_per_s / device.profile.get("hbm_share", 1.0))


# ---- asking for it -------------------------------------------------------------------------------------------------------------------------------------


def test_a_plan_in_chunks_reads_back_and_is_checked() -> None:
    plan = on_one("untied", 4)
    assert Plan.from_json(plan.to_json()) == plan
    graph = MODELS["untied"].graph(BATCH, SEQ, "float64")
    assert check_plan(in_chunks(graph, 4), plan) is plan
    with pytest.raises(PlanError, match=r"one rule for each of the axes .* at node `loss.top`"):
        lower(MODELS["untied"], replace(plan, loss_chunks=1))


def test_a_chunk_has_as_many_tokens_as_the_table_has_columns() -> None:
    graph = MODELS["untied"].graph(1, SEQ, "float64")
    assert [usual_chunks(graph, n) for n in (1, 32, 33, 320)] == [1, 1, 2, 10]


def test_logits_that_are_made_otherwise_are_refused_and_not_tried() -> None:
    """Scaled after the product, for instance."""
    build = Builder("scaled")
    for name, shape, dtype, role in (("x", (1, 4, 8), "float64", "input"), ("labels", (1, 4), "int64", "input"), ("w", (16, 8), "float64", "param")):
        build.tensor(name, shape, dtype, role)
    (logits,) = build.node("scale", build.node("linear_t", ("x", "w"), name="head"), name="scaled", attrs={"factor": 2.0})
    (top,) = build.node("last_max", (logits,), name="top")
    z, t = build.node("exp_sum", (logits, "labels", top), name="sums", outputs=("z", "t"))
    build.node("log_loss", (z, t), name="loss.each")
    graph = build.graph(("loss.each",))
    with pytest.raises(PlanError, match=r"loss_chunks: the logits of `scaled` come from `scaled` \(scale\).*leave loss_chunks out"):
        in_chunks(graph, 4)
    assert usual_chunks(graph, 1000) == 1


def one_of(usable_mib: float) -> Cluster:
    """One device with so much memory."""
    found = load_cluster("1x1xH100-SXM")
    return replace(found, devices=tuple(replace(d, memory_bytes=int(usable_mib * 2**20), usable_bytes=int(usable_mib * 2**20)) for d in found.devices))


def searched(usable_mib: float, **fix: int) -> Plan:
    return search(LARGE, one_of(usable_mib), batch=8, seq=128, dtype="float32", top=1, memory_fraction=1.0, fix={"mbs": 8, **fix}).plans[0]


def test_chunks_are_tried_where_nothing_fits_and_say_what_they_save_and_cost() -> None:
    roomy, tight = searched(64), searched(8)
    assert (roomy.loss_chunks, tight.loss_chunks) == (1, 64)
    assert "chunks" not in roomy.predicted["why"]
    told = tight.predicted["loss_chunks"]
    assert told["chunks"] == tight.layout["loss_chunks"] == 64
    assert told["saves_gib"] > 0.5 * (roomy.predicted["peak_gib"] - tight.predicted["peak_gib"]) > 0.0
    assert 0.0 < told["costs_s"] < tight.predicted["step_s"]
    assert "the loss over 64 chunks of tokens saves" in tight.predicted["why"]
    assert "without which it does not fit" in tight.predicted["why"]


def test_chunks_that_are_fixed_are_kept() -> None:
    asked = searched(64, loss_chunks=8)
    assert asked.loss_chunks == asked.predicted["loss_chunks"]["chunks"] == 8
    assert "without which" not in asked.predicted["why"]
    with pytest.raises(DoesNotFit):
        searched(8, loss_chunks=1)

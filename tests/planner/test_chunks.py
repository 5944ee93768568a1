"""Head and loss over chunks of tokens: the same as whole ones under any plan and as PyTorch's, in the memory of one chunk, tried where nothing fits otherwise."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from executor.data import text_data
from ir.cluster import Cluster
from ir.errors import PlanError
from ir.op import Context, Rule
from ir.ops import catalogue
from ir.plan import Plan
from planner.check import check_plan
from planner.chunks import in_chunks, usual_chunks
from planner.frontends import Lora, Tuning
from planner.frontends.huggingface import parse
from planner.frontends.model import Model
from planner.lower import lower, representatives
from planner.optimizers import OPTIMIZERS
from planner.search import plan as search
from planner.single import single_device
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
    "nothing divides it": (Layout(2, 2, loss_chunks=4),), "capped": (Layout(2, 2, loss_chunks=3),), "with a bias": (Layout(2, 2, loss_chunks=3),),
    "predicts twice": (Layout(2, 2, ep=2, loss_chunks=3),), "tied and frozen": (Layout(2, 2, loss_chunks=4),),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "want"), [(kind, want) for kind, wanted in LAYOUTS.items() for want in wanted], ids=str)
def test_any_plan_in_chunks_is_one_device_without(kind: str, want: Layout) -> None:
    """Losses, gradients and states of three steps; float64, 1e-10 relative."""
    found = between(ended(lower(MODELS[kind], planned(kind, want)), data=DATA), whole(kind))
    assert same(found), found


def planned(kind: str, want: Layout) -> Plan:
    return plan_for(MODELS[kind], want, batch=BATCH, seq=SEQ)

"""Shapes that do not divide and gradients that came out wrong, in cases from public reports. Each test names its thread."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import headrace as hr
from executor.buffers import as_slices
from executor.data import text_data
from executor.train import Run, run
from ir.boxing import kind_1d
from ir.errors import InputError, PlanError
from ir.sbp import B, P, S, local_region, split_sizes
from planner.candidates import legal_tp, parse_fix
from planner.frontends.weights import from_torch, padded_vocab, to_torch
from planner.lower import lower
from planner.single import single_device
from planner.stages import cut
from tests.executor.test_threads import collective
from tests.models import BATCH, SEQ, gpt, llama
from tests.parity import OPTIONS
from tests.plans import Layout, cluster, plan_for

TWO = llama(num_layers=2)


def trained(want: Layout, steps: int = 3) -> Run:
    """Two layers of Llama trained under a layout."""
    return run(lower(TWO, plan_for(TWO, want, batch=BATCH, seq=SEQ)), steps=steps, **OPTIONS)


def copies(done: Run, name: str) -> list[np.ndarray]:
    """What each rank holds of a parameter that is whole on all of them."""
    return [done.buffers.slots[r.name][0] for r in done.program.registers if r.tensor == name and r.memory == "parameter"]


# ---- shapes that do not divide ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "pp"), [(30, 4), (10, 3), (7, 2), (62, 4), (12, 5)])
def test_every_layer_is_on_one_stage(layers: int, pp: int) -> None:
    """B030, github.com/NVIDIA/Megatron-LM/issues/1304, github.com/ml-explore/mlx-lm/issues/1688: 28 of 30 layers were trained."""
    stages = cut([0.0, *[1.0] * layers, 0.0], pp)
    assert [i for first, last in stages for i in range(first, last)] == list(range(layers + 2))
    sizes = [min(last, layers + 1) - max(first, 1) for first, last in stages]
    assert max(sizes) - min(sizes) <= 1


def test_more_stages_than_layers_are_refused() -> None:
    """B030, github.com/Oneflow-Inc/libai/issues/225."""
    with pytest.raises(PlanError, match=r"--fix pp=4.*has 3 blocks, so pp x vpp can be 1 to 3"):
        parse_fix({"pp": 4}, 4, 8, gpt(num_layers=3).graph(1, SEQ))


def test_which_tensor_parallel_sizes_heads_allow() -> None:
    """B032, github.com/THU-KEG/AdaptThink/issues/1, github.com/MIV-XJTU/FSDrive/issues/21."""
    legal = {28: (1, 2, 4, 7, 14, 28), 52: (1, 2, 4, 13, 26, 52), 25: (1, 5, 25), 12: (1, 2, 3, 4, 6, 12)}
    for heads, found in legal.items():
        assert legal_tp(gpt(num_layers=1, num_heads=heads, hidden=4 * heads).graph(1, SEQ), 64) == found


def test_forty_heads_on_three_devices() -> None:
    """B032, github.com/hpcaitech/ColossalAI/issues/116: tp = 3 crashed; three stages or three replicas do it."""
    model = gpt(num_layers=3, num_heads=40, hidden=160)
    layouts = [p.layout for p in hr.plan(model, "1x3xH100-SXM", batch=6, seq=SEQ, top=20).plans]
    assert {(x["dp"], x["tp"], x["pp"]) for x in layouts} == {(1, 1, 3), (3, 1, 1)}
    with pytest.raises(PlanError, match=r"has 40 heads.*which 3 does not divide; legal tp are 1; split the 3 devices by dp or pp"):
        hr.plan(model, "1x3xH100-SXM", batch=6, seq=SEQ, fix={"tp": 3})


def test_padded_vocabularies() -> None:
    """B033, github.com/NVIDIA/Megatron-LM/issues/1000, github.com/vllm-project/vllm/issues/20843: what others pad; here slices are uneven instead."""
    cases = ((128256, 128, 8), (128256, 64, 8), (49159, 64, 1), (50257, 128, 1))
    assert [padded_vocab(*case) for case in cases] == [129024, 128512, 49216, 50304]
    assert [sum(split_sizes(vocab, tp)) for vocab, _, tp in cases] == [vocab for vocab, _, _ in cases]
    state = to_torch(TWO, {p.name: np.zeros(p.shape) for p in TWO.graph(1, SEQ).params})
    state["model.embed_tokens.weight"] = np.zeros((padded_vocab(259, 64), 32))
    with pytest.raises(InputError, match=r"320 is 259 padded to a multiple of 64: cut the table to 259 rows"):
        from_torch(TWO, state)


def test_a_split_that_does_not_divide_is_joined_again() -> None:
    """B045, github.com/pytorch/pytorch/issues/103306, /143372, /110762: 5 x 10 came back as 8 x 10, 3 + 3 + 3 + 1 rows as 12 or 4."""
    for shape, rows in (((5, 10), split_sizes(5, 4)), ((6, 256), split_sizes(6, 4)), ((10, 2), (3, 3, 3, 1))):
        whole = np.arange(math.prod(shape), dtype="float64").reshape(shape)
        ends = list(itertools.accumulate(rows, initial=0))
        src = [((a, b), (0, shape[1])) for a, b in itertools.pairwise(ends)]
        found = collective("all_gather", src, [tuple((0, n) for n in shape)] * 4, fill=lambda i, src=src, whole=whole: whole[as_slices(src[i])])
        assert all(np.array_equal(value, whole) for value in found)
        assert found[3].reshape(-1).shape == (math.prod(shape),)


# ---- gradients that came out wrong -----------------------------------------------------------------------------------------------------------------------


def test_an_odd_vocabulary_gives_the_same_loss_when_it_is_split() -> None:
    """B035, github.com/NVIDIA/Megatron-LM/issues/1754: 50,257 entries, tp 1 against 2, two layers; losses differed by more than half."""
    model = gpt(num_layers=2, vocab=50257, hidden=64)
    split = plan_for(model, Layout(tp=2), batch=2, seq=SEQ, dtype="float32")
    assert split.params["wte.weight"].held == (B, S(0))
    whole = single_device(model, cluster(), batch=2, seq=SEQ, dtype="float32", optimizer=split.optimizer)
    data = {**OPTIONS, "data": text_data(None, SEQ)}
    one, two = (run(lower(model, plan), steps=3, check=False, **data) for plan in (whole, split))
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    for name in ("d.wte.weight", "d.h.0.mlp.up.weight"):
        np.testing.assert_allclose(two.tensor(name), one.tensor(name), atol=1e-5)


@pytest.mark.parametrize(("want", "num_reductions"), [(Layout(dp=2, zero=0), 1), (Layout(tp=2, sp=True), 1), (Layout(tp=2, sp=False), 0)], ids=str)
def test_the_gradient_of_what_all_ranks_hold(want: Layout, num_reductions: int) -> None:
    """B063, github.com/pytorch/torchtitan/issues/2532, github.com/pytorch/pytorch/issues/172932: a norm's weight, whole on each rank, applied to split data.

    Its gradient is a partial sum and is reduced once a step; applied to whole data, it is whole, and a reduction would be waste.
    """
    plan = plan_for(TWO, want, batch=BATCH, seq=SEQ)
    axis = plan.mesh_shape.index(2)
    place = plan.params["h.0.ln_1.weight"]
    assert (place.held[axis], place.grad[axis]) == (B, P if num_reductions else B)
    reduced = [a for a in lower(TWO, plan).actors if a.rank == 0 and a.work.kind == "collective" and "h.0.ln_1.weight" in a.name]
    assert len(reduced) == num_reductions
    assert all((a.clock, a.work.op) == ("step", "all_reduce") for a in reduced)


def test_norm_weights_stay_equal_under_sequence_parallelism() -> None:
    """B064, github.com/NVIDIA/Megatron-LM/issues/1446, github.com/EleutherAI/gpt-neox/issues/1257: 2.99e-3 against 1.91e-3 for one element."""
    split, alone = trained(Layout(tp=4, sp=True)), trained(Layout())
    for name in ("h.0.ln_1.weight", "h.1.ln_2.weight", "ln_f.weight"):
        held = copies(split, name)
        assert len(held) == 4
        assert all(np.array_equal(held[0], other) for other in held[1:])
        np.testing.assert_allclose(split.tensor(f"d.{name}"), alone.tensor(f"d.{name}"), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("want", [Layout(tp=4, sp=False), Layout(dp=4, zero=3), Layout(pp=2), Layout(tp=2, pp=2, num_microbatches=2)], ids=str)
def test_the_norm_of_all_gradients(want: Layout) -> None:
    """B067, github.com/NVIDIA-NeMo/RL/issues/3788: 12.2 for 9.0, replicated parameters counted on each rank. B068, github.com/pytorch/torchtitan/issues/596:
    each stage clipped by its own norm.
    """
    done = trained(want, steps=1)
    norm2 = [float(done.buffers.slots[r.name][0]) for r in done.program.registers if r.name.startswith("norm2@")]
    squares = {name: float(np.sum(np.square(done.tensor(name)))) for name in done.tensors if name.startswith("d.") and "@" not in name}
    assert len(norm2) == want.num_ranks
    assert norm2 == pytest.approx([sum(squares.values())] * want.num_ranks, rel=1e-9)
    assert norm2[0] != pytest.approx(sum(n2 * (4 if "ln" in name else 1) for name, n2 in squares.items()), rel=1e-6), "replicated weights counted four times"


def test_what_is_the_same_on_all_ranks_and_what_is_not() -> None:
    """B071, github.com/Oneflow-Inc/libai/issues/212, github.com/Oneflow-Inc/oneflow/issues/8465: eight different batches of 32 were called one of 32."""
    assert kind_1d(S(0), B) == "all_gather"
    regions = [local_region((256, 3, 8, 8), (S(0),), (8,), (i,)) for i in range(8)]
    assert [a for (a, _), *_ in regions] == list(range(0, 256, 32))
    program = lower(TWO, plan_for(TWO, Layout(dp=2, tp=2), batch=BATCH, seq=SEQ))
    loads = {a.rank: a.work.attrs["dst_region"] for a in program.actors if a.work.kind == "load" and a.work.op == "ids"}
    assert loads[0] == loads[1] == ((0, BATCH // 2), (0, SEQ))
    assert loads[2] == loads[3] == ((BATCH // 2, BATCH), (0, SEQ))
    held = copies(trained(Layout(dp=2, tp=2, zero=0, sp=False), steps=1), "h.0.ln_1.weight")
    assert len(held) == 4
    assert all(np.array_equal(held[0], other) for other in held)

"""The closed path and the long one agree: works of a layer with a lowered Program, a pipeline's bubble with the exact times of its orders."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ir.errors import InputError
from planner.frontends import load
from planner.frontends.model import Model
from planner.lower import lower
from planner.recipes.bill import BUBBLES, SHARES, Bill, Pricer
from planner.recipes.release import release_of
from planner.recipes.run import Run, Shape
from planner.recipes.shares import Shares
from planner.recipes.step import step
from planner.recipes.study import fitted
from planner.recipes.timetable import timetable
from planner.recipes.validate import bundled_entries
from planner.recipes.works import Kernel, Works, embedding, flops, head, layer
from planner.schedules import schedule
from planner.schedules.pipe import Pipe, StageTimes
from planner.schedules.retime import retime
from tests.plans import Layout, plan_for

BATCH, SEQ, LAYERS = 8, 1024, 2


def shape_of(model: Model) -> Shape:
    c, has = model.summary, model.config.blocks[0].mlp
    arch = "gpt" if model.config.learned else "llama"
    sizes = (c[key] for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp_hidden", "vocab"))
    return Shape(arch, *sizes, gated=has.gated, tied=c["tied"])


def lowered(model: Model, tp: int) -> tuple[Counter[str], float]:
    """Flops by operator and phase, and bytes of all collectives that carry activations, on the first rank."""
    plan = plan_for(model, Layout(1, tp, 1, 1, sp=False), batch=BATCH, seq=SEQ, dtype="bfloat16")
    sums: Counter[str] = Counter()
    carried = 0.0
    whole = BATCH * SEQ * model.config.hidden * 2
    for actor in lower(model, plan).actors:
        if actor.rank == 0 and actor.work.kind == "compute":
            sums[actor.work.op] += int(actor.work.flops)
        if actor.rank == 0 and actor.work.kind == "collective" and actor.work.nbytes >= whole / 2:
            # a gather and the reduction before it carry together what a sum carries
            carried += actor.work.nbytes * (1.0 if actor.work.op == "all_reduce" else 0.5)
    return sums, carried


def works_of(model: Model, tp: int) -> tuple[Works, Works, Works]:
    run = Run("r", "", "", shape_of(model), seq=SEQ, gpu="H100-SXM", num_gpus=tp, tp=tp, mbs=BATCH, gbs=BATCH, precision="bf16")
    release = release_of("Megatron-Core 0.14")
    assert release is not None
    return layer(run, release), embedding(run, release), head(run, release)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["gpt2-medium", "llama-3.2-1b"])
def test_works_of_a_layer_are_those_of_a_lowered_program(name: str, tp: int) -> None:
    model = load(name, num_layers=LAYERS)
    program, carried = lowered(model, tp)
    block, table, last = works_of(model, tp)

    def of(kernels: tuple[Kernel, ...], share: str) -> float:
        return flops(k for k in kernels if k.share == share)

    products = LAYERS * of(block.f, "compute")
    assert products == program["linear"] == LAYERS * of(block.i, "compute") == LAYERS * of(block.w, "compute")
    assert program["linear.dx"] == program["linear.dw"] == products
    assert of(last.f, "compute") == program["linear_t"] == of(last.w, "compute")
    assert LAYERS * of(block.f, "attention") == pytest.approx(program["attention"], rel=1e-3)
    assert LAYERS * of(block.i, "attention") == pytest.approx(program["attention.grad"], rel=1e-3)
    parts = (*LAYERS * (*block.f, *block.i, *block.w), *table.f, *table.i, *last.f, *last.i)
    assert sum(k.nbytes for k in parts if k.share == "tp" and k.nbytes > BATCH * SEQ * 8) == pytest.approx(carried, rel=1e-3)


def pipeline(name: str, num_ranks: int, num_microbatches: int, f: float, i: float, w: float) -> float:
    """The closed form's seconds for equal stages without hops."""
    seconds = np.zeros((1, 3, 3, len(SHARES)))
    seconds[0, 0, :, 0] = f, i, w
    scalars = dict.fromkeys(("hop", "update", "host", "host_backward", "beside", "split", "tail"), np.zeros(1))
    bill = Bill(
        seconds=seconds, fsdp=np.zeros((1, 3, 3)), parts=np.array([[[1.0, 0, 0]] * 3]), ranks=np.array([[1.0, num_ranks - 2.0, 1.0]]),
        idle=np.array([BUBBLES[name]]), microbatches=np.array([float(num_microbatches)]), chunks=np.ones(1), stages=np.array([float(num_ranks)]),
        reduce=np.zeros((1, 2)), slower=np.ones((1, len(SHARES))), nodes=np.ones(1), **scalars,
    )  # fmt: skip
    return float(step(bill, Shares()).total[0])


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_the_bubble_of_whole_backwards_is_that_of_the_orders(name: str) -> None:
    f, i, w = 1.0, 1.2, 0.9
    pipe = Pipe(StageTimes.equal(4, f, i + w, 0.0), 12)  # what comes before waits for the weight gradients too
    exact = float(retime(pipe, pipe.word(schedule(name).orders(4, 12))[None])[0][0])
    assert pipeline(name, 4, 12, f, i, w) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("passes", [(1.0, 1.0, 1.0), (1.0, 1.1, 0.9), (2.0, 2.1, 1.9)])
def test_bubbles_of_split_backwards_are_near_those_of_the_orders(passes: tuple[float, float, float]) -> None:
    pipe = Pipe(StageTimes.equal(4, *passes), 12)
    for name, orders in (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")):
        word = pipe.word(schedule(orders).orders(4, 12))
        makespan, start = retime(pipe, word[None])
        ends = start[0, :, -1] + pipe.seconds[np.arange(4), word[:, -1]]
        # H2 lets a step begin while the one before drains: each rank counts from its own first start
        exact = float(makespan[0]) if name == "zb-1p" else float((ends - start[0, :, 0]).max())
        assert pipeline(name, 4, 12, *passes) == pytest.approx(exact, rel=0.03), name


@pytest.mark.parametrize(
    "name", ["zb-t4-1F1B-6.2B-24", "zb-t4-1F1B-I-6.2B-24", "zb-t6-ZB-1p-6.2B-48", "zb-t6-ZB-V-6.2B-48", "zb-t4-ZB-2p-6.2B-64", "vtrain-m-34"]
)
def test_the_closed_form_is_near_the_exact_times_of_a_runs_orders(name: str) -> None:
    run = next(e.run for e in bundled_entries() if e.id == name)
    assert run is not None
    bill, shares = Pricer().bill(run), replace(fitted(run).shares, hop=0.0)
    found = timetable(run, bill, shares)
    assert float(step(bill, shares).total[0]) == pytest.approx(found.step_s, rel=0.02)
    assert len(found.start_s) == run.pp
    assert max(found.end_s) <= found.step_s + max(found.start_s)


def test_a_run_without_pipeline_has_no_timetable() -> None:
    run = next(e.run for e in bundled_entries() if e.id == "vtrain-m-2")
    assert run is not None
    with pytest.raises(InputError, match="no orders"):
        timetable(run, Pricer().bill(run), Shares())

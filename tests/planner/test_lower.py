"""Programs of plans: golden text, credits, sizes, what stands for the whole, and the errors on the way."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ir.errors import Deadlock, PlanError
from ir.graph import Builder, Graph
from ir.mesh import Mesh
from ir.op import ALL_B, Rule
from ir.ops import catalogue
from ir.program import Program
from planner.lower import local_sizes, lower, representatives
from planner.optimizers import OPTIMIZERS
from planner.single import single_device
from tests.models import BATCH, SEQ, gpt, llama
from tests.plans import Layout, cluster, layouts, pairwise, plan_for, stages_of

GOLDEN = Path(__file__).parent.parent / "golden" / "lowered-p2-m2.txt"


def program_of(want: Layout, family: str = "gpt", num_layers: int = 4) -> Program:
    model = {"gpt": gpt, "llama": llama}[family](num_layers=num_layers)
    return lower(model, plan_for(model, want, batch=BATCH, seq=SEQ))


class Chain:
    """An embedding, a product, the sum of all: a model of three layers that prints on a page."""

    name = reference = fingerprint = "chain"

    def graph(self, batch: int, seq: int, dtype: str) -> Graph:
        build = Builder(self.name)
        build.tensor("ids", (batch,), "int64", "input")
        build.tensor("table", (8, 4), dtype, "param", {"init": "normal", "std": 0.02})
        build.tensor("up.weight", (4, 6), dtype, "param", {"init": "normal", "std": 0.02})
        build.node("embedding", ["ids", "table"], name="embed", layer=0)
        build.node("linear", ["embed", "up.weight"], name="up", layer=1)
        return build.graph(build.node("total", ["up"], name="loss", attrs={"factor": 1.0}, layer=2))


def chain_program() -> Program:
    """Stages: embedding and product | sum."""
    model = Chain()
    plan = plan_for(model, Layout(1, 1, 2, 2), batch=2, seq=1, optimizer="sgd")  # type: ignore[arg-type]
    return replace(lower(model, plan), meta={})


def test_a_pipeline_of_two_stages_is_the_golden_one() -> None:
    assert str(chain_program()) == GOLDEN.read_text(), f"the program changed; if this is meant, write it to {GOLDEN}"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("m", [2, 4, 8])
def test_what_the_backward_reads_of_the_forward_has_the_schedules_credits_and_not_one_too_many(schedule: str, m: int) -> None:
    program = program_of(Layout(1, 1, 4, m, schedule=schedule), "llama")
    moved = {r for a in program.actors if a.work.kind in ("send", "recv", "load") for r in (*a.reads, *a.writes)}
    saved = [r for r in program.registers if r.memory == "saved"]
    assert {r.rank for r in saved} == {0, 1, 2, 3}
    for r in saved:
        kept = min(4 - r.rank, m) if schedule == "1f1b" else m
        assert r.credits == min(kept + (r.name in moved), m), r.name
    for rank in range(4):
        least = next((r for r in saved if r.rank == rank and r.name not in moved and r.credits > 1), None)
        if least is not None:
            with pytest.raises(Deadlock, match=r"free credit"):
                less(program, least.name).check()


def less(program: Program, name: str) -> Program:
    """The program with one credit less on one register."""
    return replace(program, registers=tuple(replace(r, credits=r.credits - 1) if r.name == name else r for r in program.registers))


VALUES = {
    "dp": (1, 2, 4), "tp": (1, 2, 4), "pp": (1, 2, 4), "num_microbatches": (1, 2, 4, 8), "zero": (0, 1, 2, 3, None), "sp": (False, True, None),
    "recompute": (False, True), "schedule": ("1f1b", "gpipe"),
}  # fmt: skip


@pytest.mark.parametrize("want", pairwise(list(layouts(VALUES, BATCH)), list(VALUES)), ids=str)
def test_every_layout_is_proved_and_reads_back(want: Layout) -> None:
    program = program_of(want, num_layers=3)
    assert program.check() is program
    assert program.ranks == tuple(range(want.num_ranks))
    assert Program.from_json(program.to_json()).fingerprint == program.fingerprint


def test_shards_of_a_parameter_are_all_of_it_once() -> None:
    program = program_of(Layout(2, 2, 2, 2, zero=3))
    for name in {r.tensor for r in program.registers if r.initial and r.memory == "parameter"}:
        whole = [r for r in program.holders[name] if r.initial and not r.replica]
        shape = tuple(max(r.region[d][1] for r in whole) for d in range(len(whole[0].region)))
        assert sum(math.prod(r.shape) for r in whole) == math.prod(shape), name


def test_the_squares_of_every_gradient_are_counted_once() -> None:
    program = program_of(Layout(2, 2, 2, 2, zero=0))
    squares = [a for a in program.actors if a.work.op == "sum_squares"]
    regions = [(program.register[a.reads[0]].tensor, program.register[a.reads[0]].region) for a in squares]
    assert len(set(regions)) == len(regions)
    assert {t for t, _ in regions} == {f"d.{p.name}" for p in gpt().graph(1, SEQ, "float64").params}


def test_work_of_all_ranks_is_the_work_of_one() -> None:
    single, split = program_of(Layout()), program_of(Layout(4, 1, 2, 2))
    products = [sum(a.work.flops * p.firings(a) for a in p.actors if a.work.gemm) for p in (single, split)]
    assert products[0] == pytest.approx(products[1], rel=1e-12)


def test_a_part_of_the_ranks_is_that_part_of_the_whole() -> None:
    model = gpt()
    plan = plan_for(model, Layout(2, 2, 2, 2), batch=BATCH, seq=SEQ)
    whole, part = lower(model, plan), lower(model, plan, ranks=representatives(plan, cluster()))
    assert part.ranks == representatives(plan, cluster()) == (0, 4)
    assert part.registers == tuple(r for r in whole.registers if r.rank in (0, 4))
    assert [replace(a, channel="") for a in part.actors] == [replace(a, channel="") for a in whole.actors if a.rank in (0, 4)]
    assert {a.channel for a in part.actors if a.work.kind in ("send", "recv") or len({0, 4} & set(a.work.group)) == 2} >= {"norm2.join"}


def test_axes_of_one_change_nothing() -> None:
    model = gpt()
    plan = plan_for(model, Layout(2), batch=BATCH, seq=SEQ)
    assert plan.squeezed().axes == ("dp",)
    assert lower(model, plan).fingerprint == lower(model, plan.squeezed()).fingerprint


def test_local_sizes_and_offsets() -> None:
    op, mesh = catalogue("matmul"), Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))
    total = {"m": 5, "k": 4, "n": 6}
    assert local_sizes(op, (Rule("split", "m"), Rule("split", "n")), total, mesh, 3) == ({"m": 2, "k": 4, "n": 3}, {"m": 3, "k": 0, "n": 3})
    assert local_sizes(op, (Rule("split", "m"), Rule("split", "m")), total, mesh, 1) == ({"m": 1, "k": 4, "n": 6}, {"m": 2, "k": 0, "n": 0})
    assert local_sizes(op, (ALL_B, ALL_B), total, mesh, 2) == (total, dict.fromkeys(total, 0))
    with pytest.raises(PlanError, match="label k = 1 cannot be split 2 ways over axis dp"):
        local_sizes(op, (Rule("split", "k"), ALL_B), total | {"k": 1}, mesh, 0)


def test_a_plan_of_another_model_is_refused() -> None:
    plan = plan_for(gpt(), Layout(2), batch=BATCH, seq=SEQ)
    with pytest.raises(PlanError, match=r"h\.0|wte|embed|stages"):
        lower(llama(), plan)


@pytest.mark.parametrize(("schedule", "p", "m"), [("zb-v", 6, 12), ("looped-bfs", 2, 32), ("interleaved-zb", 4, 32), ("1f1b-v", 6, 24), ("dualpipe-v", 6, 32)])
def test_a_sender_never_waits_for_a_pass_that_waits_for_it(schedule: str, p: int, m: int) -> None:
    """Stages that share a rank share its queues of messages: those are received in the order in which they are sent, each with room until it is read."""
    whole = gpt(num_layers=2 * p)
    alone = single_device(whole, cluster(), batch=m, seq=SEQ, dtype="float64", optimizer=OPTIMIZERS["adamw"], num_microbatches=m)
    want = Layout(pp=p, num_microbatches=m, schedule=schedule)
    stages = stages_of(want, whole.graph(1, SEQ, "float64").num_layers)
    lower(whole, replace(alone, stages=stages, schedule=schedule)).check()

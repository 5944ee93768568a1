"""Tasks of a stage: what is re-sharded, shared, sent, summed and updated, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from ir.errors import PlanError
from ir.op import ALL_B
from ir.ops import catalogue
from planner.autodiff import backward, scale_loss
from planner.elide import elide_copies
from planner.place import place
from planner.sites import SiteTasks, Task
from tests.models import BATCH, SEQ, gpt, llama
from tests.plans import Layout, plan_for


@cache
def placed(want: Layout, family: str = "gpt", dtype: str = "float64") -> tuple[SiteTasks, ...]:
    model = {"gpt": gpt, "llama": llama}[family]()
    plan = plan_for(model, want, batch=BATCH, seq=SEQ, dtype=dtype).squeezed()
    graph = model.graph(plan.microbatch, SEQ, dtype)
    return place(backward(scale_loss(graph, plan.num_microbatches), plan.recompute), plan)


def tasks(stage: SiteTasks, *parts: str) -> list[Task]:
    return [t for part in parts or stage.tasks for t in stage.tasks[part]]


LAYOUTS = [
    Layout(), Layout(2), Layout(2, 2, 2, 2), Layout(1, 4, sp=True), Layout(1, 2, sp=False), Layout(4, zero=3), Layout(2, zero=2),
    Layout(1, 1, 4, 4), Layout(2, 2, 2, 2, recompute=True),
]  # fmt: skip


@pytest.mark.parametrize("want", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_every_value_is_written_once_and_before_it_is_read(want: Layout, family: str) -> None:
    for stage in map(elide_copies, placed(want, family)):
        there = {v.name for v in stage.values.values() if v.initial}
        writes = Counter(w for t in tasks(stage) for w in t.writes)
        assert set(writes.values()) == {1}
        assert there.isdisjoint(writes)
        assert there | set(writes) == set(stage.values)
        for t in tasks(stage):
            assert there.issuperset((*t.reads, *t.updates)), f"{t.name} reads what is not there yet"
            there.update(t.writes)


@pytest.mark.parametrize("want", LAYOUTS, ids=str)
def test_what_is_sent_is_received_as_it_is(want: Layout) -> None:
    stages = placed(want)
    sends = {t.name.rpartition(".")[0]: (i, t) for i, s in enumerate(stages) for t in tasks(s) if t.kind == "send"}
    recvs = {t.name.rpartition(".")[0]: (i, t) for i, s in enumerate(stages) for t in tasks(s) if t.kind == "recv"}
    assert sends.keys() == recvs.keys()
    for name, (src, send) in sends.items():
        dst, recv = recvs[name]
        assert send.peers == recv.peers == (src, dst)
        left, entered = stages[src].values[send.reads[0]], stages[dst].values[recv.writes[0]]
        assert left.nd == entered.nd
        assert not any(s.is_broadcast or s.is_partial for s in left.nd), f"{name}: the same bytes would cross more than once"


def test_only_neighbours_talk_but_for_a_tied_parameter() -> None:
    stages = placed(Layout(1, 1, 4, 4))
    assert {abs(a - b) for s in stages for t in tasks(s) if t.kind == "send" for a, b in [t.peers]} == {1}
    assert [t.peers for t in tasks(stages[0], "end") if t.queue == "comm.tied"] == [(0, 3)]
    assert not any(t.queue == "comm.tied" for s in placed(Layout(1, 1, 4, 4), "llama") for t in tasks(s))


def test_one_device_communicates_nothing() -> None:
    (stage,) = placed(Layout())
    assert {t.kind for t in tasks(stage)} == {"compute", "load", "store"}


def by_kind(found: Iterable[Task]) -> Counter[str]:
    return Counter(t.op for t in found if t.kind == "box" and t.queue != "compute")


def test_tensor_parallel_blocks_meet_twice_each_way() -> None:
    model = llama(hidden=2048, num_heads=16, num_kv_heads=8, head_dim=128, mlp_hidden=5632)  # in a small one all ranks would do the same
    plan = plan_for(model, Layout(1, 2, sp=False), batch=8, seq=1024, dtype="bfloat16").squeezed()
    (stage,) = place(backward(model.graph(8, 1024, "bfloat16")), plan)
    for part in ("F", "I"):
        blocks = [t for t in tasks(stage, part) if t.layer in (2, 3)]
        assert by_kind(blocks) == {"all_reduce": 4}, "two sub-blocks of two layers in the middle"


def test_data_parallel_gradients_are_reduced_once_a_step() -> None:
    (stage,) = placed(Layout(4, num_microbatches=2, zero=0))
    assert not by_kind(tasks(stage, "begin", "F", "I", "W"))
    params = [v for v in stage.values.values() if v.memory == "parameter"]
    contributions = [v for v in stage.values.values() if v.tensor.name.endswith("@acc") and v.clock == "step" and any(s.is_partial for s in v.nd)]
    assert len(contributions) == len(params) + 1, "the tied parameter has two"
    assert by_kind(t for t in tasks(stage, "end") if not t.name.startswith("loss")) == {"all_reduce": len(contributions)}


def test_zero_3_gathers_for_each_pass_and_scatters_each_gradient() -> None:
    (stage,) = placed(Layout(4, num_microbatches=2, zero=3), "llama")
    split = {name for name, v in stage.values.items() if v.initial and v.memory == "parameter" and any(s.is_split for s in v.nd)}
    gathered = {t.reads[0] for t in tasks(stage, "F") if t.op == "all_gather"}
    assert gathered == split
    assert by_kind(tasks(stage, "W"))["reduce_scatter"] == len(split)
    assert not by_kind(t for t in tasks(stage, "end") if t.reads[0] in split)


def test_wide_state_of_narrow_parameters() -> None:
    (stage,) = placed(Layout(2, zero=1), dtype="bfloat16")
    masters = [v for v in stage.values.values() if v.name.endswith("@master")]
    assert {(v.tensor.dtype, v.memory, v.initial) for v in masters} == {("float32", "optimizer", True)}
    assert {t.reads[0] for t in tasks(stage, "begin") if t.op == "cast"} == {v.name for v in masters}
    assert {stage.values[t.writes[0]].tensor.dtype for t in tasks(stage, "begin") if t.op == "cast"} == {"bfloat16"}
    assert {v.tensor.dtype for v in stage.values.values() if v.tensor.name.endswith("@acc")} == {"float32"}


def test_biases_and_norms_do_not_decay() -> None:
    (stage,) = placed(Layout())
    shape = {name: v.tensor.shape for name, v in stage.values.items()}
    decays = {len(shape[t.updates[0]]): t.attrs["weight_decay"] for t in tasks(stage, "end") if t.op == "adamw"}
    assert decays == {1: 0.0, 2: 0.1}


def test_copies_are_left_out() -> None:
    (stage,) = placed(Layout())
    lean = elide_copies(stage)
    kept = {t.name for t in tasks(lean)}
    gone = [t for t in tasks(stage) if t.name not in kept]
    assert {t.op for t in gone} == {"add.dx", "add.dy", "add_positions.dx", "bias.dx"}
    assert all(catalogue(t.op).copies for t in gone)
    assert not {w for t in gone for w in t.writes} & {r for t in tasks(lean) for r in (*t.reads, *t.writes)}
    assert set(lean.values) == set(stage.values) - {w for t in gone for w in t.writes}


@pytest.mark.parametrize(("field", "what"), [("rules", "node"), ("hubs", "tensor"), ("params", "parameter")])
def test_what_the_plan_does_not_know_is_named(field: str, what: str) -> None:
    model = gpt()
    plan = plan_for(model, Layout(2), batch=BATCH, seq=SEQ)
    name = {"rules": "h.1.mlp.up", "hubs": "h.1.mlp.up", "params": "h.1.mlp.up.weight"}[field]
    less = replace(plan, **{field: {k: v for k, v in getattr(plan, field).items() if k != name}})
    with pytest.raises(PlanError, match=f"the plan says nothing about {what} `{name}`; it was made for another model"):
        place(backward(model.graph(BATCH, SEQ, "float64")), less)


def test_a_stage_without_the_head_has_no_loss() -> None:
    stages = placed(Layout(1, 1, 2, 2))
    assert [sum(t.kind == "store" for t in tasks(s)) for s in stages] == [0, 1]


def test_the_fill_that_starts_the_backward_is_the_same_everywhere() -> None:
    (stage,) = placed(Layout(2, 2))
    (seed,) = [t for t in tasks(stage, "I") if t.op == "fill"]
    assert set(seed.rules) == {ALL_B}

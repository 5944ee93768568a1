"""Who works on what: bundles of equal matrices, full or not, dealt so that no owner does much more than another; what it costs to bring them there."""

from __future__ import annotations

from collections import Counter

import pytest

from ir.graph import Tensor
from ir.mesh import Mesh
from ir.op import nd_placements
from ir.sbp import B, NdSbp, S
from planner.lower import lower, representatives
from planner.optimizers import Update, update_of, with_defaults
from planner.owners import ALL, Bundle, bundles, calls, num_slots, stack_places
from planner.pricing import MeshPricing
from planner.tables import Tables
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.memory import ledger
from tests.models import BATCH, SEQ, gpt
from tests.plans import Layout, cluster, plan_for


def muon(*shape: int, dtype: str = "bfloat16") -> Update:
    return update_of(with_defaults("muon"), Tensor("w", shape, dtype, "param"), True)


def dealt(shapes: list[tuple[int, ...]], place: NdSbp, mesh_shape: tuple[int, ...]) -> tuple[Bundle, ...]:
    return bundles([(f"w{i}", muon(*shape), place) for i, shape in enumerate(shapes)], [0] * len(shapes), mesh_shape)


def test_as_many_equal_matrices_as_ranks_are_updated_together() -> None:
    found = dealt([(8, 16), (8, 8)] * 5, (S(0), B), (2, 2))
    assert [(b.members, b.slots) for b in found[:2]] == [(("w0", "w2", "w4", "w6"), 4), (("w1", "w3", "w5", "w7"), 4)]
    assert sorted(b.members for b in found[2:]) == [("w8",), ("w9",)]


def test_what_is_whole_anyhow_has_no_owner() -> None:
    adamw = update_of(with_defaults("adamw"), Tensor("w", (8, 16), "bfloat16", "param"), True)
    lamb = update_of(with_defaults("lamb"), Tensor("w", (8, 16), "bfloat16", "param"), True)
    assert num_slots(adamw, (B, B), (4, 2)) == num_slots(lamb, (B, B), (4, 2)) == 1
    assert num_slots(muon(8, 16), (B, S(1)), (4, 2)) == 8
    assert num_slots(muon(4, 8, 16), (S(1), S(0)), (4, 2)) == 4  # experts are split as they are


@pytest.mark.parametrize(("num", "shape"), [(3, (8, 8)), (5, (16, 8)), (7, (4, 8))])
def test_owners_of_what_is_left_over_are_others_each_time(num: int, shape: tuple[int, ...]) -> None:
    """No owner does more than the dearest matrix beyond the mean of what does not fill a stack."""
    shapes = [(8, 16)] * 3 + [(4, 16)] * num + [shape] * 2 + [(2, 16)] * 3
    rest = [b for b in dealt(shapes, (S(0),), (8,)) if len(b.members) < b.slots]
    loads: Counter[int] = Counter()
    for b in rest:
        loads.update({(b.first + i) % b.slots: b.flops for i in range(len(b.members))})
    assert max(loads.values()) <= sum(loads.values()) / 8 + max(b.flops for b in rest)
    assert len({b.first for b in rest}) > 1


def test_equal_matrices_of_other_places_or_groups_stay_apart() -> None:
    update = muon(8, 8)
    found = bundles([("a", update, (S(0),)), ("b", update, (S(1),)), ("c", update, (S(0),))], [0, 0, 1], (2,))
    assert {b.members for b in found} == {("a",), ("b",), ("c",)}


@pytest.mark.parametrize(
    ("place", "shape", "laid"),
    [
        ((S(0), B), (8, 16), (S(1), B)), ((B, S(1)), (8, 16), (S(0), S(2))), ((B, B), (8, 16), (S(0), S(0))), ((S(1), S(0)), (4, 8, 16), (S(2), S(1))),
    ],
)  # fmt: skip
def test_a_stack_is_laid_as_its_members_are_cut(place: NdSbp, shape: tuple[int, ...], laid: NdSbp) -> None:
    """And where they are whole each rank lays its own slots only, unless an outer axis would have to be brought to slots that an inner one splits."""
    update = muon(*shape)
    rules = next(nd for op, nd in zip(update.ops, update.rules(place), strict=True) if op.name == "orthogonalize")
    first, working, taken = stack_places(place, rules)
    assert first == laid
    assert all(s == S(0) for s, rule in zip(working, rules, strict=True) if rule.kind == "B")
    assert taken == tuple(S(s.dim + 1) if s.is_split else B for s in place)
    (bundle,) = dealt([shape], place, (2, 2))
    for step in calls(bundle):
        for call in step:
            ins, _ = nd_placements(call.rules, call.op)
            assert {nd for _, nd in call.reads} <= set(ins)


def test_steps_of_a_bundle() -> None:
    (bundle,) = dealt([(8, 16)] * 2, (S(0),), (2,))
    steps = [[(call.op.name, call.member) for call in step] for step in calls(bundle)]
    assert steps == [
        [("muon_direction", 0), ("muon_direction", 1)], [("stack.of2", ALL)], [("orthogonalize", ALL)], [("unstack.of2", ALL)], [("muon", 0), ("muon", 1)],
    ]  # fmt: skip


def test_rounds_are_taken_in_bfloat16_where_the_parameters_are() -> None:
    for dtype, told in (("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32"), ("float64", "float64")):
        update = muon(8, 8, dtype=dtype)
        assert update.between(update.ops[0], "d").dtype == update.between(update.ops[1], "o").dtype == told
        assert {t.dtype for t in update.states} == {"float64" if dtype == "float64" else "float32"}


MODEL = gpt(num_layers=6, hidden=512, num_heads=8, mlp_hidden=2048)
"""So large that rounds take longer than launches; 24 square matrices, 6 of each side of the MLP."""


@pytest.mark.parametrize(("want", "zero"), [(Layout(8, zero=1), 1), (Layout(4, 2, zero=1), 1), (Layout(2, 2, 2, 2), 0)], ids=str)
def test_one_rank_that_stands_for_all_takes_as_long_as_all(want: Layout, zero: int) -> None:
    """Stacks that are not full count their mean for it; owners taking turns make that true within 3 %."""
    plan = plan_for(MODEL, want, batch=BATCH, seq=SEQ, dtype="bfloat16", optimizer="muon")
    cost = CostModel(cluster())
    alone, every = (lower(MODEL, plan, ranks) for ranks in (representatives(plan, cluster()), None))
    told = [simulate(p, cost, steps=2).breakdown(p)["optimizer_s"] for p in (alone, every)]
    assert told[0] == pytest.approx(told[1], rel=0.03)


def test_owners_share_the_rounds_and_the_momentum() -> None:
    """Eight ranks take an eighth of what one takes (more, since six matrices do not fill eight slots), and keep an eighth of the momentum."""
    flops, momentum = [], []
    for want in (Layout(), Layout(8, zero=1)):
        program = lower(MODEL, plan_for(MODEL, want, batch=BATCH, seq=SEQ, dtype="bfloat16", optimizer="muon"))
        by_rank: Counter[int] = Counter()
        for a in program.actors:
            by_rank[a.rank] += a.work.flops * (a.work.op == "orthogonalize")
        flops.append(by_rank)
        momentum.append(ledger(program, cluster=cluster()).by_class["optimizer"])
    assert sum(flops[1].values()) == pytest.approx(flops[0][0])
    assert max(flops[1].values()) <= 1.25 * flops[0][0] / 8
    assert momentum[1] <= 0.14 * momentum[0]


def test_the_search_charges_what_the_end_of_a_step_takes() -> None:
    """Of 24 square matrices on 8 ranks three stacks are made: their update takes 24 times what the table says of one."""
    mesh, cost = Mesh(("dp",), (8,), tuple(range(8))), CostModel(cluster())
    plan = plan_for(MODEL, Layout(8, zero=1), batch=BATCH, seq=SEQ, dtype="bfloat16", optimizer="muon")
    squares = [p for p in MODEL.graph(BATCH, SEQ, "bfloat16").params if p.shape == (512, 512)]
    found = Tables(MeshPricing(cost, mesh), mesh.axes, mesh.shape).param(squares[0], frozenset(), update_of(with_defaults("muon"), squares[0], True))
    state = next(i for i, at in enumerate(found.state) if found.boxes.places[at] == (S(0),))
    assert {plan.params[p.name].state[0] for p in squares} == {S(0)}
    program = lower(MODEL, plan, ranks=(0,))
    ops = ("cast", "muon_direction", "stack.of8", "orthogonalize", "unstack.of8", "muon", "all_to_all")
    ends = [a for a in program.actors if a.clock == "step" and a.work.op in ops and a.origin.partition("@")[0] in {p.name for p in squares}]
    assert len(squares) == 24
    assert sum(cost.work_s(a.work, 0) for a in ends) == pytest.approx(24 * found.update_s[state], rel=0.02)

"""Plans that are not legal: what is wrong is named, with what would be legal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ir.errors import PlanError
from ir.op import Rule
from ir.plan import Hub, ParamPlacement, Plan, Stage
from ir.sbp import B, P, S
from planner.check import check_plan
from tests.models import BATCH, SEQ, gpt
from tests.plans import Layout, plan_for

MODEL = gpt()
PLAN = plan_for(MODEL, Layout(2, 2, 2, 2), batch=BATCH, seq=SEQ)
GRAPH = MODEL.graph(PLAN.microbatch, SEQ, "float64")
FIRST, SECOND = PLAN.stages


def rules(node: str, *found: Rule) -> Plan:
    return replace(PLAN, rules={**PLAN.rules, node: found})


def hub(tensor: str, value: Any, cotangent: Any) -> Plan:
    return replace(PLAN, hubs={**PLAN.hubs, tensor: Hub(value, cotangent)})


def param(name: str, **changed: Any) -> Plan:
    return replace(PLAN, params={**PLAN.params, name: PLAN.params[name]._replace(**changed)})


def less(field: str, key: str) -> Plan:
    return replace(PLAN, **{field: {k: v for k, v in getattr(PLAN, field).items() if k != key}})


WRONG: dict[str, tuple[Callable[[], Plan], str]] = {
    "batch": (lambda: replace(PLAN, batch=0), "batch is 0; give a whole number of 1 or more"),
    "seq": (lambda: replace(PLAN, seq=-1), "seq is -1; give a whole number"),
    "microbatches": (lambda: replace(PLAN, num_microbatches=3), "batch 8 cannot be cut into 3 equal microbatches; try 1, 2, 4, 8"),
    "dtype": (lambda: replace(PLAN, dtype="int64"), "dtype `int64` is not known; known are .*bfloat16"),
    "optimizer": (lambda: replace(PLAN, optimizer={"name": "lion"}), "optimizer `lion` is not known; known are adamw, sgd"),
    "axis size": (lambda: replace(PLAN, mesh_shape=(2, 0)), r"mesh axes \('dp', 'tp'\) have sizes \(2, 0\); give each axis"),
    "axis twice": (lambda: replace(PLAN, axes=("dp", "dp")), "give each axis a name of its own"),
    "links": (lambda: replace(PLAN, links=((0.0, 1.0),)), "has 1 links, its mesh of 2 axes 3"),
    "rank twice": (lambda: replace(PLAN, stages=(FIRST, replace(SECOND, ranks=(4, 5, 6, 0)))), "rank 0 stands in 2 places; stages have the same"),
    "few ranks": (lambda: replace(PLAN, stages=(FIRST, replace(SECOND, ranks=(4, 5)))), "every stage needs 4 ranks for mesh {'dp': 2, 'tp': 2}"),
    "gap": (lambda: replace(PLAN, stages=(FIRST, replace(SECOND, first=4))), r"stages \[\(0, 3\), \(4, 6\)\] must follow one another and cover layers 0 to 6"),
    "short": (lambda: replace(PLAN, stages=(FIRST, replace(SECOND, last=5))), "cover layers 0 to 6 of"),
    "empty stage": (lambda: replace(PLAN, stages=(FIRST, SECOND, Stage(6, 6, (8, 9, 10, 11)))), "one or more each"),
    "recompute": (lambda: replace(PLAN, recompute=(9,)), r"recompute names layers \(9,\); .* has layers 0 to 5"),
    "rerun": (lambda: replace(PLAN, recompute=(1, "h.9.ln_1")), r"recompute names operators h.9.ln_1, which .* does not have"),
    "schedule": (lambda: replace(PLAN, schedule="zb"), "schedule `zb` is not known; known are gpipe, 1f1b"),
    "no rule": (lambda: less("rules", "h.1.mlp.up"), "one rule for each of the axes .* at node `h.1.mlp.up`, it has None"),
    "rule": (lambda: rules("h.1.ln_1", Rule("split", "h"), Rule("B")), r"node `h.1.ln_1` .* cannot follow `.*h.*` on axis dp; it can follow B"),
    "hub": (lambda: hub("nobody", (B, B), (B, B)), "hub for tensor `nobody`, which `.*` has not"),
    "hub axes": (lambda: hub("h.1.mlp.up", (B,), (B, B)), r"tensor `h.1.mlp.up` has 1 placements \(B,\) for the 2 axes .*; give one for each"),
    "hub split": (
        lambda: hub("h.1.attn.residual", (S(0), S(3)), (B, B)),
        r"tensor `h.1.attn.residual` of shape \(4, 12, 32\) cannot be \[dp: S\(0\), tp: S\(3\)\] on mesh",
    ),
    "no parameter": (lambda: less("params", "h.1.mlp.up.weight"), "nothing about parameter `h.1.mlp.up.weight`"),
    "partial state": (lambda: param("h.1.mlp.up.weight", state=(P, B)), r"parameter `h.1.mlp.up.weight`: state is \[dp: P, tp: B\]; only a gradient can be P"),
    "partial held": (lambda: param("h.1.mlp.up.weight", held=(B, P)), r"held is \[dp: B, tp: P\]; only a gradient can be P"),
}  # fmt: skip


def test_a_plan_of_the_search_is_legal() -> None:
    assert check_plan(GRAPH, PLAN) is PLAN


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what: str) -> None:
    wrong, sentence = WRONG[what]
    with pytest.raises(PlanError, match=sentence):
        check_plan(GRAPH, wrong())


@pytest.mark.parametrize(
    "plan",
    [rules("h.1.attn.attend", Rule("split", "g"), Rule("split", "g")), hub("h.1.mlp.up", (S(0), S(0)), (S(0), S(0)))],
    ids=["four heads over four ranks", "four samples over four ranks"],
)
def test_one_dim_may_be_split_over_both_axes(plan: Plan) -> None:
    assert check_plan(GRAPH, plan) is plan


def test_heads_that_do_not_divide_are_named_with_numbers_that_do() -> None:
    plan = replace(PLAN, mesh_shape=(2, 3), stages=(replace(FIRST, ranks=tuple(range(6))), replace(SECOND, ranks=tuple(range(6, 12)))))
    with pytest.raises(PlanError, match=r"node `h\.\d.*`: \w+ = 4 cannot be split 3 ways; legal near it are 1, 2, 4"):
        check_plan(GRAPH, replace(plan, rules={**PLAN.rules, "h.1.attn.attend": (Rule("split", "b"), Rule("split", "g"))}))


def test_every_field_of_a_parameter_is_looked_at() -> None:
    for field in ParamPlacement._fields:
        with pytest.raises(PlanError, match=r"`h.1.mlp.up.bias` of shape \(64,\) cannot be \[dp: S\(5\), tp: B\]"):
            check_plan(GRAPH, param("h.1.mlp.up.bias", **{field: (S(5), B)}))

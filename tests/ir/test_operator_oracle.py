"""Every operator of the catalogue against the oracle: its rules are sound and complete, its gradients are the gradients, on one axis and on two."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ir.op import ALL_B, Linear, Op, Rule, nd_placements
from ir.ops import CATALOGUE, catalogue
from ir.ops.stacking import numbered
from ir.sbp import B, P, S, split_sizes
from tests.operator_cases import CASES, UNEVEN
from tests.oracle import Case, compare, nd_joined, nd_shards, same, survey

NAMES = tuple(dict.fromkeys(case.name for case in CASES))
FORWARD = tuple(case for case in CASES if case.op.grads)


def test_every_operator_has_a_case() -> None:
    assert {name for name in CATALOGUE if not name.startswith("box.")} == {name for name in NAMES if numbered(name) is None}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_rules_are_sound_and_complete(name: str, ranks: int) -> None:
    """Derived and found sets of (placements of inputs, placements of outputs) are equal: nothing unsound, nothing missing."""
    for case in (c for c in CASES if c.name == name):
        unsound, missing = compare(case, ranks)
        assert not unsound, f"{case}: derived, but wrong on {ranks} ranks: {unsound}"
        assert not missing, f"{case}: right on {ranks} ranks, but not derived: {missing}"


# ---- the oracle itself -----------------------------------------------------------------------------------------------------------------------------


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_the_oracle_sees_an_unsound_rule() -> None:
    case = _case("gelu")
    everything = Linear(frozenset({"x"}), frozenset({"out"}))
    assert compare(case, 2, replace(case.op, linear=(everything,))) == ([((P,), (P,))], [])


def test_the_oracle_sees_a_missing_rule() -> None:
    case = _case("linear")
    assert compare(case, 2, replace(case.op, linear=case.op.linear[:1])) == ([], [((B, P), (P,))])
    assert compare(case, 2, replace(case.op, whole=frozenset("n"))) == ([], [((B, S(1)), (S(2),))])


def test_the_oracle_sees_an_output_that_does_not_depend_on_the_group() -> None:
    case = _case("attention")
    both = Linear(frozenset({"v"}), frozenset({"out", "lse"}))
    unsound, missing = compare(case, 2, replace(case.op, linear=(both,)))
    assert unsound == [((B, B, P), (P, P))]
    assert missing == [((B, B, P), (P, B))]


# ---- gradients: rules ------------------------------------------------------------------------------------------------------------------------------


def _grads(case: Case) -> list[Op]:
    """The gradient operators with `...` written out as in the forward."""
    out = []
    for name in case.op.grads:
        raw = catalogue(name)
        out.append(raw.for_ranks([len(o.dims) - 1 + case.leading if ("...",) in o.dims else len(o.dims) for o in raw.inputs]))
    return out


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_gradient_rules_follow_from_forward_rules(case: Case) -> None:
    """Under every rule, what a gradient reads is placed as the forward left it, and what it writes as `cotangents` promises."""
    op = case.op
    for rule in op.rules():
        ins, outs = op.placements(rule)
        given, need = op.cotangents(rule)
        here = {o.name: s for o, s in zip((*op.inputs, *op.outputs), (*ins, *outs), strict=True)}
        here |= {"d" + o.name: s for o, s in zip(op.outputs, need, strict=True)}
        promised = {"d" + o.name: s for o, s in zip(op.inputs, given, strict=True) if o.name not in op.stop}
        written: set[str] = set()
        for grad in _grads(case):
            its_rule = op.grad_rule(rule, grad)
            assert its_rule in grad.rules(), f"{rule} of {op} gives {its_rule}, which {grad} does not have"
            grad_ins, grad_outs = grad.placements(its_rule)
            assert grad_ins == tuple(here[o.name] for o in grad.inputs), f"{rule} of {op}, {its_rule} of {grad}"
            assert grad_outs == tuple(promised[o.name] for o in grad.outputs), f"{rule} of {op}, {its_rule} of {grad}"
            written |= {o.name for o in grad.outputs}
        assert written == promised.keys()


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_a_partial_cotangent_passes_through(case: Case) -> None:
    """`B~P`: with all cotangents P, every output of the gradient operators is P; the oracle has shown that this holds."""
    for grad in _grads(case):
        ins, outs = grad.placements(case.op.grad_rule(Rule("B~P"), grad))
        cotangents = {"d" + o.name for o in case.op.outputs}
        assert ins == tuple(P if o.name in cotangents else B for o in grad.inputs)
        assert set(outs) == {P}


# ---- gradients: values -----------------------------------------------------------------------------------------------------------------------------


def _loss(case: Case, ins: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> float:
    outs = dict(zip((o.name for o in case.op.outputs), case.run(list(ins.values())), strict=True))
    return float(sum((outs[name] * weight).sum() for name, weight in weights.items()))


def _by_differences(case: Case, ins: dict[str, np.ndarray], weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Central differences of the weighted sum of the outputs."""
    step, slope = 1e-5, np.empty_like(ins[name])
    for i in np.ndindex(ins[name].shape):
        ends = []
        for sign in (1.0, -1.0):
            moved = ins[name].copy()
            moved[i] += sign * step
            ends.append(_loss(case, {**ins, name: moved}, weights))
        slope[i] = (ends[0] - ends[1]) / (2.0 * step)
    return slope


@pytest.mark.parametrize("case", [c for c in FORWARD if c.sizes["b"] == UNEVEN["b"]], ids=str)
def test_gradients_agree_with_differences(case: Case) -> None:
    rng = np.random.default_rng(3)
    op, ins = case.op, case.draw(rng)
    outs = dict(zip((o.name for o in op.outputs), case.run(list(ins.values())), strict=True))
    weights = {name: rng.normal(size=value.shape) for name, value in outs.items() if name not in op.stop}
    values = {**ins, **outs, **{"d" + name: weight for name, weight in weights.items()}}
    for grad in _grads(case):
        there = replace(case, name=grad.name)
        for operand, slope in zip(grad.outputs, there.run([values[o.name] for o in grad.inputs]), strict=True):
            expected = _by_differences(case, ins, weights, operand.name[1:])
            assert np.abs(slope - expected).max() <= 1e-8 * max(1.0, np.abs(expected).max()), f"{grad.name}: {operand}"


# ---- two axes --------------------------------------------------------------------------------------------------------------------------------------

MESH = (2, 2)
WIDE = {"b": 5, "s": 6, "h": 8, "n": 5, "k": 6, "v": 9, "z": 6, "g": 4, "r": 2, "d": 2, "w": 3, "e": 5, "c": 3}
ON_A_MESH = tuple(
    replace(next(c for c in CASES if c.name == name), sizes=WIDE)
    for name in (
        "linear", "linear.dw", "bias.dc", "swiglu.grad", "dropout", "layer_norm", "layer_norm.dgc", "head_norm.dg", "rope", "attention", "attention.grad",
        "embedding", "embedding.dtable", "exp_sum", "cross_entropy.dlogits", "adamw", "dispatch", "combine", "combine.dweight", "grouped_linear.dw",
        "attention_relative.grad", "attention_sinks.dsinks",
    )
)  # fmt: skip


def _local(case: Case, rules: tuple[Rule, Rule], coords: tuple[int, int]) -> tuple[dict[str, int], dict[str, int]] | None:
    """(sizes, offsets) on one rank, outer axis first; None where a split is not legal."""
    sizes, at = case.label_sizes, dict.fromkeys(case.label_sizes, 0)
    for rule, n, i in zip(rules, MESH, coords, strict=True):
        if rule.kind == "split":
            here = sizes[rule.on]
            if here < n or (case.op.must_divide(rule.on) and here % n):
                return None
            at[rule.on] += sum(split_sizes(here, n)[:i])
            sizes[rule.on] = split_sizes(here, n)[i]
    return sizes, at


@pytest.mark.parametrize("case", ON_A_MESH, ids=str)
def test_the_nd_signatures_are_the_product_over_axes(case: Case) -> None:
    rng = np.random.default_rng(5)
    ins = case.draw(rng)
    whole, op, tried = case.run(list(ins.values())), case.op, 0
    for rules in itertools.product([r for r in op.rules() if r.kind != "B~P"], repeat=2):
        places = list(itertools.product(*map(range, MESH)))
        local = [_local(case, rules, coords) for coords in places]
        if None in local:
            continue
        nd_ins, nd_outs = nd_placements(rules, op)
        held = [nd_shards(value, nd, MESH, rng) for value, nd in zip(ins.values(), nd_ins, strict=True)]
        with np.errstate(invalid="ignore"):
            parts = [case.run([h[i] for h in held], *here) for i, here in enumerate(local) if here]
        for j, (value, nd) in enumerate(zip(whole, nd_outs, strict=True)):
            assert same(nd_joined([p[j] for p in parts], nd, MESH), value), f"{op} under {rules}: {nd_ins} -> {nd_outs}"
        tried += 1
    assert tried >= 4


# ---- what the field got wrong ----------------------------------------------------------------------------------------------------------------------


def test_the_norm_of_partial_sums_is_taken_after_the_reduction() -> None:
    """https://github.com/pytorch/pytorch/issues/159856: sum of local norms 5.398, the norm is 5."""
    case = Case("sum_squares", {"b": 2}, leading=1)
    partials = [np.array([1.0, 3.0]), np.array([2.0, 1.0])]
    assert not any(P in case.op.placements(rule)[0] for rule in case.op.rules())
    assert not any(P in ins for ins, _ in survey(case, 2))
    (boxed,) = case.run([partials[0] + partials[1]])
    assert math.sqrt(boxed) == pytest.approx(5.0, abs=1e-6)
    assert sum(math.sqrt(case.run([part])[0]) for part in partials) == pytest.approx(5.398, abs=1e-3)


def test_a_constant_is_not_added_to_partial_sums() -> None:
    """https://github.com/pytorch/pytorch/issues/149768: four partial ones plus ten are 14, not 44."""
    op = catalogue("add").for_ranks([0, 0])
    legal = {op.placements(rule)[0] for rule in op.rules()}
    assert (P, B) not in legal
    assert (P, P) in legal
    case = Case("add", {}, leading=0)
    ten, ones = np.array(10.0), [np.array(1.0)] * 4
    assert case.run([sum(ones), ten])[0] == 14.0
    padded = [ten, *(np.array(0.0) for _ in range(3))]
    assert sum(case.run([one, part])[0] for one, part in zip(ones, padded, strict=True)) == 14.0
    assert sum(case.run([one, ten])[0] for one in ones) == 44.0


# ---- cupy ------------------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cupy() -> Any:
    found = pytest.importorskip("cupy", reason="needs cupy and an NVIDIA GPU: cupy is not installed")
    try:
        found.cuda.runtime.getDeviceCount()
    except found.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs an NVIDIA GPU, there is none here: {error}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_cupy_is_numpy(name: str, cupy: Any) -> None:
    """The same values in float64 and float32, and the same legal placements."""
    for case in (c for c in CASES if c.name == name):
        ins = list(case.draw(np.random.default_rng(1)).values())
        for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
            typed = [value.astype(dtype) if value.dtype.kind == "f" else value for value in ins]
            for ours, theirs in zip(case.run(typed, dtype=dtype), case.run(typed, xp=cupy, dtype=dtype), strict=True):
                np.testing.assert_allclose(theirs, ours, rtol=tolerance, atol=tolerance, err_msg=str(case))
        if len(case.op.inputs) <= 4:
            assert compare(case, 2, xp=cupy) == ([], []), str(case)


def test_b_is_always_legal() -> None:
    assert all(ALL_B in op.rules() for op in CATALOGUE.values())

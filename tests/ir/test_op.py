"""The operator sentence: shapes, rules as text, work."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from ir.errors import GraphError
from ir.op import ALL_B, Context, Rule, contraction, op
from ir.ops import CATALOGUE, catalogue
from ir.ops.algebra import contract
from ir.sbp import P_MAX, B, P, S
from tests.operator_cases import CASES
from tests.oracle import Case


def test_rules_print_short_and_read_back() -> None:
    for made in CATALOGUE.values():
        for rule in made.rules():
            assert Rule.parse(repr(rule)) == rule


def test_rules_of_linear() -> None:
    linear = catalogue("linear").for_ranks([3, 2])
    assert [repr(r) for r in linear.rules()] == ["B", "split b", "split s", "split k", "split n", "linear x", "linear w", "B~P"]
    assert linear.placements(Rule("split", "k")) == ((S(2), S(0)), (P,))
    assert linear.placements(Rule("split", "n")) == ((B, S(1)), (S(2),))


def test_a_maximum_that_vanishes_is_a_partial_maximum() -> None:
    assert catalogue("last_max").for_ranks([3]).placements(Rule("split", "v")) == ((S(2),), (P_MAX,))


def test_outputs_off_the_linear_group_stay_whole() -> None:
    norm = catalogue("layer_norm").for_ranks([3, 1, 1])
    assert norm.placements(Rule("linear", "g+c")) == ((B, P, P), (P, B, B))
    assert catalogue("swiglu.grad").for_ranks([3, 3, 3]).placements(Rule("linear", "up")) == ((B, B, P), (P, B))


def test_a_gradient_reads_partial_what_the_forward_left_partial() -> None:
    attention, grad = catalogue("attention"), catalogue("attention.grad")
    assert attention.grad_rule(Rule("linear", "v"), grad) == Rule("linear", "v+out")
    assert catalogue("linear").grad_rule(Rule("linear", "w"), catalogue("linear.dw")) == ALL_B


def test_a_linear_rule_that_is_not_there_is_named() -> None:
    with pytest.raises(GraphError, match=r"has no rule `linear gate`; it has B, split b, linear up, B~P"):
        catalogue("swiglu").for_ranks([1, 1]).placements(Rule("linear", "gate"))


def test_a_linear_group_of_unknown_operands_is_refused() -> None:
    with pytest.raises(GraphError, match=r"linear in \['y'\], which are no operands"):
        op("f(x[b]) -> out[b]", lambda *_: None, linear=["y"])
    with pytest.raises(GraphError, match=r"linear in \['z'\], which are no operands"):
        op("f(x[b]) -> out[b]", lambda *_: None, linear=["x -> z"])


# ---- work ------------------------------------------------------------------------------------------------------------------------------------------


def test_gemm_of_contractions() -> None:
    linear, sizes = catalogue("linear").for_ranks([3, 2]), {"b": 2, "s": 8, "k": 16, "n": 32}
    assert linear.gemm_of(sizes) == (1, 16, 32, 16)
    assert catalogue("linear.dx").for_ranks([3, 2]).gemm_of(sizes) == (1, 16, 16, 32)
    assert catalogue("linear.dw").for_ranks([3, 3]).gemm_of(sizes) == (1, 16, 32, 16)
    assert catalogue("batched_matmul").for_ranks([4, 4]).gemm_of({"b": 2, "s": 3, "m": 5, "k": 7, "n": 11}) == (6, 5, 11, 7)
    assert catalogue("gelu").for_ranks([1]).gemm_of({"b": 4}) == ()


def test_flops_of_contractions_are_those_of_their_gemm() -> None:
    for case in (c for c in CASES if c.op.is_contraction):
        batch, m, n, k = case.op.gemm_of(case.label_sizes)
        assert case.op.flops_of(case.label_sizes, {}) == 2.0 * batch * m * n * k


def test_every_operator_says_its_flops_and_a_split_shares_them() -> None:
    for case in CASES:
        made, sizes = case.op, case.label_sizes
        assert made.flops is not None, made
        whole = made.flops_of(sizes, case.all_attrs)
        for rule in made.rules():
            if rule.kind == "split" and rule.on not in "sz" and sizes[rule.on] % 2 == 0:
                half = made.flops_of({**sizes, rule.on: sizes[rule.on] // 2}, case.all_attrs)
                # a look-up works once for each index, whatever part of the table is here
                assert half in (whole / 2, whole if rule.on in ("v", "p") else -1.0), (made, rule)


def test_causal_attention_is_half_the_work_and_a_split_sequence_as_much_as_its_last_rank() -> None:
    attention = catalogue("attention")
    sizes = {"b": 1, "s": 64, "z": 64, "g": 2, "r": 3, "d": 8, "w": 8}
    full = attention.flops_of(sizes, {"causal": False})
    assert full == 4.0 * 64 * 64 * 6 * 8
    assert attention.flops_of(sizes, {"causal": True}) == full / 2
    assert attention.flops_of({**sizes, "s": 16}, {"causal": True}) == full * (16 * (64 - 8)) / 64**2
    assert catalogue("attention.grad").flops_of(sizes, {"causal": True}) == 2.5 * full / 2


def test_a_look_up_reads_rows_of_its_table_only() -> None:
    sizes = {"b": 2, "s": 4, "v": 50_000, "h": 8}
    assert catalogue("embedding").for_ranks([2, 2]).elements_of(sizes) == ((8, 64), (64,))
    assert catalogue("linear").for_ranks([2, 2]).elements_of({"b": 2, "k": 3, "n": 5}) == ((6, 15), (10,))


# ---- kernels of contractions -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.op.is_contraction], ids=str)
def test_contractions_of_the_catalogue_are_one_matrix_product_on_views(case: Case) -> None:
    seen = []

    def matmul(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
        seen.append((x, y, out))
        np.matmul(x, y, out=out)

    ins = list(case.draw(np.random.default_rng(0)).values())
    out = np.empty(case.op.outputs[0].shape(case.label_sizes))
    case.op.kernel(Context(SimpleNamespace(matmul=matmul), {}, case.label_sizes, case.label_sizes, {}), *ins, out)
    ((x, y, into),) = seen
    assert np.shares_memory(into, out)
    assert all(any(np.shares_memory(view, array) for array in ins) for view in (x, y))
    assert not case.name.startswith("linear") or x.ndim == 2


def test_a_contraction_in_another_order_goes_through_einsum() -> None:
    rng = np.random.default_rng(0)
    scores, dq, dk = contraction("scores(q[b s h d], k[b z h d]) -> out[b h s z]", contract)
    sizes = {"b": 2, "s": 3, "z": 5, "h": 4, "d": 6}
    arrays = {o.name: rng.normal(size=o.shape(sizes)) for o in (*scores.inputs, *dq.inputs, *dk.inputs)}
    for made, formula in ((scores, "bshd,bzhd->bhsz"), (dq, "bhsz,bzhd->bshd"), (dk, "bshd,bhsz->bzhd")):
        ins = [arrays[o.name] for o in made.inputs]
        out = np.empty(made.outputs[0].shape(sizes))
        made.kernel(Context(np, {}, sizes, sizes, {}), *ins, out)
        np.testing.assert_allclose(out, np.einsum(formula, *ins), rtol=1e-12)


def test_long_labels_out_of_order_are_refused() -> None:
    with pytest.raises(GraphError, match="needs labels of one letter"):
        contraction("f(x[rows inner], w[inner cols]) -> out[cols extra rows]", contract)


# ---- shapes ----------------------------------------------------------------------------------------------------------------------------------------


def test_shapes_that_disagree_are_named() -> None:
    linear = catalogue("linear").for_ranks([2, 2])
    with pytest.raises(GraphError, match=r"node `up`: w\[k n\] of linear\(.*dim \(k\) is 5, but .*'k': 4"):
        linear.bind([(2, 4), (5, 3)], {}, "up")
    with pytest.raises(GraphError, match="takes 2 operands, 1 were given"):
        linear.bind([(2, 4)], {})
    with pytest.raises(GraphError, match=r"give the size of h or d as an attribute"):
        catalogue("rope").bind([(1, 2, 8)], {})
    with pytest.raises(GraphError, match="near: linear"):
        catalogue("linaer")


def test_an_operator_is_written_out_for_its_ranks() -> None:
    for leading, labels in ((0, ()), (1, ("b",)), (2, ("b", "s"))):
        made = catalogue("linear").for_ranks([leading + 1, 2])
        assert made.inputs[0].labels == (*labels, "k")
    for a, b in itertools.permutations((1, 2)):
        with pytest.raises(GraphError, match=r"`...` stands for"):
            catalogue("add").for_ranks([a, b])

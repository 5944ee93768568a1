"""Attention over the pieces of a sequence: each piece by itself gives what the whole sequence gives, forward and backward, and its rules are sound."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from ir.errors import GraphError
from ir.op import Context, Rule
from ir.ops import catalogue
from ir.ops.over import over_rule
from tests.operator_cases import DROP, EVEN, UNEVEN
from tests.oracle import Case, compare

SIZES = {"b": 2, "g": 2, "r": 2, "d": 4, "w": 4}
ATTRS = {"r": 2, "d": 4, "causal": True}


def run(name: str, arrays: list[np.ndarray], attrs: dict[str, Any], start: int = 0, total: int = 0) -> list[np.ndarray]:
    """The outputs of an operator whose queries start at a position of a sequence."""
    op = catalogue(name)
    sizes = op.bind([a.shape for a in arrays], attrs)
    outputs = [np.full(o.shape(sizes), 7.0) for o in op.outputs]
    whole = {**sizes, **dict.fromkeys({"s", op.past} & sizes.keys(), total or sizes["s"])}
    op.kernel(Context(np, attrs, sizes, whole, {"s": start}, seed=1, step=2), *arrays, *outputs)
    return outputs


@pytest.mark.parametrize("attrs", [ATTRS, {**ATTRS, **DROP}, {**ATTRS, "window": 4}, {**ATTRS, "softcap": 2.0}], ids=["plain", "dropout", "window", "softcap"])
@pytest.mark.parametrize("pieces", [(9,), (4, 5), (5, 3, 1)])
def test_pieces_give_what_the_whole_gives(pieces: tuple[int, ...], attrs: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    seq, width = sum(pieces), {"q": 16, "k": 8, "v": 8, "dout": 16}
    q, k, v, dout = (rng.normal(size=(2, seq, width[name])) for name in width)
    out, lse = run("attention", [q, k, v], attrs)
    dq, dk, dv = run("attention.grad", [dout, q, k, v, out, lse], attrs)
    cuts = [slice(b - n, b) for n, b in zip(pieces, accumulate(pieces), strict=True)]
    parts = {name: [np.ascontiguousarray(x[:, at]) for at in cuts] for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout))}
    found: dict[str, np.ndarray] = {"dk": np.zeros_like(k), "dv": np.zeros_like(v)}
    for j, at in enumerate(cuts):
        suffix = f".over{j + 1}" if j else ""
        past = [*parts["k"][: j + 1], *parts["v"][: j + 1]]
        here, sums = run(f"attention{suffix}", [parts["q"][j], *past], attrs, at.start, seq)
        np.testing.assert_allclose(here, out[:, at], rtol=1e-12)
        np.testing.assert_allclose(sums, lse[:, at], rtol=1e-12)
        mine, *others = run(f"attention.grad{suffix}", [parts["dout"][j], parts["q"][j], *past, here, sums], attrs, at.start, seq)
        np.testing.assert_allclose(mine, dq[:, at], rtol=1e-10, atol=1e-13)
        for i, x in enumerate(others):
            found["dk" if i <= j else "dv"][:, cuts[i % (j + 1)]] += x
    np.testing.assert_allclose(found["dk"], dk, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(found["dv"], dv, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["attention.over2", "attention.grad.over2"])
@pytest.mark.parametrize("sizes", [{**UNEVEN, "z0": 2, "z1": 3}, {**EVEN, "z0": 2, "z1": 4}], ids=["uneven", "even"])
def test_rules_are_sound_and_complete(name: str, sizes: dict[str, int]) -> None:
    for ranks in (2,) if "grad" in name else (2, 3):
        assert compare(Case(name, sizes, {"causal": True}), ranks) == ([], [])


def test_flops_are_those_of_the_whole() -> None:
    whole = catalogue("attention").flops_of({**SIZES, "s": 12, "z": 12}, ATTRS)
    pieces = [("attention", {"s": 5, "z": 5}), ("attention.over2", {"s": 4, "z0": 5, "z1": 4}), ("attention.over3", {"s": 3, "z0": 5, "z1": 4, "z2": 3})]
    assert sum(catalogue(name).flops_of({**SIZES, **sizes}, ATTRS) for name, sizes in pieces) == whole


def test_rules_are_those_of_the_operator() -> None:
    three = catalogue("attention.over3")
    assert [over_rule(rule, three) for rule in catalogue("attention").rules()] == list(three.rules())
    assert over_rule(Rule("linear", "v"), three) == Rule("linear", "v0+v1+v2")


def test_only_what_looks_back_goes_over_pieces() -> None:
    for name in ("linear.over2", "attention.over0x", "attention.over1"):
        with pytest.raises(GraphError, match="no operator"):
            catalogue(name)

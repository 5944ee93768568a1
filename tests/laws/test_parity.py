"""Any plan = one device: losses, gradients and states of three steps, float64, 1e-10 relative, dropout on. Every combination: `benchmarks/parity.py`."""

from __future__ import annotations

import pytest

from tests.models import BATCH
from tests.parity import MODELS, VALUES, apart, same
from tests.plans import Layout, layouts, pairwise

COVERING = pairwise(list(layouts(VALUES, BATCH)), list(VALUES))


@pytest.mark.parametrize("want", COVERING, ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_any_plan_gives_what_one_device_gives(family: str, want: Layout) -> None:
    found = apart(family, want)
    assert same(found), found


@pytest.mark.parametrize("memory_price", [1e-9, 1e-6, 1e-3])
@pytest.mark.parametrize("want", [Layout(2, 2, 1, 2), Layout(2, 2, 2, 2), Layout(4, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_whatever_the_price_of_memory(family: str, want: Layout, memory_price: float) -> None:
    found = apart(family, want, memory_price=memory_price)
    assert same(found), found


def test_with_another_optimizer() -> None:
    found = apart("gpt", Layout(2, 2, 2, 2, zero=1), optimizer="sgd")
    assert same(found), found


def test_the_covering_set_covers_every_pair() -> None:
    names = list(VALUES)
    every, chosen = list(layouts(VALUES, BATCH)), COVERING
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert {(getattr(w, a), getattr(w, b)) for w in chosen} == {(getattr(w, a), getattr(w, b)) for w in every}

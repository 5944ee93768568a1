"""What carries over: factors of classes and frameworks, found again in runs that were made with them."""

from __future__ import annotations

import numpy as np
import pytest

from planner.recipes.bill import Bill, Pricer
from planner.recipes.step import step
from planner.recipes.study import class_shares, fits, framework_of, framework_shares
from planner.recipes.transfer import Transfer, equal_weights, transfer
from tests.planner.recipes.test_fit import variants

NAMES = ("compute", "memory", "link")


@pytest.fixture(scope="module")
def bill() -> Bill:
    pricer = Pricer()
    return Bill.stack([pricer.bill(run) for run in variants()])


def test_a_framework_takes_its_factor_to_a_class_where_it_was_not_measured(bill: Bill) -> None:
    """Three of four pairs are measured; the fourth follows."""
    true = Transfer(NAMES, np.zeros(3), {"a": np.array([0.1, 0.0, 0.0]), "b": np.array([-0.1, 0.0, 0.0])}, {"x": np.zeros(3), "y": np.array([0.0, 0.3, 0.2])})
    n, pairs = len(bill), (("a", "x"), ("a", "y"), ("b", "x"))
    seconds = np.concatenate([step(bill, true.shares(*pair)).total for pair in pairs])
    kinds, frameworks = (np.repeat([pair[k] for pair in pairs], n) for k in (0, 1))
    found = transfer(NAMES, ("memory", "link"), bill.take(np.tile(np.arange(n), 3)), seconds, kinds, frameworks, frameworks)
    told, measured = (step(bill, shares).total for shares in (found.shares("b", "y"), true.shares("b", "y")))
    assert told == pytest.approx(measured, rel=0.03)
    assert np.abs(np.log(step(bill, found.shares("b", "x")).total / measured)).mean() > 0.05
    assert found.frameworks["y"][0] == 0.0
    assert found.shares("b", "of my own") == found.shares("b")


def test_families_of_a_class_weigh_the_same() -> None:
    weights = equal_weights(np.array(["a", "a", "a", "b"]), np.array(["f", "f", "g", "f"]))
    assert weights.tolist() == [5.0, 5.0, 10.0, 10.0]


def test_frameworks_differ_only_in_what_is_theirs() -> None:
    assert set(framework_shares()) < set(class_shares())
    assert all(set(found) <= set(framework_shares()) for found in fits()["frameworks"].values())
    assert all(framework_of(name) == name for name in fits()["frameworks"])

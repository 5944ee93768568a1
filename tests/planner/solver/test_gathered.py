"""Tables by classes of states against the same tables written out."""

from __future__ import annotations

import numpy as np
import pytest

from planner.solver.elimination import solve
from planner.solver.factors import FactorGraph
from planner.solver.gathered import Gathered, distinct, least_of_classes
from planner.solver.reductions import _minimum


def gathered(rng: np.random.Generator, *shape: int) -> Gathered:
    """A table of integers and infinities in which about every third state of an axis is a class of its own."""
    classes = tuple(distinct(rng.integers(0, 1 + n // 3, n))[1] for n in shape)
    base = rng.integers(0, 5, [int(c.max()) + 1 for c in classes]).astype(float)
    base[rng.random(base.shape) < 0.1] = np.inf
    return Gathered(base, classes)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_done_to_a_gathered_table_is_done_to_all_its_entries(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = gathered(rng, 7, 9, 8), gathered(rng, 7, 9, 8)
    dense, some, image = a.dense(), rng.permutation(9)[:4], rng.integers(0, 7, 8)
    assert dense[3, 5, 6] == a[3, 5, 6]
    assert (a[3, 5] == dense[3, 5]).all()
    assert ((a + b).dense() == dense + b.dense()).all()
    assert (a.take(some, 1).dense() == dense[:, some]).all()
    assert (a.transpose((2, 0, 1)).dense() == dense.transpose(2, 0, 1)).all()
    assert (a.diagonal(0, image, 2).dense() == dense[image, :, np.arange(8)].T).all()
    assert (a.diagonal(2, rng.integers(0, 8, 7) * 0, 0).dense() == dense[:, :, 0]).all()
    assert (a.is_possible(1) == np.isfinite(dense).any(axis=(0, 2))).all()
    assert {tuple(row) for row in a.lines(1).dense()} == {tuple(a.lines(1).dense()[i]) for i in range(9)}
    number = distinct(rng.integers(0, 3, 8))[1]
    least = least_of_classes(dense, number)
    assert all((least[..., k] == dense[..., number == k].min(axis=-1)).all() for k in range(number.max() + 1))


def test_a_table_keeps_no_class_without_a_state() -> None:
    table = Gathered(np.arange(6.0).reshape(2, 3), (np.array([0, 1]), np.array([0, 1, 2, 1]))).take(np.array([3, 1]), 1)
    assert table.base.shape == (2, 1)
    assert table.dense().tolist() == [[1.0, 1.0], [4.0, 4.0]]


def test_an_image_needs_one_state_and_not_one_class() -> None:
    base = np.array([[0.0, np.inf], [np.inf, 0.0]])
    rows = np.array([0, 1, 0])
    found = Gathered(base, (rows, np.array([0, 1]))).image(0)
    assert found is not None
    assert found.tolist() == [0, 1, 0]
    assert Gathered(base, (rows, np.array([0, 1, 1]))).image(0) is None


@pytest.mark.parametrize("seed", range(6))
def test_elimination_by_classes_is_elimination_of_all_states(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scopes = [(), (0,), (1,), (0, 1), (0, 2)]
    tables = [gathered(rng, *(5 + u for u in s), 30) for s in scopes]
    whole = sum(t.dense().reshape([5 + u if u in s else 1 for u in range(3)] + [30]) for s, t in zip(scopes, tables, strict=True))
    found = _minimum(scopes, tables, (0, 1, 2))
    assert (found.dense() == whole.min(axis=-1)).all()
    assert found.base.size < whole.min(axis=-1).size


@pytest.mark.parametrize("seed", range(10))
def test_a_graph_of_gathered_tables_has_the_answer_of_the_graph_written_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = tuple(map(int, rng.integers(2, 12, 9)))
    edges = [(a, b) for a in range(9) for b in range(a + 1, 9) if b - a < 3 or rng.random() < 0.1]
    unary = tuple(rng.integers(0, 4, n).astype(float) for n in sizes)
    tables = tuple(gathered(rng, sizes[a], sizes[b]) for a, b in edges)
    by_classes = FactorGraph(sizes, unary, tuple(edges), tables)
    written_out = FactorGraph(sizes, unary, tuple(edges), tuple(t.dense() for t in tables))
    found = solve(by_classes)
    assert found.cost == solve(written_out).cost
    assert not found.states or by_classes.cost(found.states) == written_out.cost(found.states) == found.cost

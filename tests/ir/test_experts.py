"""Experts against plain loops: who is chosen, who waits where, what is dropped."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracle import Case


def chosen(scores: np.ndarray, k: int, groups: int, top_groups: int, of_group: int) -> np.ndarray:
    """Indices of the experts of each row, one row at a time."""
    out = np.empty((*scores.shape[:-1], k), int)
    for at in np.ndindex(scores.shape[:-1]):
        parts = np.split(scores[at], groups)
        best = sorted(range(groups), key=lambda g: -sum(sorted(parts[g])[-of_group:]))[:top_groups]
        size = scores.shape[-1] // groups
        legal = [e for e in range(scores.shape[-1]) if e // size in best]
        out[at] = sorted(legal, key=lambda e: -scores[(*at, e)])[:k]
    return out


@pytest.mark.parametrize(("groups", "top_groups", "of_group"), [(1, 1, 1), (4, 2, 2), (4, 1, 1)])
def test_the_best_of_the_best_groups_are_chosen(groups: int, top_groups: int, of_group: int) -> None:
    rng = np.random.default_rng(0)
    scores, bias = rng.normal(size=(2, 5, 12)), rng.normal(size=12)
    attrs = {"groups": groups, "top_groups": top_groups, "of_group": of_group}
    sizes = {"b": 2, "s": 5, "e": 12, "k": 3}
    weight, expert = Case("top_k_moved", sizes, attrs).run([scores, bias])
    expected = chosen(scores + bias, 3, groups=groups, top_groups=top_groups, of_group=of_group)
    np.testing.assert_array_equal(expert, expected)
    np.testing.assert_array_equal(weight, np.take_along_axis(scores, expected, axis=-1))


def queued(x: np.ndarray, expert: np.ndarray, num_experts: int, capacity: int) -> tuple[np.ndarray, dict[tuple[int, int, int], int]]:
    """(what stands before each expert, the slot of every (sample, position, choice) that has one), token after token."""
    b, _, h = x.shape
    out, slots, length = np.zeros((num_experts, b, capacity, h)), {}, np.zeros((num_experts, b), int)
    for i, t, j in np.ndindex(expert.shape):
        e = expert[i, t, j]
        if length[e, i] < capacity:
            slots[i, t, j] = length[e, i]
            out[e, i, length[e, i]] = x[i, t]
        length[e, i] += 1
    return out, slots


@pytest.mark.parametrize("capacity", [1, 3, 7])
def test_tokens_queue_in_order_and_what_finds_no_slot_is_dropped(capacity: int) -> None:
    rng = np.random.default_rng(1)
    b, s, h, e, k = 2, 7, 3, 4, 2
    x, weight = rng.normal(size=(b, s, h)), rng.uniform(size=(b, s, k))
    expert = np.argsort(rng.uniform(size=(b, s, e)), axis=-1)[..., :k]
    sizes = {"b": b, "s": s, "h": h, "e": e, "k": k, "c": capacity}
    expected, slots = queued(x, expert, e, capacity)
    (before,) = Case("dispatch", sizes).run([x, expert])
    np.testing.assert_array_equal(before, expected)
    assert (len(slots) == b * s * k) == (capacity == s)
    y = rng.normal(size=before.shape)
    (after,) = Case("combine", sizes).run([y, weight, expert])
    sums = np.zeros_like(x)
    for (i, t, j), slot in slots.items():
        sums[i, t] += weight[i, t, j] * y[expert[i, t, j], i, slot]
    np.testing.assert_allclose(after, sums, rtol=1e-14)

"""The slow twin itself: its gradients against differences of its losses, its random numbers against another cut of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.frontends import load
from tests import reference

SIZES: dict[str, dict[str, Any]] = {
    "gpt2-tiny": {"hidden": 16, "num_heads": 2, "num_layers": 2, "vocab": 19, "max_positions": 8, "attention_dropout": 0.3, "residual_dropout": 0.2},
    "llama-tiny": {"hidden": 16, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2, "vocab": 19, "mlp_hidden": 24, "attention_dropout": 0.3},
}


def setting(name: str, batch: int) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """(graph, parameters, ids, labels) with weights large enough that nothing is nearly linear."""
    rng = np.random.default_rng(5)
    graph = load(name, **SIZES[name]).graph(batch, 8, "float64")
    params = {k: v + rng.normal(0, 0.2, v.shape) for k, v in reference.init(graph, seed=1).items()}
    tokens = rng.integers(0, 19, (batch, 9))
    return graph, params, tokens[:, :-1].copy(), tokens[:, 1:].copy()


@pytest.mark.parametrize("name", SIZES)
def test_gradients_are_the_slopes_of_the_loss(name: str) -> None:
    graph, params, ids, labels = setting(name, batch=2)
    _, grads = reference.step(graph, params, ids, labels, seed=3, step=4)
    rng = np.random.default_rng(6)
    for key in params:
        way = rng.normal(size=params[key].shape)
        way /= np.sqrt((way**2).sum())
        high, low = (reference.step(graph, params | {key: params[key] + h * way}, ids, labels, seed=3, step=4)[0] for h in (1e-5, -1e-5))
        assert (high - low) / 2e-5 == pytest.approx(float((grads[key] * way).sum()), rel=1e-6, abs=1e-9), key


@pytest.mark.parametrize("name", SIZES)
def test_microbatches_draw_what_the_whole_batch_draws(name: str) -> None:
    graph, params, ids, labels = setting(name, batch=4)
    loss, grads = reference.step(graph, params, ids, labels, seed=3, step=4)
    half = load(name, **SIZES[name]).graph(2, 8, "float64")
    parts = [reference.step(half, params, ids[i : i + 2], labels[i : i + 2], seed=3, step=4, first_sample=i) for i in (0, 2)]
    assert loss == pytest.approx(sum(part[0] for part in parts) / 2, rel=1e-12)
    for key, grad in grads.items():
        np.testing.assert_allclose((parts[0][1][key] + parts[1][1][key]) / 2, grad, rtol=1e-9, atol=1e-13)


def test_dropout_depends_on_seed_and_step() -> None:
    graph, params, ids, labels = setting("gpt2-tiny", batch=2)
    losses = [reference.step(graph, params, ids, labels, seed, step)[0] for seed, step in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3

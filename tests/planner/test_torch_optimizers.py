"""Every optimizer against PyTorch's, or, where PyTorch has none, against the formulas of its paper written out again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.ops.adamw8bit import codes
from tests.updates import updates

STEPS = 4
SHAPES = ((48, 32), (32, 48), (96,))


def _draw(shape: tuple[int, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return rng.normal(size=shape), [rng.normal(size=shape) for _ in range(STEPS)]


def _by_torch(maker: Any, start: np.ndarray, grads: list[np.ndarray], max_norm: float, **settings: Any) -> np.ndarray:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    weight = torch.tensor(start, requires_grad=True)
    optimizer = maker([weight], **settings)
    for g in grads:
        weight.grad = torch.tensor(g)
        if max_norm:
            torch.nn.utils.clip_grad_norm_([weight], max_norm)
        optimizer.step()
    return np.asarray(weight.detach().numpy())


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_sgd_and_adafactor_are_pytorchs(shape: tuple[int, ...], max_norm: float) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    start, grads = _draw(shape)
    decay = 0.1 if len(shape) > 1 else 0.0  # vectors are not decayed
    cases: tuple[tuple[Any, dict[str, Any], dict[str, Any]], ...] = (
        (torch.optim.SGD, {"name": "sgd", "momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"name": "sgd", "momentum": 0.0}, {}),
        (torch.optim.Adafactor, {"name": "adafactor"}, {}),
        (torch.optim.Adafactor, {"name": "adafactor", "beta2_decay": -0.5, "d": 2.0, "eps2": 5.0}, {"beta2_decay": -0.5, "d": 2.0, "eps": (None, 5.0)}),
        (torch.optim.AdamW, {"name": "muon", "beta1": 0.8, "beta2": 0.99}, {"betas": (0.8, 0.99)}),
    )
    for maker, ours, theirs in cases:
        found = updates({**ours, "lr": 0.01, "weight_decay": 0.1, "max_norm": max_norm}, start, grads, hidden=False)["w"]
        true = _by_torch(maker, start, grads, max_norm, lr=0.01, weight_decay=decay, **theirs)
        np.testing.assert_allclose(found, true, rtol=1e-10, err_msg=ours["name"])


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_muon_is_pytorchs_but_for_bfloat16(shape: tuple[int, ...], adjust: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch iterates in bfloat16; held in float64 it gives the same numbers."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    start, grads = _draw(shape)
    found = updates({"name": "muon", "lr": 0.02, "adjust": adjust, "max_norm": 0.0}, start, grads)["w"]
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": adjust}
    near = _by_torch(torch.optim.Muon, start, grads, 0.0, **settings)
    assert 0 < np.abs(found - near).max() <= 0.02 * np.abs(near - start).max()
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    np.testing.assert_allclose(found, _by_torch(torch.optim.Muon, start, grads, 0.0, **settings), rtol=1e-10)


def test_what_muon_steps_along_is_nearly_orthogonal() -> None:
    """All singular values of the step lie between 0.5 and 1.5, whatever those of the gradient were."""
    start, grads = _draw((64, 48))
    moved = start - updates({"name": "muon", "lr": 1.0, "weight_decay": 0.0, "adjust": "original", "max_norm": 0.0}, start, grads[:1])["w"]
    values = np.linalg.svd(moved / np.sqrt(64 / 48), compute_uv=False)
    assert 0.5 < values.min() <= values.max() < 1.5


def _lamb(start: np.ndarray, grads: list[np.ndarray], lr: float, decay: float) -> np.ndarray:
    """Algorithm 2 of arXiv:1904.00962 with the identity for its function phi."""
    w, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
        w = w - lr * np.linalg.norm(w) / np.linalg.norm(r + decay * w) * (r + decay * w)
    return w


def test_lamb_is_its_papers() -> None:
    start, grads = _draw((48, 32))
    ours = {"name": "lamb", "lr": 0.01, "weight_decay": 0.1, "max_norm": 0.0}
    np.testing.assert_allclose(updates(ours, start, grads)["w"], _lamb(start, grads, 0.01, 0.1), rtol=1e-12)
    zeros = np.zeros((8, 8))
    assert np.abs(updates(ours, zeros, [grads[0][:8, :8]])["w"]).max() <= 0.01 * (1 + 1e-12)
    np.testing.assert_array_equal(updates(ours, start, [np.zeros_like(start)])["m"], 0.0)


# ---- 8 bits ----------------------------------------------------------------------------------------------------------------------------------------


def _nearest(values: np.ndarray, table: np.ndarray, width: int) -> np.ndarray:
    """What is left of values that are written as codes and a scale for each block of `width` neighbours: an element at a time."""
    out = np.empty_like(values)
    for at in range(0, values.size, width):
        block = values.reshape(-1)[at : at + width]
        scale = np.abs(block).max()
        for i, x in enumerate(block):
            out.reshape(-1)[at + i] = table[np.abs(table - x / scale).argmin()] * scale if scale else 0.0
    return out


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_8_bit_adamw_is_adamw_on_rounded_states(dtype: str) -> None:
    start, grads = _draw((12, 32))
    w = start.astype(dtype)
    typed = [g.astype(dtype) for g in grads]
    found = updates({"name": "adamw8bit", "lr": 0.01, "block": 16, "min_size": 1, "max_norm": 0.0, "beta2": 0.999}, w, typed)
    signed, unsigned = (codes(s).astype(dtype) for s in (True, False))
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(typed, 1):
        m, v = 0.9 * m + (1 - 0.9) * g, 0.999 * v + (1 - 0.999) * g * g
        w = w * (1 - 0.01 * 0.1) - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        m, v = _nearest(m, signed, 16), _nearest(v, unsigned, 16)
    tolerance = 1e-10 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(found["w"], w, rtol=tolerance)
    np.testing.assert_allclose(signed[found["mc"]] * np.repeat(found["ms"], 16, axis=1), m, rtol=tolerance)
    np.testing.assert_allclose(unsigned[found["vc"]] * np.repeat(found["vs"], 16, axis=1), v, rtol=tolerance)
    assert found["mc"].dtype == np.uint8


def test_codes_are_dynamic_trees() -> None:
    """256 different values, dense near zero: seven decades, each cut twice as fine as the one below."""
    signed, unsigned = codes(True), codes(False)
    for table, least in ((signed, -1.0), (unsigned, 0.0)):
        assert len(set(table)) == 256
        assert table[-1] == 1.0
        assert 0.0 in table
        assert least <= table[0]
        assert [int(((table > 10.0**-k) & (table < 10.0 ** (1 - k))).sum()) for k in range(1, 8)] == [
            (64 if table is signed else 128) >> k - 1 for k in range(1, 8)
        ]
    np.testing.assert_array_equal(signed[1:127], -signed[128:254][::-1])


def test_8_bits_follow_32() -> None:
    """A state in a byte costs little: after four steps the weights have gone where AdamW's have, within a few percent of the way."""
    start, grads = _draw((64, 64))
    ours, full = (updates({"name": name, "lr": 0.01, "max_norm": 0.0, "beta2": 0.999}, start, grads)["w"] for name in ("adamw8bit", "adamw"))
    assert 0 < np.linalg.norm(ours - full) <= 0.05 * np.linalg.norm(full - start)

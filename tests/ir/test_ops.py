"""Kernels against plain formulas: attention in blocks, rotary tables, erf, updates, local re-sharding, precision."""

from __future__ import annotations

import ast
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ir.ops
from ir.op import Context
from ir.ops import CATALOGUE, catalogue
from ir.ops.erf import erf
from ir.ops.rotary import frequencies
from ir.ops.tiles import TILE_BYTES


def run(name: str, *ins: Any, at: dict[str, int] | None = None, seed: int = 0, step: int = 0, lr: float | None = None, **attrs: Any) -> Any:
    """The outputs of an operator in arrays of the first float input's dtype; one array where it has one output."""
    op = catalogue(name).for_ranks([a.ndim for a in ins])
    sizes = op.bind([a.shape for a in ins], attrs)
    dtype = next((a.dtype for a in ins if a.dtype.kind == "f"), np.float64)
    outs = [np.full(o.shape(sizes), np.nan, dtype) for o in op.outputs]
    op.kernel(Context(np, attrs, sizes, sizes, at or {}, seed, step, lr), *ins, *outs)
    return outs[0] if len(outs) == 1 else outs


# ---- attention -------------------------------------------------------------------------------------------------------------------------------------


def _plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, r: int, d: int, causal: bool) -> np.ndarray:
    b, s, z = q.shape[0], q.shape[1], k.shape[1]
    heads = q.reshape(b, s, -1, d)
    keys, values = (np.repeat(a.reshape(b, z, -1, d), r, axis=2) for a in (k, v))
    scores = np.einsum("bshd,bzhd->bhsz", heads, keys) / math.sqrt(d)
    if causal:
        scores = np.where(np.arange(z) > np.arange(s)[:, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhsz,bzhd->bshd", weights, values).reshape(q.shape)


@pytest.mark.parametrize(("s", "g", "r"), [(200, 3, 2), (129, 1, 4), (600, 2, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_in_blocks_is_attention(s: int, g: int, r: int, causal: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, s, g * r * 8)), rng.normal(size=(2, s, g * 8)), rng.normal(size=(2, s, g * 8))
    out, _ = run("attention", q, k, v, r=r, d=8, causal=causal)
    np.testing.assert_allclose(out, _plain_attention(q, k, v, r, 8, causal), rtol=1e-12, atol=1e-13)


def test_the_causal_mask_is_the_default() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 5, 4)) for _ in range(3))
    assert (run("attention", q, k, v, r=1, d=4)[0] == run("attention", q, k, v, r=1, d=4, causal=True)[0]).all()


def test_attention_does_not_overflow() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 70, 8)).astype("float32") for _ in range(3))
    out, lse = run("attention", q * 1e4, k * 1e4, v, r=1, d=8, causal=True)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    grads = run("attention.grad", v, q * 1e4, k * 1e4, v, out, lse, r=1, d=8, causal=True)
    assert all(np.isfinite(g).all() for g in grads)


def test_attention_keeps_its_temporaries_small() -> None:
    """All scores would be 134 MB here."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2048, 128)).astype("float32") for _ in range(3))
    out, lse = run("attention", q, k, v, r=1, d=16, causal=True)
    tracemalloc.start()
    run("attention", q, k, v, r=1, d=16, causal=True)
    run("attention.grad", v, q, k, v, out, lse, r=1, d=16, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


def test_attention_drops_a_share_of_the_probabilities_and_keeps_the_mean() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 64, 32)), rng.normal(size=(2, 64, 32)), np.ones((2, 64, 32))
    attrs = {"r": 1, "d": 8, "causal": False, "p": 0.2, "salt": 3}
    out = run("attention", q, k, v, **attrs)[0]
    assert abs(out.mean() - 1.0) < 0.02
    assert out.std() > 0.01
    assert (run("attention", q, k, v, **attrs)[0] == out).all()
    assert (run("attention", q, k, v, step=1, **attrs)[0] != out).all()


# ---- rotary positions ------------------------------------------------------------------------------------------------------------------------------


def test_rope_turns_pairs_by_position() -> None:
    x = np.random.default_rng(0).normal(size=(1, 6, 8))
    out = run("rope", x, d=8, theta=100.0)
    pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * np.arange(6)[:, None] * 100.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(out, np.concatenate([pairs.real, pairs.imag], axis=-1), rtol=1e-12)
    np.testing.assert_allclose(run("rope.dx", out, d=8, theta=100.0), x, rtol=1e-12)


def test_a_factor_alone_slows_every_wave() -> None:
    np.testing.assert_allclose(frequencies({"theta": 1e4, "factor": 4.0}, 16), frequencies({"theta": 1e4}, 16) / 4.0)


def test_llama_3_slows_long_waves_only() -> None:
    attrs = {"theta": 500000.0, "factor": 8.0, "low": 1.0, "high": 4.0, "original": 8192}
    plain, slowed = frequencies({"theta": 500000.0}, 128), frequencies(attrs, 128)
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(slowed[wavelength < 2048], plain[wavelength < 2048])
    np.testing.assert_allclose(slowed[wavelength > 8192], plain[wavelength > 8192] / 8.0)
    between = (wavelength > 2048) & (wavelength < 8192)
    assert between.any()
    assert ((slowed < plain) & (slowed > plain / 8.0))[between].all()


# ---- activations -----------------------------------------------------------------------------------------------------------------------------------


def test_erf_is_erf() -> None:
    x = np.concatenate([np.linspace(-8, 8, 4001), [0.0, 1e-300, -1e-9, 30.0, -np.inf, np.inf]])
    true = np.array([math.erf(v) for v in x])
    assert np.abs(erf(np, x) - true).max() < 2e-15
    assert np.abs(erf(np, x.astype("float32")) - true).max() < 5e-7


def test_activations_do_not_overflow() -> None:
    x = np.array([-1e30, -1e4, -90.0, 0.0, 90.0, 1e4], "float32")
    for name, attrs in (("silu", {}), ("gelu", {"approximate": "none"})):
        np.testing.assert_allclose(run(name, x, **attrs), np.maximum(x, 0.0), atol=1e-6)
    np.testing.assert_allclose(run("gelu", x[1:], approximate="tanh"), np.maximum(x[1:], 0.0), atol=1e-6)


def test_a_kernel_of_many_tiles_is_the_kernel() -> None:
    x = np.random.default_rng(0).normal(size=(3, TILE_BYTES // 8 + 5))
    np.testing.assert_allclose(run("silu", x), x / (1 + np.exp(-x)), rtol=1e-12)
    np.testing.assert_allclose(run("softmax", x).sum(-1), 1.0)
    assert run("sum_squares", x) == pytest.approx((x**2).sum(), rel=1e-13)


# ---- precision -------------------------------------------------------------------------------------------------------------------------------------


def test_sums_in_float32_keep_six_digits() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 1.5, size=(4, 20000, 32)).astype("float32")
    exact = x.astype("float64")
    np.testing.assert_allclose(run("bias.dc", x), exact.sum((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(run("total", x[..., 0], factor=1.0), exact[..., 0].sum(), rtol=1e-6)
    np.testing.assert_allclose(run("sum_squares", x), (exact**2).sum(), rtol=1e-6)
    one = np.ones((4, 20000), "float32")
    dg, dc = run("layer_norm.dgc", x, x, np.zeros_like(one), one)
    np.testing.assert_allclose(dg, (exact**2).sum((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(dc, exact.sum((0, 1)), rtol=1e-6)


def test_equal_rows_of_a_table_are_added() -> None:
    ids, dout = np.array([[3, 1, 3], [3, 0, 1]]), np.random.default_rng(0).normal(size=(2, 3, 4))
    expected = np.zeros((5, 4))
    np.add.at(expected, ids.ravel(), dout.reshape(-1, 4))
    np.testing.assert_allclose(run("embedding.dtable", ids, dout, v=5), expected, rtol=1e-14)


# ---- updates ---------------------------------------------------------------------------------------------------------------------------------------


def _steps(name: str, weights: np.ndarray, grads: list[np.ndarray], state: int, **attrs: Any) -> np.ndarray:
    """The weights after updates in place, the outputs being the inputs."""
    op = catalogue(name).for_ranks([1, 0, *(1,) * (1 + state)])
    arrays = [weights.copy(), *(np.zeros_like(weights) for _ in range(state))]
    sizes = {"b": len(weights)}
    for step, g in enumerate(grads):
        op.kernel(Context(np, attrs, sizes, sizes, {}, step=step), g, np.array((g**2).sum()), *arrays, *arrays)
    return arrays[0]


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e9])
def test_updates_are_those_of_pytorch(max_norm: float) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=300), [rng.normal(size=300) for _ in range(4)]
    makers = (
        ("adamw", 2, {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}, {"betas": (0.8, 0.95), "eps": 1e-6}, torch.optim.AdamW),
        ("sgd", 1, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9}, torch.optim.SGD),
    )
    for name, state, attrs, theirs, maker in makers:
        weight = torch.tensor(start, requires_grad=True)
        optimizer = maker([weight], lr=0.01, weight_decay=0.1, **theirs)
        for g in grads:
            weight.grad = torch.tensor(g)
            if max_norm:
                torch.nn.utils.clip_grad_norm_([weight], max_norm)
            optimizer.step()
        np.testing.assert_allclose(_steps(name, start, grads, state, max_norm=max_norm, **attrs), weight.detach().numpy(), rtol=1e-12)


def test_adamw_follows_its_formula() -> None:
    w, g = np.array([2.0, -1.0]), np.array([0.3, 0.4])
    m, v = 0.1 * g, 0.001 * g**2
    expected = w * (1 - 0.01 * 0.1) - 0.01 * (m / 0.1) / (np.sqrt(v / 0.001) + 1e-8)
    np.testing.assert_allclose(_steps("adamw", w, [g], 2, lr=0.01, weight_decay=0.1), expected, rtol=1e-12)
    clipped = g * (0.1 / (0.5 + 1e-6))
    np.testing.assert_allclose(_steps("sgd", w, [g], 1, lr=0.01, max_norm=0.1), w - 0.01 * clipped, rtol=1e-12)


def test_the_rate_of_the_context_goes_first_even_when_it_is_zero() -> None:
    g, w, zero = np.ones(3), np.ones(3), np.zeros(3)
    op, sizes = catalogue("sgd").for_ranks([1, 0, 1, 1]), {"b": 3}
    for rate, expected in ((None, 0.5), (0.25, 0.75), (0.0, 1.0)):
        outs = np.empty(3), np.empty(3)
        op.kernel(Context(np, {"lr": 0.5}, sizes, sizes, {}, lr=rate), g, np.array(3.0), w, zero, *outs)
        assert (outs[0] == expected).all()


def test_inputs_are_left_alone_and_cast_changes_the_dtype() -> None:
    g, w, zero = np.ones(3), np.ones(3), np.zeros(3)
    run("adamw", g, np.array(3.0), w, zero, zero, step=0, lr=0.1)
    assert (g == 1).all()
    assert (w == 1).all()
    assert (zero == 0).all()
    out = np.empty(3, "float32")
    catalogue("cast").for_ranks([1]).kernel(Context(np, {"dtype": "float32"}, {"b": 3}, {"b": 3}, {}), w * 1.1, out)
    assert (out == np.float32(1.1)).all()


def test_operators_that_say_so_copy_their_input() -> None:
    copying = [op for op in CATALOGUE.values() if op.copies]
    assert {"add.dx", "bias.dx"} <= {op.name for op in copying}
    for op in copying:
        x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)[: max(3, len(op.inputs[0].dims))])
        np.testing.assert_array_equal(run(op.name, x), x)


# ---- local re-sharding -----------------------------------------------------------------------------------------------------------------------------


def _box(name: str, x: np.ndarray, shape: tuple[int, ...], **attrs: Any) -> np.ndarray:
    out = np.full(shape, np.nan)
    CATALOGUE[name].kernel(Context(np, attrs, {}, {}, {}), x, out)
    return out


def test_local_boxing() -> None:
    whole = np.random.default_rng(0).normal(size=(6, 5))
    here, part = [[2, 6], [0, 5]], [[3, 5], [1, 4]]  # regions are lists after a program was read from JSON
    np.testing.assert_array_equal(_box("box.slice", whole[2:6], (2, 3), src_region=here, dst_region=part), whole[3:5, 1:4])
    padded = _box("box.pad", whole[3:5, 1:4], (4, 5), src_region=part, dst_region=here)
    np.testing.assert_array_equal(padded[1:3, 1:4], whole[3:5, 1:4])
    assert np.count_nonzero(padded) == 6
    np.testing.assert_array_equal(_box("box.zero", whole, (6, 5), src_region=here, dst_region=here), whole)
    assert (_box("box.zero", whole, (6, 5), src_region=here, dst_region=here, keep=False) == 0).all()
    assert _box("box.slice", np.array(4.0), (), src_region=[], dst_region=[]) == 4.0


# ---- cupy ------------------------------------------------------------------------------------------------------------------------------------------


def _taken_from_xp() -> set[str]:
    """Names of what kernels take from `xp`, in every file that has kernels."""
    found = set()
    package = Path(ir.ops.__file__).parent
    for path in (*sorted(package.glob("*.py")), package.parent / "random.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = node.value
                if (isinstance(owner, ast.Name) and owner.id == "xp") or (isinstance(owner, ast.Attribute) and owner.attr == "xp"):
                    found.add(node.attr)
    return found


def test_cupy_has_every_function_that_kernels_use() -> None:
    """Kernels are made of array functions alone: there is no CUDA source of our own to compile. The values are compared where there is a GPU."""
    cupy = pytest.importorskip("cupy", reason="needs cupy")
    names = _taken_from_xp()
    assert {"matmul", "exp", "tanh", "uint64"} <= names
    assert [name for name in sorted(names) if not hasattr(cupy, name)] == []

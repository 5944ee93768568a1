"""Muon: momentum whose matrix is brought near to an orthogonal one before it is a step (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon).

The rule is PyTorch's (`torch.optim.Muon`), but for the dtype of the iteration, which here is the state's and there bfloat16. Momentum and update
are elementwise; the iteration between them needs the whole matrix, and is the one operator of the three that no split of it may touch. Of a stack of matrices
(`ir.ops.stacking`) only `members` of the slots, from `first` on, hold one; those that do not cost nothing.
"""

from __future__ import annotations

import math
from typing import Any

from ir.op import Attrs, Context, Sizes, op
from ir.ops.optimizer import clip_of, rate_of
from ir.ops.tiles import each, flat

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial of degree 5 that every round applies to all singular values; Jordan et al. chose them for the steepest slope at 0."""


def muon_direction(c: Context, g: Any, norm2: Any, m: Any, d: Any) -> None:
    """The momentum after this step, or as Nesterov looks one step ahead."""
    clip, momentum = clip_of(c, norm2, g), float(c.attrs.get("momentum", 0.95))
    for grad, mean, into in flat(c, g, m, d):
        part = grad * clip
        c.xp.multiply(mean, momentum, out=into)
        into += part * (1.0 - momentum)
        if c.attrs.get("nesterov", True):
            into *= momentum
            into += part * (1.0 - momentum)


def orthogonalize(c: Context, d: Any, o: Any) -> None:
    """Newton-Schulz rounds: o = U S V^T of d = U S' V^T with every value of S near 1."""
    slope, cubic, quintic = c.attrs.get("coefficients", COEFFICIENTS)
    filled = _filled(c.sizes, c.attrs, c.at, c.total)
    if filled is not None:
        o[...] = 0.0
    pairs = ((d, o),) if filled is None else ((d[j], o[j]) for j in filled)
    for source, into in (pair for a, b in pairs for pair in zip(a.reshape(-1, *d.shape[-2:]), b.reshape(-1, *o.shape[-2:]), strict=True)):
        x = source.T if source.shape[0] > source.shape[1] else source
        x = x / c.xp.maximum(c.xp.sqrt(c.xp.vdot(x, x)), float(c.attrs.get("eps", 1e-7))).astype(x.dtype)
        for _ in range(int(c.attrs.get("ns_steps", 5))):
            gram = x @ x.T
            inner = gram @ gram
            inner *= quintic
            gram *= cubic
            inner += gram
            x = inner @ x + x * slope
        c.xp.copyto(into, x.T if source.shape[0] > source.shape[1] else x)


def muon(c: Context, g: Any, norm2: Any, o: Any, w: Any, m: Any, w2: Any, m2: Any) -> None:
    """`adjust` says how the rate follows the matrix's shape: "original", or "match_rms_adamw", under which AdamW's rate fits."""
    clip, momentum, rate = clip_of(c, norm2, g), float(c.attrs.get("momentum", 0.95)), rate_of(c)
    n, k = c.total["n"], c.total["m"]
    grown = rate * (math.sqrt(max(1.0, n / k)) if c.attrs.get("adjust", "original") == "original" else 0.2 * math.sqrt(max(n, k)))
    decay = 1.0 - rate * float(c.attrs.get("weight_decay", 0.0))
    for grad, step, weight, mean, into_w, into_m in flat(c, g, o, w, m, w2, m2):
        c.xp.multiply(weight, decay, out=into_w)
        into_w -= step * grown
        c.xp.multiply(mean, momentum, out=into_m)
        into_m += grad * clip * (1.0 - momentum)


def _filled(sizes: Sizes, attrs: Attrs, at: Sizes, total: Sizes) -> list[int] | None:
    """Which of this rank's slots hold matrices; None where all do."""
    if "members" not in attrs:
        return None
    first, slots = int(attrs["first"]), total["b"]
    return [j for j in range(sizes["b"]) if (at.get("b", 0) + j - first) % slots < int(attrs["members"])]


def _gemm(sizes: Sizes, attrs: Attrs) -> tuple[int, ...]:
    """Three products a round: with both sides twice, and of the smaller side alone once, laid end to end.

    Of a stack that is not full it is a rank's mean, since owners take turns.
    """
    small, large = sorted((sizes["n"], sizes["m"]))
    matrices = math.prod(size for label, size in sizes.items() if label not in ("n", "m"))
    length = 2 * large + small
    if "members" in attrs:
        length = -(-length * int(attrs["members"]) // int(attrs["slots"]))
    return int(attrs.get("ns_steps", 5)) * matrices, small, small, length


def _flops(sizes: Sizes, attrs: Attrs) -> float:
    return 2.0 * math.prod(_gemm(sizes, attrs))


def _flops_at(sizes: Sizes, attrs: Attrs, at: Sizes, total: Sizes) -> float:
    filled = _filled(sizes, attrs, at, total)
    plain = {k: v for k, v in attrs.items() if k != "members"}
    return _flops(sizes if filled is None else {**sizes, "b": len(filled)}, plain)


OPS = (
    # attrs: lr, momentum, nesterov, adjust, ns_steps, eps, weight_decay, max_norm
    op("muon_direction(g[... n m], norm2[], m[... n m]) -> d[... n m]", muon_direction, linear=["g m"], stepped=True, flops=each(6)),
    op("orthogonalize(d[... n m]) -> o[... n m]", orthogonalize, whole="n m", flops=_flops, gemm=_gemm, flops_at=_flops_at),
    op("muon(g[... n m], norm2[], o[... n m], w[... n m], m[... n m]) -> w2[... n m], m2[... n m]", muon,
       linear=["g o w m", "g m -> m2", "o w -> w2"], stepped=True, flops=each(8)),
)  # fmt: skip

__all__ = ["COEFFICIENTS", "OPS", "muon", "muon_direction", "orthogonalize"]

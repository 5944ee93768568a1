"""LAMB: Adam's step, scaled for every tensor by the norm of its weights over the norm of the step (You et al., 2020, arXiv:1904.00962, algorithm 2).

The norms are of whole tensors: where a tensor is split, each rank's squares are a P that is summed before the update.
"""

from __future__ import annotations

import math
from typing import Any

from ir.op import Context, op
from ir.ops.optimizer import clip_of, rate_of
from ir.ops.tiles import each, flat


def _step(c: Context, grad: Any, weight: Any, mean: Any, square: Any, clip: Any) -> tuple[Any, Any, Any]:
    """(the step before it is scaled, new mean, new mean square) of a piece; the decay is part of the step."""
    beta1, beta2, eps = (float(c.attrs.get(name, default)) for name, default in (("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-6)))
    t = c.step + 1
    part = grad * clip
    new_mean = mean * beta1
    new_mean += part * (1.0 - beta1)
    part *= part
    part *= 1.0 - beta2
    part += square * beta2
    root = c.xp.sqrt(part)
    root *= 1.0 / math.sqrt(1.0 - beta2**t)
    root += eps
    step = new_mean / root
    step *= 1.0 / (1.0 - beta1**t)
    step += weight * float(c.attrs.get("weight_decay", 0.0))
    return step, new_mean, part


def sums_of_squares(c: Context, norms: Any, weights: Any, steps: Any) -> None:
    """Writes what this rank has of the vector (weights, steps)."""
    first = c.at.get("pair", 0)
    for i, value in enumerate((weights, steps)[first : first + len(norms)]):
        norms[i] = value


def lamb_norms(c: Context, g: Any, norm2: Any, w: Any, m: Any, v: Any, norms: Any) -> None:
    clip, weights, steps = clip_of(c, norm2, g), 0.0, 0.0
    for grad, weight, mean, square in flat(c, g, w, m, v):
        step, _, _ = _step(c, grad, weight, mean, square, clip)
        weights = weights + c.xp.vdot(weight, weight)
        steps = steps + c.xp.vdot(step, step)
    sums_of_squares(c, norms, weights, steps)


def lamb(c: Context, g: Any, norm2: Any, norms: Any, w: Any, m: Any, v: Any, w2: Any, m2: Any, v2: Any) -> None:
    """A tensor of zeros, or one whose step is zero, takes Adam's step as it is."""
    clip, weights, steps = clip_of(c, norm2, g), norms[0], norms[1]
    known = (weights > 0) & (steps > 0)
    ratio = c.xp.where(known, c.xp.sqrt(weights / c.xp.where(known, steps, 1.0)), 1.0).astype(g.dtype) * rate_of(c)
    for grad, weight, mean, square, into_w, into_m, into_v in flat(c, g, w, m, v, w2, m2, v2):
        step, new_mean, new_square = _step(c, grad, weight, mean, square, clip)
        step *= ratio
        c.xp.subtract(weight, step, out=into_w)
        c.xp.copyto(into_m, new_mean)
        c.xp.copyto(into_v, new_square)


OPS = (
    # attrs: beta1, beta2, eps, weight_decay, max_norm; pair = 2: the squares of the weights and those of the steps
    op("lamb_norms(g[...], norm2[], w[...], m[...], v[...]) -> norms[pair]", lamb_norms, sums="...", stepped=True, flops=each(9)),
    op("lamb(g[...], norm2[], norms[pair], w[...], m[...], v[...]) -> w2[...], m2[...], v2[...]", lamb, whole="pair", stepped=True,
       flops=each(16, without=("pair",))),
)  # fmt: skip

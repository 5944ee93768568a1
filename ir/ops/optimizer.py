"""Updates of parameters, in place: the outputs may be the very arrays of the inputs they renew. `norm2` is the global sum of squared gradients.

The rules are PyTorch's (`torch.optim.AdamW`, `torch.optim.SGD`, `torch.nn.utils.clip_grad_norm_`), step count from 1. Operators that one update takes after
another (`planner.optimizers`) call the same thing by the same name: `g`, `w` and the states, and what the one gives and the other reads.
"""

from __future__ import annotations

import math
from typing import Any

from ir.op import Context, op
from ir.ops.tiles import each, flat


def rate_of(c: Context) -> float:
    """The learning rate of this step."""
    return float(c.attrs["lr"] if c.lr is None else c.lr)


def clip_of(c: Context, norm2: Any, like: Any) -> Any:
    """What gradients are multiplied by: min(1, max_norm / (norm + 1e-6)), an array without dims; 1.0 without clipping."""
    max_norm = float(c.attrs.get("max_norm", 0.0))
    if max_norm <= 0.0:
        return 1.0
    return c.xp.minimum(1.0, max_norm / (c.xp.sqrt(norm2) + 1e-6)).astype(like.dtype)


def adamw(c: Context, g: Any, norm2: Any, w: Any, m: Any, v: Any, w2: Any, m2: Any, v2: Any) -> None:
    """Loshchilov and Hutter (arXiv:1711.05101): the decay is not part of the gradient."""
    beta1, beta2, eps = (float(c.attrs.get(name, default)) for name, default in (("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8)))
    rate, clip, t = rate_of(c), clip_of(c, norm2, g), c.step + 1
    unbias2 = math.sqrt(1.0 - beta2**t)
    for grad, weight, mean, square, into_w, into_m, into_v in flat(c, g, w, m, v, w2, m2, v2):
        part = grad * clip
        c.xp.multiply(square, beta2, out=into_v)
        root = part * part
        root *= 1.0 - beta2
        into_v += root
        c.xp.multiply(mean, beta1, out=into_m)
        part *= 1.0 - beta1
        into_m += part
        c.xp.sqrt(into_v, out=root)
        root *= 1.0 / unbias2
        root += eps
        c.xp.divide(into_m, root, out=part)
        part *= rate / (1.0 - beta1**t)
        c.xp.multiply(weight, 1.0 - rate * float(c.attrs.get("weight_decay", 0.0)), out=into_w)
        into_w -= part


def sgd(c: Context, g: Any, norm2: Any, w: Any, m: Any, w2: Any, m2: Any) -> None:
    """The decay is added to the gradient, the momentum is not damped; Nesterov's looks one momentum step ahead."""
    rate, clip = rate_of(c), clip_of(c, norm2, g)
    momentum, decay = float(c.attrs.get("momentum", 0.0)), float(c.attrs.get("weight_decay", 0.0))
    for grad, weight, mean, into_w, into_m in flat(c, g, w, m, w2, m2):
        part = grad * clip
        part += weight * decay
        c.xp.multiply(mean, momentum, out=into_m)
        into_m += part
        if c.attrs.get("nesterov"):
            part += into_m * momentum
            part *= rate
        else:
            c.xp.multiply(into_m, rate, out=part)
        c.xp.subtract(weight, part, out=into_w)


def plain_sgd(c: Context, g: Any, norm2: Any, w: Any, w2: Any) -> None:
    """Without momentum there is no state."""
    rate, clip, decay = rate_of(c), clip_of(c, norm2, g), float(c.attrs.get("weight_decay", 0.0))
    for grad, weight, into_w in flat(c, g, w, w2):
        part = grad * clip
        part += weight * decay
        part *= rate
        c.xp.subtract(weight, part, out=into_w)


def cast(c: Context, x: Any, out: Any) -> None:
    c.xp.copyto(out, x, casting="unsafe")


OPS = (
    # attrs: lr (unless the context has one), beta1, beta2, eps, weight_decay, max_norm (0: no clipping); the step counts from the context
    op("adamw(g[...], norm2[], w[...], m[...], v[...]) -> w2[...], m2[...], v2[...]", adamw, flops=each(15)),
    # attrs: lr, momentum, nesterov, weight_decay, max_norm
    op("sgd(g[...], norm2[], w[...], m[...]) -> w2[...], m2[...]", sgd, linear=["g w m"], flops=each(7)),
    op("plain_sgd(g[...], norm2[], w[...]) -> w2[...]", plain_sgd, linear=["g w"], flops=each(5)),
    op("cast(x[...]) -> out[...]", cast, linear=["x"], flops=each(0)),  # attrs: dtype
)

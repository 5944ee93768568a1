"""Updates of parameters, in place: the outputs may be the very arrays of the inputs they renew. `norm2` is the global sum of squared gradients."""

from __future__ import annotations

from typing import Any

from ir.op import op


def todo(*_: Any) -> None:
    raise NotImplementedError


OPS = (
    # attrs: lr (unless the context has one), beta1, beta2, eps, weight_decay, max_norm (0: no clipping); the step counts from the context
    op("adamw(g[...], norm2[], w[...], m[...], v[...]) -> w2[...], m2[...], v2[...]", todo),
    # attrs: lr, momentum, weight_decay, max_norm
    op("sgd(g[...], norm2[], w[...], m[...]) -> w2[...], m2[...]", todo),
    op("cast(x[...]) -> out[...]", todo, linear=["x"]),  # attrs: dtype
)

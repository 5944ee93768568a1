"""Rotary positions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ir.op import Attrs, Context, op
from ir.ops.tiles import each


def frequencies(attrs: Attrs, d: int) -> Any:
    """float64 [d / 2]: radians a position turns each pair; Su et al. (arXiv:2104.09864).

    `factor` alone slows them all (linear interpolation of positions, Chen et al., arXiv:2306.15595). With `original` only the slow ones are slowed: as
    Llama 3 does, wavelengths above original / low by `factor`, below original / high not at all, between them smoothly; or, with `fast` and `slow`, as YaRN
    does (Peng et al., arXiv:2309.00071), with a ramp over the pairs that turn between `slow` and `fast` times in `original` positions.
    """
    turn = float(attrs["theta"]) ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    if not attrs.get("factor"):
        return turn
    if "original" not in attrs:
        return turn / float(attrs["factor"])
    share = _yarn_share(attrs, d) if "fast" in attrs else _llama3_share(attrs, turn)
    return turn * (share + (1.0 - share) / float(attrs["factor"]))


def _llama3_share(attrs: Attrs, turn: Any) -> Any:
    periods = float(attrs["original"]) * turn / (2.0 * math.pi)
    low, high = float(attrs["low"]), float(attrs["high"])
    return np.clip((periods - low) / (high - low), 0.0, 1.0)


def _yarn_share(attrs: Attrs, d: int) -> Any:
    """How much of each frequency stays as it is."""
    first, last = (
        d * math.log(attrs["original"] / (turns * 2.0 * math.pi)) / (2.0 * math.log(attrs["theta"])) for turns in (float(attrs["fast"]), float(attrs["slow"]))
    )
    if attrs.get("truncate", True):
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, d - 1.0)
    ramp = (np.arange(d // 2, dtype=np.float64) - first) / (last - first if last != first else 0.001)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def _rotate(c: Context, x: Any, out: Any, sign: float) -> None:
    xp, d, attrs = c.xp, c.sizes["d"], c.attrs
    turned = attrs.get("turned", d)
    b, s, half = x.shape[0], x.shape[1], turned // 2
    positions = np.concatenate([np.arange(*run, dtype=np.float64) for run in c.runs()])
    angle = positions[:, None] * frequencies(attrs, turned)
    amplitude = attrs.get("amplitude", 1.0)
    cos, sin = (xp.asarray((amplitude * a).astype(x.dtype))[:, None, :] for a in (np.cos(angle), sign * np.sin(angle)))
    start = d - turned if attrs.get("last", False) else 0
    if turned < d:
        xp.copyto(out, x)
    # the two elements of a pair stand beside each other, or half of what is turned apart
    left, right = (
        (slice(start, start + turned, 2), slice(start + 1, start + turned, 2))
        if attrs.get("interleaved", False)
        else (slice(start, start + half), slice(start + half, start + turned))
    )
    for sample in range(b):
        source, target = x[sample].reshape(s, -1, d), out[sample].reshape(s, -1, d)
        xp.multiply(source[:, :, left], cos, out=target[:, :, left])
        target[:, :, left] -= source[:, :, right] * sin
        xp.multiply(source[:, :, right], cos, out=target[:, :, right])
        target[:, :, right] += source[:, :, left] * sin


def rope(c: Context, x: Any, out: Any) -> None:
    _rotate(c, x, out, 1.0)


def rope_dx(c: Context, dout: Any, dx: Any) -> None:
    _rotate(c, dout, dx, -1.0)


OPS = (
    # attrs: d, theta; for linear scaling factor, for Llama 3's factor, low, high, original, for YaRN's factor, original, fast, slow, truncate; turned (how many
    # elements of a head, absent: all), last (they are the last of the head, not the first), interleaved (pairs side by side), amplitude (of cos and sin)
    op("rope(x[b s (h d)]) -> out[b s (h d)]", rope, whole="d", linear=["x"], grads=("rope.dx",), flops=each(3)),
    op("rope.dx(dout[b s (h d)]) -> dx[b s (h d)]", rope_dx, whole="d", linear=["dout"], flops=each(3)),
)  # fmt: skip

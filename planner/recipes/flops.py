"""Model flops of a training step by the convention that is named, and the utilisation that follows.

Conventions: attention of a causal model counts half of all pairs (`causal`) or all (`full`); recomputation counts (`hardware`) or does not (`model`).

>>> from planner.recipes.run import Shape
>>> attention_flops(hidden=4096, seq=4096, causal=True), attention_flops(hidden=4096, seq=4096, causal=False)
(412316860416, 824633720832)
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.errors import InputError
from planner.recipes.run import Shape
from simulator.profile import gpu_profile


@dataclass(frozen=True, slots=True)
class Flops:
    """Flops and what they count, in words."""

    value: int
    convention: str


def attention_flops(hidden: int, seq: int, causal: bool, window: int = 0) -> int:
    """Forward and backward of one layer's scores and values over one sequence; `hidden` = heads x size of a head. A window sees that many tokens at most."""
    pairs = seq * seq // (2 if causal else 1)
    if causal and 0 < window < seq:
        pairs = seq * window - window * (window - 1) // 2
    return 3 * 4 * pairs * hidden


def train_flops(shape: Shape, seq: int, batch: int = 1, causal: bool = True, window: int = 0, window_layers: int = 0) -> Flops:
    """One step's model flops, three times the forward: products of weights, attention, head; a token passes `topk` experts; the router is left out.

    `window_layers` of the layers see `window` tokens. Recomputation does not count.
    """
    experts = shape.num_expert_layers
    mlps = (shape.layers - experts) * shape.mlp_params(shape.ffn) + experts * shape.mlp_params(shape.moe_ffn) * (shape.topk + shape.shared_experts)
    products = 6 * seq * (shape.layers * shape.attention_params + mlps + shape.vocab * shape.hidden)
    width = shape.heads * shape.head_dim
    wide = (shape.layers - window_layers) * attention_flops(width, seq, causal)
    narrow = window_layers * attention_flops(width, seq, causal, window)
    pairs = "half of all pairs" if causal else "all pairs"
    return Flops(batch * (products + wide + narrow), f"forward x 3, attention over {pairs}, recomputation not counted, router not counted")


def mfu(flops_per_s: float, gpu: str, dtype: str = "bfloat16") -> float:
    """Share of the dense peak; InputError where the GPU is not known, or where the share is above 1, so that one of the figures is wrong.

    >>> round(mfu(1.04 * 312e12, "H100-SXM"), 3)
    0.328
    """
    name, profile = gpu_profile(gpu)
    peak = profile["flops_per_s"].get(dtype)
    if peak is None:
        raise InputError(f"{name} has no {dtype} peak, so there is no utilisation of it; it has {', '.join(profile['flops_per_s'])}")
    share = flops_per_s / peak
    if share > 1:
        raise InputError(f"{flops_per_s / 1e12:.1f} Tflop/s are {share:.2f} of the dense {dtype} peak of {name} ({peak / 1e12:g}): peak and profile mismatch")
    return float(share)

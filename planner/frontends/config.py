"""The facts about a decoder-only transformer that its graph and its parameters follow from, whatever family they were read from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ir.errors import InputError

MAX_SIZE = 1 << 31
"""No dim of a tensor is longer: indices are 32 bits wide in what executes it."""

MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the base `theta`, and how frequencies are stretched for longer sequences.

    `factor` alone divides every position (linear interpolation); with `low`, `high` and `original` it is Llama 3's scaling by wavelength
    (Hugging Face's `rope_scaling` of type `llama3`). `factor` 1 is plain RoPE.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    low: float = 0.0
    high: float = 0.0
    original: int = 0

    @property
    def attrs(self) -> dict[str, Any]:
        """What the operator `rope` is told, besides the size of a head."""
        if self.original:
            return {"theta": self.theta, "factor": self.factor, "low": self.low, "high": self.high, "original": self.original}
        return {"theta": self.theta} | ({"factor": self.factor} if self.factor != 1.0 else {})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Sizes in elements; `rope` None means learned positions.

    `num_heads` query heads share `num_kv_heads` key and value heads, each of `head_dim`. `norm` is `layer` or `rms`; `activation` is `gelu` (exact),
    `gelu_tanh` or `silu`, `gated` whether it multiplies a second projection. `window`: no query sees further back; 0 without limit. `attention_scale`
    multiplies the scores; `scale_by_layer` divides them by the number of the layer, counted from 1. `init_std` is the deviation of the weights' start,
    `init_residual_std` that of the projections that add to the residual.
    """

    family: str
    vocab: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_hidden: int
    max_positions: int
    norm: str
    norm_eps: float
    activation: str
    gated: bool
    rope: Rope | None
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    window: int = 0
    attention_scale: float = 0.0
    scale_by_layer: bool = False
    embed_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    init_std: float = 0.02
    init_residual_std: float = 0.02

    @property
    def fingerprint(self) -> str:
        """Changes when anything that the graph depends on changes; 16 hexadecimal digits."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check(self) -> ModelConfig:
        """Returns the config itself, or raises InputError naming the first field that is wrong, its value and the legal ones."""
        for name in ("vocab", "hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_hidden", "max_positions"):
            check_size(name, getattr(self, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE)
        for name in ("embed_dropout", "attention_dropout", "residual_dropout"):
            check_number(name, getattr(self, name), "a probability of 0 or more and less than 1", lambda p: 0 <= p < 1)
        for name in ("norm_eps", "attention_scale"):
            check_number(name, getattr(self, name), "a number above 0", lambda x: x > 0)
        for name in ("init_std", "init_residual_std"):
            check_number(name, getattr(self, name), "a number of 0 or more", lambda x: x >= 0)
        if self.num_heads % self.num_kv_heads:
            legal = [n for n in range(1, min(self.num_heads, 1024) + 1) if self.num_heads % n == 0]
            raise InputError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly; num_kv_heads can be one of {legal}")
        if self.rope is not None and self.head_dim % 2:
            raise InputError(f"head_dim is {self.head_dim}: rotary positions turn pairs of elements, so it must be even")
        return self


def check_size(name: str, value: Any, most: int = MAX_SIZE) -> int:
    """The value, if it is a whole number from 1 to `most`; InputError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(f"{name} is {reprlib.repr(value)}; it must be a whole number from 1 to {most}")
    return value


def check_number(name: str, value: Any, what: str, legal: Callable[[float], bool]) -> float:
    """The value as a float, if it is a finite number for which `legal` holds; InputError saying it must be `what` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not legal(value):
        raise InputError(f"{name} is {reprlib.repr(value)}; it must be {what}")
    return float(value)

"""A config's keys read one by one with their type checked, and what several families spell alike: heads, rotary positions, windows."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from ir.errors import InputError
from planner.frontends.config import MAX_LAYERS, PROBABILITY, Rope, check_number, check_size, divisors, windows

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "silu": "silu", "swish": "silu", "relu": "relu",
}  # fmt: skip

LAYER_KEYS = ("n_layer", "num_hidden_layers", "num_layers", "num_decoder_layers")


class Keys:
    """The object of a config.json; null counts as absent, as in `transformers`."""

    def __init__(self, data: Mapping[str, Any], family: str) -> None:
        self.data, self.family = data, family

    def size(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None and default is None:
            raise InputError(f"the size `{key}` is missing; a {self.family} config.json has it")
        return check_size(key, default if value is None else value, MAX_LAYERS if key in LAYER_KEYS else 1 << 31)

    def count(self, key: str, default: int) -> int:
        """A whole number that may be 0."""
        value = self.data.get(key)
        return 0 if value == 0 and value is not False else self.size(key, default) if value is not None or default else 0

    def number(self, key: str, default: float, what: str, legal: Callable[[float], bool]) -> float:
        value = self.data.get(key)
        return check_number(key, default if value is None else value, what, legal)

    def probability(self, key: str, default: float) -> float:
        return self.number(key, default, *PROBABILITY)

    def above_0(self, key: str, default: float) -> float:
        return self.number(key, default, "a number above 0", lambda x: x > 0)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{key} is {reprlib.repr(value)}; it must be true or false")
        return default if value is None else value

    def word(self, key: str, default: str, legal: tuple[str, ...]) -> str:
        value = self.data.get(key)
        if value is not None and value not in legal:
            raise InputError(f"{key} is {reprlib.repr(value)}; headrace builds {', '.join(legal)}")
        return default if value is None else str(value)

    def activation(self, key: str, default: str) -> str:
        value = self.data.get(key)
        name = default if value is None else value
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise InputError(f"{key} is {reprlib.repr(name)}, an activation that headrace does not know; known are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def std(self, key: str = "initializer_range") -> float:
        return self.number(key, 0.02, "a number of 0 or more", lambda x: x >= 0)

    def refuse(self, key: str, why: str) -> None:
        """InputError where the flag is set."""
        if self.flag(key, False):
            raise InputError(f"`{key}` is set; {why}")


# ---- heads -----------------------------------------------------------------------------------------------------------------------------------------


def head_dim(k: Keys, hidden_key: str = "hidden_size", heads_key: str = "num_attention_heads") -> int:
    """The size of a head: its share of the hidden size."""
    hidden, heads = k.size(hidden_key), k.size(heads_key)
    if hidden % heads:
        near = sorted(sorted(divisors(hidden), key=lambda n: (abs(n - heads), n))[:5])
        raise InputError(f"{hidden_key} = {hidden} is not divisible by {heads_key} = {heads}; near numbers of heads that divide it are {near}")
    return hidden // heads


def own_head_dim(k: Keys, default: int = 0) -> int:
    """`head_dim` where the config gives it, else the default, else the head's share of the hidden size."""
    if k.data.get("head_dim") is not None or default:
        return k.size("head_dim", default or None)
    return head_dim(k)


def kv_heads(k: Keys, absent: int = 0) -> int:
    """Absent, they are the family's default; null, they are as many as the query heads."""
    heads = k.size("num_attention_heads")
    found = k.size("num_key_value_heads", absent if absent and "num_key_value_heads" not in k.data else heads)
    if heads % found:
        raise InputError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {found}; legal are {divisors(heads)}")
    return found


# ---- windows ---------------------------------------------------------------------------------------------------------------------------------------


def layer_windows(k: Keys, layers: int, pattern: Callable[[int], bool], default: int) -> tuple[int, ...]:
    """The window of each layer: by `layer_types`, else where `pattern(i)` says that layer i slides; 0 where the window is null."""
    kinds = k.data.get("layer_types")
    window = 0 if k.data.get("sliding_window", default) is None else k.size("sliding_window", default)
    if not isinstance(kinds, list):
        kinds = ["sliding_attention" if pattern(i) else "full_attention" for i in range(layers)]
    if len(kinds) < layers:
        raise InputError(f"`layer_types` names {len(kinds)} layers of {layers}")
    return windows(kinds[:layers], window)


# ---- rotary positions ------------------------------------------------------------------------------------------------------------------------------


def rope(k: Keys, dim: int, *, theta: float = 10_000.0, theta_key: str = "rope_theta", share: float | None = None, share_key: str = "", kind: str = "") -> Rope:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before); of the layers of one `kind` where they differ.

    `theta`: the family's default. `share`: the default part of a head, of `dim` elements, that is turned; None: the family turns whole heads only.
    """
    scaling = k.data.get("rope_scaling") or k.data.get("rope_parameters") or {}
    if isinstance(scaling, dict) and kind and isinstance(scaling.get(kind), dict):
        scaling = scaling[kind]
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise InputError(f"the RoPE parameters are {reprlib.repr(scaling)}; headrace reads one object with `rope_type` in it, alike for all layers")
    s = Keys(scaling, k.family)
    turned = _turned(k, s, dim, share, share_key)
    base = s.above_0("rope_theta", theta) if scaling.get("rope_theta") is not None else k.above_0(theta_key, theta)
    found = scaling.get("rope_type", scaling.get("type", "default"))
    if found == "default":
        return Rope(base, turned=turned)
    if found == "linear":
        return Rope(base, _required(s, "factor", 1.0), turned=turned)
    if found == "llama3":
        low, high = _required(s, "low_freq_factor", 0.0), _required(s, "high_freq_factor", 0.0)
        if not low < high:
            raise InputError(f"low_freq_factor = {low} must be below high_freq_factor = {high}")
        return Rope(base, _required(s, "factor", 1.0), low, high, _original(k, s), turned=turned)
    if found == "yarn":
        return _yarn(k, s, base, turned)
    raise InputError(f"RoPE scaling of type {reprlib.repr(found)} is not built by headrace; default, linear, llama3 and yarn are")


def _turned(k: Keys, s: Keys, dim: int, share: float | None, share_key: str) -> int:
    """How many elements of a head are turned, 0 for all."""
    given = s.data.get("partial_rotary_factor", k.data.get("partial_rotary_factor"))
    if share is None:
        if given not in (None, 1, 1.0):
            raise InputError(f"partial_rotary_factor is {reprlib.repr(given)}; headrace turns whole heads of {k.family} only")
        return 0
    where, key = (s if "partial_rotary_factor" in s.data else k), "partial_rotary_factor"
    if given is None:
        where, key = k, share_key or key
    part = where.number(key, share, "a share above 0, at most 1", lambda x: 0 < x <= 1)
    return 0 if part == 1.0 else int(dim * part)


def _original(k: Keys, s: Keys) -> int:
    key = "original_max_position_embeddings"
    where = next((keys for keys in (k, s) if keys.data.get(key) is not None), None)
    return where.size(key) if where else k.size("max_position_embeddings")


def _yarn(k: Keys, s: Keys, theta: float, turned: int) -> Rope:
    original = _original(k, s)
    factor = _required(s, "factor", 1.0) if s.data.get("factor") is not None else k.size("max_position_embeddings") / original
    amplitude = s.data.get("attention_factor")
    if amplitude is None:
        both = s.data.get("mscale") and s.data.get("mscale_all_dim")
        amplitude = mscale(factor, s.above_0("mscale", 1.0)) / mscale(factor, s.above_0("mscale_all_dim", 1.0)) if both else mscale(factor, 1.0)
    fast, slow = s.above_0("beta_fast", 32.0), s.above_0("beta_slow", 1.0)
    return Rope(
        theta, factor, original=original, fast=fast, slow=slow, truncate=s.flag("truncate", True),
        amplitude=check_number("attention_factor", amplitude, "a number above 0", lambda x: x > 0), turned=turned,
    )  # fmt: skip


def mscale(factor: float, by: float) -> float:
    """YaRN's stretch of the scores: 0.1 by log(factor) + 1 (arXiv:2309.00071, equation 22)."""
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _required(s: Keys, key: str, least: float) -> float:
    if s.data.get(key) is None:
        raise InputError(f"the scaling of RoPE lacks `{key}`")
    return s.number(key, least, f"a number of {least:g} or more", lambda x: x >= least)

"""What headrace must know to read a family of models: how its config is read, which values may be overridden, what its parameters are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.frontends.config import ModelConfig
from planner.frontends.keys import Keys
from planner.frontends.names import Names


@dataclass(frozen=True, slots=True)
class Family:
    """`keys`: our names of single values, and the keys of the config that hold them."""

    read: Callable[[Keys], ModelConfig]
    keys: Mapping[str, str]
    names: Names


def llama_keys(**more: str) -> dict[str, str]:
    """The keys that most families share, changed and added to by `more`; an empty word takes one out."""
    common = {
        "vocab": "vocab_size", "hidden": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp_hidden": "intermediate_size", "max_positions": "max_position_embeddings",
        "norm_eps": "rms_norm_eps", "activation": "hidden_act", "tied": "tie_word_embeddings", "attention_dropout": "attention_dropout",
        "init_std": "initializer_range", "window": "sliding_window", "theta": "rope_theta",
    }  # fmt: skip
    return {k: v for k, v in {**common, **more}.items() if v}

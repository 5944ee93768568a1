"""Small models that tests plan and run."""

from __future__ import annotations

from typing import Any

from planner.frontends import load
from planner.frontends.model import Model

BATCH, SEQ = 8, 12


def gpt(**overrides: Any) -> Model:
    """Four layers, tied embeddings, dropout; a vocabulary that no number of ranks divides."""
    return load("gpt2-tiny", **{"vocab": 259, "hidden": 32, "num_heads": 4, "mlp_hidden": 64, "max_positions": SEQ, **overrides})


def llama(**overrides: Any) -> Model:
    """Four layers, eight query heads on four key and value heads; a vocabulary that no number of ranks divides."""
    return load("llama-tiny", **{"vocab": 259, "hidden": 32, "num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "mlp_hidden": 72, **overrides})

"""The cache of keys and values while serving: bytes on each pipeline stage, and the longest context that fits.

>>> cache = KvCache(kv_heads=4, head_dim=128, width=2)
>>> [cache.stage_bytes(layers, 262_144) / 2**30 for layers in (16, 32)]
[8.0, 16.0]
>>> cache.longest((16, 32), (3.18 * 2**30, 12.0 * 2**30))
(104202, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ir.errors import InputError


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of `kv_heads` heads of `head_dim` elements of `width` bytes, the heads split over `tp`; fewer heads than ranks are copied."""

    kv_heads: int
    head_dim: int
    width: float
    tp: int = 1

    def layer_bytes(self) -> float:
        """Of one token in one layer on one device."""
        return 2.0 * -(-self.kv_heads // self.tp) * self.head_dim * self.width

    def stage_bytes(self, layers: int, tokens: int) -> float:
        """A stage keeps those of its own layers alone."""
        return layers * tokens * self.layer_bytes()

    def longest(self, stage_layers: Sequence[int], free_bytes: Sequence[float]) -> tuple[int, int]:
        """(tokens that fit on every stage, the stage that allows fewest)."""
        if len(stage_layers) != len(free_bytes) or not stage_layers:
            raise InputError(f"{len(stage_layers)} stages of layers, {len(free_bytes)} of free bytes: give one figure for each stage")
        fit = [int(free // (layers * self.layer_bytes())) for layers, free in zip(stage_layers, free_bytes, strict=True)]
        tightest = min(range(len(fit)), key=lambda s: (fit[s], s))
        return fit[tightest], tightest

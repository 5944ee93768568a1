"""The families whose configs headrace reads, by the `model_type` of their config; a family is a reader, the keys that may be overridden, and its names.

`decoders` (dense), `experts` (mixtures of experts, latent attention), `encoders` (BERT, ViT, T5).
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.frontends.families import decoders, encoders, experts
from planner.frontends.families.family import Family

FAMILIES: Mapping[str, Family] = {
    "gpt2": decoders.GPT2, "llama": decoders.LLAMA, "mistral": decoders.LLAMA, "qwen2": decoders.LLAMA, "qwen3": decoders.LLAMA, "phi3": decoders.PHI3,
    "gpt_neox": decoders.GPT_NEOX, "falcon": decoders.FALCON, "phi": decoders.PHI, "gemma2": decoders.GEMMA, "gemma3": decoders.GEMMA,
    "gemma3_text": decoders.GEMMA, "mixtral": experts.MIXTRAL, "qwen3_moe": experts.QWEN3_MOE, "gpt_oss": experts.GPT_OSS, "deepseek_v2": experts.DEEPSEEK,
    "deepseek_v3": experts.DEEPSEEK, "bert": encoders.BERT, "vit": encoders.VIT, "t5": encoders.T5,
}  # fmt: skip

__all__ = ["FAMILIES", "Family"]

"""Small models of every kind, for tests that plan and run them: experts, latent attention, encoders, an encoder with a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.frontends.huggingface import parse
from planner.frontends.model import Model

_LLAMA = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {**_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "capacity": 2.0},
    "mixtral, tokens dropped": {**_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2},
    "mixtral, balanced": {
        **_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "capacity": 2.0,
        "output_router_logits": True, "router_aux_loss_coef": 0.3,
    },
    "gpt_oss": {
        **_LLAMA, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5, "num_hidden_layers": 2,
        "capacity": 2.0,
    },
    "deepseek_v3": {
        **_LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "kv_lora_rank": 12, "q_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1,
        "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "capacity": 4.0,
    },
    "gemma2": {**_LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 5, "num_hidden_layers": 2},
    "gpt_neox": {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"} | {"model_type": "gpt_neox", "hidden_dropout": 0.1, "num_hidden_layers": 2},
    "bert": {
        "model_type": "bert", "vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 64, "padding": True,
    },
    "t5": {
        "model_type": "t5", "vocab_size": 259, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10,
    },
    "vit": {
        "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 12, "patch_size": 4,
        "num_labels": 10, "hidden_dropout_prob": 0.1,
    },
}  # fmt: skip


def of_kind(kind: str) -> Model:
    return Model(kind.replace(",", "").replace(" ", "-"), parse(CONFIGS[kind], kind))

"""Decoders whose MLPs are experts: mixtral, qwen3_moe, gpt_oss; with latent attention deepseek_v2 and deepseek_v3.

`capacity` is no key of theirs: `transformers` gives each expert whatever comes to it, a static shape cannot. It may be overridden, and is 1 (the even share)
otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from ir.errors import InputError
from planner.frontends.config import Attention, Block, Experts, Latent, Mlp, ModelConfig, Norm
from planner.frontends.families.decoders import LLAMA_INSIDE, LLAMA_OUTSIDE
from planner.frontends.families.family import Family, llama_keys
from planner.frontends.keys import Keys, kv_heads, layer_windows, mscale, own_head_dim, rope
from planner.frontends.names import Columns, Names, Where, halves

EXPERT_KEYS = {"top_k": "num_experts_per_tok", "capacity": "capacity"}
BALANCE_KEYS = {"balanced": "output_router_logits", "balance": "router_aux_loss_coef"}
EXPERTS_INSIDE = {
    "mlp.router": "mlp.gate", "mlp.experts.gate.weight": "mlp.experts.gate_up_proj", "mlp.experts.up.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.down.weight": "mlp.experts.down_proj", "mlp.shared.gate": "mlp.shared_experts.gate_proj", "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj", "mlp.choice.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip


def _expert_hidden(c: ModelConfig) -> int:
    assert c.experts is not None
    return c.experts.mlp.hidden


EXPERTS_FUSED = {f"mlp.experts.{name}": halves(_expert_hidden, name) for name in ("gate", "up")}


def _capacity(k: Keys) -> float:
    return k.above_0("capacity", 1.0)


def _balance(k: Keys) -> float:
    """The balancing loss counts where the config asks for the router's scores."""
    return k.number("router_aux_loss_coef", 0.001, "a number of 0 or more", lambda x: x >= 0) if k.flag("output_router_logits", False) else 0.0


# ---- mixtral and qwen3_moe ---------------------------------------------------------------------------------------------------------------------------


def _mixtral(k: Keys) -> ModelConfig:
    """mixtral and qwen3_moe: a llama's block with experts in it."""
    qwen = k.family == "qwen3_moe"
    hidden, heads, layers = k.size("hidden_size"), k.size("num_attention_heads"), k.size("num_hidden_layers")
    dim, shared = own_head_dim(k), kv_heads(k, 4 if qwen else 8)
    norm = Norm("rms", k.above_0("rms_norm_eps", 1e-6 if qwen else 1e-5))
    bias = k.flag("attention_bias", False) if qwen else False
    turned = rope(k, dim, theta=10_000.0 if qwen else 1e6)
    activation = k.activation("hidden_act", "silu")
    dense = Mlp(k.size("intermediate_size", 6144 if qwen else 14336), activation, gated=True)
    experts = Experts(
        replace(dense, hidden=k.size("moe_intermediate_size", 768)) if qwen else dense,
        k.size("num_experts" if qwen else "num_local_experts", 128 if qwen else 8),
        k.size("num_experts_per_tok", 8 if qwen else 2), "softmax", normalised=k.flag("norm_topk_prob", False) if qwen else True, capacity=_capacity(k),
    )  # fmt: skip
    if qwen:
        windows = layer_windows(k, layers, lambda _: True, 4096) if k.flag("use_sliding_window", False) else (0,) * layers
    else:
        windows = (0,) * layers if k.data.get("sliding_window") is None else (k.size("sliding_window"),) * layers
    attention = {
        window: Attention(
            heads, shared, dim, dim**-0.5, rope=turned, window=window, norm=norm if qwen else None, qkv_bias=bias, out_bias=bias,
            dropout=k.probability("attention_dropout", 0.0),
        )
        for window in dict.fromkeys(windows)
    }  # fmt: skip
    blocks = tuple(Block(attention[window], experts if _is_sparse(k, i) else dense, norm) for i, window in enumerate(windows))
    std = k.std()
    return ModelConfig(
        k.family, k.size("vocab_size"), hidden, k.size("max_position_embeddings", 32768 if qwen else 131_072), blocks, norm,
        k.flag("tie_word_embeddings", False),
        balance=_balance(k), init_std=std, init_residual_std=std,
    )  # fmt: skip


def _is_sparse(k: Keys, layer: int) -> bool:
    """Whether a layer of qwen3_moe has experts; all of mixtral's do."""
    if k.family != "qwen3_moe":
        return True
    dense = k.data.get("mlp_only_layers") or []
    return layer not in dense and (layer + 1) % k.size("decoder_sparse_step", 1) == 0


MIXTRAL = Family(
    _mixtral,
    llama_keys(num_experts="num_local_experts", **EXPERT_KEYS, **BALANCE_KEYS),
    Names("model.layers.{i}.", LLAMA_OUTSIDE, LLAMA_INSIDE | EXPERTS_INSIDE, fused=EXPERTS_FUSED),
)
QWEN3_MOE = Family(_mixtral, llama_keys(num_experts="num_experts", expert_hidden="moe_intermediate_size", **EXPERT_KEYS, **BALANCE_KEYS), MIXTRAL.names)

# ---- gpt_oss -----------------------------------------------------------------------------------------------------------------------------------------


def _gpt_oss(k: Keys) -> ModelConfig:
    hidden, heads, layers = k.size("hidden_size", 2880), k.size("num_attention_heads", 64), k.size("num_hidden_layers", 36)
    dim, bias = k.size("head_dim", 64), k.flag("attention_bias", True)
    norm = Norm("rms", k.above_0("rms_norm_eps", 1e-5))
    usual = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}
    told = k.data.get("rope_scaling") or k.data.get("rope_parameters")
    turned = rope(k if told else Keys({**k.data, "rope_scaling": usual}, k.family), dim, theta=150_000.0)
    limit, alpha = k.above_0("swiglu_limit", 7.0), k.above_0("swiglu_alpha", 1.702)
    experts = Experts(
        Mlp(k.size("intermediate_size", 2880), "silu", gated=True, bias=True, limit=limit, alpha=alpha), k.size("num_local_experts", 128),
        k.size("num_experts_per_tok", 4), "chosen", router_bias=True, capacity=_capacity(k),
    )  # fmt: skip
    windows = layer_windows(k, layers, lambda i: i % 2 == 0, 128)
    blocks = {
        window: Block(
            Attention(
                heads, k.size("num_key_value_heads", 8), dim, dim**-0.5, rope=turned, window=window, sinks=True, qkv_bias=bias, out_bias=bias,
                dropout=k.probability("attention_dropout", 0.0),
            ), experts, norm,
        )
        for window in dict.fromkeys(windows)
    }  # fmt: skip
    std = k.std()
    return ModelConfig(
        "gpt_oss", k.size("vocab_size", 201_088), hidden, k.size("max_position_embeddings", 131_072), tuple(blocks[window] for window in windows), norm,
        k.flag("tie_word_embeddings", False), balance=_balance(k), init_std=std, init_residual_std=std,
    )  # fmt: skip


def _every_other(which: str) -> Where:
    """gpt-oss's gate and up stand element by element beside each other."""

    def columns(c: ModelConfig) -> Columns:
        n = 2 * _expert_hidden(c)
        return Columns(1, n, 0 if which == "gate" else 1, n, 2)

    return columns


GPT_OSS = Family(
    _gpt_oss,
    llama_keys(num_experts="num_local_experts", **EXPERT_KEYS, **BALANCE_KEYS),
    Names(
        "model.layers.{i}.",
        LLAMA_OUTSIDE,
        LLAMA_INSIDE | EXPERTS_INSIDE
        | {"attn.sinks": "self_attn.sinks", "mlp.router": "mlp.router", "mlp.experts.down.bias": "mlp.experts.down_proj_bias"}
        | {f"mlp.experts.{name}.bias": "mlp.experts.gate_up_proj_bias" for name in ("gate", "up")},
        fused={f"mlp.experts.{name}": _every_other(name) for name in ("gate", "up")}, straight=("mlp.experts",),
    ),
)  # fmt: skip

# ---- deepseek ----------------------------------------------------------------------------------------------------------------------------------------


def _deepseek(k: Keys) -> ModelConfig:
    """deepseek_v2 and deepseek_v3: latent attention, the first layers dense, experts in groups beside shared ones."""
    k.refuse("output_router_logits", "headrace builds deepseek without a balancing loss, as its config has no weight for one")
    newer = k.family == "deepseek_v3"
    hidden, layers = k.size("hidden_size"), k.size("num_hidden_layers")
    norm = Norm("rms", k.above_0("rms_norm_eps", 1e-6))
    dense = Mlp(k.size("intermediate_size", 18432 if newer else 11008), k.activation("hidden_act", "silu"), gated=True)
    experts, attention = _deepseek_experts(k, dense), _latent_attention(k)
    first = k.count("first_k_dense_replace", 3 if newer else 0)
    std = k.std()
    return ModelConfig(
        k.family, k.size("vocab_size"), hidden, k.size("max_position_embeddings", 4096 if newer else 2048),
        tuple(Block(attention, dense if i < first else experts, norm) for i in range(layers)), norm, k.flag("tie_word_embeddings", False),
        extra_predictions=k.count("num_nextn_predict_layers", k.count("num_mtp_layers", 1)) if newer else 0, init_std=std, init_residual_std=std,
    )  # fmt: skip


def _deepseek_experts(k: Keys, dense: Mlp) -> Experts:
    newer = k.family == "deepseek_v3"
    hidden, num_experts = k.size("moe_intermediate_size", 2048 if newer else 1407), k.size("n_routed_experts", 256 if newer else 64)
    in_groups = newer or k.word("topk_method", "greedy", ("greedy", "group_limited_greedy")) != "greedy"
    if num_experts == 0:
        raise InputError("n_routed_experts is 0; a model without experts is a llama")
    return Experts(
        replace(dense, hidden=hidden), num_experts, k.size("num_experts_per_tok", 8 if newer else None), "sigmoid" if newer else "softmax",
        shared=hidden * k.count("n_shared_experts", 1 if newer else 2), moved=newer, groups=k.size("n_group", 8 if newer else 1) if in_groups else 1,
        top_groups=k.size("topk_group", 4 if newer else 1) if in_groups else 1, of_group=2 if newer else 1,
        normalised=k.flag("norm_topk_prob", True) if newer else False, eps=1e-20 if newer else 0.0,
        factor=k.above_0("routed_scaling_factor", 2.5 if newer else 1.0), capacity=_capacity(k),
    )  # fmt: skip


def _latent_attention(k: Keys) -> Attention:
    newer = k.family == "deepseek_v3"
    heads, bias = k.size("num_attention_heads"), k.flag("attention_bias", False)
    plain, part, values = k.size("qk_nope_head_dim", 128), k.size("qk_rope_head_dim", 64), k.size("v_head_dim", 128)
    # null: queries straight from the stream
    rank = 0 if "q_lora_rank" in k.data and k.data["q_lora_rank"] is None else k.size("q_lora_rank", 1536)
    turned = rope(Keys({**k.data, "head_dim": part}, k.family), part)
    scaling = k.data.get("rope_scaling") or k.data.get("rope_parameters") or {}
    stretched = mscale(turned.factor, scaling["mscale_all_dim"]) ** 2 if turned.fast and scaling.get("mscale_all_dim") else 1.0
    interleaved = k.flag("rope_interleave", True) if newer else True
    # the norms of the short vectors keep the default eps of `transformers`
    latent = Latent(rank, k.size("kv_lora_rank", 512), part, Norm("rms", 1e-6))
    return Attention(
        heads, heads, plain + part, (plain + part) ** -0.5 * stretched, value_dim=values, rope=replace(turned, turned=part, last=True, interleaved=interleaved),
        latent=latent, qkv_bias=bias, out_bias=bias, dropout=k.probability("attention_dropout", 0.0),
    )  # fmt: skip


def _of_values(which: str) -> Where:
    """Keys and values of the latent's projection stand head by head."""

    def columns(c: ModelConfig) -> Columns:
        a = c.attention
        assert a.latent is not None
        plain = a.head_dim - a.latent.rope_dim
        return Columns(a.num_heads, plain + a.width, 0 if which == "k" else plain, plain if which == "k" else plain + a.width)

    return columns


def _of_latent(which: str) -> Where:
    def columns(c: ModelConfig) -> Columns:
        latent = c.attention.latent
        assert latent is not None
        total = latent.key_rank + latent.rope_dim
        return Columns(1, total, 0, latent.key_rank) if which == "kv_down" else Columns(1, total, latent.key_rank, total)

    return columns


_LATENT_INSIDE = {
    "attn.q_down": "self_attn.q_a_proj", "attn.q_norm": "self_attn.q_a_layernorm", "attn.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attn.k_rope": "self_attn.kv_a_proj_with_mqa", "attn.kv_norm": "self_attn.kv_a_layernorm", "attn.k": "self_attn.kv_b_proj", "attn.v": "self_attn.kv_b_proj",
}  # fmt: skip


DEEPSEEK = Family(
    _deepseek,
    llama_keys(
        num_kv_heads="", head_dim="", window="", num_experts="n_routed_experts", expert_hidden="moe_intermediate_size",
        extra_predictions="num_nextn_predict_layers", dense_layers="first_k_dense_replace", query_rank="q_lora_rank", key_rank="kv_lora_rank",
        **EXPERT_KEYS,
    ),
    Names(
        "model.layers.{i}.",
        LLAMA_OUTSIDE,
        LLAMA_INSIDE | EXPERTS_INSIDE | _LATENT_INSIDE,
        fused=EXPERTS_FUSED | {f"attn.{name}": _of_values(name) for name in "kv"} | {f"attn.{name}": _of_latent(name) for name in ("kv_down", "k_rope")},
        renamed=lambda c: {"attn.q": "self_attn.q_b_proj"} if c.attention.latent and c.attention.latent.query_rank else {},
    ),
)  # fmt: skip

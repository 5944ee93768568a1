"""Dense decoders: gpt2; llama, mistral, qwen2, qwen3, phi3; gpt_neox, falcon, phi; gemma2, gemma3."""

from __future__ import annotations

import math

from ir.errors import InputError
from planner.frontends.config import Attention, Block, Mlp, ModelConfig, Norm, divisors
from planner.frontends.families.family import Family, llama_keys
from planner.frontends.keys import Keys, head_dim, kv_heads, layer_windows, own_head_dim, rope
from planner.frontends.names import Names, halves, of_heads, side_by_side

# ---- gpt2 ------------------------------------------------------------------------------------------------------------------------------------------


def _gpt2(k: Keys) -> ModelConfig:
    k.refuse("add_cross_attention", "headrace builds the decoder without an encoder only")
    hidden, heads, layers = k.size("n_embd"), k.size("n_head"), k.size("n_layer")
    dim = head_dim(k, "n_embd", "n_head")
    norm = Norm("layer", k.above_0("layer_norm_epsilon", 1e-5))
    scale = dim**-0.5 if k.flag("scale_attn_weights", True) else 1.0
    by_layer = k.flag("scale_attn_by_inverse_layer_idx", False)
    mlp = Mlp(k.size("n_inner", 4 * hidden), k.activation("activation_function", "gelu_new"), gated=False, bias=True)
    dropout = k.probability("attn_pdrop", 0.1)
    blocks = tuple(
        Block(
            Attention(heads, heads, dim, scale / (i + 1 if by_layer else 1), qkv_bias=True, out_bias=True, dropout=dropout), mlp, norm,
            dropout=k.probability("resid_pdrop", 0.1),
        )
        for i in range(layers)
    )  # fmt: skip
    std = k.std()
    return ModelConfig(
        "gpt2", k.size("vocab_size"), hidden, k.size("n_positions"), blocks, norm, k.flag("tie_word_embeddings", True), learned=True,
        embed_dropout=k.probability("embd_pdrop", 0.1), init_std=std, init_residual_std=std / math.sqrt(2 * layers),
    )  # fmt: skip


GPT2 = Family(
    _gpt2,
    {
        "vocab": "vocab_size", "hidden": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "mlp_hidden": "n_inner", "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon", "activation": "activation_function", "tied": "tie_word_embeddings", "embed_dropout": "embd_pdrop",
        "attention_dropout": "attn_pdrop", "residual_dropout": "resid_pdrop", "init_std": "initializer_range",
        "scale_by_layer": "scale_attn_by_inverse_layer_idx",
    },
    Names(
        "transformer.h.{i}.",
        {"wte": "transformer.wte", "wpe": "transformer.wpe", "ln_f": "transformer.ln_f", "lm_head": "lm_head"},
        {
            "ln_1": "ln_1", "attn.q": "attn.c_attn", "attn.k": "attn.c_attn", "attn.v": "attn.c_attn", "attn.out": "attn.c_proj", "ln_2": "ln_2",
            "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
        },
        fused={f"attn.{name}": side_by_side(name) for name in "qkv"}, straight=("attn", "mlp"),
    ),
)  # fmt: skip

# ---- llama and its kin -------------------------------------------------------------------------------------------------------------------------------

LLAMA_OUTSIDE = {"wte": "model.embed_tokens", "lm_head": "lm_head", "ln_f": "model.norm"}
LLAMA_INSIDE = {
    "ln_1": "input_layernorm", "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.out": "self_attn.o_proj",
    "attn.q.norm": "self_attn.q_norm", "attn.k.norm": "self_attn.k_norm", "ln_2": "post_attention_layernorm", "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
LLAMA_NAMES = Names("model.layers.{i}.", LLAMA_OUTSIDE, LLAMA_INSIDE)


def _llama_like(k: Keys) -> ModelConfig:
    """llama, mistral, qwen2, qwen3 and phi3: one block, apart from biases, the norm of each head and the sliding window."""
    hidden, heads, layers = k.size("hidden_size"), k.size("num_attention_heads"), k.size("num_hidden_layers")
    # Qwen3's heads have a default size of their own, the others' share the hidden size
    dim = own_head_dim(k, 128 if k.family == "qwen3" else 0)
    bias = k.flag("attention_bias", False) if k.family in ("llama", "qwen3") else False
    norm = Norm("rms", k.above_0("rms_norm_eps", 1e-5 if k.family == "phi3" else 1e-6))
    mlp = Mlp(k.size("intermediate_size"), k.activation("hidden_act", "silu"), gated=True, bias=k.flag("mlp_bias", False) if k.family == "llama" else False)
    turned = rope(k, dim, share=1.0 if k.family == "phi3" else None)
    shared = kv_heads(k, {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(k.family, 0))
    found = _windows(k, layers)
    attention = {
        window: Attention(
            heads, shared, dim, dim**-0.5, rope=turned, window=window, norm=norm if k.family == "qwen3" else None, qkv_bias=bias or k.family == "qwen2",
            out_bias=bias, dropout=k.probability("attention_dropout", 0.0),
        )
        for window in dict.fromkeys(found)
    }  # fmt: skip
    std = k.std()
    blocks = tuple(Block(attention[window], mlp, norm, dropout=k.probability("resid_pdrop", 0.0) if k.family == "phi3" else 0.0) for window in found)
    return ModelConfig(
        k.family, k.size("vocab_size"), hidden, k.size("max_position_embeddings"), blocks, norm, k.flag("tie_word_embeddings", False),
        embed_dropout=k.probability("embd_pdrop", 0.0) if k.family == "phi3" else 0.0, init_std=std, init_residual_std=std,
    )  # fmt: skip


def _windows(k: Keys, layers: int) -> tuple[int, ...]:
    """mistral and phi3 have one window for all layers; qwen from a layer on, where `use_sliding_window` says so."""
    if k.family in ("mistral", "phi3"):
        return layer_windows(Keys({**k.data, "layer_types": None}, k.family), layers, lambda _: True, 4096) if _has_window(k) else (0,) * layers
    if not k.family.startswith("qwen") or not k.flag("use_sliding_window", False):
        return (0,) * layers
    first = k.count("max_window_layers", 28)
    return layer_windows(k, layers, lambda i: i >= first, 4096)


def _has_window(k: Keys) -> bool:
    """Mistral's window is 4096 where the config does not speak of it."""
    return k.data.get("sliding_window", 4096 if k.family == "mistral" else None) is not None


LLAMA = Family(_llama_like, llama_keys(), LLAMA_NAMES)
PHI3 = Family(
    _llama_like,
    llama_keys(residual_dropout="resid_pdrop", embed_dropout="embd_pdrop"),
    Names(
        "model.layers.{i}.",
        LLAMA_OUTSIDE,
        LLAMA_INSIDE | {f"attn.{name}": "self_attn.qkv_proj" for name in "qkv"} | {"mlp.gate": "mlp.gate_up_proj", "mlp.up": "mlp.gate_up_proj"},
        fused={f"attn.{name}": side_by_side(name) for name in "qkv"} | {f"mlp.{name}": halves(lambda c: c.mlp.hidden, name) for name in ("gate", "up")},
    ),
)

# ---- attention and MLP side by side ------------------------------------------------------------------------------------------------------------------


def _gpt_neox(k: Keys) -> ModelConfig:
    hidden, heads, layers = k.size("hidden_size"), k.size("num_attention_heads"), k.size("num_hidden_layers")
    dim = head_dim(k)
    norm = Norm("layer", k.above_0("layer_norm_eps", 1e-5))
    bias = k.flag("attention_bias", True)
    attention = Attention(
        heads, heads, dim, dim**-0.5, rope=rope(k, dim, theta_key="rotary_emb_base", share=0.25, share_key="rotary_pct"), qkv_bias=bias, out_bias=bias,
        dropout=k.probability("attention_dropout", 0.0),
    )  # fmt: skip
    mlp = Mlp(k.size("intermediate_size"), k.activation("hidden_act", "gelu"), gated=False, bias=True)
    residual = "parallel" if k.flag("use_parallel_residual", True) else "pre"
    block = Block(attention, mlp, norm, residual, dropout=k.probability("hidden_dropout", 0.0))
    std = k.std()
    return ModelConfig(
        "gpt_neox", k.size("vocab_size"), hidden, k.size("max_position_embeddings"), (block,) * layers, norm, k.flag("tie_word_embeddings", False),
        embed_dropout=k.probability("hidden_dropout", 0.0), init_std=std, init_residual_std=std,
    )  # fmt: skip


GPT_NEOX = Family(
    _gpt_neox,
    llama_keys(num_kv_heads="", head_dim="", window="", norm_eps="layer_norm_eps", theta="rotary_emb_base", residual_dropout="hidden_dropout"),
    Names(
        "gpt_neox.layers.{i}.",
        {"wte": "gpt_neox.embed_in", "lm_head": "lm_head", "ln_f": "gpt_neox.final_layer_norm"},
        {
            "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.out": "attention.dense", "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h", **{f"attn.{name}": "attention.query_key_value" for name in "qkv"},
        },
        fused={f"attn.{name}": of_heads(name) for name in "qkv"},
    ),
)  # fmt: skip


def _falcon(k: Keys) -> ModelConfig:
    k.refuse("alibi", "headrace builds falcon with rotary positions only")
    hidden, heads, layers = k.size("hidden_size"), k.size("num_attention_heads"), k.size("num_hidden_layers")
    dim, new = head_dim(k), k.flag("new_decoder_architecture", False)
    shared = k.size("num_kv_heads", heads) if new else 1 if k.flag("multi_query", True) else heads
    if heads % shared:
        raise InputError(f"num_attention_heads = {heads} is not a multiple of num_kv_heads = {shared}; legal are {divisors(heads)}")
    norm, bias = Norm("layer", k.above_0("layer_norm_epsilon", 1e-5)), k.flag("bias", False)
    beside = new or k.flag("parallel_attn", True)
    residual = ("parallel" if new and k.size("num_ln_in_parallel_attn", 2) == 2 else "shared") if beside else "pre"
    dropout = k.probability("hidden_dropout", 0.0)
    attention = Attention(
        heads, shared, dim, dim**-0.5, rope=rope(k, dim), qkv_bias=bias, out_bias=bias, dropout=k.probability("attention_dropout", 0.0)
    )  # fmt: skip
    mlp = Mlp(k.size("ffn_hidden_size", 4 * hidden), k.activation("activation", "gelu"), gated=False, bias=bias)
    std = k.std()
    return ModelConfig(
        "falcon", k.size("vocab_size"), hidden, k.size("max_position_embeddings", 2048), (Block(attention, mlp, norm, residual, dropout=dropout),) * layers,
        norm, k.flag("tie_word_embeddings", True), init_std=std, init_residual_std=std,
    )  # fmt: skip


FALCON = Family(
    _falcon,
    llama_keys(
        head_dim="", window="", num_kv_heads="num_kv_heads", mlp_hidden="ffn_hidden_size", norm_eps="layer_norm_epsilon", activation="activation",
        residual_dropout="hidden_dropout",
    ),
    Names(
        "transformer.h.{i}.",
        {"wte": "transformer.word_embeddings", "ln_f": "transformer.ln_f", "lm_head": "lm_head"},
        {
            "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.out": "self_attention.dense", "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h", **{f"attn.{name}": "self_attention.query_key_value" for name in "qkv"},
        },
        fused={f"attn.{name}": of_heads(name) for name in "qkv"},
        renamed=lambda c: {"ln_1": "ln_attn", "ln_2": "ln_mlp"} if c.blocks[0].residual == "parallel" else {},
    ),
)  # fmt: skip


def _phi(k: Keys) -> ModelConfig:
    k.refuse("qk_layernorm", "headrace builds phi without a LayerNorm of each head only")
    hidden, heads, layers = k.size("hidden_size"), k.size("num_attention_heads"), k.size("num_hidden_layers")
    dim = own_head_dim(k)
    norm = Norm("layer", k.above_0("layer_norm_eps", 1e-5))
    attention = Attention(
        heads, kv_heads(k), dim, dim**-0.5, rope=rope(k, dim, share=0.5), qkv_bias=True, out_bias=True, dropout=k.probability("attention_dropout", 0.0)
    )
    mlp = Mlp(k.size("intermediate_size"), k.activation("hidden_act", "gelu_new"), gated=False, bias=True)
    block = Block(attention, mlp, norm, "shared", dropout=k.probability("resid_pdrop", 0.0))
    std = k.std()
    return ModelConfig(
        "phi", k.size("vocab_size"), hidden, k.size("max_position_embeddings"), (block,) * layers, norm, k.flag("tie_word_embeddings", False),
        embed_dropout=k.probability("embd_pdrop", 0.0), head_bias=True, init_std=std, init_residual_std=std,
    )  # fmt: skip


PHI = Family(
    _phi,
    llama_keys(window="", norm_eps="layer_norm_eps", residual_dropout="resid_pdrop", embed_dropout="embd_pdrop"),
    Names(
        "model.layers.{i}.",
        LLAMA_OUTSIDE | {"ln_f": "model.final_layernorm"},
        LLAMA_INSIDE | {"attn.out": "self_attn.dense", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
    ),
)

# ---- gemma -------------------------------------------------------------------------------------------------------------------------------------------


def _gemma(k: Keys) -> ModelConfig:
    """gemma2 and the text model of gemma3: norms before and after, layers with a window between others."""
    if k.family == "gemma3" and isinstance(k.data.get("text_config"), dict):
        k = Keys({"tie_word_embeddings": k.data.get("tie_word_embeddings"), **k.data["text_config"], **_told(k)}, "gemma3")
    k.refuse("use_bidirectional_attention", "headrace builds gemma as a decoder only")
    three = k.family != "gemma2"
    hidden, layers = k.size("hidden_size", 2304 if three else None), k.size("num_hidden_layers", 26 if three else None)
    heads, dim = k.size("num_attention_heads", 8), k.size("head_dim", 256)
    shared = k.size("num_key_value_heads", 4)
    norm = Norm("rms", k.above_0("rms_norm_eps", 1e-6))
    mlp = Mlp(k.size("intermediate_size", 9216 if three else None), k.activation("hidden_activation", "gelu_pytorch_tanh"), gated=True)
    every = k.size("sliding_window_pattern", 6) if three else 2
    bias = k.flag("attention_bias", False)

    def attention(window: int) -> Attention:
        if not three:
            turned = rope(k, dim)
        elif window:
            turned = rope(Keys({**k.data, "rope_scaling": None}, k.family), dim, theta_key="rope_local_base_freq", kind="sliding_attention")
        else:
            turned = rope(k, dim, theta=1e6, kind="full_attention")
        return Attention(
            heads, shared, dim, k.above_0("query_pre_attn_scalar", 256) ** -0.5, rope=turned, window=window,
            softcap=k.above_0("attn_logit_softcapping", 50.0) if not three and _capped(k, "attn_logit_softcapping") else 0.0,
            norm=norm if three else None, qkv_bias=bias,
            out_bias=bias, dropout=k.probability("attention_dropout", 0.0),
        )  # fmt: skip

    found = layer_windows(k, layers, lambda i: bool((i + 1) % every), 4096)
    kinds = {window: Block(attention(window), mlp, norm, "sandwich") for window in dict.fromkeys(found)}
    std = k.std()
    return ModelConfig(
        k.family, k.size("vocab_size", 262_208 if three else None), hidden, k.size("max_position_embeddings", 131_072 if three else 8192),
        tuple(kinds[window] for window in found), norm, k.flag("tie_word_embeddings", True), embed_factor=hidden**0.5,
        softcap=k.above_0("final_logit_softcapping", 30.0) if _capped(k, "final_logit_softcapping") else 0.0, init_std=std, init_residual_std=std,
    )  # fmt: skip


def _told(k: Keys) -> dict[str, object]:
    """What an override put beside `text_config`."""
    return {key: k.data[key] for key in GEMMA.keys.values() if key in k.data}


def _capped(k: Keys, key: str) -> bool:
    """gemma2 caps where the config does not speak of it, gemma3 does not; null: not at all. `transformers` caps the logits alone of gemma3."""
    return k.data.get(key, 1.0 if k.family == "gemma2" else None) is not None


GEMMA = Family(
    _gemma,
    llama_keys(activation="hidden_activation"),
    Names(
        "model.layers.{i}.",
        LLAMA_OUTSIDE,
        LLAMA_INSIDE | {"ln_1_after": "post_attention_layernorm", "ln_2": "pre_feedforward_layernorm", "ln_2_after": "post_feedforward_layernorm"},
        plus_one=True,
    ),
)

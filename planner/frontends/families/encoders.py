"""Encoders, and an encoder with a decoder: bert (masked tokens), vit (the class of an image), t5."""

from __future__ import annotations

import math

from ir.errors import InputError
from planner.frontends.config import Attention, Block, Image, Mlp, ModelConfig, Norm
from planner.frontends.families.family import Family, llama_keys
from planner.frontends.keys import Keys, head_dim
from planner.frontends.names import Names

# ---- bert --------------------------------------------------------------------------------------------------------------------------------------------


def _bert(k: Keys) -> ModelConfig:
    """With the head that names masked tokens. `padding`, no key of theirs, adds the input `mask`."""
    for key in ("is_decoder", "add_cross_attention"):
        k.refuse(key, "headrace builds bert as an encoder only")
    k.word("position_embedding_type", "absolute", ("absolute",))
    if not k.flag("tie_word_embeddings", True):
        raise InputError("tie_word_embeddings is false; headrace builds bert with its decoder tied to the embedding only")
    hidden, heads, layers = k.size("hidden_size", 768), k.size("num_attention_heads", 12), k.size("num_hidden_layers", 12)
    dim = head_dim(Keys({**k.data, "hidden_size": hidden, "num_attention_heads": heads}, k.family))
    norm, act = Norm("layer", k.above_0("layer_norm_eps", 1e-12)), k.activation("hidden_act", "gelu")
    attention = Attention(
        heads, heads, dim, dim**-0.5, causal=False, qkv_bias=True, out_bias=True, dropout=k.probability("attention_probs_dropout_prob", 0.1)
    )  # fmt: skip
    dropout = k.probability("hidden_dropout_prob", 0.1)
    block = Block(attention, Mlp(k.size("intermediate_size", 3072), act, gated=False, bias=True), norm, "post", dropout=dropout)
    std = k.std()
    return ModelConfig(
        "bert", k.size("vocab_size", 30522), hidden, k.size("max_position_embeddings", 512), (block,) * layers, None, True,
        learned=True, token_types=k.size("type_vocab_size", 2), padding=k.flag("padding", False), embed_norm=norm, embed_dropout=dropout, head_activation=act,
        head_bias=True, init_std=std, init_residual_std=std,
    )  # fmt: skip


BERT = Family(
    _bert,
    llama_keys(
        num_kv_heads="", head_dim="", window="", theta="", norm_eps="layer_norm_eps", attention_dropout="attention_probs_dropout_prob",
        residual_dropout="hidden_dropout_prob", padding="padding", token_types="type_vocab_size",
    ),
    Names(
        "bert.encoder.layer.{i}.",
        {
            "wte": "bert.embeddings.word_embeddings", "wpe": "bert.embeddings.position_embeddings", "wtt": "bert.embeddings.token_type_embeddings",
            "embed.norm": "bert.embeddings.LayerNorm", "head": "cls.predictions.transform.dense", "head.norm": "cls.predictions.transform.LayerNorm",
            "lm_head.bias": "cls.predictions.bias", "lm_head": "cls.predictions.decoder",
        },
        {
            "attn.q": "attention.self.query", "attn.k": "attention.self.key", "attn.v": "attention.self.value", "attn.out": "attention.output.dense",
            "ln_1": "attention.output.LayerNorm", "mlp.up": "intermediate.dense", "mlp.down": "output.dense", "ln_2": "output.LayerNorm",
        },
    ),
)  # fmt: skip

# ---- vit ---------------------------------------------------------------------------------------------------------------------------------------------


def _vit(k: Keys) -> ModelConfig:
    hidden, heads, layers = k.size("hidden_size", 768), k.size("num_attention_heads", 12), k.size("num_hidden_layers", 12)
    dim = head_dim(Keys({**k.data, "hidden_size": hidden, "num_attention_heads": heads}, k.family))
    image = Image(_side(k, "image_size", 224), _side(k, "patch_size", 16), k.size("num_channels", 3))
    norm, bias = Norm("layer", k.above_0("layer_norm_eps", 1e-12)), k.flag("qkv_bias", True)
    attention = Attention(
        heads, heads, dim, dim**-0.5, causal=False, qkv_bias=bias, out_bias=True, dropout=k.probability("attention_probs_dropout_prob", 0.0)
    )  # fmt: skip
    mlp = Mlp(k.size("intermediate_size", 3072), k.activation("hidden_act", "gelu"), gated=False, bias=True)
    dropout, std = k.probability("hidden_dropout_prob", 0.0), k.std()
    labels = k.data.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) and labels else k.size("num_labels", 2)
    return ModelConfig(
        "vit", num_labels, hidden, image.num_patches + 1, (Block(attention, mlp, norm, dropout=dropout),) * layers, norm, False, learned=True, image=image,
        embed_dropout=dropout, head_bias=True, init_std=std, init_residual_std=std,
    )  # fmt: skip


def _side(k: Keys, key: str, default: int) -> int:
    """Pixels a side of a square; a pair must be equal."""
    value = k.data.get(key)
    if isinstance(value, list | tuple):
        if len(set(value)) != 1:
            raise InputError(f"{key} is {value}; headrace cuts squares out of square images only")
        value = value[0]
    return Keys({key: value}, k.family).size(key, default)


VIT = Family(
    _vit,
    {
        "vocab": "num_labels", "hidden": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "mlp_hidden":
        "intermediate_size", "norm_eps": "layer_norm_eps", "activation": "hidden_act", "attention_dropout": "attention_probs_dropout_prob", "residual_dropout":
        "hidden_dropout_prob", "init_std": "initializer_range", "image_size": "image_size", "patch_size": "patch_size", "num_channels": "num_channels",
    },
    Names(
        "vit.layers.{i}.",
        {
            "patches": "vit.embeddings.patch_embeddings.projection", "cls": "vit.embeddings.cls_token", "wpe.weight": "vit.embeddings.position_embeddings",
            "ln_f": "vit.layernorm", "lm_head": "classifier",
        },
        {
            "ln_1": "layernorm_before", "ln_2": "layernorm_after", "attn.q": "attention.q_proj", "attn.k": "attention.k_proj", "attn.v": "attention.v_proj",
            "attn.out": "attention.o_proj", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2",
        },
        shapes={
            "cls": lambda c: (1, 1, c.hidden), "wpe.weight": lambda c: (1, c.max_positions, c.hidden),
            "patches.weight": lambda c: (c.hidden, c.image.channels, c.image.patch, c.image.patch) if c.image else (),
        },
    ),
)  # fmt: skip

# ---- t5 ----------------------------------------------------------------------------------------------------------------------------------------------


def _t5(k: Keys) -> ModelConfig:
    """Encoder and decoder read sequences of one length; the decoder's tokens are `ids`, the encoder's `source`."""
    hidden, heads, layers = k.size("d_model"), k.size("num_heads"), k.size("num_layers")
    dim, inner = k.size("d_kv", 64), k.size("d_ff")
    kind = k.data.get("feed_forward_proj", "relu")
    words = kind.split("-") if isinstance(kind, str) else [""]
    if words[0] not in ("gated", words[-1]) or len(words) > 2:
        raise InputError(f"feed_forward_proj is {kind!r}; it must be an activation, or one behind `gated-`")
    gated = len(words) == 2
    act = Keys({"feed_forward_proj": "gelu_new" if kind == "gated-gelu" else words[-1]}, k.family).activation("feed_forward_proj", "relu")
    norm, dropout = Norm("rms", k.above_0("layer_norm_epsilon", 1e-6)), k.probability("dropout_rate", 0.1)
    relative = (k.size("relative_attention_num_buckets", 32), k.size("relative_attention_max_distance", 128))

    def attention(causal: bool, positions: tuple[int, int] | None) -> Attention:
        return Attention(heads, heads, dim, 1.0, causal=causal, relative=positions, dropout=dropout, query_init=dim**-0.5)

    mlp = Mlp(inner, act, gated, dropout=dropout)
    encoder = Block(attention(False, relative), mlp, norm, dropout=dropout)
    decoder = Block(attention(True, relative), mlp, norm, cross=attention(False, None), dropout=dropout)
    # T5 1.1 does not scale what the tied head reads; transformers tells it by this flag alone, and ties always
    scaled = k.flag("scale_decoder_outputs", k.data.get("tie_word_embeddings") is not False)
    std = k.number("initializer_factor", 1.0, "a number of 0 or more", lambda x: x >= 0) * hidden**-0.5
    return ModelConfig(
        "t5", k.size("vocab_size"), hidden, k.size("n_positions", 512), (decoder,) * k.size("num_decoder_layers", layers), norm, True, encoder=(encoder,) *
        layers, embed_dropout=dropout, logit_factor=hidden**-0.5 if scaled else 1.0, init_std=std, init_residual_std=std / math.sqrt(2 * layers),
    )  # fmt: skip


def _t5_stack(which: str, mlp: int) -> dict[str, str]:
    """Names inside a block; the feed-forward part is the layer number `mlp`."""
    parts = {"attn": "layer.0.SelfAttention", "cross": "layer.1.EncDecAttention"} if which == "decoder" else {"attn": "layer.0.SelfAttention"}
    out = {f"{ours}.{a}": f"{theirs}.{b}" for ours, theirs in parts.items() for a, b in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))}
    out |= {"ln_1": "layer.0.layer_norm", "ln_x": "layer.1.layer_norm", "ln_2": f"layer.{mlp}.layer_norm"}
    return out | {f"mlp.{a}": f"layer.{mlp}.DenseReluDense.{b}" for a, b in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo"))}


def _t5_names(which: str, mlp: int, encoder: Names | None = None) -> Names:
    return Names(
        f"{which}.block.{{i}}.",
        {"wte": "shared", "ln_f": f"{which}.final_layer_norm", "relative": f"{which}.block.0.layer.0.SelfAttention.relative_attention_bias"},
        _t5_stack(which, mlp),
        renamed=lambda c: {} if c.mlp.gated else {"mlp.up": f"layer.{mlp}.DenseReluDense.wi"}, encoder=encoder,
    )  # fmt: skip


T5 = Family(
    _t5,
    {
        "vocab": "vocab_size", "hidden": "d_model", "num_layers": "num_layers", "num_heads": "num_heads", "head_dim": "d_kv", "mlp_hidden": "d_ff",
        "decoder_layers": "num_decoder_layers", "max_positions": "n_positions", "norm_eps": "layer_norm_epsilon", "activation": "feed_forward_proj",
        "residual_dropout": "dropout_rate", "buckets": "relative_attention_num_buckets", "max_distance": "relative_attention_max_distance",
    },
    _t5_names("decoder", 2, _t5_names("encoder", 1)),
)  # fmt: skip

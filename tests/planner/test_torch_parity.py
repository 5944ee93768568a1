"""The same weights and data in PyTorch: loss, every gradient, every zoo model's parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ir.errors import InputError
from planner.frontends import Model, load, zoo_names
from planner.frontends.huggingface import parse
from planner.frontends.transformer import params
from planner.frontends.weights import from_torch, origins, to_torch
from planner.frontends.zoo import config_of
from tests import reference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, SEQ, VOCAB = 2, 13, 53

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 17, "n_embd": 24, "n_layer": 3, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

NEOX = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")} | {"model_type": "gpt_neox", "hidden_size": 32}
FALCON = {k: v for k, v in NEOX.items() if k != "intermediate_size"} | {"model_type": "falcon", "ffn_hidden_size": 40}
GEMMA = LLAMA | {
    "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 6, "sliding_window": 5, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0,
    "pad_token_id": 0,
}  # fmt: skip
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 6, "sliding_window": 5, "capacity": 2.0,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "capacity": 2.0}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_shared_experts": 2,
    "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "capacity": 4.0,
}  # fmt: skip
DEEPSEEK_YARN = {"rope_scaling": {"type": "yarn", "factor": 8.0, "mscale": 0.8, "mscale_all_dim": 1.0, "beta_fast": 4, "beta_slow": 1,
                                  "original_max_position_embeddings": 16}}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}

CASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, exact gelu, own head, scores scaled by layer": GPT2
    | {"activation_function": "gelu", "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True, "n_inner": 36},
    "gpt2, scores not scaled": GPT2 | {"scale_attn_weights": False},
    "llama": LLAMA,
    "llama, tied, biases, as many key heads, wider heads": LLAMA
    | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": 8},
    "llama, llama3 rope": LLAMA | {"rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE},
    "llama, linear rope": LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama, gated gelu": LLAMA | {"hidden_act": "gelu_pytorch_tanh"},
    "mistral": LLAMA | {"model_type": "mistral", "head_dim": 10, "sliding_window": SEQ},
    "mistral, looking back over four tokens": LLAMA | {"model_type": "mistral", "sliding_window": 4},
    "llama, yarn": LLAMA | {"rope_theta": 500.0, "rope_scaling": YARN},
    "mixtral": MIXTRAL,
    "mixtral, looking back over five tokens, three of eight": MIXTRAL
    | {"sliding_window": 5, "num_local_experts": 8, "num_experts_per_tok": 3, "capacity": 8 / 3},
    "mixtral, balanced": MIXTRAL | {"output_router_logits": True, "router_aux_loss_coef": 0.3},
    "gpt_oss, balanced": GPT_OSS
    | {
        "output_router_logits": True,
        "router_aux_loss_coef": 0.2,
    },
    "qwen3_moe": LLAMA
    | {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "capacity": 3.0,
    },
    "qwen3_moe, weights as they are": LLAMA
    | {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "head_dim": 8, "capacity": 9.0},
    "gpt_oss": GPT_OSS
    | {
        "swiglu_limit": 0.5,
        "rope_scaling": YARN | {"truncate": False},
        "initializer_range": 0.2,
    },
    "deepseek_v2": DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7},
    "deepseek_v2, greedy, queries straight from the stream": DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": None, "attention_bias": True},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, yarn, halves": DEEPSEEK | DEEPSEEK_YARN | {"rope_interleave": False, "norm_topk_prob": False},
    "qwen2": LLAMA | {"model_type": "qwen2", "num_key_value_heads": 1},
    "qwen2, the last layers with a window": LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "phi3": LLAMA | {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 6},
    "phi3, part of a head turned": LLAMA | {"model_type": "phi3", "pad_token_id": 0, "hidden_size": 32, "partial_rotary_factor": 0.5},
    "gpt_neox": NEOX,
    "gpt_neox, one after the other": NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_fast"},
    "falcon": FALCON,
    "falcon, new decoder": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon, new decoder, one norm": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "falcon, one after the other, a key head for each": FALCON | {"parallel_attn": False, "multi_query": False, "tie_word_embeddings": False},
    "phi": NEOX | {"model_type": "phi", "num_key_value_heads": 2},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"model_type": "gemma3_text", "sliding_window_pattern": 2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text, linear rope": GEMMA
    | {
        "model_type": "gemma3_text",
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
}


ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40,
             "max_position_embeddings": 17, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 3},
    "bert, padded": {"model_type": "bert", "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
                     "max_position_embeddings": 17, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "padding": True, "hidden_act": "gelu_new"},
    "vit": {"model_type": "vit", "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 12,
            "patch_size": 4, "num_labels": VOCAB},
    "t5": {"model_type": "t5", "vocab_size": VOCAB, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0,
           "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10},
    "t5, gated, a shorter decoder": {"model_type": "t5", "vocab_size": VOCAB, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 3, "num_heads": 4,
                                     "num_decoder_layers": 2, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}  # fmt: skip
HEADS = {"bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification", "t5": "AutoModelForSeq2SeqLM"}


@contextmanager
def in_float64() -> Iterator[None]:
    """transformers computes RoPE, RMSNorm, softmax and routers in float32 whatever the dtype; here what it calls float32 is float64, so that all of it is
    exact.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


SINGLE = ("gpt2", "llama", "falcon, new decoder", "gemma2")
"""Cases that are compared in float32 too."""

THERE_AND_BACK = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox", "falcon", "falcon, new decoder", "phi", "gemma2", "gemma3_text", "mixtral", "qwen3_moe",
    "gpt_oss", "deepseek_v2", "deepseek_v3",
)  # fmt: skip


UNTRAINED = "e_score_correction_bias"
"""Ours is a parameter without a gradient, theirs a buffer."""


def twin(config: dict[str, Any], dtype: Any) -> Any:
    """The module of `transformers` for a config, with random weights, norms and biases included, and plain attention."""
    made = transformers.AutoConfig.for_model(**config)
    torch.manual_seed(7)
    made._experts_implementation = "eager"
    head = getattr(transformers, HEADS.get(config["model_type"], "AutoModelForCausalLM"))
    module = head.from_config(made, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(dtype), alpha=0.1)
        for name, buffer in module.named_buffers():
            if name.endswith(UNTRAINED):
                buffer.add_(torch.randn(buffer.shape, dtype=torch.float64).to(dtype), alpha=0.1)
    return module


def data() -> tuple[np.ndarray, np.ndarray]:
    """(ids, labels), labels already shifted as our graphs take them."""
    tokens = np.random.default_rng(3).integers(0, VOCAB, (BATCH, SEQ + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def torch_step(module: Any) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, gradient by key of the state dict) as PyTorch computes them."""
    ids, labels = data()
    balanced = {"output_router_logits": True} if getattr(module.config, "output_router_logits", False) else {}
    out = module(torch.from_numpy(ids), use_cache=False, **balanced)
    loss = torch.nn.functional.cross_entropy(out.logits.reshape(-1, VOCAB), torch.from_numpy(labels).reshape(-1))
    if balanced:
        loss = loss + module.config.router_aux_loss_coef * out.aux_loss
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in module.named_parameters()}


def our_step(model: Model, weights: dict[str, np.ndarray], dtype: str) -> tuple[float, dict[str, np.ndarray]]:
    loss, grads = reference.step(model.graph(BATCH, SEQ, dtype), weights, *data())
    return loss, {key: grad for key, grad in to_torch(model, grads, are_gradients=True).items() if not key.endswith(UNTRAINED)}


def relative(found: np.ndarray, true: np.ndarray) -> float:
    """The largest difference against the largest true value."""
    return float(np.abs(found - true).max() / np.abs(true).max())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_pytorchs(case: str, dtype: str) -> None:
    if dtype == "float64":
        with in_float64():
            _compare(case, dtype, 1e-12, 1e-10)
    elif case in SINGLE:
        _compare(case, dtype, 1e-5, 1e-4)


def _compare(case: str, dtype: str, loss_limit: float, grad_limit: float) -> None:
    module = twin(CASES[case], getattr(torch, dtype))
    model = Model(case, parse(CASES[case], case))
    loss, grads = our_step(model, from_torch(model, module.state_dict()), dtype)
    true_loss, true_grads = torch_step(module)
    assert abs(loss - true_loss) <= loss_limit
    assert grads.keys() == true_grads.keys()
    worst = max((relative(grads[key], true_grads[key]), key) for key in grads)
    assert worst[0] <= grad_limit, worst


def encoder_inputs(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Inputs by our names."""
    rng = np.random.default_rng(4)
    ids, labels = data()
    if config["model_type"] == "vit":
        return {"pixels": rng.normal(size=(BATCH, 3, config["image_size"], config["image_size"])), "labels": labels[:, :1]}
    if config["model_type"] == "t5":
        return {"source": rng.integers(0, VOCAB, ids.shape), "ids": ids, "labels": labels}
    given = {"ids": ids, "labels": labels, "token_types": rng.integers(0, config.get("type_vocab_size", 2), ids.shape)}
    return given | ({"mask": (np.arange(SEQ) < np.array([[SEQ], [SEQ - 4]])).astype(np.int64)} if config.get("padding") else {})


THEIR_INPUTS = {
    "bert": {"ids": "input_ids", "token_types": "token_type_ids", "mask": "attention_mask"}, "vit": {"pixels": "pixel_values"},
    "t5": {"source": "input_ids", "ids": "decoder_input_ids"},
}  # fmt: skip


@pytest.mark.parametrize("case", ENCODERS)
def test_loss_and_gradients_of_encoders_are_pytorchs(case: str) -> None:
    config = ENCODERS[case]
    given, model = encoder_inputs(config), Model(case, parse(config, case))
    with in_float64():
        module = twin(config, torch.float64)
        named = THEIR_INPUTS[config["model_type"]]
        logits = module(**{theirs: torch.from_numpy(given[ours]) for ours, theirs in named.items() if ours in given}).logits
        true = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), torch.from_numpy(given["labels"]).reshape(-1))
        true.backward()
        weights = from_torch(model, module.state_dict())
    seq = model.max_seq if config["model_type"] == "vit" else SEQ
    inputs = {"ids": np.zeros(()), **given}
    loss, grads = reference.step(model.graph(BATCH, seq, "float64"), weights, **inputs)
    assert abs(loss - true.item()) <= 1e-12
    found = to_torch(model, grads, are_gradients=True)
    true_grads = {name: p.grad.numpy() for name, p in module.named_parameters()}
    assert found.keys() == true_grads.keys()
    for key, grad in found.items():
        # a key's bias moves all scores of a query alike, so its gradient is rounding
        assert np.abs(grad - true_grads[key]).max() <= 1e-10 * max(np.abs(true_grads[key]).max(), 1e-4), key


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_three_steps_of_training_are_pytorchs(family: str) -> None:
    with in_float64():
        module = twin(CASES[family], torch.float64)
        model = Model(family, parse(CASES[family], family))
        weights = from_torch(model, module.state_dict())
        theirs = torch.optim.AdamW(module.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        ours = reference.AdamW(weights, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_norm=0.5)
        for _ in range(3):
            theirs.zero_grad()
            true_loss, _ = torch_step(module)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            theirs.step()
            loss, grads = reference.step(model.graph(BATCH, SEQ, "float64"), weights, *data())
            ours.update(grads)
            assert abs(loss - true_loss) <= 1e-10
    after = to_torch(model, weights)
    for key, p in module.named_parameters():
        assert np.abs(after[key] - p.detach().numpy()).max() <= 1e-9, key


@pytest.mark.parametrize("family", THERE_AND_BACK)
def test_there_and_back(family: str) -> None:
    config = CASES[family]
    model = Model(family, parse(config, family))
    module = twin(config, torch.float32)
    state = {k: v.numpy() for k, v in module.state_dict().items()}
    back = to_torch(model, from_torch(model, state))
    assert back.keys() == {key for key in (*dict(module.named_parameters()), *dict(module.named_buffers())) if key in state}
    for key, array in back.items():
        np.testing.assert_allclose(array, state[key], rtol=1e-6, atol=1e-6 if model.family.startswith("gemma") else 0)
        assert not np.shares_memory(array, state[key])


def test_bare_checkpoints_and_bfloat16() -> None:
    model = Model("gpt2", parse(GPT2, "gpt2"))
    module = twin(GPT2, torch.bfloat16)
    weights = from_torch(model, module.transformer.state_dict())
    assert weights["wte.weight"].dtype == np.float32
    np.testing.assert_array_equal(weights["wte.weight"], module.transformer.wte.weight.float().detach().numpy())


def test_state_dicts_that_are_refused() -> None:
    model = Model("gpt2", parse(GPT2, "gpt2"))
    state = dict(twin(GPT2, torch.float32).state_dict())
    with pytest.raises(InputError, match=r"the state dict has no `transformer\.h\.1\.mlp\.c_fc\.bias`"):
        from_torch(model, {k: v for k, v in state.items() if k != "transformer.h.1.mlp.c_fc.bias"})
    with pytest.raises(InputError, match=r"gives \(24, 95\) for `h.0.mlp.up.weight`, which is \(24, 96\)"):
        from_torch(model, state | {"transformer.h.0.mlp.c_fc.weight": np.zeros((24, 95))})
    with pytest.raises(InputError, match=r"`lm_head\.weight` differs from the embedding's table"):
        from_torch(model, state | {"lm_head.weight": state["lm_head.weight"] + 1})
    with pytest.raises(InputError, match=r"no array for parameter `wte\.weight`"):
        to_torch(model, {})


LEFT_OUT: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 99, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 8},
    "falcon": {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
}  # fmt: skip
_SIZES = {"vocab_size": 99, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 40, "num_attention_heads": 32}
LEFT_OUT |= {f: _SIZES | {"max_position_embeddings": 8} for f in ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox", "phi", "gemma2", "gemma3_text")}
LEFT_OUT |= {"bert": {}, "vit": {}, "t5": {"vocab_size": 99, "d_model": 32, "d_ff": 48, "num_layers": 3, "num_heads": 4}}
LEFT_OUT |= {f: _SIZES | {"num_experts_per_tok": 2} for f in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(family: str) -> None:
    for changes in ({}, {"use_sliding_window": True} if family.startswith("qwen") else {}):
        short = {"model_type": family, **LEFT_OUT[family], **changes}
        assert parse(short, "short") == parse(transformers.AutoConfig.for_model(**short).to_dict(), "whole")


@pytest.mark.parametrize("name", zoo_names())
def test_zoo_models_have_the_parameters_of_transformers(name: str) -> None:
    config = config_of(name)
    layers = next((key for key in ("n_layer", "num_layers") if key in config), "num_hidden_layers")
    # transformers leaves the blocks of extra predictions out
    alone = {"num_nextn_predict_layers": 0} if config["model_type"] == "deepseek_v3" else {}
    made = transformers.AutoConfig.for_model(**{**config, layers: 2, **alone})
    with torch.device("meta"):
        module = getattr(transformers, HEADS.get(config["model_type"], "AutoModelForCausalLM")).from_config(made)
    model = load(name, num_layers=2, **({"extra_predictions": 0} if alone else {}))
    shapes = {key: tuple(p.shape) for key, p in (*module.named_parameters(), *module.named_buffers()) if key in module.state_dict()}
    shapes = {key: shape for key, shape in shapes.items() if key in dict(module.named_parameters()) or key.endswith(UNTRAINED)}
    assert model.num_params == sum(math.prod(shape) for shape in shapes.values())
    found = origins(model)
    assert {o.key for o in found.values()} == shapes.keys()
    for key, param in params(model.config).items():
        theirs = (*param.shape[:-2], *param.shape[:-3:-1]) if found[key].transposed else param.shape
        if found[key].columns is None:
            assert shapes[found[key].key] == (found[key].shape or theirs), key

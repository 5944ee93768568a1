"""The same weights and data in PyTorch: loss, every gradient, every zoo model's parameters."""

from __future__ import annotations

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
    "qwen2": LLAMA | {"model_type": "qwen2", "num_key_value_heads": 1},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
}


def twin(config: dict[str, Any], dtype: Any) -> Any:
    """The module of `transformers` for a config, with random weights, norms and biases included, and plain attention."""
    made = transformers.AutoConfig.for_model(**config)
    torch.manual_seed(7)
    module = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(dtype), alpha=0.1)
    return module


def data() -> tuple[np.ndarray, np.ndarray]:
    """(ids, labels), labels already shifted as our graphs take them."""
    tokens = np.random.default_rng(3).integers(0, VOCAB, (BATCH, SEQ + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def torch_step(module: Any) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, gradient by key of the state dict) as PyTorch computes them."""
    ids, labels = data()
    logits = module(torch.from_numpy(ids), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), torch.from_numpy(labels).reshape(-1))
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in module.named_parameters()}


def our_step(model: Model, weights: dict[str, np.ndarray], dtype: str) -> tuple[float, dict[str, np.ndarray]]:
    loss, grads = reference.step(model.graph(BATCH, SEQ, dtype), weights, *data())
    return loss, to_torch(model, grads)


def relative(found: np.ndarray, true: np.ndarray) -> float:
    """The largest difference against the largest true value."""
    return float(np.abs(found - true).max() / np.abs(true).max())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_pytorchs(case: str, dtype: str) -> None:
    module = twin(CASES[case], getattr(torch, dtype))
    model = Model(case, parse(CASES[case], case))
    loss, grads = our_step(model, from_torch(model, module.state_dict()), dtype)
    true_loss, true_grads = torch_step(module)
    # transformers computes RoPE, RMSNorm and the softmax of llama's attention in float32 whatever the dtype; gpt2 is float64 throughout
    exact = dtype == "float64" and model.family == "gpt2"
    assert abs(loss - true_loss) <= (1e-12 if exact else 1e-6)
    assert grads.keys() == true_grads.keys()
    worst = max((relative(grads[key], true_grads[key]), key) for key in grads)
    assert worst[0] <= (1e-11 if exact else 1e-5), worst


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_three_steps_of_training_are_pytorchs(family: str) -> None:
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
        assert abs(loss - true_loss) <= 1e-6
    after = to_torch(model, weights)
    for key, p in module.named_parameters():
        # Adam makes whole steps of 1e-2 out of the smallest gradients, so llama's float32 inside shows: a hundredth of a step
        assert np.abs(after[key] - p.detach().numpy()).max() <= (1e-10 if family == "gpt2" else 1e-4), key


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_there_and_back(family: str) -> None:
    config = CASES[family]
    model = Model(family, parse(config, family))
    state = {k: v.numpy() for k, v in twin(config, torch.float32).state_dict().items()}
    back = to_torch(model, from_torch(model, state))
    assert back.keys() == state.keys() - ({"lm_head.weight"} if model.config.tied else set())
    for key, array in back.items():
        np.testing.assert_array_equal(array, state[key])
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


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_what_transformers_fills_in(family: str) -> None:
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 40, "num_attention_heads": 32, "max_position_embeddings": 8}
    if family == "gpt2":
        sizes = {"vocab_size": 99, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 8}
    for changes in ({}, {"use_sliding_window": True} if family.startswith("qwen") else {}):
        short = {"model_type": family, **sizes, **changes}
        assert parse(short, "short") == parse(transformers.AutoConfig.for_model(**short).to_dict(), "whole")


@pytest.mark.parametrize("name", zoo_names())
def test_zoo_models_have_the_parameters_of_transformers(name: str) -> None:
    layers = "n_layer" if "n_layer" in config_of(name) else "num_hidden_layers"
    made = transformers.AutoConfig.for_model(**{**config_of(name), layers: 2})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(made)
    model = load(name, num_layers=2)
    assert model.num_params == sum(p.numel() for p in module.parameters())
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters()}
    found = origins(model)
    assert {o.key for o in found.values()} == shapes.keys()
    for key, param in params(model.config).items():
        if found[key].stop is None:
            assert shapes[found[key].key] == (param.shape[::-1] if found[key].transposed else param.shape), key

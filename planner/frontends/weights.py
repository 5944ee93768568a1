"""Arrays of a model carried over from the state dict of its PyTorch twin in `transformers`, and back.

Projections of `torch.nn.Linear` hold [outputs, inputs] and are transposed; GPT-2's hold [inputs, outputs] already, but its q, k and v are one matrix side by
side, which is cut. A tied head is the embedding's table and has no entry of its own here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.errors import InputError
from planner.frontends.model import Model
from planner.frontends.transformer import params

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a parameter lies in a state dict: the whole of `key`, or its columns [start, stop) of the last dim; `transposed` against ours."""

    key: str
    transposed: bool = False
    start: int = 0
    stop: int | None = None


_GPT2_OUTSIDE = {"wte.weight": "transformer.wte.weight", "wpe.weight": "transformer.wpe.weight", "lm_head.weight": "lm_head.weight"}
_GPT2_INSIDE = {"ln_1": "ln_1", "attn.out": "attn.c_proj", "ln_2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_LLAMA_OUTSIDE = {"wte.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight", "ln_f.weight": "model.norm.weight"}
_LLAMA_INSIDE = {
    "ln_1": "input_layernorm", "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.out": "self_attn.o_proj",
    "attn.q.norm": "self_attn.q_norm", "attn.k.norm": "self_attn.k_norm", "ln_2": "post_attention_layernorm", "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip


def origins(model: Model) -> dict[str, Origin]:
    """For every parameter of the model's graph, where `transformers` keeps it.

    >>> from planner.frontends import load
    >>> origins(load("gpt2"))["h.0.attn.k.weight"]
    Origin(key='transformer.h.0.attn.c_attn.weight', transposed=False, start=768, stop=1536)
    """
    find = _gpt2_origin if model.family == "gpt2" else _llama_origin
    return {name: find(model, name) for name in params(model.config)}


def from_torch(model: Model, state_dict: Mapping[str, Any]) -> dict[str, Array]:
    """Parameter name -> array, from the state dict (tensors or arrays) of the model's twin in `transformers`.

    They are copies of the same dtype, but that bfloat16, which numpy lacks, becomes float32. Other entries, such as buffers, are passed over. Raises
    InputError when one is missing or has another shape.
    """
    out: dict[str, Array] = {}
    for name, origin in origins(model).items():
        whole = _array(state_dict, origin.key)
        part = whole[..., origin.start : origin.stop]
        out[name] = np.array(part.T if origin.transposed else part, order="C")  # a copy: a tensor's array shares its memory
    for name, param in params(model.config).items():
        if out[name].shape != param.shape:
            raise InputError(f"the state dict gives {out[name].shape} for `{name}`, which is {param.shape} in {model.name}; is it another model's?")
    if model.config.tied and "lm_head.weight" in state_dict and not np.array_equal(_array(state_dict, "lm_head.weight"), out["wte.weight"]):
        raise InputError(f"`lm_head.weight` differs from the embedding's table, but {model.name} ties them; set tie_word_embeddings to false in its config")
    return out


def to_torch(model: Model, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """State dict key -> array, from arrays by parameter name: weights, or their gradients. The way back from `from_torch`."""
    parts: dict[str, list[Array]] = {}
    for name, origin in origins(model).items():
        if name not in arrays:
            raise InputError(f"no array for parameter `{name}` of {model.name}")
        parts.setdefault(origin.key, []).append(arrays[name].T if origin.transposed else arrays[name])
    return {key: np.ascontiguousarray(np.concatenate(found, axis=-1)) for key, found in parts.items()}


def _gpt2_origin(model: Model, name: str) -> Origin:
    if name in _GPT2_OUTSIDE:
        return Origin(_GPT2_OUTSIDE[name])
    if not name.startswith("h."):
        return Origin(f"transformer.{name}")
    block, inside, kind = _in_block(name)
    if inside in ("attn.q", "attn.k", "attn.v"):
        start = ("attn.q", "attn.k", "attn.v").index(inside) * model.config.hidden
        return Origin(f"transformer.{block}.attn.c_attn.{kind}", False, start, start + model.config.hidden)
    return Origin(f"transformer.{block}.{_GPT2_INSIDE[inside]}.{kind}")


def _llama_origin(_: Model, name: str) -> Origin:
    if name in _LLAMA_OUTSIDE:
        return Origin(_LLAMA_OUTSIDE[name])
    block, inside, kind = _in_block(name)
    is_matrix = kind == "weight" and not inside.startswith("ln_") and not inside.endswith(".norm")
    return Origin(f"model.layers.{block.removeprefix('h.')}.{_LLAMA_INSIDE[inside]}.{kind}", is_matrix)


def _in_block(name: str) -> tuple[str, str, str]:
    """("h.0", "attn.q", "weight") of "h.0.attn.q.weight"."""
    h, i, rest = name.split(".", 2)
    inside, _, kind = rest.rpartition(".")
    return f"{h}.{i}", inside, kind


def _array(state_dict: Mapping[str, Any], key: str) -> Array:
    # Checkpoints of the bare model lack the first word of the key
    found = state_dict.get(key, state_dict.get(key.partition(".")[2]))
    if found is None:
        raise InputError(f"the state dict has no `{key}`; it has {len(state_dict)} entries, such as {', '.join(list(state_dict)[:3])}")
    if hasattr(found, "detach"):
        tensor = found.detach().cpu()
        found = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return np.asarray(found)

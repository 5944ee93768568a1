"""Arrays of a model carried over from the state dict of its PyTorch twin in `transformers`, and back.

What `torch.nn.Linear` holds as [outputs, inputs] is transposed, what is fused there (q, k and v; gate and up) is cut, and norms that multiply by 1 + weight get
their 1 (`planner.frontends.names`). A tied head is the embedding's table and has no entry of its own here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ir.errors import InputError
from planner.frontends.families import FAMILIES
from planner.frontends.model import Model
from planner.frontends.names import Origin
from planner.frontends.transformer import params

Array = np.ndarray[Any, np.dtype[Any]]


def origins(model: Model) -> dict[str, Origin]:
    """For every parameter of the model's graph, where `transformers` keeps it.

    >>> from planner.frontends import load
    >>> origins(load("gpt2"))["h.0.attn.k.weight"].columns
    Columns(groups=1, width=2304, start=768, stop=1536, step=1)
    """
    names = FAMILIES[model.family].names
    return {name: names.origin(model.config, name, param) for name, param in params(model.config).items()}


def from_torch(model: Model, state_dict: Mapping[str, Any]) -> dict[str, Array]:
    """Parameter name -> array, from the state dict (tensors or arrays) of the model's twin in `transformers`.

    They are copies of the same dtype, but that bfloat16, which numpy lacks, becomes float32. Other entries, such as buffers, are passed over. Raises
    InputError when one is missing or has another shape.
    """
    out: dict[str, Array] = {}
    shapes = params(model.config)
    for name, origin in origins(model).items():
        whole = _array(state_dict, origin.key)
        if origin.shape and whole.shape == origin.shape:
            shape = shapes[name].shape
            whole = whole.reshape(shape[::-1] if origin.transposed else shape)
        part = whole.swapaxes(-1, -2) if origin.transposed else whole
        if origin.columns is not None and part.shape[-1] == origin.columns.total:
            part = part[..., origin.columns.index]
        out[name] = np.array(part + origin.shift if origin.shift else part, order="C")  # a copy: a tensor's array shares its memory
        if out[name].shape != shapes[name].shape:
            told = f"the state dict gives {out[name].shape} for `{name}`, which is {shapes[name].shape} in {model.name}"
            hint = _padding(out[name].shape[0], model.config.vocab)
            raise InputError(f"{told}; {hint or 'is it the state dict of another model?'}")
    if model.config.tied and "lm_head.weight" in state_dict and not np.array_equal(_array(state_dict, "lm_head.weight"), out["wte.weight"]):
        raise InputError(f"`lm_head.weight` differs from the embedding's table, but {model.name} ties them; set tie_word_embeddings to false in its config")
    return out


def to_torch(model: Model, arrays: Mapping[str, Array], *, are_gradients: bool = False) -> dict[str, Array]:
    """State dict key -> array, from arrays by parameter name: weights, or their gradients. The way back from `from_torch`."""
    out: dict[str, Array] = {}
    for name, origin in origins(model).items():
        if name not in arrays:
            raise InputError(f"no array for parameter `{name}` of {model.name}")
        part = arrays[name] if are_gradients or not origin.shift else arrays[name] - origin.shift
        if origin.columns is None:
            whole = part
        else:
            # fused matrices are put together here as they lie turned our way
            whole = out[origin.key].swapaxes(-1, -2) if origin.key in out and origin.transposed else out.get(origin.key, _EMPTY)
            if origin.key not in out:
                whole = np.zeros((*part.shape[:-1], origin.columns.total), part.dtype)
            whole[..., origin.columns.index] = part
        whole = whole.swapaxes(-1, -2) if origin.transposed else whole
        out[origin.key] = whole.reshape(origin.shape) if origin.shape else whole
    return {key: np.array(whole, order="C") for key, whole in out.items()}


def padded_vocab(vocab: int, multiple: int, tp: int = 1) -> int:
    """Rows of a table that frameworks pad so that every one of `tp` ranks holds a multiple of `multiple` of them.

    >>> padded_vocab(50257, 128), padded_vocab(128256, 64, tp=8)
    (50304, 128512)
    """
    return -(-vocab // (multiple * tp)) * multiple * tp


def _padding(rows: int, vocab: int) -> str:
    """What to do with a table whose rows are the vocabulary padded; empty where they are not."""
    found = next((n for n in (8, 16, 32, 64, 128, 256, 512, 1024, 2048) if rows > vocab and padded_vocab(vocab, n) == rows), 0)
    return f"{rows} is {vocab} padded to a multiple of {found}: cut the table to {vocab} rows, no split needs padding here" if found else ""


_EMPTY: Array = np.empty(0)


def _array(state_dict: Mapping[str, Any], key: str) -> Array:
    # Checkpoints of the bare model lack the first word of the key
    found = state_dict.get(key, state_dict.get(key.partition(".")[2]))
    if found is None:
        raise InputError(f"the state dict has no `{key}`; it has {len(state_dict)} entries, such as {', '.join(list(state_dict)[:3])}")
    if hasattr(found, "detach"):
        tensor = found.detach().cpu()
        found = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return np.asarray(found)

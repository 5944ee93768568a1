"""Hugging Face configs, as `config.json` holds them, of the families whose graph headrace can build: gpt2, llama, mistral, qwen2, qwen3.

Nothing is fetched and no code of a config is run. A key that changes the computation and that headrace does not build is refused by name; a size that is
missing is refused too, while other missing keys take the defaults of `transformers` (5.24, `configuration_<family>.py`).
"""

from __future__ import annotations

import difflib
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ir.errors import InputError
from planner.frontends.config import MAX_LAYERS, ModelConfig, Rope, check_number, check_size
from planner.frontends.model import Model

MAX_NBYTES = 1 << 22
"""A config is a few kilobytes; a longer file is something else."""

GPT2_KEYS: Mapping[str, str] = {
    "vocab": "vocab_size", "hidden": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "mlp_hidden": "n_inner", "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon", "activation": "activation_function", "tied": "tie_word_embeddings", "embed_dropout": "embd_pdrop",
    "attention_dropout": "attn_pdrop", "residual_dropout": "resid_pdrop", "init_std": "initializer_range", "scale_by_layer": "scale_attn_by_inverse_layer_idx",
}  # fmt: skip
LLAMA_KEYS: Mapping[str, str] = {
    "vocab": "vocab_size", "hidden": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp_hidden": "intermediate_size", "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps", "activation": "hidden_act", "tied": "tie_word_embeddings", "attention_dropout": "attention_dropout",
    "init_std": "initializer_range", "window": "sliding_window", "theta": "rope_theta",
}  # fmt: skip
"""Names of ours and the keys of the family's config: what `load(..., num_layers=4)` may override."""

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "silu": "silu", "swish": "silu",
}  # fmt: skip

OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "DoubleHeadsModel")


def read(path: Path, overrides: Mapping[str, Any] | None = None) -> Model:
    """The model of a `config.json` or of the folder that holds one; its name is that of the folder, or of the file where it is called otherwise.

    Raises InputError when the file is missing, empty, not JSON, or describes what headrace does not build.
    """
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise InputError(f"folder `{path}` holds no config.json; a Hugging Face model folder has one: download it there, or name the config file itself")
    config = parse(load_json(file), f"`{file}`", overrides)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    suffix = changes(overrides or {})
    return Model(("_".join(name.split()) or "config") + suffix, config, str(file), str(file.resolve()) + suffix)


def load_json(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file; InputError naming the file and the place where it breaks."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_NBYTES + 1)
        text = raw.decode("utf-8-sig")
        data = json.loads(text) if text.strip() and len(raw) <= MAX_NBYTES else None
    except OSError as error:
        raise InputError(f"cannot read `{file}`: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"`{file}` is no text file (byte {error.start} is not UTF-8); give a Hugging Face config.json") from error
    except json.JSONDecodeError as error:
        raise InputError(f"`{file}` is no valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; is it cut off? Download it again") from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"`{file}` is no config.json: {error}") from error
    if len(raw) > MAX_NBYTES:
        raise InputError(f"`{file}` has more than {MAX_NBYTES} bytes; a config.json has a few thousand: give the config, not the weights")
    if not text.strip():
        raise InputError(f"`{file}` is empty; give a Hugging Face config.json")
    if not isinstance(data, dict):
        raise InputError(f"`{file}` holds a JSON {type(data).__name__}, not an object; a config.json starts with {{")
    return data


def parse(data: Mapping[str, Any], where: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config in a `config.json` object, with `overrides` of single values, named as ModelConfig or as the config names them.

    `where` names the origin in messages. Raises InputError; see the module.
    """
    family = data.get("model_type")
    try:
        _refuse_foreign(data)
        if not isinstance(family, str) or family not in FAMILIES:
            raise InputError(_unknown_family(family))
        reader, keys = FAMILIES[family]
        return reader(_Keys({**data, **_translated(overrides or {}, keys, data)}, family)).check()
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def changes(overrides: Mapping[str, Any]) -> str:
    """How overrides stand behind a model's name; `parse_changes` reads it back.

    >>> changes({"num_layers": 2, "tied": True}), parse_changes("num_layers=2,tied=true")
    ('[num_layers=2,tied=true]', {'num_layers': 2, 'tied': True})
    """
    return f"[{','.join(f'{k}={json.dumps(v)}' for k, v in overrides.items())}]" if overrides else ""


def parse_changes(text: str) -> dict[str, Any]:
    """The overrides in `num_layers=2,tied=true`; values are JSON, or plain words."""
    out: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not name or not value:
            raise InputError(f"`{part}` in `[{text}]` is no override; write [num_layers=2,hidden=256]")
        try:
            out[name] = json.loads(value)
        except json.JSONDecodeError:
            out[name] = value
    return out


def _unknown_family(family: Any) -> str:
    known = ", ".join(FAMILIES)
    if family is None:
        return f"no `model_type`; is this a model's config.json? Known types are {known}"
    near = difflib.get_close_matches(str(family), FAMILIES, n=1)
    return f"model_type {reprlib.repr(family)} is not known; known are {known}" + (f"; did you mean {near[0]}?" if near else "")


def _refuse_foreign(data: Mapping[str, Any]) -> None:
    """What makes the described model another one than its `model_type` says."""
    if data.get("auto_map"):
        raise InputError(
            "`auto_map` names code that comes with the model; headrace never runs code from a config, and cannot know what that code computes. "
            "Take the key out if the model is the plain one of its `model_type`"
        )
    if data.get("quantization_config"):
        raise InputError("`quantization_config` describes quantized weights, which are not trained as they are; take the key out to plan the unquantized model")
    kinds = data.get("layer_types") or []
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")] if isinstance(kinds, list) else [kinds]
    if unknown:
        raise InputError(
            f"`layer_types` has {reprlib.repr(unknown[0])}; headrace builds layers of full_attention, and of sliding_attention within their window"
        )
    architectures = data.get("architectures") or ()
    names = [a for a in architectures if isinstance(a, str)] if isinstance(architectures, list | tuple) else []
    foreign = [a for a in names if a.endswith(OTHER_HEADS)]
    if foreign:
        raise InputError(f"architecture {foreign[0]} ends in another head than the next-token loss; headrace builds causal language models only")


def _translated(overrides: Mapping[str, Any], keys: Mapping[str, str], data: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides under the names of the family's config."""
    out: dict[str, Any] = {}
    for name, value in overrides.items():
        key = keys.get(name, name)
        if name not in keys and key not in keys.values():
            near = difflib.get_close_matches(name, keys, n=3)
            raise InputError(f"`{name}` cannot be overridden" + (f"; near: {', '.join(near)}" if near else f"; these can: {', '.join(keys)}"))
        out[key] = value
    if "rope_theta" in out and isinstance(data.get("rope_parameters"), dict):
        out["rope_parameters"] = {**data["rope_parameters"], "rope_theta": out["rope_theta"]}
    return out


class _Keys:
    """A config's keys, read one by one with their type checked; null counts as absent, as in `transformers`."""

    def __init__(self, data: Mapping[str, Any], family: str) -> None:
        self.data, self.family = data, family

    def size(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None and default is None:
            raise InputError(f"the size `{key}` is missing; a {self.family} config.json has it")
        return check_size(key, default if value is None else value, MAX_LAYERS if key in ("n_layer", "num_hidden_layers") else 1 << 31)

    def number(self, key: str, default: float, what: str, legal: Callable[[float], bool]) -> float:
        value = self.data.get(key)
        return check_number(key, default if value is None else value, what, legal)

    def probability(self, key: str, default: float) -> float:
        return self.number(key, default, "a probability of 0 or more and less than 1", lambda p: 0 <= p < 1)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{key} is {reprlib.repr(value)}; it must be true or false")
        return default if value is None else value

    def activation(self, key: str, default: str) -> str:
        value = self.data.get(key)
        name = default if value is None else value
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise InputError(f"{key} is {reprlib.repr(name)}, an activation that headrace does not know; known are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def eps(self, key: str, default: float) -> float:
        return self.number(key, default, "a number above 0", lambda x: x > 0)

    def std(self, key: str) -> float:
        return self.number(key, 0.02, "a number of 0 or more", lambda x: x >= 0)


def _even_heads(hidden_key: str, hidden: int, heads_key: str, heads: int) -> int:
    """The size of a head, where the config does not give it."""
    if hidden % heads:
        legal = [n for n in range(1, min(hidden, 1024) + 1) if hidden % n == 0]
        near = sorted(sorted(legal, key=lambda n: (abs(n - heads), n))[:5])
        raise InputError(f"{hidden_key} = {hidden} is not divisible by {heads_key} = {heads}; near numbers of heads that divide it are {near}")
    return hidden // heads


def _gpt2(k: _Keys) -> ModelConfig:
    if k.flag("add_cross_attention", False):
        raise InputError("`add_cross_attention` is set; headrace builds the decoder without an encoder only")
    hidden, heads, layers = k.size("n_embd"), k.size("n_head"), k.size("n_layer")
    head_dim = _even_heads("n_embd", hidden, "n_head", heads)
    std = k.std("initializer_range")
    return ModelConfig(
        family="gpt2", vocab=k.size("vocab_size"), hidden=hidden, num_layers=layers, num_heads=heads, num_kv_heads=heads, head_dim=head_dim,
        mlp_hidden=k.size("n_inner", 4 * hidden), max_positions=k.size("n_positions"), norm="layer", norm_eps=k.eps("layer_norm_epsilon", 1e-5),
        activation=k.activation("activation_function", "gelu_new"), gated=False, rope=None, tied=k.flag("tie_word_embeddings", True),
        qkv_bias=True, out_bias=True, mlp_bias=True, attention_scale=head_dim**-0.5 if k.flag("scale_attn_weights", True) else 1.0,
        scale_by_layer=k.flag("scale_attn_by_inverse_layer_idx", False), embed_dropout=k.probability("embd_pdrop", 0.1),
        attention_dropout=k.probability("attn_pdrop", 0.1), residual_dropout=k.probability("resid_pdrop", 0.1),
        init_std=std, init_residual_std=std / math.sqrt(2 * layers),
    )  # fmt: skip


def _llama_like(k: _Keys) -> ModelConfig:
    """llama, mistral, qwen2 and qwen3: one block, apart from biases, the norm of each head and the sliding window."""
    qwen = k.family.startswith("qwen")
    hidden, heads, layers = k.size("hidden_size"), k.size("num_attention_heads"), k.size("num_hidden_layers")
    # Qwen3's heads have a default size of their own, the others' share the hidden size
    given = k.size("head_dim", 128) if k.family == "qwen3" else k.size("head_dim", 0) if k.data.get("head_dim") is not None else 0
    head_dim = given or _even_heads("hidden_size", hidden, "num_attention_heads", heads)
    bias = k.flag("attention_bias", False) if k.family in ("llama", "qwen3") else False
    std = k.std("initializer_range")
    return ModelConfig(
        family=k.family, vocab=k.size("vocab_size"), hidden=hidden, num_layers=layers, num_heads=heads, num_kv_heads=_kv_heads(k, heads), head_dim=head_dim,
        mlp_hidden=k.size("intermediate_size"), max_positions=k.size("max_position_embeddings"), norm="rms", norm_eps=k.eps("rms_norm_eps", 1e-6),
        activation=k.activation("hidden_act", "silu"), gated=True, rope=_rope(k), tied=k.flag("tie_word_embeddings", False),
        qkv_bias=bias or k.family == "qwen2", out_bias=bias, mlp_bias=k.flag("mlp_bias", False) if k.family == "llama" else False,
        head_norm=k.family == "qwen3", window=_qwen_window(k, layers) if qwen else _mistral_window(k), attention_scale=head_dim**-0.5,
        attention_dropout=k.probability("attention_dropout", 0.0), init_std=std, init_residual_std=std,
    )  # fmt: skip


def _kv_heads(k: _Keys, heads: int) -> int:
    """Absent, they are the family's default; null, they are as many as the query heads."""
    absent = "num_key_value_heads" not in k.data
    default = {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(k.family, heads) if absent else heads
    kv_heads = k.size("num_key_value_heads", default)
    if heads % kv_heads:
        legal = [n for n in range(1, min(heads, 1024) + 1) if heads % n == 0]
        raise InputError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}; legal are {legal}")
    return kv_heads


def _mistral_window(k: _Keys) -> int:
    if k.family != "mistral":
        return 0
    if "sliding_window" not in k.data:
        return 4096
    return k.size("sliding_window") if k.data["sliding_window"] is not None else 0


def _qwen_window(k: _Keys, layers: int) -> int:
    """The window, where `use_sliding_window` and the kinds of the layers give any layer one."""
    if not k.flag("use_sliding_window", False) or k.data.get("sliding_window", 4096) is None:
        return 0
    kinds = k.data.get("layer_types")
    slides = "sliding_attention" in kinds[:layers] if isinstance(kinds, list) else layers > k.size("max_window_layers", 28)
    return k.size("sliding_window", 4096) if slides else 0


def _rope(k: _Keys) -> Rope:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before)."""
    scaling = k.data.get("rope_scaling") or k.data.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise InputError(f"the RoPE parameters are {reprlib.repr(scaling)}; headrace reads one object with `rope_type` in it, alike for all layers")
    s = _Keys(scaling, k.family)
    partial = scaling.get("partial_rotary_factor", k.data.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise InputError(f"partial_rotary_factor is {reprlib.repr(partial)}; headrace turns whole heads only")
    where = s if scaling.get("rope_theta") is not None else k
    theta = where.number("rope_theta", 10_000.0, "a number above 0", lambda x: x > 0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, _required(s, "factor", 1.0))
    if kind == "llama3":
        low, high = _required(s, "low_freq_factor", 0.0), _required(s, "high_freq_factor", 0.0)
        if not low < high:
            raise InputError(f"low_freq_factor = {low} must be below high_freq_factor = {high}")
        key = "original_max_position_embeddings"
        original = k.size(key) if k.data.get(key) is not None else s.size(key, k.size("max_position_embeddings"))
        return Rope(theta, _required(s, "factor", 1.0), low, high, original)
    raise InputError(f"RoPE scaling of type {reprlib.repr(kind)} is not built by headrace; default, linear and llama3 are")


def _required(s: _Keys, key: str, least: float) -> float:
    if s.data.get(key) is None:
        raise InputError(f"the scaling of RoPE lacks `{key}`")
    return s.number(key, least, f"a number of {least:g} or more", lambda x: x >= least)


FAMILIES: Mapping[str, tuple[Callable[[_Keys], ModelConfig], Mapping[str, str]]] = {
    "gpt2": (_gpt2, GPT2_KEYS), "llama": (_llama_like, LLAMA_KEYS), "mistral": (_llama_like, LLAMA_KEYS), "qwen2": (_llama_like, LLAMA_KEYS),
    "qwen3": (_llama_like, LLAMA_KEYS),
}  # fmt: skip
"""model_type -> (reader, names of ours and of the config)."""

"""From what a user has (a zoo name, a config) to a Graph.

In the order in which a model passes through them: `huggingface` and `zoo` read it, by the `keys` and `names` of its family (`families/`); `config` holds its
facts, `model` is the value that others see; `transformer` builds its graph out of `attention` and `mlp` with a `writer`; `tuning` says what of it is trained;
`weights` carries arrays over from PyTorch and back.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from ir.errors import InputError
from planner.frontends import huggingface
from planner.frontends.model import Model, ModelConfig
from planner.frontends.tuning import Lora, Tuning
from planner.frontends.zoo import from_zoo, zoo_names

ACCEPTED = "a zoo name (`headrace models` lists them), a Hugging Face config.json or the folder that holds one"
NOT_YET = {".onnx": "ONNX", ".pt2": "torch.export", ".pt": "PyTorch", ".pth": "PyTorch", ".bin": "PyTorch", ".safetensors": "safetensors", ".gguf": "GGUF"}

_BRACKET = re.compile(r"(.*?)\[(.*)\]", re.S)


def load(name_or_path: str | Path, **overrides: Any) -> Model:
    """The model of a zoo name, of a Hugging Face `config.json`, or of the folder that holds one.

    `overrides` change single values of its config, named as in ModelConfig or as the config names them; they may also stand behind the name, in brackets.
    Behind that may stand what is trained: `gpt2+lora(rank=8,targets=q+v)`, `gpt2+freeze(wte*,h.0.*)`.
    A name of the zoo wins over a folder called alike: write `./gpt2` for the folder. Raises InputError when there is no such model or it cannot be built;
    nothing is fetched and no code is run.

    >>> load("gpt2", num_layers=2)
    Model(gpt2[num_layers=2]: 53.6 M parameters, 2 layers)
    >>> load("gpt2[num_layers=2]") == load("gpt2", num_layers=2)
    True
    """
    text = str(name_or_path).strip()
    if not text:
        raise InputError(f"no model was named; give {ACCEPTED}")
    base, tuning = (text, Tuning()) if _exists(Path(text)) else Tuning.split(text)
    if tuning:
        return load(base, **overrides).tuned(tuning)
    bracket = _BRACKET.fullmatch(text)
    if bracket and not _exists(Path(text)):
        return load(bracket[1], **{**huggingface.parse_changes(bracket[2]), **overrides})
    if text in zoo_names():
        return from_zoo(text, overrides)
    path = Path(text).expanduser()
    kind = NOT_YET.get(path.suffix.lower())
    if kind is not None:
        raise InputError(f"`{text}`: {kind} files are not read yet; accepted are {ACCEPTED}")
    if _exists(path):
        return huggingface.read(path, overrides)
    raise InputError(_not_found(text))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a character that no path has
        return False


def _not_found(text: str) -> str:
    """Why nothing answers to this text, and what would."""
    short = text if len(text) <= 200 else text[:200] + "..."
    near = _near(text.rsplit("/", 1)[-1])
    hint = f"; near names in the zoo: {', '.join(near)}" if near else ""
    is_path = text.endswith((".json", "/", "\\")) or text.startswith((".", "/", "~", "\\")) or text.count("/") > 1
    if not is_path and re.fullmatch(r"(https?://\S+|[\w.-]+/[\w.-]+)", text):
        return f"`{short}` names a model on a hub, and headrace fetches nothing: download the config (its config.json) and give the path{hint}"
    if text.startswith(("http://", "https://")):
        return f"`{short}` is an address, and headrace fetches nothing: download the config and give the path{hint}"
    if is_path:
        return f"there is no file or folder `{short}`; accepted are {ACCEPTED}"
    return f"no model `{short}`{hint or '; the zoo has ' + ', '.join(zoo_names())}. Accepted are {ACCEPTED}"


def _near(name: str) -> list[str]:
    names = zoo_names()
    close = difflib.get_close_matches(name.lower(), names, n=4, cutoff=0.55)
    return close or [n for n in names if n.startswith(name.lower()[:5]) and len(name) >= 3][:4]


__all__ = ["Lora", "Model", "ModelConfig", "Tuning", "load", "zoo_names"]

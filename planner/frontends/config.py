"""The facts about a transformer that its graph and its parameters follow from, whatever family they were read from.

Nouns: a model is a chain of `Block`s between an embedding and a head (with an `encoder`, two chains). A block holds `Attention`, an `Mlp` or `Experts`, a
`Norm`, and says how these stand on the residual stream.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ir.errors import InputError

MAX_SIZE = 1 << 31
"""No dim of a tensor is longer: indices are 32 bits wide in what executes it."""

MAX_LAYERS = 10_000

RESIDUALS = ("pre", "post", "sandwich", "parallel", "shared")
"""How a part f and its norm stand on the residual stream x, after:
pre: x + f(norm x); post: norm(x + f x), as BERT; sandwich: x + norm(f(norm x)), as Gemma 2; parallel: x + attention(norm x) + mlp(other norm x), as GPT-NeoX;
shared: the same with one norm for both, as Phi.
"""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the base `theta`, how frequencies are stretched for longer sequences, and which elements of a head are turned.

    `factor` alone divides every position (linear interpolation); with `low`, `high` and `original` it is Llama 3's scaling by wavelength (Hugging Face's
    `rope_scaling` of type `llama3`), with `fast`, `slow` and `original` YaRN's, which also stretches by `amplitude`. `turned`: the first so many elements of a
    head, or the last where `last`; 0: all. `interleaved`: pairs stand side by side.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    low: float = 0.0
    high: float = 0.0
    original: int = 0
    fast: float = 0.0
    slow: float = 0.0
    truncate: bool = True
    amplitude: float = 1.0
    turned: int = 0
    last: bool = False
    interleaved: bool = False

    @property
    def attrs(self) -> dict[str, Any]:
        """What the operator `rope` is told, besides the size of a head."""
        out: dict[str, Any] = {"theta": self.theta}
        if self.fast:
            out |= {"factor": self.factor, "fast": self.fast, "slow": self.slow, "original": self.original, "truncate": self.truncate}
        elif self.original:
            out |= {"factor": self.factor, "low": self.low, "high": self.high, "original": self.original}
        elif self.factor != 1.0:
            out |= {"factor": self.factor}
        plain = Rope()
        return out | {k: v for k in ("amplitude", "turned", "last", "interleaved") if (v := getattr(self, k)) != getattr(plain, k)}


@dataclass(frozen=True, slots=True)
class Norm:
    """`layer` (with a bias) or `rms`."""

    kind: str
    eps: float


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values are made from one short vector of a token, queries maybe from another.

    `query_rank` 0: queries straight from the stream. `rope_dim` elements of a head carry the position; those of the keys are shared by all heads.
    """

    query_rank: int
    key_rank: int
    rope_dim: int
    norm: Norm


@dataclass(frozen=True, slots=True)
class Attention:
    """`num_heads` query heads share `num_kv_heads` key and value heads, of `head_dim` elements each; values have `value_dim`.

    `scale` multiplies the scores, `softcap` bounds them; `window`: no query sees further back, 0 without limit. `relative`: (buckets, largest distance) of
    learned relative positions. `norm` is that of each head's queries and keys. `query_init`: by how much smaller than others the weights of queries start.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    value_dim: int = 0
    rope: Rope | None = None
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    relative: tuple[int, int] | None = None
    norm: Norm | None = None
    latent: Latent | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: float = 0.0
    query_init: float = 1.0

    @property
    def width(self) -> int:
        """Elements of a value head."""
        return self.value_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class Mlp:
    """`activation` is `gelu` (exact), `gelu_tanh`, `silu` or `relu`; `gated`: it multiplies a second projection. `limit` > 0: gpt-oss's clamped silu."""

    hidden: int
    activation: str
    gated: bool
    bias: bool = False
    dropout: float = 0.0
    limit: float = 0.0
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class Experts:
    """`num_experts` MLPs like `mlp`, of which each token passes `top_k`, and one of `shared` hidden elements that all pass (0: none).

    `score`: `softmax` over all experts, `sigmoid` of each, or `chosen`: softmax over those chosen. `moved`: a bias of each expert moves the choice alone. With
    `groups` > 1 only experts of the best `top_groups` can be chosen, a group counting as the sum of its `of_group` best. `normalised`: weights of a token sum
    to 1; `factor` multiplies them. `capacity`: slots of an expert for each sample as a multiple of its even share, length x top_k / num_experts; what finds no
    slot is dropped, and num_experts / top_k or more drops nothing. It is what imbalance costs: the busiest expert is waited for.
    """

    mlp: Mlp
    num_experts: int
    top_k: int
    score: str
    shared: int = 0
    moved: bool = False
    groups: int = 1
    top_groups: int = 1
    of_group: int = 1
    normalised: bool = True
    eps: float = 0.0
    factor: float = 1.0
    router_bias: bool = False
    capacity: float = 1.0

    def slots(self, seq: int) -> int:
        """Slots of one expert for a sample of `seq` tokens."""
        return min(seq, math.ceil(seq * self.top_k / self.num_experts * self.capacity))


@dataclass(frozen=True, slots=True)
class Block:
    """One layer of the chain; `cross`: attention to what the encoder gave; `residual` is one of `RESIDUALS`, `dropout` acts on what joins the stream."""

    attention: Attention
    mlp: Mlp | Experts
    norm: Norm
    residual: str = "pre"
    cross: Attention | None = None
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class Image:
    """Square images of `size` pixels a side in `channels`, cut into patches of `patch` pixels a side."""

    size: int
    patch: int
    channels: int

    @property
    def num_patches(self) -> int:
        return (self.size // self.patch) ** 2


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes in elements. `vocab` counts the classes of the loss: tokens, or labels of an image.

    `learned`: positions have a learned table. `norm` is the one before the head. `tied`: the head is the embedding's table. `embed_factor`, `logit_factor`
    multiply, `softcap` bounds the logits. `head_activation`: before the head stand a projection, this activation and a norm, as in BERT. `padding`: an input
    `mask` hides keys. `balance`: so much of the balancing loss of all layers' experts is added. `extra_predictions`: so many further tokens are predicted, each
    by a block like the last (DeepSeek-V3, arXiv:2412.19437, section 2.2), which add `extra_weight` of their mean loss. `init_std` is the deviation of the
    weights' start, `init_residual_std` that of the projections that add to the residual.
    """

    family: str
    vocab: int
    hidden: int
    max_positions: int
    blocks: tuple[Block, ...]
    norm: Norm | None
    tied: bool
    encoder: tuple[Block, ...] = ()
    learned: bool = False
    token_types: int = 0
    image: Image | None = None
    padding: bool = False
    embed_factor: float = 1.0
    embed_norm: Norm | None = None
    embed_dropout: float = 0.0
    head_activation: str = ""
    head_bias: bool = False
    logit_factor: float = 1.0
    softcap: float = 0.0
    balance: float = 0.0
    extra_predictions: int = 0
    extra_weight: float = 0.3
    init_std: float = 0.02
    init_residual_std: float = 0.02

    @property
    def num_layers(self) -> int:
        """Blocks of the chain, an encoder's and those of extra predictions included."""
        return len(self.encoder) + len(self.blocks) + self.extra_predictions

    @property
    def attention(self) -> Attention:
        """That of the first block, which stands for all where sizes are asked for."""
        return self.blocks[0].attention

    @property
    def mlp(self) -> Mlp:
        """The first MLP that every token passes, or the expert's where there is none."""
        kinds = [b.mlp for b in self.blocks]
        return next((m for m in kinds if isinstance(m, Mlp)), None) or next(m.mlp for m in kinds if isinstance(m, Experts))

    @property
    def experts(self) -> Experts | None:
        return next((b.mlp for b in self.blocks if isinstance(b.mlp, Experts)), None)

    @property
    def fingerprint(self) -> str:
        """Changes when anything that the graph depends on changes; 16 hexadecimal digits."""
        kinds = list(dict.fromkeys((*self.encoder, *self.blocks)))
        whole = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("blocks", "encoder")}
        text = json.dumps([_plain(whole), _plain(kinds), [kinds.index(b) for b in self.encoder], [kinds.index(b) for b in self.blocks]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check(self) -> ModelConfig:
        """Returns the config itself, or raises InputError naming the first field that is wrong, its value and the legal ones."""
        for name in ("vocab", "hidden", "max_positions"):
            check_size(name, getattr(self, name))
        check_size("num_layers", self.num_layers, MAX_LAYERS)
        check_number("embed_dropout", self.embed_dropout, *PROBABILITY)
        for name in ("init_std", "init_residual_std"):
            check_number(name, getattr(self, name), "a number of 0 or more", lambda x: x >= 0)
        if self.image is not None:
            _check_image(self.image)
        for block in dict.fromkeys((*self.encoder, *self.blocks)):
            _check_block(block)
        return self


def _plain(value: Any) -> Any:
    """What JSON can hold of dataclasses and their containers."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


PROBABILITY: tuple[str, Callable[[float], bool]] = ("a probability of 0 or more and less than 1", lambda p: 0 <= p < 1)


def _check_block(block: Block) -> None:
    if block.residual not in RESIDUALS:
        raise InputError(f"residual is {block.residual!r}; it must be one of {', '.join(RESIDUALS)}")
    check_number("residual_dropout", block.dropout, *PROBABILITY)
    check_number("norm_eps", block.norm.eps, "a number above 0", lambda x: x > 0)
    for attention in filter(None, (block.attention, block.cross)):
        _check_attention(attention)
    mlp = block.mlp.mlp if isinstance(block.mlp, Experts) else block.mlp
    check_size("mlp_hidden", mlp.hidden)
    if isinstance(block.mlp, Experts):
        _check_experts(block.mlp)


def _check_attention(a: Attention) -> None:
    for name in ("num_heads", "num_kv_heads", "head_dim"):
        check_size(name, getattr(a, name))
    check_number("attention_dropout", a.dropout, *PROBABILITY)
    check_number("attention_scale", a.scale, "a number above 0", lambda x: x > 0)
    if a.num_heads % a.num_kv_heads:
        raise InputError(f"{a.num_heads} heads cannot share {a.num_kv_heads} key-value heads evenly; num_kv_heads can be one of {divisors(a.num_heads)}")
    turned = a.latent.rope_dim if a.latent else (a.rope.turned or a.head_dim) if a.rope else 0
    if turned % 2:
        what = "head_dim" if turned == a.head_dim else "the part of a head that rotary positions turn"
        raise InputError(f"{what} is {turned}: rotary positions turn pairs of elements, so it must be even")


def _check_experts(e: Experts) -> None:
    check_size("num_experts", e.num_experts)
    check_size("top_k", e.top_k, e.num_experts)
    check_number("capacity", e.capacity, "a number above 0, 1 for the even share of an expert", lambda x: x > 0)
    if e.num_experts % e.groups or not 1 <= e.top_groups <= e.groups:
        raise InputError(f"{e.num_experts} experts in {e.groups} groups, {e.top_groups} of them open: groups must divide the experts, and be as many or more")
    if e.top_groups * (e.num_experts // e.groups) < e.top_k:
        raise InputError(f"{e.top_groups} groups of {e.num_experts // e.groups} experts have fewer than the {e.top_k} that each token passes")


def _check_image(image: Image) -> None:
    if image.size % image.patch:
        near = [n for n in divisors(image.size) if abs(n - image.patch) <= image.patch]
        raise InputError(f"image_size = {image.size} is not a multiple of patch_size = {image.patch}; near it are {near}")


def divisors(n: int, most: int = 1024) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def check_size(name: str, value: Any, most: int = MAX_SIZE) -> int:
    """The value, if it is a whole number from 1 to `most`; InputError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(f"{name} is {reprlib.repr(value)}; it must be a whole number from 1 to {most}")
    return value


def check_number(name: str, value: Any, what: str, legal: Callable[[float], bool]) -> float:
    """The value as a float, if it is a finite number for which `legal` holds; InputError saying it must be `what` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not legal(value):
        raise InputError(f"{name} is {reprlib.repr(value)}; it must be {what}")
    return float(value)


def windows(kinds: Iterable[str], window: int) -> tuple[int, ...]:
    """The window of every layer from the kinds that Hugging Face's `layer_types` names.

    >>> windows(["full_attention", "sliding_attention"], 128)
    (0, 128)
    """
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

"""The forward graph of a decoder-only transformer, from its config.

A block is `x + attention(norm(x))`, then `x + mlp(norm(x))`. What differs between the families (learned or rotary positions, LayerNorm or RMSNorm, biases,
grouped queries, a gated MLP, a norm of each head, tied embeddings) is in the config; the names are one scheme for all:

    wte  wpe  embed                          layer 0
    h.<i>.ln_1  h.<i>.attn.{q,k,v,attend,out}  h.<i>.attn.residual
    h.<i>.ln_2  h.<i>.mlp.{gate,up,act,down}   h.<i>.mlp.residual       layer i + 1
    ln_f  lm_head  loss                      layer L + 1

A parameter is called like the node that reads it, plus `.weight` or `.bias`. Projections hold [inputs, outputs]; the two tables `wte.weight` and
`lm_head.weight` hold [vocabulary, hidden], so that a tied head reads the very tensor of the embedding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ir.errors import GraphError
from ir.graph import Builder, Graph
from ir.units import dtype_name
from planner.frontends.config import MAX_SIZE, ModelConfig


@dataclass(frozen=True, slots=True)
class Param:
    """The shape of a parameter and how it starts."""

    shape: tuple[int, ...]
    init: Mapping[str, Any]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def embedding_params(c: ModelConfig) -> dict[str, Param]:
    """Parameters before the blocks, by name."""
    out = {"wte.weight": Param((c.vocab, c.hidden), _normal(c.init_std))}
    return out if c.rope is not None else out | {"wpe.weight": Param((c.max_positions, c.hidden), _normal(c.init_std))}


def output_params(c: ModelConfig) -> dict[str, Param]:
    """Parameters after the blocks, by name."""
    out = _norm_params(c, "ln_f", c.hidden)
    return out if c.tied else out | {"lm_head.weight": Param((c.vocab, c.hidden), _normal(c.init_std))}


def block_params(c: ModelConfig) -> dict[str, Param]:
    """Parameters of one block, by their name inside it; all blocks are alike."""
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    out = _norm_params(c, "ln_1", c.hidden)
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        out |= _linear_params(f"attn.{name}", c.hidden, width, c.qkv_bias, c.init_std)
    if c.head_norm:
        out |= {f"attn.{name}.norm.weight": Param((c.head_dim,), {"init": "ones"}) for name in ("q", "k")}
    out |= _linear_params("attn.out", queries, c.hidden, c.out_bias, c.init_residual_std)
    out |= _norm_params(c, "ln_2", c.hidden)
    for name in ("gate", "up") if c.gated else ("up",):
        out |= _linear_params(f"mlp.{name}", c.hidden, c.mlp_hidden, c.mlp_bias, c.init_std)
    return out | _linear_params("mlp.down", c.mlp_hidden, c.hidden, c.mlp_bias, c.init_residual_std)


def params(c: ModelConfig) -> dict[str, Param]:
    """Every parameter by its name in the graph, in the order of the layers."""
    block = block_params(c)
    blocks = {f"h.{i}.{name}": p for i in range(c.num_layers) for name, p in block.items()}
    return embedding_params(c) | blocks | output_params(c)


def num_params(c: ModelConfig) -> int:
    """Elements of all parameters; a tied table counts once."""
    outside = sum(p.num_elements for part in (embedding_params(c), output_params(c)) for p in part.values())
    return outside + c.num_layers * sum(p.num_elements for p in block_params(c).values())


def build(c: ModelConfig, name: str, batch: int, seq: int, dtype: str) -> Graph:
    """The forward graph of one microbatch: inputs `ids` and `labels` [batch, seq], output the scalar `loss`, the mean over its tokens.

    `labels` are the next tokens, already shifted. Raises GraphError when a size is not a whole number of 1 or more, or the sequence is longer than the
    learned positions or the attention window.
    """
    _check_sizes(c, name, batch, seq)
    write = _Writer(c, Builder(name), dtype_name(dtype), batch, seq)
    x = write.embedding()
    for i in range(c.num_layers):
        x = write.block(i, x)
    write.head(x)
    return write.b.graph(("loss",))


def salt(node: str) -> int:
    """An integer of its own for each node that draws random numbers: 31 bits of SHA-256 of its name, the same in every run."""
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:4], "big") >> 1


def _check_sizes(c: ModelConfig, name: str, batch: int, seq: int) -> None:
    for what, value in (("batch", batch), ("seq", seq)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
            raise GraphError(f"{what} is {value!r}; it must be a whole number from 1 to {MAX_SIZE}")
    if c.rope is None and seq > c.max_positions:
        raise GraphError(f"seq is {seq}, but `{name}` has {c.max_positions} learned positions; use a seq of {c.max_positions} or less")
    if c.window and seq > c.window:
        raise GraphError(
            f"seq is {seq}, but `{name}` looks back over a sliding window of {c.window} tokens, which headrace does not build; "
            f"up to seq {c.window} the window changes nothing: use that, or set it to null in the config for full attention"
        )


def _normal(std: float) -> dict[str, Any]:
    return {"init": "normal", "std": std}


def _linear_params(name: str, k: int, n: int, bias: bool, std: float) -> dict[str, Param]:
    out = {f"{name}.weight": Param((k, n), _normal(std))}
    return out | {f"{name}.bias": Param((n,), {"init": "zeros"})} if bias else out


def _norm_params(c: ModelConfig, name: str, width: int) -> dict[str, Param]:
    out = {f"{name}.weight": Param((width,), {"init": "ones"})}
    return out | {f"{name}.bias": Param((width,), {"init": "zeros"})} if c.norm == "layer" else out


class _Writer:
    """Writes one graph; every method adds the nodes of one part and returns the tensor that the next part reads."""

    def __init__(self, c: ModelConfig, b: Builder, dtype: str, batch: int, seq: int) -> None:
        self.c, self.b, self.batch, self.seq = c, b, batch, seq
        self.layer = 0
        b.tensor("ids", (batch, seq), "int64", "input")
        b.tensor("labels", (batch, seq), "int64", "input")
        for name, p in params(c).items():
            b.tensor(name, p.shape, dtype, "param", p.init)

    def embedding(self) -> str:
        x = self._node("embedding", "wte", "ids", "wte.weight")
        if self.c.rope is None:
            y = self._node("positions", "wpe", "wpe.weight", s=self.seq)
            x = self._node("add_positions", "embed", x, y)
        return self._dropout("embed.drop", x, self.c.embed_dropout)

    def block(self, i: int, x: str) -> str:
        self.layer = i + 1
        h = f"h.{i}"
        y = self._attention(f"{h}.attn", i, self._norm(f"{h}.ln_1", x))
        x = self._node("add", f"{h}.attn.residual", x, y)
        y = self._mlp(f"{h}.mlp", self._norm(f"{h}.ln_2", x))
        return self._node("add", f"{h}.mlp.residual", x, y)

    def head(self, x: str) -> None:
        self.layer = self.c.num_layers + 1
        x = self._norm("ln_f", x)
        logits = self._node("linear_t", "lm_head", x, "wte.weight" if self.c.tied else "lm_head.weight")
        # The split form of cross_entropy, because in it the vocabulary may lie on several ranks.
        top = self._node("last_max", "loss.top", logits)
        z, t = self.b.node("exp_sum", (logits, "labels", top), name="loss.sums", outputs=("loss.z", "loss.t"), layer=self.layer)
        each = self._node("log_loss", "loss.each", z, t)
        self._node("total", "loss", each, factor=1.0 / (self.batch * self.seq))

    def _attention(self, at: str, i: int, x: str) -> str:
        c = self.c
        q, k, v = (self._linear(f"{at}.{name}", x, c.qkv_bias) for name in ("q", "k", "v"))
        q, k = (self._positioned(f"{at}.{name}", y) for name, y in (("q", q), ("k", k)))
        scale = c.attention_scale / (i + 1) if c.scale_by_layer else c.attention_scale
        attrs: dict[str, Any] = {"r": c.num_heads // c.num_kv_heads, "d": c.head_dim, "causal": True, "scale": scale}
        if c.attention_dropout:
            attrs |= {"p": c.attention_dropout, "salt": salt(f"{at}.attend")}
        y = self._node("attention", f"{at}.attend", q, k, v, **attrs)
        return self._dropout(f"{at}.drop", self._linear(f"{at}.out", y, c.out_bias), c.residual_dropout)

    def _positioned(self, at: str, x: str) -> str:
        """Queries or keys, with the norm of each head and the rotary positions where the model has them."""
        if self.c.head_norm:
            x = self._node("head_norm", f"{at}.norm", x, f"{at}.norm.weight", eps=self.c.norm_eps, d=self.c.head_dim)
        if self.c.rope is not None:
            x = self._node("rope", f"{at}.rope", x, d=self.c.head_dim, **self.c.rope.attrs)
        return x

    def _mlp(self, at: str, x: str) -> str:
        c = self.c
        if c.gated and c.activation == "silu":
            gate, up = (self._linear(f"{at}.{name}", x, c.mlp_bias) for name in ("gate", "up"))
            y = self._node("swiglu", f"{at}.act", gate, up)
        elif c.gated:
            gate = self._activation(f"{at}.act", self._linear(f"{at}.gate", x, c.mlp_bias))
            y = self._node("mul", f"{at}.gated", gate, self._linear(f"{at}.up", x, c.mlp_bias))
        else:
            y = self._activation(f"{at}.act", self._linear(f"{at}.up", x, c.mlp_bias))
        return self._dropout(f"{at}.drop", self._linear(f"{at}.down", y, c.mlp_bias), c.residual_dropout)

    def _activation(self, name: str, x: str) -> str:
        if self.c.activation == "silu":
            return self._node("silu", name, x)
        return self._node("gelu", name, x, approximate="tanh" if self.c.activation == "gelu_tanh" else "none")

    def _norm(self, name: str, x: str) -> str:
        if self.c.norm == "layer":
            return self._node("layer_norm", name, x, f"{name}.weight", f"{name}.bias", eps=self.c.norm_eps)
        return self._node("rms_norm", name, x, f"{name}.weight", eps=self.c.norm_eps)

    def _linear(self, name: str, x: str, bias: bool) -> str:
        y = self._node("linear", name, x, f"{name}.weight")
        return self._node("bias", f"{name}.add_bias", y, f"{name}.bias") if bias else y

    def _dropout(self, name: str, x: str, p: float) -> str:
        return self._node("dropout", name, x, p=p, salt=salt(name)) if p else x

    def _node(self, op: str, name: str, *inputs: str, **attrs: Any) -> str:
        """Adds a node and returns its first output, which is called like it."""
        return self.b.node(op, inputs, name=name, attrs=attrs, layer=self.layer)[0]

"""The kinds of attention: their parameters and their part of a graph.

at.{q,k,v}  at.{q,k}.norm  at.{q,k}.rope  at.attend  at.out                      queries of several heads share a key and value head
at.q_down  at.q_down.norm  at.q  at.kv_down  at.kv_down.norm  at.k_rope  at.k  at.v     latent attention: from one short vector of a token
"""

from __future__ import annotations

from typing import Any

from planner.frontends.config import Attention, ModelConfig, Rope
from planner.frontends.writer import Param, Params, Writer, linear_params, norm_params, normal, salt


def attention_params(c: ModelConfig, a: Attention, at: str = "attn") -> Params:
    """Parameters of one attention by their name inside a block; relative positions are a stack's, not a block's."""
    std = c.init_std
    out = _latent_params(c, a, at) if a.latent is not None else {}
    if a.latent is None:
        for name, heads, dim in (("q", a.num_heads, a.head_dim), ("k", a.num_kv_heads, a.head_dim), ("v", a.num_kv_heads, a.width)):
            out |= linear_params(f"{at}.{name}", c.hidden, heads * dim, a.qkv_bias, std * (a.query_init if name == "q" else 1.0))
    if a.norm is not None:
        for name in ("q", "k"):
            out |= norm_params(a.norm, f"{at}.{name}.norm", a.head_dim)
    if a.sinks:
        out |= {f"{at}.sinks": Param((a.num_heads,), normal(std))}
    return out | linear_params(f"{at}.out", a.num_heads * a.width, c.hidden, a.out_bias, c.init_residual_std)


def _latent_params(c: ModelConfig, a: Attention, at: str) -> Params:
    latent = a.latent
    out: Params = {}
    assert latent is not None
    plain, queries = a.head_dim - latent.rope_dim, a.num_heads * a.head_dim
    if latent.query_rank:
        out |= linear_params(f"{at}.q_down", c.hidden, latent.query_rank, a.qkv_bias, c.init_std) | norm_params(latent.norm, f"{at}.q_norm", latent.query_rank)
    out |= linear_params(f"{at}.q", latent.query_rank or c.hidden, queries, False, c.init_std)
    out |= linear_params(f"{at}.kv_down", c.hidden, latent.key_rank, a.qkv_bias, c.init_std) | norm_params(latent.norm, f"{at}.kv_norm", latent.key_rank)
    out |= linear_params(f"{at}.k_rope", c.hidden, latent.rope_dim, a.qkv_bias, c.init_std)
    out |= linear_params(f"{at}.k", latent.key_rank, a.num_heads * plain, False, c.init_std)
    return out | linear_params(f"{at}.v", latent.key_rank, a.num_heads * a.width, False, c.init_std)


def write_attention(w: Writer, a: Attention, at: str, x: str, *, memory: str | None = None, table: str = "") -> str:
    """The nodes of one attention over `x`, its keys and values from `memory` where that is another sequence.

    `table`: the parameter of relative positions.
    """
    q, k, v = _latent_heads(w, a, at, x) if a.latent is not None else _heads(w, a, at, x, memory or x)
    attrs: dict[str, Any] = {"r": a.num_heads // a.num_kv_heads, "d": a.head_dim, "causal": a.causal, "scale": a.scale}
    attrs |= {name: value for name in ("window", "softcap") if (value := getattr(a, name))}
    if a.dropout:
        attrs |= {"p": a.dropout, "salt": salt(f"{at}.attend")}
    if a.sinks:
        y = w.node("attention_sinks", f"{at}.attend", q, k, v, f"{at}.sinks", **attrs)
    elif a.relative is not None:
        y = w.node("attention_relative", f"{at}.attend", q, k, v, table, max_distance=a.relative[1], **attrs)
    elif w.c.padding and not a.causal:
        y = w.node("attention_masked", f"{at}.attend", q, k, v, "mask", **attrs)
    else:
        y = w.node("attention", f"{at}.attend", q, k, v, **attrs)
    return w.linear(f"{at}.out", y, a.out_bias)


def _heads(w: Writer, a: Attention, at: str, x: str, memory: str) -> tuple[str, str, str]:
    q, k, v = (w.linear(f"{at}.{name}", source, a.qkv_bias) for name, source in (("q", x), ("k", memory), ("v", memory)))
    return _positioned(w, a, f"{at}.q", q), _positioned(w, a, f"{at}.k", k), v


def _positioned(w: Writer, a: Attention, at: str, x: str) -> str:
    """Queries or keys, with the norm of each head and the rotary positions where the model has them."""
    if a.norm is not None:
        x = w.node("head_norm", f"{at}.norm", x, f"{at}.norm.weight", eps=a.norm.eps, d=a.head_dim)
    return _turned(w, a.rope, f"{at}.rope", x, a.head_dim)


def _turned(w: Writer, rope: Rope | None, name: str, x: str, head_dim: int) -> str:
    return w.node("rope", name, x, d=head_dim, **rope.attrs) if rope is not None else x


def _latent_heads(w: Writer, a: Attention, at: str, x: str) -> tuple[str, str, str]:
    latent, rope = a.latent, a.rope
    assert latent is not None
    if latent.query_rank:
        queries = w.norm(latent.norm, f"{at}.q_norm", w.linear(f"{at}.q_down", x, a.qkv_bias))
    else:
        queries = x
    q = _turned(w, rope, f"{at}.q.rope", w.linear(f"{at}.q", queries, False), a.head_dim)
    keys = w.norm(latent.norm, f"{at}.kv_norm", w.linear(f"{at}.kv_down", x, a.qkv_bias))
    # what is turned of the keys is one head that all share, and the whole of it is turned
    own = None if rope is None else Rope(**{name: getattr(rope, name) for name in Rope.__slots__ if name not in ("turned", "last")})
    position = _turned(w, own, f"{at}.k_rope.rope", w.linear(f"{at}.k_rope", x, a.qkv_bias), latent.rope_dim)
    k = w.node("append_to_heads", f"{at}.k.whole", w.linear(f"{at}.k", keys, False), position, m=a.head_dim - latent.rope_dim, n=a.head_dim)
    return q, k, w.linear(f"{at}.v", keys, False)

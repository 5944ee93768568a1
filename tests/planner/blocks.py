"""Llama blocks and models written node by node, and a machine of two numbers per axis to price them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ir.boxing import Price, step_nbytes
from ir.graph import Builder, Graph
from ir.mesh import JOINED
from planner.pricing import Pricing, step_price


@dataclass(frozen=True)
class AlphaBeta:
    """Latency and bandwidth of links, a tenth on `slow` axes; one rate for products, one for memory; rings, an all-reduce being `all_reduce_rounds` of them."""

    sizes: dict[str, int]
    latency_s: float = 5e-6
    bytes_per_s: float = 200e9
    slow: tuple[str, ...] = ()
    flops_per_s: float = 400e12
    memory_bytes_per_s: float = 2e12
    launch_s: float = 3e-6
    all_reduce_rounds: float = 2.0

    def compute_s(self, op: str, dtype: str, flops: float, nbytes: float, gemm: tuple[int, ...]) -> float:
        return max(flops / self.flops_per_s, nbytes / self.memory_bytes_per_s) + self.launch_s

    def collective_s(self, kind: str, nbytes: float, axis: str) -> float:
        joined = axis.split(JOINED)
        n = prod(self.sizes[name] for name in joined)
        rate = self.bytes_per_s / (10 if any(name in self.slow for name in joined) else 1)
        rounds = self.all_reduce_rounds if kind == "all_reduce" else 1.0
        return rounds * (self.latency_s * (n - 1) + nbytes * (n - 1) / n / rate)

    def local_s(self, nbytes: float) -> float:
        return nbytes / self.memory_bytes_per_s + self.launch_s


def boxing_price(pricing: Pricing, axes: Sequence[str], mesh: Sequence[int], shape: Sequence[int], itemsize: int) -> Price:
    """What one boxing step of a tensor costs, for `ir.boxing.chain`."""
    return lambda step: step_price(pricing, step.over(axes), step.kind, *step_nbytes(step, shape, mesh, itemsize))


@dataclass(frozen=True)
class Llama:
    """Sizes of a Llama: `heads` query heads of size `d` in `groups` key and value heads."""

    batch: int = 8
    seq: int = 2048
    hidden: int = 4096
    heads: int = 32
    groups: int = 8
    d: int = 128
    inner: int = 14336
    vocab: int = 128256
    layers: int = 1
    tied: bool = False
    dtype: str = "bfloat16"


def block(g: Builder, x: str, c: Llama, layer: int) -> str:
    """One layer; returns the residual stream."""
    p = f"h.{layer - 1}."

    def linear(name: str, source: str, n: int, k: int) -> str:
        w = g.tensor(f"{p}{name}.w", (n, k), c.dtype, "param", {"init": "normal", "std": 0.02})
        return g.node("linear_t", [source, w], name=f"{p}{name}", layer=layer)[0]

    def norm(name: str, source: str) -> str:
        gain = g.tensor(f"{p}{name}.g", (c.hidden,), c.dtype, "param", {"init": "ones"})
        return g.node("rms_norm", [source, gain], name=f"{p}{name}", attrs={"eps": 1e-5}, layer=layer)[0]

    a = norm("norm1", x)
    rope = {"d": c.d, "theta": 5e5}
    q = g.node("rope", [linear("q", a, c.heads * c.d, c.hidden)], name=f"{p}rope_q", attrs=rope, layer=layer)[0]
    k = g.node("rope", [linear("k", a, c.groups * c.d, c.hidden)], name=f"{p}rope_k", attrs=rope, layer=layer)[0]
    v = linear("v", a, c.groups * c.d, c.hidden)
    heads = {"r": c.heads // c.groups, "d": c.d, "causal": True}
    mixed = g.node("attention", [q, k, v], name=f"{p}attn", attrs=heads, layer=layer)[0]
    x = g.node("add", [x, linear("o", mixed, c.hidden, c.heads * c.d)], name=f"{p}add1", layer=layer)[0]
    a = norm("norm2", x)
    gated = g.node("swiglu", [linear("gate", a, c.inner, c.hidden), linear("up", a, c.inner, c.hidden)], name=f"{p}swiglu", layer=layer)[0]
    return g.node("add", [x, linear("down", gated, c.hidden, c.inner)], name=f"{p}add2", layer=layer)[0]


def model(c: Llama) -> Graph:
    """Embedding, layers, norm, head and the split form of cross-entropy, ending in the loss."""
    g = Builder("llama")
    ids = g.tensor("ids", (c.batch, c.seq), "int64", "input")
    labels = g.tensor("labels", (c.batch, c.seq), "int64", "input")
    table = g.tensor("embed.w", (c.vocab, c.hidden), c.dtype, "param", {"init": "normal", "std": 0.02})
    x = g.node("embedding", [ids, table], name="embed", layer=0)[0]
    for layer in range(1, c.layers + 1):
        x = block(g, x, c, layer)
    last = c.layers + 1
    gain = g.tensor("norm.g", (c.hidden,), c.dtype, "param", {"init": "ones"})
    x = g.node("rms_norm", [x, gain], name="norm", attrs={"eps": 1e-5}, layer=last)[0]
    head = table if c.tied else g.tensor("head.w", (c.vocab, c.hidden), c.dtype, "param", {"init": "normal", "std": 0.02})
    logits = g.node("linear_t", [x, head], name="head", layer=last)[0]
    top = g.node("last_max", [logits], name="top", layer=last)[0]
    z, t = g.node("exp_sum", [logits, labels, top], name="sum", layer=last)
    losses = g.node("log_loss", [z, t], name="losses", layer=last)[0]
    loss = g.node("total", [losses], name="loss", attrs={"factor": 1.0 / (c.batch * c.seq)}, layer=last)[0]
    return g.graph((loss,))

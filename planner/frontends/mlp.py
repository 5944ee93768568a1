"""The kinds of MLP: one that every token passes, or experts of which each token passes a few; their parameters and their part of a graph.

at.{gate,up,act,down}
at.router  at.choice  at.dispatch  at.experts.{gate,up,act,down}  at.combine  at.shared.{gate,up,act,down}  at.sum
"""

from __future__ import annotations

from dataclasses import replace

from planner.frontends.config import Experts, Mlp, ModelConfig
from planner.frontends.writer import ZEROS, Param, Params, Writer, linear_params, normal


def mlp_params(c: ModelConfig, m: Mlp | Experts, at: str = "mlp") -> Params:
    """Parameters by their name inside a block."""
    if isinstance(m, Experts):
        return _experts_params(c, m, at)
    out: Params = {}
    for name in _inward(m):
        out |= linear_params(f"{at}.{name}", c.hidden, m.hidden, m.bias, c.init_std)
    return out | linear_params(f"{at}.down", m.hidden, c.hidden, m.bias, c.init_residual_std)


def _inward(m: Mlp) -> tuple[str, ...]:
    return ("gate", "up") if m.gated else ("up",)


def _experts_params(c: ModelConfig, e: Experts, at: str) -> Params:
    out = linear_params(f"{at}.router", c.hidden, e.num_experts, e.router_bias, c.init_std)
    if e.moved:
        out |= {f"{at}.choice.bias": Param((e.num_experts,), ZEROS)}
    inward = [(name, c.hidden, e.mlp.hidden, c.init_std) for name in _inward(e.mlp)]
    for name, k, n, std in (*inward, ("down", e.mlp.hidden, c.hidden, c.init_residual_std)):
        out |= {f"{at}.experts.{name}.weight": Param((e.num_experts, k, n), normal(std))}
        out |= {f"{at}.experts.{name}.bias": Param((e.num_experts, n), ZEROS)} if e.mlp.bias else {}
    return out | (mlp_params(c, replace(e.mlp, hidden=e.shared), f"{at}.shared") if e.shared else {})


def write_mlp(w: Writer, m: Mlp | Experts, at: str, x: str) -> str:
    """The nodes of one MLP over `x`."""
    if isinstance(m, Experts):
        return _write_experts(w, m, at, x)
    inward = [w.linear(f"{at}.{name}", x, m.bias) for name in _inward(m)]
    y = w.dropout(f"{at}.inner_drop", _gated(w, m, at, inward), m.dropout)
    return w.linear(f"{at}.down", y, m.bias)


def _gated(w: Writer, m: Mlp, at: str, inward: list[str]) -> str:
    """The activation of what the inward projections gave."""
    if m.limit:
        return w.node("clamped_swiglu", f"{at}.act", *inward, alpha=m.alpha, limit=m.limit)
    if m.gated and m.activation == "silu":
        return w.node("swiglu", f"{at}.act", *inward)
    y = w.activation(f"{at}.act", m.activation, inward[0])
    return w.node("mul", f"{at}.gated", y, inward[1]) if m.gated else y


def _write_experts(w: Writer, e: Experts, at: str, x: str) -> str:
    logits = w.linear(f"{at}.router", x, e.router_bias)
    weight, expert = _choice(w, e, at, logits)
    if w.c.balance:
        _count_load(w, e, at, logits, expert)
    y = w.node("dispatch", f"{at}.dispatch", x, expert, e=e.num_experts, c=e.slots(w.seq))
    inward = [_grouped(w, f"{at}.experts.{name}", y, e.mlp.bias) for name in _inward(e.mlp)]
    y = _grouped(w, f"{at}.experts.down", _gated(w, e.mlp, f"{at}.experts", inward), e.mlp.bias)
    y = w.node("combine", f"{at}.combine", y, weight, expert)
    if not e.shared:
        return y
    return w.node("add", f"{at}.sum", y, write_mlp(w, replace(e.mlp, hidden=e.shared), f"{at}.shared", x))


def _grouped(w: Writer, name: str, x: str, bias: bool) -> str:
    y = w.node("grouped_linear", name, x, f"{name}.weight")
    return w.node("expert_bias", f"{name}.add_bias", y, f"{name}.bias") if bias else y


def _count_load(w: Writer, e: Experts, at: str, logits: str, expert: str) -> None:
    """Adds a layer's load and mass of each expert to those of the layers before."""
    probs = f"{at}.scores" if e.score == "softmax" else w.node("softmax", f"{at}.balance.scores", logits)
    found = w.nodes("expert_load", f"{at}.balance.load", probs, expert)
    if w.load:
        found = tuple(w.node("add", f"{at}.balance.{name}", a, b) for name, a, b in zip(("sum_load", "sum_mass"), w.load, found, strict=True))
    w.load = found


def _choice(w: Writer, e: Experts, at: str, logits: str) -> tuple[str, str]:
    """(weights of the chosen experts, which they are), [b s k] each."""
    scores = logits if e.score == "chosen" else w.node(e.score, f"{at}.scores", logits)
    attrs = {"k": e.top_k} | ({"groups": e.groups, "top_groups": e.top_groups, "of_group": e.of_group} if e.groups > 1 else {})
    operator, moved = ("top_k_moved", (f"{at}.choice.bias",)) if e.moved else ("top_k", ())
    weight, expert = w.nodes(operator, f"{at}.choice", scores, *moved, **attrs)
    if e.score == "chosen":
        weight = w.node("softmax", f"{at}.weights", weight)
    elif e.normalised:
        weight = w.node("shares", f"{at}.weights", weight, eps=e.eps)
    return (w.node("scale", f"{at}.weights.scaled", weight, factor=e.factor) if e.factor != 1.0 else weight), expert

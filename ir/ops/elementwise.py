"""Element by element: sums, biases, activations, dropout, re-arranged dims."""

from __future__ import annotations

from typing import Any

from ir.op import op


def todo(*_: Any) -> None:
    raise NotImplementedError


OPS = (
    op("add(x[...], y[...]) -> out[...]", todo, linear=["x y"], grads=("add.dx", "add.dy")),
    op("add.dx(dout[...]) -> dx[...]", todo, linear=["dout"]),
    op("add.dy(dout[...]) -> dy[...]", todo, linear=["dout"]),
    op("bias(x[... n], c[n]) -> out[... n]", todo, linear=["x c"], grads=("bias.dx", "bias.dc")),
    op("bias.dx(dout[... n]) -> dx[... n]", todo, linear=["dout"]),
    op("bias.dc(dout[... n]) -> dc[n]", todo, sums="...", linear=["dout"]),
    op("add_positions(x[b s h], y[s h]) -> out[b s h]", todo, linear=["x y"], grads=("add_positions.dx", "add_positions.dy")),
    op("add_positions.dx(dout[b s h]) -> dx[b s h]", todo, linear=["dout"]),
    op("add_positions.dy(dout[b s h]) -> dy[s h]", todo, sums="b", linear=["dout"]),
    op("scale(x[...]) -> out[...]", todo, linear=["x"], grads=("scale.dx",)),  # attrs: factor
    op("scale.dx(dout[...]) -> dx[...]", todo, linear=["dout"]),
    op("mul(x[...], y[...]) -> out[...]", todo, linear=["x", "y"], grads=("mul.dx", "mul.dy")),
    op("mul.dx(dout[...], y[...]) -> dx[...]", todo, linear=["dout", "y"]),
    op("mul.dy(dout[...], x[...]) -> dy[...]", todo, linear=["dout", "x"]),
    op("gelu(x[...]) -> out[...]", todo, grads=("gelu.dx",)),  # attrs: approximate ("tanh" | "none")
    op("gelu.dx(dout[...], x[...]) -> dx[...]", todo, linear=["dout"]),
    op("silu(x[...]) -> out[...]", todo, grads=("silu.dx",)),
    op("silu.dx(dout[...], x[...]) -> dx[...]", todo, linear=["dout"]),
    # gated MLP: silu(gate) * up
    op("swiglu(gate[...], up[...]) -> out[...]", todo, linear=["up"], grads=("swiglu.grad",)),
    op("swiglu.grad(dout[...], gate[...], up[...]) -> dgate[...], dup[...]", todo, linear=["dout"]),
    # attrs: p (probability of a zero), salt (an integer of its own for each node); the mask is a function of (seed, step, salt, logical index)
    op("dropout(x[b s h]) -> out[b s h]", todo, linear=["x"], grads=("dropout.dx",), random=True),
    op("dropout.dx(dout[b s h]) -> dx[b s h]", todo, linear=["dout"], random=True),
    # attrs: d, the size of a head
    op("split_heads(x[b s (h d)]) -> out[b h s d]", todo, linear=["x"], grads=("split_heads.dx",)),
    op("split_heads.dx(dout[b h s d]) -> dx[b s (h d)]", todo, linear=["dout"]),
    op("merge_heads(x[b h s d]) -> out[b s (h d)]", todo, linear=["x"], grads=("merge_heads.dx",)),
    op("merge_heads.dx(dout[b s (h d)]) -> dx[b h s d]", todo, linear=["dout"]),
    op("transpose(x[... m n]) -> out[... n m]", todo, linear=["x"], grads=("transpose.dx",)),
    op("transpose.dx(dout[... n m]) -> dx[... m n]", todo, linear=["dout"]),
)

"""Element by element: sums, biases, activations, dropout, re-arranged dims."""

from __future__ import annotations

import math
from typing import Any

from ir.op import Context, op
from ir.ops.erf import erf
from ir.ops.tiles import each, flat, matrix, scratch, tiles
from ir.random import growth, kept, stream

# ---- sums and products -----------------------------------------------------------------------------------------------------------------------------


def add(c: Context, x: Any, y: Any, out: Any) -> None:
    c.xp.add(x, y, out=out)


def copy(c: Context, x: Any, out: Any) -> None:
    c.xp.copyto(out, x)


def sum_rows(c: Context, x: Any, out: Any) -> None:
    """The sum over all dims but the last; tile by tile, so that float32 loses less than by adding row after row."""
    out[...] = 0.0
    for (rows,) in tiles(c, matrix(x)):
        out += c.xp.ones(len(rows), x.dtype) @ rows


def sum_samples(c: Context, x: Any, out: Any) -> None:
    c.xp.sum(x, axis=0, out=out)


def scale(c: Context, x: Any, out: Any) -> None:
    c.xp.multiply(x, c.attrs["factor"], out=out)


def mul(c: Context, x: Any, y: Any, out: Any) -> None:
    c.xp.multiply(x, y, out=out)


# ---- activations -----------------------------------------------------------------------------------------------------------------------------------

_TANH_SLOPE = math.sqrt(2.0 / math.pi)
_TANH_CUBE = 0.044715
"""gelu(x) ~ x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel, arXiv:1606.08415)."""


def _tanh_gate(c: Context, x: Any, square: Any) -> Any:
    """tanh(sqrt(2/pi) (x + 0.044715 x^3)); leaves x^2 in `square`."""
    c.xp.multiply(x, x, out=square)
    gate = square * (_TANH_SLOPE * _TANH_CUBE)
    gate += _TANH_SLOPE
    gate *= x
    return c.xp.tanh(gate, out=gate)


def _normal_cdf(c: Context, x: Any) -> Any:
    phi = erf(c.xp, x * math.sqrt(0.5))
    phi += 1.0
    phi *= 0.5
    return phi


def gelu(c: Context, x: Any, out: Any) -> None:
    tanh = c.attrs.get("approximate", "tanh") == "tanh"
    for part, result in flat(c, x, out):
        if tanh:
            gate = _tanh_gate(c, part, result)
            gate += 1.0
            gate *= 0.5
        else:
            gate = _normal_cdf(c, part)
        c.xp.multiply(gate, part, out=result)


def gelu_dx(c: Context, dout: Any, x: Any, dx: Any) -> None:
    slope = _tanh_slope if c.attrs.get("approximate", "tanh") == "tanh" else _normal_slope
    for cotangent, part, result in flat(c, dout, x, dx):
        c.xp.multiply(slope(c, part), cotangent, out=result)


def _tanh_slope(c: Context, x: Any) -> Any:
    """(1 + t) / 2 + x (1 - t^2) sqrt(2/pi) (1 + 3 * 0.044715 x^2) / 2"""
    square, grown = scratch(c, x, 2)
    gate = _tanh_gate(c, x, square)
    square *= 1.5 * _TANH_SLOPE * _TANH_CUBE
    square += 0.5 * _TANH_SLOPE
    square *= x
    c.xp.multiply(gate, gate, out=grown)
    c.xp.subtract(1.0, grown, out=grown)
    square *= grown
    gate += 1.0
    gate *= 0.5
    gate += square
    return gate


def _normal_slope(c: Context, x: Any) -> Any:
    """Phi(x) + x phi(x)"""
    density = x * x
    density *= -0.5
    c.xp.exp(density, out=density)
    density *= 1.0 / math.sqrt(2.0 * math.pi)
    density *= x
    density += _normal_cdf(c, x)
    return density


def _sigmoid(c: Context, x: Any) -> Any:
    """Through tanh, which does not overflow."""
    gate = x * 0.5
    c.xp.tanh(gate, out=gate)
    gate += 1.0
    gate *= 0.5
    return gate


def silu(c: Context, x: Any, out: Any) -> None:
    for part, result in flat(c, x, out):
        c.xp.multiply(_sigmoid(c, part), part, out=result)


def _silu_slope(c: Context, x: Any, gate: Any) -> Any:
    """s (1 + x (1 - s)) where s is the sigmoid of x."""
    slope = 1.0 - gate
    slope *= x
    slope += 1.0
    slope *= gate
    return slope


def silu_dx(c: Context, dout: Any, x: Any, dx: Any) -> None:
    for cotangent, part, result in flat(c, dout, x, dx):
        c.xp.multiply(_silu_slope(c, part, _sigmoid(c, part)), cotangent, out=result)


def swiglu(c: Context, gate: Any, up: Any, out: Any) -> None:
    for g, u, result in flat(c, gate, up, out):
        s = _sigmoid(c, g)
        s *= g
        c.xp.multiply(s, u, out=result)


def swiglu_grad(c: Context, dout: Any, gate: Any, up: Any, dgate: Any, dup: Any) -> None:
    for cotangent, g, u, into_gate, into_up in flat(c, dout, gate, up, dgate, dup):
        s = _sigmoid(c, g)
        slope = _silu_slope(c, g, s)
        slope *= u
        c.xp.multiply(slope, cotangent, out=into_gate)
        s *= g
        c.xp.multiply(s, cotangent, out=into_up)


def clamped_swiglu(c: Context, gate: Any, up: Any, out: Any) -> None:
    for g, u, result in flat(c, gate, up, out):
        low, high = _clamped(c, g, u)
        share = _sigmoid(c, low * c.attrs["alpha"])
        share *= low
        high += 1.0
        c.xp.multiply(share, high, out=result)


def _clamped(c: Context, gate: Any, up: Any) -> tuple[Any, Any]:
    """The gate at most `limit`, the other operand at most `limit` either way."""
    limit = c.attrs["limit"]
    return c.xp.minimum(gate, limit), c.xp.minimum(c.xp.maximum(up, -limit), limit)


def clamped_swiglu_grad(c: Context, dout: Any, gate: Any, up: Any, dgate: Any, dup: Any) -> None:
    limit, alpha = c.attrs["limit"], c.attrs["alpha"]
    for cotangent, g, u, into_gate, into_up in flat(c, dout, gate, up, dgate, dup):
        low, high = _clamped(c, g, u)
        share = _sigmoid(c, low * alpha)
        slope = share * (1.0 + alpha * low * (1.0 - share))
        c.xp.multiply(slope * (high + 1.0), cotangent * (g <= limit), out=into_gate)
        c.xp.multiply(share * low, cotangent * (c.xp.abs(u) <= limit), out=into_up)


def relu(c: Context, x: Any, out: Any) -> None:
    c.xp.maximum(x, 0.0, out=out)


def relu_dx(c: Context, dout: Any, x: Any, dx: Any) -> None:
    c.xp.multiply(dout, x > 0.0, out=dx)


def sigmoid(c: Context, x: Any, out: Any) -> None:
    for part, result in flat(c, x, out):
        c.xp.copyto(result, _sigmoid(c, part))


def sigmoid_dx(c: Context, dout: Any, out: Any, dx: Any) -> None:
    for cotangent, part, result in flat(c, dout, out, dx):
        c.xp.multiply(part * (1.0 - part), cotangent, out=result)


def softcap(c: Context, x: Any, out: Any) -> None:
    """cap tanh(x / cap): about x where x is small against the cap, never beyond it."""
    cap = float(c.attrs["cap"])
    for part, result in flat(c, x, out):
        c.xp.multiply(part, 1.0 / cap, out=result)
        c.xp.tanh(result, out=result)
        result *= cap


def softcap_dx(c: Context, dout: Any, out: Any, dx: Any) -> None:
    cap = float(c.attrs["cap"])
    for cotangent, part, result in flat(c, dout, out, dx):
        slope = part * (1.0 / cap)
        slope *= slope
        c.xp.multiply(1.0 - slope, cotangent, out=result)


# ---- dropout ---------------------------------------------------------------------------------------------------------------------------------------


def dropout(c: Context, x: Any, out: Any) -> None:
    """Zero with probability `p`, else x / (1 - p); the gradient draws the same numbers again."""
    p = float(c.attrs["p"])
    if p <= 0.0:
        c.xp.copyto(out, x)
        return
    samples, _, width = x.shape
    xp, at, total = c.xp, c.at, c.total
    key = stream(c.seed, c.step, c.attrs["salt"])
    sample = xp.arange(at.get("b", 0), at.get("b", 0) + samples)
    index = (sample[:, None] * total["s"] + c.positions()).reshape(-1)
    first = at.get("h", 0)
    for rows, part, result in tiles(c, index, matrix(x), matrix(out)):
        keep = kept(xp, key, p, rows, total["h"], first, first + width)
        xp.multiply(part, growth(p), out=result)
        xp.multiply(result, keep, out=result)


# ---- other orders of the dims ----------------------------------------------------------------------------------------------------------------------


def split_heads(c: Context, x: Any, out: Any) -> None:
    b, h, s, d = out.shape
    c.xp.copyto(out, x.reshape(b, s, h, d).swapaxes(1, 2))


def merge_heads(c: Context, x: Any, out: Any) -> None:
    b, h, s, d = x.shape
    c.xp.copyto(out.reshape(b, s, h, d), x.swapaxes(1, 2))


def transpose(c: Context, x: Any, out: Any) -> None:
    c.xp.copyto(out, x.swapaxes(-1, -2))


OPS = (
    op("add(x[...], y[...]) -> out[...]", add, linear=["x y"], grads=("add.dx", "add.dy"), flops=each(1)),
    op("add.dx(dout[...]) -> dx[...]", copy, linear=["dout"], flops=each(0), copies=True),
    op("add.dy(dout[...]) -> dy[...]", copy, linear=["dout"], flops=each(0), copies=True),
    op("bias(x[... n], c[n]) -> out[... n]", add, linear=["x c"], grads=("bias.dx", "bias.dc"), flops=each(1)),
    op("bias.dx(dout[... n]) -> dx[... n]", copy, linear=["dout"], flops=each(0), copies=True),
    op("bias.dc(dout[... n]) -> dc[n]", sum_rows, sums="...", linear=["dout"], flops=each(1)),
    op("add_positions(x[b s h], y[s h]) -> out[b s h]", add, linear=["x y"], grads=("add_positions.dx", "add_positions.dy"), flops=each(1)),
    op("add_positions.dx(dout[b s h]) -> dx[b s h]", copy, linear=["dout"], flops=each(0), copies=True),
    op("add_positions.dy(dout[b s h]) -> dy[s h]", sum_samples, sums="b", linear=["dout"], flops=each(1)),
    op("scale(x[...]) -> out[...]", scale, linear=["x"], grads=("scale.dx",), flops=each(1)),  # attrs: factor
    op("scale.dx(dout[...]) -> dx[...]", scale, linear=["dout"], flops=each(1)),
    op("mul(x[...], y[...]) -> out[...]", mul, linear=["x", "y"], grads=("mul.dx", "mul.dy"), flops=each(1)),
    op("mul.dx(dout[...], y[...]) -> dx[...]", mul, linear=["dout", "y"], flops=each(1)),
    op("mul.dy(dout[...], x[...]) -> dy[...]", mul, linear=["dout", "x"], flops=each(1)),
    op("gelu(x[...]) -> out[...]", gelu, grads=("gelu.dx",), flops=each(8)),  # attrs: approximate ("tanh" | "none")
    op("gelu.dx(dout[...], x[...]) -> dx[...]", gelu_dx, linear=["dout"], flops=each(14)),
    op("silu(x[...]) -> out[...]", silu, grads=("silu.dx",), flops=each(5)),
    op("silu.dx(dout[...], x[...]) -> dx[...]", silu_dx, linear=["dout"], flops=each(9)),
    # gated MLP: silu(gate) * up
    op("swiglu(gate[...], up[...]) -> out[...]", swiglu, linear=["up"], grads=("swiglu.grad",), flops=each(6)),
    op("swiglu.grad(dout[...], gate[...], up[...]) -> dgate[...], dup[...]", swiglu_grad, linear=["dout", "up -> dgate"], flops=each(12)),
    # the same with limits and (up + 1), as gpt-oss has it; attrs: alpha, limit
    op("clamped_swiglu(gate[...], up[...]) -> out[...]", clamped_swiglu, grads=("clamped_swiglu.grad",), flops=each(9)),
    op("clamped_swiglu.grad(dout[...], gate[...], up[...]) -> dgate[...], dup[...]", clamped_swiglu_grad, linear=["dout"], flops=each(16)),
    op("relu(x[...]) -> out[...]", relu, grads=("relu.dx",), flops=each(1)),
    op("relu.dx(dout[...], x[...]) -> dx[...]", relu_dx, linear=["dout"], flops=each(1)),
    op("sigmoid(x[...]) -> out[...]", sigmoid, grads=("sigmoid.dx",), flops=each(4)),
    op("sigmoid.dx(dout[...], out[...]) -> dx[...]", sigmoid_dx, linear=["dout"], flops=each(3)),
    op("softcap(x[...]) -> out[...]", softcap, grads=("softcap.dx",), flops=each(3)),  # attrs: cap
    op("softcap.dx(dout[...], out[...]) -> dx[...]", softcap_dx, linear=["dout"], flops=each(4)),
    # attrs: p (probability of a zero), salt (an integer of its own for each node); the mask is a function of (seed, step, salt, logical index)
    op("dropout(x[b s h]) -> out[b s h]", dropout, linear=["x"], grads=("dropout.dx",), flops=each(7), random=True),
    op("dropout.dx(dout[b s h]) -> dx[b s h]", dropout, linear=["dout"], flops=each(7), random=True),
    # attrs: d, the size of a head
    op("split_heads(x[b s (h d)]) -> out[b h s d]", split_heads, linear=["x"], grads=("split_heads.dx",), flops=each(0)),
    op("split_heads.dx(dout[b h s d]) -> dx[b s (h d)]", merge_heads, linear=["dout"], flops=each(0)),
    op("merge_heads(x[b h s d]) -> out[b s (h d)]", merge_heads, linear=["x"], grads=("merge_heads.dx",), flops=each(0)),
    op("merge_heads.dx(dout[b s (h d)]) -> dx[b h s d]", split_heads, linear=["dout"], flops=each(0)),
    op("transpose(x[... m n]) -> out[... n m]", transpose, linear=["x"], grads=("transpose.dx",), flops=each(0)),
    op("transpose.dx(dout[... n m]) -> dx[... m n]", transpose, linear=["dout"], flops=each(0)),
)

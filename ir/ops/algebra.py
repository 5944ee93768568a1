"""Contractions: matrix products, their kernels and gradients derived from one sentence each."""

from __future__ import annotations

from typing import Any

from ir.op import Context, Kernel, Op, contraction


def contract(op: Op) -> Kernel:
    """The kernel of a contraction, from its sentence."""

    def kernel(c: Context, a: Any, b: Any, out: Any) -> None:
        raise NotImplementedError(op.sentence)

    return kernel


OPS = (
    *contraction("linear(x[... k], w[k n]) -> out[... n]", contract),
    *contraction("linear_t(x[... k], w[n k]) -> out[... n]", contract),
    *contraction("matmul(x[m k], w[k n]) -> out[m n]", contract),
    *contraction("batched_matmul(x[... m k], w[... k n]) -> out[... m n]", contract),
)

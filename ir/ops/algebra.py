"""Contractions: matrix products, their kernels and gradients derived from one sentence each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ir.errors import GraphError
from ir.op import Context, Kernel, Op, Operand, contraction

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Fold:
    """An operand as a stack of matrices: its labels in three runs, the last two exchanged where `turned`. Folding C-contiguous memory copies nothing."""

    runs: tuple[Labels, Labels, Labels]
    turned: bool

    def __call__(self, array: Any) -> Any:
        extra = array.ndim - sum(label != "..." for run in self.runs for label in run)
        shape, start = [], 0
        for run in self.runs:
            stop = start + sum(extra if label == "..." else 1 for label in run)
            shape.append(math.prod(array.shape[start:stop]))
            start = stop
        stack = array.reshape(shape)
        return stack.swapaxes(1, 2) if self.turned else stack


def _fold(operand: Operand, batch: Labels, rows: Labels, columns: Labels) -> _Fold | None:
    """How to see `operand` as [batch, rows, columns]; None where its labels stand in another order."""
    if operand.labels == batch + rows + columns:
        return _Fold((batch, rows, columns), False)
    return _Fold((batch, columns, rows), True) if operand.labels == batch + columns + rows else None


def _folds(a: Operand, b: Operand, out: Operand) -> tuple[_Fold, _Fold, _Fold] | None:
    """How to see the three operands so that `out = a @ b`; None where `out` is not laid out like that."""
    batch = tuple(label for label in out.labels if label in a.labels and label in b.labels)
    rows = tuple(label for label in out.labels if label not in b.labels)
    columns = tuple(label for label in out.labels if label not in a.labels)
    summed = tuple(label for label in a.labels if label not in out.labels)
    views = _fold(a, batch, rows, summed), _fold(b, batch, summed, columns), _fold(out, batch, rows, columns)
    if any(view is None for view in views) or out.labels != batch + rows + columns or any(len(dim) > 1 for o in (a, b, out) for dim in o.dims):
        return None
    return views  # type: ignore[return-value]


def contract(op: Op) -> Kernel:
    """The kernel of a contraction: one stack of matrix products on views where the order of the labels allows it, else einsum."""
    (a, b), (out,) = op.inputs, op.outputs
    straight, exchanged = _folds(a, b, out), _folds(b, a, out)
    if straight:
        return _product(*straight)
    if exchanged:
        product = _product(*exchanged)
        return lambda c, x, y, result: product(c, y, x, result)
    formula = f"{_formula(a)},{_formula(b)}->{_formula(out)}"

    def kernel(c: Context, x: Any, y: Any, result: Any) -> None:
        result[...] = c.xp.einsum(formula, x, y)

    return kernel


def _product(a: _Fold, b: _Fold, out: _Fold) -> Kernel:
    def kernel(c: Context, x: Any, y: Any, result: Any) -> None:
        left, right, into = a(x), b(y), out(result)
        if len(left) == 1:
            left, right, into = left[0], right[0], into[0]
        c.xp.matmul(left, right, out=into)

    return kernel


def _formula(operand: Operand) -> str:
    if any(len(label) > 1 and label != "..." for label in operand.labels) or any(len(dim) > 1 for dim in operand.dims):
        raise GraphError(f"{operand!r}: a contraction whose labels are not in the order of a matrix product needs labels of one letter, one a dim")
    return "".join(operand.labels)


OPS = (
    *contraction("linear(x[... k], w[k n]) -> out[... n]", contract),
    *contraction("linear_t(x[... k], w[n k]) -> out[... n]", contract),
    *contraction("matmul(x[m k], w[k n]) -> out[m n]", contract),
    *contraction("batched_matmul(x[... m k], w[... k n]) -> out[... m n]", contract),
)

"""A causal operator over the pieces of a sequence that is cut: `attention.over3` reads the keys and values of three pieces as operands of their own.

Of an operator with the label `past` (`Op.past`) every operand that has it is given once for each piece so far, in their order: `k0 k1 k2`. Its queries are a
run of positions of the same sequence; `at["s"]` says where they start. Nothing else changes: flops, rules and gradients are those of the operator itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ir.op import Context, Linear, Op, Operand, Rule

_NAME = re.compile(r"(.+)\.over(\d+)")


def over_name(op: str, num_pieces: int) -> str:
    """What the operator `op` is called over so many pieces.

    >>> over_name("attention", 3), over_name("attention", 1)
    ('attention.over3', 'attention')
    """
    return f"{op}.over{num_pieces}" if num_pieces > 1 else op


def parted(name: str) -> tuple[str, int]:
    """(operator, pieces) of a name.

    >>> parted("attention.grad.over3"), parted("attention")
    (('attention.grad', 3), ('attention', 1))
    """
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 1)


@lru_cache(maxsize=256)
def over_pieces(op: Op, num_pieces: int) -> Op:
    """The operator over so many pieces.

    >>> from ir.ops.attention import OPS
    >>> over_pieces(OPS[0], 2)
    attention.over2(q[b s (g r d)], k0[b z0 (g d)], k1[b z1 (g d)], v0[b z0 (g w)], v1[b z1 (g w)]) -> out[b s (g r w)], lse[b s (g r)]
    """

    def some(labels: frozenset[str]) -> frozenset[str]:
        return frozenset(x for label in labels for x in (_numbered(label, num_pieces) if label == op.past else (label,)))

    def names(operands: frozenset[str]) -> frozenset[str]:
        return frozenset(o.name for o in made if o.name in operands or (o.name not in own and o.name.rstrip("0123456789") in operands))

    inputs, outputs = (tuple(x for o in operands for x in _parts(o, op.past, num_pieces)) for operands in (op.inputs, op.outputs))
    made, own = (*inputs, *outputs), {o.name for o in (*op.inputs, *op.outputs) if op.past not in o.labels}
    return replace(
        op, name=over_name(op.name, num_pieces), inputs=inputs, outputs=outputs, kernel=_kernel(op, num_pieces), sums=some(op.sums) - _pasts(op, num_pieces),
        whole=some(op.whole) | _pasts(op, num_pieces), linear=tuple(Linear(names(g.operands), names(g.outputs)) for g in op.linear), stop=names(op.stop),
        grads=tuple(over_name(g, num_pieces) for g in op.grads), flops=lambda sizes, attrs: op.flops_of(_joined(op, sizes, num_pieces), attrs), past="",
        flops_at=None,
    )  # fmt: skip


def over_rule(rule: Rule, op: Op) -> Rule:
    """The rule of `op`, an operator over pieces, that is `rule` of the operator itself: `linear v` is `linear v0+v1`."""
    if rule.kind != "linear":
        return rule
    wanted = rule.on.split("+")
    return Rule("linear", "+".join(o.name for o in op.inputs if o.name in wanted or o.name.rstrip("0123456789") in wanted))


def _numbered(label: str, num_pieces: int) -> tuple[str, ...]:
    return tuple(f"{label}{i}" for i in range(num_pieces))


def _pasts(op: Op, num_pieces: int) -> frozenset[str]:
    return frozenset(_numbered(op.past, num_pieces))


def _parts(operand: Operand, past: str, num_pieces: int) -> tuple[Operand, ...]:
    if past not in operand.labels:
        return (operand,)
    return tuple(Operand(f"{operand.name}{i}", tuple((f"{past}{i}",) if dim == (past,) else dim for dim in operand.dims)) for i in range(num_pieces))


def _joined(op: Op, sizes: Any, num_pieces: int) -> dict[str, int]:
    """Label sizes of the operator itself: what it looks back over is all pieces together."""
    return {**sizes, op.past: sum(sizes.get(label, 0) for label in _numbered(op.past, num_pieces))}


def _kernel(op: Op, num_pieces: int) -> Any:
    dims = [o.dim_of(op.past) for o in (*op.inputs, *op.outputs)]
    widths = [1 if dim is None else num_pieces for dim in dims]
    split = len(op.inputs)

    def kernel(c: Context, *arrays: Any) -> None:
        sizes = _joined(op, c.sizes, num_pieces)
        inner = replace(c, sizes=sizes, total={**c.total, op.past: c.total["s"]}, at={**c.at, op.past: 0})
        groups, at = list[Sequence[Any]](), 0
        for width in widths:
            groups.append(arrays[at : at + width])
            at += width
        read = [g[0] if dim is None else c.xp.concatenate(g, axis=dim) for g, dim in zip(groups[:split], dims, strict=False)]
        written = [g[0] if dim is None else _empty(c, g, dim) for g, dim in zip(groups[split:], dims[split:], strict=True)]
        op.kernel(inner, *read, *written)
        for group, dim, whole in zip(groups[split:], dims[split:], written, strict=True):
            if dim is not None:
                _hand_out(group, dim, whole)

    return kernel


def _empty(c: Context, parts: Sequence[Any], dim: int) -> Any:
    shape = list(parts[0].shape)
    shape[dim] = sum(p.shape[dim] for p in parts)
    return c.xp.empty(tuple(shape), parts[0].dtype)


def _hand_out(parts: Sequence[Any], dim: int, whole: Any) -> None:
    cuts = [0]
    for p in parts:
        cuts.append(cuts[-1] + p.shape[dim])
    for p, (a, b) in zip(parts, pairwise(cuts), strict=True):
        p[...] = whole[(slice(None),) * dim + (slice(a, b),)]

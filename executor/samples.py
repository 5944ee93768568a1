"""Operands for every operator of the catalogue: to time its kernel, and to compare one array module with another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.op import Context, Op
from ir.units import DTYPE_BYTES

SMALL = {
    "b": 1, "s": 32, "t": 64, "u": 1, "h": 64, "n": 64, "m": 32, "k": 64, "v": 256, "p": 32, "z": 32, "g": 2, "r": 1, "d": 32, "w": 32, "e": 4, "c": 16,
    "y": 4, "x": 4, "i": 8, "j": 8, "q": 16, "pair": 2,
}  # fmt: skip
LARGE = {
    "b": 4, "s": 128, "t": 768, "u": 1, "h": 768, "n": 768, "m": 128, "k": 768, "v": 4096, "p": 128, "z": 128, "g": 4, "r": 1, "d": 64, "w": 64, "e": 8,
    "c": 64, "y": 14, "x": 14, "i": 16, "j": 16, "q": 96, "pair": 2,
}  # fmt: skip
ATTRS: Mapping[str, Any] = {
    "eps": 1e-5, "salt": 1, "causal": True, "approximate": "tanh", "value": 1.0, "theta": 1e4, "lr": 1e-3, "beta1": 0.9, "beta2": 0.95,
    "weight_decay": 0.1, "max_norm": 1.0, "momentum": 0.9, "max_distance": 128, "alpha": 1.702, "limit": 7.0, "cap": 30.0, "parts": 4, "turn": 1, "chunks": 4,
}  # fmt: skip
FAMILY_ATTRS: Mapping[str, Mapping[str, Any]] = {"dropout": {"p": 0.1}, "scale": {"factor": 1.0}, "total": {"factor": 1.0}, "balance": {"factor": 1.0}}
FAMILY_LABELS: Mapping[str, Mapping[str, int]] = {"top_k": {"k": 2}, "dispatch": {"k": 2}, "combine": {"k": 2}, "expert_load": {"k": 2}, "pick": {"t": 1}}
INTEGER_OPERANDS: Mapping[str, str] = {"ids": "v", "labels": "v", "expert": "e", "mask": "d", "mc": "", "vc": ""}
"""Operands that are indices, and the label below whose size they lie."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One firing of an operator on random operands; `op` has `...` written out, `inputs` are numpy arrays."""

    op: Op
    sizes: Mapping[str, int]
    attrs: Mapping[str, Any]
    dtype: str
    inputs: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        itemsize = DTYPE_BYTES[self.dtype]
        written = sum(math.prod(o.shape(self.sizes)) * itemsize for o in self.op.outputs)
        return written + sum(x.nbytes for x in self.inputs)

    @property
    def flops(self) -> float:
        return self.op.flops_of(self.sizes, self.attrs)

    def outputs(self, xp: Any) -> list[Any]:
        """Arrays to write into; what is in them before must not matter."""
        return [xp.full(o.shape(self.sizes), 7.0, self.dtype) for o in self.op.outputs]

    def work(self, xp: Any) -> Callable[[], list[Any]]:
        """A callable that runs the kernel on arrays of the module `xp` and returns the outputs, the same ones every time."""
        context = Context(xp, self.attrs, self.sizes, self.sizes, dict.fromkeys(self.sizes, 0), 1, 1, 1e-3)
        inputs, outputs = [xp.array(x) for x in self.inputs], self.outputs(xp)
        room = [xp.full(self.op.room(self.sizes, self.attrs), 7.0, self.dtype)] if self.op.room else []

        def run() -> list[Any]:
            self.op.kernel(context, *inputs, *outputs, *room)
            return outputs

        return run


def sample(op: Op, labels: Mapping[str, int], dtype: str, seed: int, **more: Any) -> Sample:
    """Random operands between 0.5 and 1.5; `labels` gives the size of every label that an operator may have (SMALL, LARGE), `more` replaces attributes."""
    this = op.for_ranks([len(o.dims) - 1 + _leading(op, len(o.dims)) if ("...",) in o.dims else len(o.dims) for o in op.inputs])
    sizes = {label: {**labels, **_tied(op.name, labels)}[label] for label in this.labels}
    draw = np.random.default_rng(seed)
    inputs = []
    for operand in this.inputs:
        shape = operand.shape(sizes)
        if operand.name in INTEGER_OPERANDS:
            inputs.append(draw.integers(0, sizes.get(INTEGER_OPERANDS[operand.name], 2), shape))
        else:
            inputs.append((draw.random(shape, np.float64 if dtype == "float64" else np.float32) + 0.5).astype(dtype, copy=False))
    whole = tuple((0, n) for n in this.inputs[0].shape(sizes)) if this.inputs else ()
    attrs: dict[str, Any] = {**ATTRS, **sizes, "dtype": dtype, "src_region": whole, "dst_region": whole}
    for family, special in FAMILY_ATTRS.items():
        if op.name.startswith(family):
            attrs |= special
    return Sample(this, sizes, attrs | more, dtype, tuple(inputs))


def _tied(name: str, labels: Mapping[str, int]) -> Mapping[str, int]:
    """Sizes that an operator ties to others, or has small."""
    if name.startswith("prepend"):
        return {"t": labels["s"] + 1}
    if name.startswith("append_to_heads"):
        return {"n": labels["m"] + labels["k"]}
    return next((tied for family, tied in FAMILY_LABELS.items() if name.startswith(family)), {})


def _leading(op: Op, num_dims: int) -> int:
    """How many dims `...` stands for: two, but three where it is all that any operand has, so that the tensor is large."""
    alone = all(len(o.dims) == 1 for o in (*op.inputs, *op.outputs) if ("...",) in o.dims)
    return 3 if alone and num_dims == 1 else 2

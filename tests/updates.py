"""One parameter updated by an optimizer's operators in their order, whole, on one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ir.graph import Tensor
from ir.op import Context
from planner.optimizers import attrs_of, update_of, updated, with_defaults


def updates(optimizer: dict[str, Any], start: np.ndarray, grads: Iterable[np.ndarray], hidden: bool = True) -> dict[str, np.ndarray]:
    """Weights `w` and states after one step for each gradient."""
    update = update_of(with_defaults(optimizer), Tensor("w", start.shape, str(start.dtype), "param"), hidden)
    held = {"w": start.copy(), **{t.name: np.zeros(t.shape, t.dtype) for t in update.states}}
    for step, g in enumerate(grads):
        values = {**held, "g": g, "norm2": np.array((g**2).sum())}
        for op in update.ops:
            sizes = {label: update.sizes[label] for label in op.labels}
            if updated(op):
                outs = [held[name] for name in updated(op)]
            else:
                outs = [np.empty(o.shape(update.sizes), g.dtype) for o in op.outputs]
                values.update({o.name: out for o, out in zip(op.outputs, outs, strict=True)})
            op.kernel(Context(np, attrs_of(update, op), sizes, sizes, {}, step=step), *(values[o.name] for o in op.inputs), *outs)
    return held

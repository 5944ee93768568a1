"""Whether two runs agree: losses step by step, gradients tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from executor.train import Run
from ir.errors import InputError


@dataclass(frozen=True, slots=True)
class Seen:
    """What is compared of a run: its losses, and its last gradients by name, whole."""

    loss: Sequence[float]
    gradients: Mapping[str, np.ndarray]


def seen(run: Run) -> Seen:
    """Copies what is compared out of a run, whose memory may then be given back."""
    return Seen(tuple(run.loss), {name: run.tensor(name) for name in gradients(run)})


def compare(ours: Seen, theirs: Seen) -> dict[str, Any]:
    """`loss_max_rel`: the largest |a - b| / |b| of the losses; `grad_max_rel`: the largest |a - b| / |b| over the last gradients of all parameters.

    Gradients are compared in the Euclidean norm of the whole tensor, against `theirs` (one device): an element near zero would make an elementwise relative
    error say nothing. A tensor whose elements are smaller than those of all gradients on average (in root mean square) is measured against that average: a
    gradient that is zero but for rounding, such as that of a key's bias, has no relative error. `grad_worst` names the tensor that differs most. Raises
    InputError where the runs have different steps or parameters.
    """
    if len(ours.loss) != len(theirs.loss) or not ours.loss:
        raise InputError(f"the runs cannot be compared: {len(ours.loss)} and {len(theirs.loss)} steps with a loss")
    if set(ours.gradients) != set(theirs.gradients):
        raise InputError(f"the runs cannot be compared: gradients of {sorted(set(ours.gradients) ^ set(theirs.gradients))} are in one of them only")
    losses = [relative(np.asarray(a), np.asarray(b)) for a, b in zip(ours.loss, theirs.loss, strict=True)]
    average = root_mean_square(theirs.gradients.values())
    grads = {name: relative(value, theirs.gradients[name], average) for name, value in ours.gradients.items()}
    worst = max(grads, key=lambda name: grads[name], default="")
    return {"loss_max_rel": max(losses), "grad_max_rel": grads.get(worst, 0.0), "grad_worst": worst}


def gradients(run: Run) -> tuple[str, ...]:
    """The names of the final gradients that a run holds."""
    return tuple(dict.fromkeys(r.tensor for r in run.program.registers if r.memory == "gradient" and r.tensor and not r.tensor.endswith("@acc")))


def root_mean_square(arrays: Iterable[np.ndarray]) -> float:
    """Of all elements of all arrays."""
    squares, count = 0.0, 0
    for a in arrays:
        squares += float(np.sum(np.square(a, dtype=np.float64)))
        count += a.size
    return math.sqrt(squares / count) if count else 0.0


def relative(a: np.ndarray, b: np.ndarray, average: float = 0.0) -> float:
    """|a - b| / |b| in the Euclidean norm, |b| counted as at least that of elements of size `average`; 0 where both are zero, infinity where one is not finite.

    >>> relative(np.array([1.0, 2.0]), np.array([1.0, 2.0])), relative(np.array([1.0]), np.array([0.0])), relative(np.array([1.0]), np.array([0.0]), 2.0)
    (0.0, inf, 0.5)
    """
    size = max(float(np.linalg.norm(np.asarray(b, np.float64))), average * math.sqrt(np.size(b)))
    difference = float(np.linalg.norm(np.subtract(a, b, dtype=np.float64)))
    if not np.isfinite(difference):
        return float("inf")
    return difference / size if size else float("inf") if difference else 0.0

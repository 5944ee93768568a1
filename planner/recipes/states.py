"""What a device holds for each parameter: a term for each kind of state, which axis splits it, and where it lies.

>>> megatron = holding_of("Megatron-LM")
>>> [(t.name, t.nbytes, t.split) for t in terms(megatron, zero=1)]
[('parameters', 2.0, ''), ('gradients', 4.0, ''), ('states', 12.0, 'dp')]
>>> per_parameter(terms(megatron, zero=0), dp=8), per_parameter(terms(megatron, zero=1), dp=8)
(18.0, 7.5)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from ir.errors import InputError

HOST_FACTOR = 1.5
"""Host memory for a byte that is offloaded: the copy and its pinned buffers, as DeepSpeed's own estimate counts (deepspeedai/DeepSpeed issue 4527)."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a release keeps: the few figures beyond tensors that are counted. `simulator/profiles/ledgers.json`, one entry a release.

    Bytes for each parameter: `param` in the dtype of the products, `grad` accumulated, `state` master copy and optimizer. With `zero` 1 states are split over
    the replicas, with 2 gradients, with 3 parameters, which are then gathered unit by unit: `units` of them at once. `hops`: tensors of the hidden size that a
    pipeline stage keeps for each microbatch in flight, half of them on the first and last rank. `logits`: bytes for each logit at the loss. `flight`:
    microbatches in flight over what the schedule's orders keep. `slack`: what the allocator holds for one byte of activations. `rerun`: the same for what a
    recomputed layer holds. `weight`: bytes for each element of the largest weight while its gradient is computed. `fixed_gib`: context and workspaces, where
    what was measured counts them, and `group_gib` for every axis along which devices communicate. `keeps`: `tensors`, as fused kernels do, or `eager`.
    `whole_in_pipeline`: with a pipeline, parameters of ZeRO-3 stay gathered and their gradients whole from microbatch to microbatch. `always_sp`: tensor
    parallelism is always with sequence parallelism. `planned`: memory is planned before the run, so nothing is held longer than it is read. `fitted`: which
    of these figures were fitted to measured runs, `left_out` the mean, 90 % and worst error in percent of rows that were left out
    (`benchmarks/fit_ledgers.py`), `band` what follows.
    """

    releases: tuple[str, ...]
    param: float
    grad: float
    state: float
    units: float
    hops: float
    logits: float
    flight: float
    slack: float
    rerun: float
    weight: float
    fixed_gib: float
    group_gib: float
    keeps: str
    whole_in_pipeline: bool
    always_sp: bool
    planned: bool
    fitted: tuple[str, ...]
    left_out: tuple[float, ...]
    band: float
    source: str


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes for each parameter; `split`: the axis that divides them, or nothing; `where`: `device` or `host`."""

    name: str
    nbytes: float
    split: str
    where: str = "device"


def terms(holding: Holding, zero: int, offload: Sequence[str] = ()) -> tuple[Term, ...]:
    """The terms under ZeRO 0 to 3. `offload`: names of terms that lie in host memory; gradients go with states."""
    out = []
    for name, nbytes, since in (("parameters", holding.param, 3), ("gradients", holding.grad, 2), ("states", holding.state, 1)):
        away = name in offload or (name == "gradients" and "states" in offload)
        out.append(Term(name, nbytes, "dp" if zero >= since else "", "host" if away else "device"))
    return tuple(out)


def per_parameter(held: Sequence[Term], dp: int, where: str = "device") -> float:
    """Bytes for each parameter on one of `dp` replicas; on the host, of all its devices' shares with `HOST_FACTOR`, where `dp` devices share one host."""
    if where == "host":
        return HOST_FACTOR * sum(t.nbytes for t in held if t.where == "host")
    return sum(t.nbytes / (dp if t.split else 1) for t in held if t.where == "device")


def holding_of(text: str) -> Holding:
    """The entry of this release: the one with the longest beginning in common; InputError where there is none."""
    found = [(len(start), h) for h in holdings() for start in h.releases if text.startswith(start)]
    if not found:
        names = ", ".join(sorted(start for h in holdings() for start in h.releases))
        raise InputError(f"release `{text}` has no memory ledger; known are {names}")
    return max(found, key=lambda pair: pair[0])[1]


@cache
def holdings() -> tuple[Holding, ...]:
    """Every entry, in the file's order."""
    document = json.loads(resources.files("simulator").joinpath("profiles", "ledgers.json").read_text("utf-8"))
    return tuple(_holding(entry, document["default"]) for entry in document["ledgers"])


def _holding(entry: Mapping[str, Any], default: Mapping[str, Any]) -> Holding:
    said: dict[str, Any] = {**default, **entry}
    said |= {name: tuple(said[name]) for name in ("releases", "fitted", "left_out")}
    return Holding(**{f.name: said[f.name] for f in fields(Holding)})

"""What is fitted: how a GPU, a release and a machine together differ from the priced bill. Few numbers, each with a meaning and a value to expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Shares:
    """Times the bill's seconds: `compute` products of weights, `low` those in fp8 or less, `grouped` those of experts, `attention` its products or flash
    kernels, `misaligned` attention products whose head size is no multiple of eight, `memory` memory-bound kernels, `link` and `nic` collectives inside a node
    and between nodes, `ep` all-to-alls, `fsdp` gathers and reductions of fully sharded parameters, `hop` messages between stages, `bubble` what a schedule
    leaves idle, `reduce` (times `link` or `nic`) gradients and parameters once a step, `update` the optimizer. `beside`: times what kernels lose of their speed
    while a collective runs beside them. Seconds: `host_s` that the host needs for one layer's forward, `step_s` once a step. `straggle`: longer for every
    doubling of nodes."""

    compute: float = 1.0
    low: float = 1.0
    grouped: float = 2.0
    attention: float = 1.0
    misaligned: float = 8.0
    memory: float = 1.0
    link: float = 1.0
    nic: float = 1.0
    ep: float = 1.0
    fsdp: float = 1.0
    hop: float = 1.0
    bubble: float = 1.0
    reduce: float = 1.0
    update: float = 1.0
    beside: float = 1.0
    host_s: float = 0.001
    step_s: float = 0.0
    straggle: float = 0.0

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    def with_(self, values: Mapping[str, float]) -> Shares:
        return replace(self, **values)


NAMES = tuple(f.name for f in fields(Shares))

"""What computing loses while a collective runs beside it, and what many nodes lose by waiting for the slowest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

SLOWER = {"gemm": 1.76, "attention": 1.83, "memory": 2.5}
"""Times as long as alone, by class of kernel, beside an all-gather on A100: 1.18 -> 2.08 ms, 0.18 -> 0.33 ms, 0.02 -> 0.05 ms (NVIDIA/nccl issue 1428)."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How a runtime's communication and its kernels share a device.

    `slower`: by class of kernel, how many times as long it takes while a collective runs. `share`: of the communication that could hide, how much is started
    early enough to. `straggler`: what is added to a step, as a share of it, with each doubling of the nodes.

    >>> Overlap(share=1.0).step_s({"gemm": 1.0}, hidden_s=0.5, exposed_s=0.1)
    1.3159...
    """

    slower: Mapping[str, float] = field(default_factory=lambda: dict(SLOWER))
    share: float = 1.0
    straggler: float = 0.0

    def beside_s(self, compute_s: Mapping[str, float], comm_s: float) -> float:
        """Seconds of kernels (by class, alone) and of a collective that starts with them; never less than the longer of the two.

        While both run a kernel advances `1 / slower` as fast; classes follow each other in any order, so the mean counts.
        """
        alone = sum(compute_s.values())
        if not alone or not comm_s:
            return alone + comm_s
        factor = sum(seconds * max(1.0, self.slower.get(kind, 1.0)) for kind, seconds in compute_s.items()) / alone
        return comm_s if alone * factor <= comm_s else comm_s + alone - comm_s / factor

    def step_s(self, compute_s: Mapping[str, float], hidden_s: float = 0.0, exposed_s: float = 0.0, num_nodes: int = 1) -> float:
        """Seconds of a step of which `hidden_s` of communication may run beside the kernels and `exposed_s` may not."""
        early = hidden_s * self.share
        return (self.beside_s(compute_s, early) + hidden_s - early + exposed_s) * (1.0 + self.straggler * math.log2(max(1, num_nodes)))

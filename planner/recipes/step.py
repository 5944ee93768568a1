"""The seconds of a step from a bill and shares: passes of every stage, the schedule's bubble, hops, the reduction of gradients, the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.recipes.bill import SHARES, Bill
from planner.recipes.shares import Shares

LINK = SHARES.index("link")

SHARPNESS = 4.0
"""How nearly the longer of host and device alone counts for a pass. Some kernels of a layer are shorter than their launch and some longer, and ranks that meet
in a collective wait for the slowest host among them: where both take equally long a pass takes 2^(1/4) = 1.19 times that."""


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds [n] of steps: they sum to `total`. `work` of the slowest rank's microbatches, `bubble`, `hops`, `reduce` what of the reduction is not hidden,
    `update` the optimizer and what else happens once.
    """

    work: np.ndarray
    bubble: np.ndarray
    hops: np.ndarray
    reduce: np.ndarray
    update: np.ndarray

    @property
    def total(self) -> np.ndarray:
        total: np.ndarray = self.work + self.bubble + self.hops + self.reduce + self.update
        return total

    def breakdown(self, i: int) -> Mapping[str, float]:
        return {name: float(getattr(self, name)[i]) for name in self.__dataclass_fields__}


def step(bill: Bill, shares: Shares) -> Step:
    """1F1B and what derives from it: m times the slowest rank, and once every other rank's part of the bubble, an interleaved rank's over its chunks."""
    n = np.arange(len(bill))
    of_part = passes(bill, shares)
    of_rank = np.einsum("nkp,nps->nks", bill.parts, of_part)
    pace = of_rank.sum(axis=2) * (bill.ranks > 0)
    slowest = pace.argmax(axis=1)
    idle = np.maximum((of_rank * bill.idle[:, None, :]).sum(axis=2), 0.0)
    bubble = ((idle * bill.ranks).sum(axis=1) - idle[n, slowest]) / bill.chunks
    passes_s = pace[n, slowest]  # gradients hide behind the last backward, parameters behind the first forward
    late = 1.0 + shares.straggle * np.log2(np.maximum(bill.nodes, 1.0))
    once = bill.reduce @ np.array([shares.link, shares.nic]) * shares.reduce
    shown = np.where(bill.beside > 0, np.maximum(once - passes_s, 0.0) + shares.beside * np.minimum(once, passes_s), once)
    crossed = np.where(bill.stages > 1, 2 * bill.hop * (bill.microbatches * bill.chunks + bill.stages / bill.chunks - 1), 0.0)
    return Step(
        bill.microbatches * pace[n, slowest] * late, bubble * shares.bubble * late, shares.hop * crossed, shown, bill.update * shares.update + shares.step_s
    )  # fmt: skip


def passes(bill: Bill, shares: Shares) -> np.ndarray:
    """Seconds [n, part, pass] of one layer, embedding, head: of device and host together; beside them the gathers of sharded parameters."""
    out: np.ndarray = bill.seconds @ np.array([getattr(shares, name) for name in SHARES])
    hidden = bill.seconds[..., LINK] * shares.link * bill.split[:, None, None]
    out = np.maximum(out - hidden, hidden) + shares.beside * hidden
    layer = out[:, 0]
    forward = _both(layer[:, 0], bill.host * shares.host_s)
    backward = layer[:, 1] + layer[:, 2]
    slower = _both(backward, bill.host_backward * shares.host_s) / np.maximum(backward, 1e-12)
    out[:, 0, 0] = forward
    out[:, 0, 1:] *= slower[:, None]
    gathers = bill.fsdp * shares.fsdp
    exposed: np.ndarray = np.maximum(out, gathers) + shares.beside * gathers
    return np.where(bill.fsdp > 0, exposed, out)


def _both(device_s: np.ndarray, host_s: np.ndarray) -> np.ndarray:
    """Seconds [n] of a pass that the device computes while the host launches it."""
    together: np.ndarray = (device_s**SHARPNESS + host_s**SHARPNESS) ** (1 / SHARPNESS)
    return together

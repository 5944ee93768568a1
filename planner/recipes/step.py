"""The seconds of a step from a bill and shares: passes of every stage, the schedule's bubble, hops, the reduction of gradients, the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.recipes.bill import SHARES, Bill
from planner.recipes.shares import Shares
from simulator.overlap import lost, together_s

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
    slowed = _lost(bill, shares)
    of_rank = np.einsum("nkp,nps->nks", bill.parts, of_part)
    pace = of_rank.sum(axis=2) * (bill.ranks > 0)
    slowest = pace.argmax(axis=1)
    idle = np.maximum((of_rank * bill.idle[:, None, :]).sum(axis=2), 0.0)
    bubble = ((idle * bill.ranks).sum(axis=1) - idle[n, slowest]) / bill.chunks
    passes_s = pace[n, slowest]  # gradients hide behind the last backward, parameters behind the first forward
    late = 1.0 + shares.straggle * np.log2(np.maximum(bill.nodes, 1.0))
    once = bill.reduce @ np.array([shares.link, shares.nic]) * shares.reduce
    tail = once * bill.tail
    shown = np.where(bill.beside > 0, together_s(passes_s, once - tail, slowed[:, 0].mean(axis=1)) - passes_s + tail, once)
    crossed = np.where(bill.stages > 1, 2 * bill.hop * (bill.microbatches * bill.chunks + bill.stages / bill.chunks - 1), 0.0)
    return Step(
        bill.microbatches * pace[n, slowest] * late, bubble * shares.bubble * late, shares.hop * crossed, shown, bill.update * shares.update + shares.step_s
    )  # fmt: skip


def passes(bill: Bill, shares: Shares) -> np.ndarray:
    """Seconds [n, part, pass] of one layer, embedding, head: of device and host together; beside them the gathers of sharded parameters."""
    out: np.ndarray = bill.seconds @ _weights(shares)
    slowed = _lost(bill, shares)
    hidden = bill.seconds[..., LINK] * shares.link * bill.split[:, None, None]
    out = together_s(out - hidden, hidden, slowed)
    layer = out[:, 0]
    forward = _both(layer[:, 0], bill.host * shares.host_s)
    backward = layer[:, 1] + layer[:, 2]
    slower = _both(backward, bill.host_backward * shares.host_s) / np.maximum(backward, 1e-12)
    out[:, 0, 0] = forward
    out[:, 0, 1:] *= slower[:, None]
    gathers = bill.fsdp * shares.fsdp
    return together_s(out, gathers, slowed)


def _weights(shares: Shares) -> np.ndarray:
    return np.array([getattr(shares, name) for name in SHARES])


def _lost(bill: Bill, shares: Shares) -> np.ndarray:
    """The share of its speed [n, part, pass] that a pass loses while a collective runs beside it: of its kernels, each by its seconds."""
    weights = _weights(shares)
    alone = bill.seconds @ weights
    longer = np.einsum("nkps,s,ns->nkp", bill.seconds, weights, bill.slower)
    return np.minimum(shares.beside * lost(longer / np.maximum(alone, 1e-12)), 1.0)


def _both(device_s: np.ndarray, host_s: np.ndarray) -> np.ndarray:
    """Seconds [n] of a pass that the device computes while the host launches it."""
    together: np.ndarray = (device_s**SHARPNESS + host_s**SHARPNESS) ** (1 / SHARPNESS)
    return together

"""Runs to seconds: prices a run, takes the shares that were fitted for its GPU, release and machine, and says how far to trust the result.

>>> from planner.recipes.run import Run, Shape
>>> shape = Shape("gpt", layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152, vocab=51200)
>>> run = Run("175b", "", "gpt3-175b", shape, seq=2048, gpu="A100-SXM-80GB", num_gpus=1024, tp=8, pp=16, dp=8, mbs=1, gbs=1536, schedule="1f1b",
...           recompute="full", precision="fp16", nic="ib200x8", release="Megatron-LM 2021", machine="a100-8xHDR (Megatron 2021)")
>>> found = Estimator().estimate(run)
>>> 25 < found.step_s < 35 and found.low_s < found.step_s < found.high_s
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ir.errors import HeadraceError
from planner.recipes.bill import Bill, Pricer
from planner.recipes.rows import Entry
from planner.recipes.run import Run
from planner.recipes.step import step
from planner.recipes.study import Fitted, fitted


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted seconds of a step; four of five runs like it lie between `low_s` and `high_s`, by `basis`; `breakdown` sums to `step_s`."""

    step_s: float
    low_s: float
    high_s: float
    basis: str
    breakdown: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Priced:
    """Rows that have a bill: their runs and all their bills as one. `found`: of every row, where among the runs it is, or why it is not there."""

    runs: tuple[Run, ...]
    bill: Bill
    found: tuple[int | str, ...]


class Estimator:
    """Estimates runs; machines once priced are kept."""

    def __init__(self) -> None:
        self.pricer = Pricer()

    def estimate(self, run: Run) -> Estimate:
        """InputError or ClusterError where the run has no closed form, its release no profile, or its GPU is not known."""
        return told(fitted(run), self.pricer.bill(run))

    def price(self, entries: Sequence[Entry]) -> Priced:
        """The bills of all rows that can be priced."""
        runs: list[Run] = []
        bills: list[Bill] = []
        found: list[int | str] = []
        for e in entries:
            if e.run is None:
                found.append(e.reason)
                continue
            try:
                bills.append(self.pricer.bill(e.run))
            except HeadraceError as error:
                found.append(str(error))
                continue
            found.append(len(runs))
            runs.append(e.run)
        return Priced(tuple(runs), Bill.stack(bills), tuple(found))


def told(by: Fitted, bill: Bill) -> Estimate:
    """The estimate of the first run of a bill."""
    found = step(bill, by.shares)
    seconds = float(found.total[0])
    return Estimate(seconds, seconds * math.exp(-by.band), seconds * math.exp(by.band), by.basis, found.breakdown(0))

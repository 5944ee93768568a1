"""What a simulation foretells of a plan, and the document that `headrace simulate` prints of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from headrace.documents import SCHEMA_VERSION
from ir.cluster import Cluster
from ir.plan import Plan
from ir.program import Program
from ir.timeline import Timeline
from planner.frontends.model import Model
from planner.reasons import advice
from planner.recipes.study import class_band
from planner.summary import metrics
from simulator.memory import Ledger


@dataclass(frozen=True)
class Prediction:
    """A plan's program, simulated: when everything runs, and which rank holds how much memory."""

    model: Model
    cluster: Cluster
    plan: Plan
    program: Program
    timeline: Timeline
    ledger: Ledger

    @property
    def step_s(self) -> float:
        return self.timeline.step_s

    def document(self) -> dict[str, Any]:
        """The keys of COMMAND `simulate`; `breakdown` sums to `step_s`."""
        found = metrics(self.model, self.cluster, self.plan, self.program, self.timeline, self.ledger)
        return {
            "schema_version": SCHEMA_VERSION, "kind": "simulation", "model": {"name": self.plan.model, "fingerprint": self.plan.model_fingerprint},
            "cluster": {"name": self.cluster.name, "fingerprint": self.cluster.fingerprint, "assumed": list(self.cluster.assumed)},
            "layout": dict(self.plan.layout), **found, "memory": self.memory(), "band": self.band(),
            "advice": list(advice(replace(self.plan, predicted=found), self.cluster)),
        }  # fmt: skip

    def band(self) -> dict[str, Any]:
        """Within which four of five measured steps are expected, and by what evidence."""
        width, basis = class_band(self.cluster.devices[0].name, levelled="levels" in self.cluster.profile)
        return {"low_s": self.step_s * math.exp(-width), "high_s": self.step_s * math.exp(width), "basis": basis}

    def memory(self) -> dict[str, Any]:
        """The peak, where and when it is, and what it consists of; by stage the rank of each that holds most."""
        held = self.ledger
        return {
            "peak_bytes": held.peak_bytes, "peak_rank": held.peak_rank, "peak_at": held.peak_at, "usable_bytes": held.usable_bytes,
            "by_class": dict(held.by_class), "by_stage": [self._stage_memory(i) for i in range(len(self.plan.stages))],
        }  # fmt: skip

    def _stage_memory(self, stage: int) -> dict[str, Any]:
        fullest = max((r for r in self.plan.stages[stage].ranks if r in self.ledger.ranks), key=lambda r: (self.ledger.total(r), -r))
        return {"stage": stage, "rank": fullest, "bytes": self.ledger.total(fullest), "by_class": dict(self.ledger.ranks[fullest])}

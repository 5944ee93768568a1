"""What a simulation foretells of a plan, and the document that `headrace simulate` prints of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.documents import SCHEMA_VERSION
from ir.cluster import Cluster
from ir.plan import Plan
from ir.program import Program
from ir.timeline import Timeline
from planner.frontends.model import Model
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
            "layout": dict(self.plan.layout), **found, "memory": self.memory(),
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        """The peak, where and when it is, and what it consists of; by stage the rank of each that holds most."""
        ledger = self.ledger
        return {
            "peak_bytes": ledger.peak_bytes, "peak_rank": ledger.peak_rank, "peak_at": ledger.peak_at, "usable_bytes": ledger.usable_bytes,
            "by_class": dict(ledger.by_class), "by_stage": [dict(s) for s in ledger.by_stage(self.plan)],
        }  # fmt: skip

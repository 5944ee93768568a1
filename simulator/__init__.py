"""How long it takes: clusters and their profiles, costs, and the event simulation of a Program.

`profile` (bundled figures), `topology` (the links of a node), `clusters` (names to Cluster), `routes` (paths of the topology), `collectives` (alpha-beta on
it), `gemm` (rates by shape), `cost` (Work to seconds), `contention` (what is shared), `overlap` (kernels beside collectives, stragglers), `sweep` (fixed
durations to times), `engine` (Program to Timeline), `figures` (of a step, without one), `fold` (ranks that do the same), `memory` (the ledger), `estimate`
(closed forms and lower bounds)."""

from simulator.clusters import load_cluster
from simulator.cost import CostModel, Runtime
from simulator.engine import simulate
from simulator.estimate import pipeline_lower_bound
from simulator.memory import Ledger, ledger

__all__ = ["CostModel", "Ledger", "Runtime", "ledger", "load_cluster", "pipeline_lower_bound", "simulate"]

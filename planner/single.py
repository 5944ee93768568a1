"""The plan of one device: everything B, one stage, no decision to make. What every other plan must compute the same as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ir.cluster import Cluster
from ir.plan import Hub, ParamPlacement, Plan, Stage
from planner.frontends.model import Model
from planner.optimizers import with_defaults


def single_device(
    model: Model,
    cluster: Cluster,
    *,
    batch: int,
    seq: int,
    dtype: str,
    optimizer: Mapping[str, Any],
    num_microbatches: int = 1,
    recompute: tuple[int, ...] = (),
) -> Plan:
    """The plan that runs the whole model on rank 0."""
    graph = model.graph(batch // num_microbatches, seq, dtype)
    values = [t.name for t in graph.tensors.values() if t.role == "value"]
    layout = {
        "dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "vpp": 1, "mbs": batch // num_microbatches, "num_microbatches": num_microbatches, "schedule": "1f1b",
        "seq_chunks": 1,
        "recompute": "full" if recompute else "none", "zero": 0, "sp": False,
    }  # fmt: skip
    return Plan(
        model.reference or model.name, model.fingerprint, cluster.name, cluster.fingerprint, batch, seq, dtype, with_defaults(optimizer), (), (),
        (Stage(0, graph.num_layers, (0,)),), "1f1b", num_microbatches, recompute, {n.name: () for n in graph.nodes}, {t: Hub((), ()) for t in values},
        {p.name: ParamPlacement((), (), ()) for p in graph.params}, layout=layout,
    )  # fmt: skip


__all__ = ["single_device"]

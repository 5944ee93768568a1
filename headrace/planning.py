"""The verbs before a run: load a model, load a cluster, plan, lower, simulate, explain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.documents import read_kind
from headrace.local import local_cluster
from headrace.prediction import Prediction
from ir.cluster import Cluster
from ir.errors import ClusterError, InputError, PlanError
from ir.plan import Plan
from ir.program import Program
from planner import explain as planner_explain
from planner import frontends, search
from planner import lower as planner_lower
from planner.frontends.model import Model
from planner.single import single_device
from simulator import clusters
from simulator.calibrate import of_program
from simulator.cost import CostModel
from simulator.engine import simulate as simulate_program
from simulator.memory import ledger

Progress = Callable[..., None]
DEFAULT_BATCH_PER_DEVICE = 8
ALL_RANKS = 16
"""Up to so many ranks each is simulated; above, some stand for the others, which do the same at the same time."""


def _silent(*_: Any) -> None:
    pass


def load(name: str, **overrides: Any) -> Model:
    """A model by zoo name, or from a Hugging Face `config.json` or its folder; `overrides` change single sizes, such as `num_layers=4`.

    Raises InputError when there is no such model, or its config cannot be used.
    """
    return frontends.load(name, **overrides)


def load_tuned(name: str, lora: str | None = None, freeze: str | None = None, moe_imbalance: float | None = None) -> Model:
    """A model of which only a part is trained: with adapters (`rank=16,alpha=32,targets=q,v`), or without the parameters that patterns name (`wte*,h.0.*`).

    `moe_imbalance`: its experts have so many times the slots of their even share, so that all wait for the busiest (absent: what its config says).
    Raises InputError.
    """
    patterns = tuple(filter(None, (p.strip() for p in (freeze or "").split(","))))
    if freeze is not None and not patterns:
        raise InputError("--freeze names nothing: give patterns of parameters' names, such as wte*,h.0.*")
    tuning = frontends.Tuning(patterns, frontends.Lora.parse(lora) if lora is not None else None)
    model = load(name)
    if moe_imbalance is not None:
        if model.config.experts is None:
            raise InputError(f"--moe-imbalance {moe_imbalance:g}: `{name}` has no experts; leave it out")
        model = load(name, capacity=moe_imbalance)
    return model.tuned(tuning) if tuning else model


def load_cluster(text: str, progress: Progress = _silent) -> Cluster:
    """A cluster: `local`, a shorthand such as `4x8xH100-SXM`, a machine's name, or the path of a cluster JSON.

    `local` is measured on first use, which takes up to 30 s. Raises InputError or ClusterError.
    """
    return clusters.load_cluster(text, local=lambda: local_cluster(progress))


def plan(
    model: Model | str, cluster: Cluster | str, *, batch: int | None = None, seq: int | None = None, dtype: str | None = None,
    optimizer: str | Mapping[str, Any] = "adamw",
    top: int = 5, fix: Mapping[str, str | int] | None = None, memory_fraction: float = 0.95, budget_s: float = 30.0, progress: Progress = _silent,
    cluster_name: str | None = None, stages: str | None = None,
) -> search.Result:  # fmt: skip
    """The best ways to train `model` on `cluster`, fastest first: `.plans`, each with `.layout` and `.predicted`.

    `batch` in sequences (8 a device), `seq` in tokens (the model's longest), `dtype` (bfloat16; float32 on a machine without it). `fix` says what every plan
    must keep, `{"tp": 2}`; `stages` which layers each stage gets, `"11,10,11"`; `cluster_name` what the plan is to call a cluster that is given as a value (its
    name). Raises PlanError for what is illegal, DoesNotFit when nothing fits.
    """
    graph_of, devices = _model(model), _cluster(cluster, progress)
    found = search.plan(
        graph_of, devices,
        batch=batch if batch is not None else DEFAULT_BATCH_PER_DEVICE * devices.num_devices,
        seq=seq if seq is not None else graph_of.max_seq,
        dtype=dtype if dtype is not None else default_dtype(devices),
        optimizer=optimizer, top=top, fix=dict(fix or {}), memory_fraction=memory_fraction, budget_s=budget_s, progress=progress, stages=stages,
    )  # fmt: skip
    text = cluster if isinstance(cluster, str) else cluster_name
    named = cluster_reference(text) if text is not None else devices.name
    return replace(found, plans=tuple(replace(p, cluster=named) for p in found.plans))


def lower(plan: Plan | str | Path, model: Model | None = None) -> Program:
    """The program of a plan or of a plan's file; the model is loaded again by the name that the plan holds, unless it is given.

    Raises PlanError when the model is not the one that the plan was made for.
    """
    made = read_plan(plan)
    return planner_lower.lower(model_of(made, model), made)


def lower_single(plan: Plan | str | Path, model: Model | None = None) -> Program:
    """The program that trains the same model on one device, as what a plan must compute the same as."""
    made = read_plan(plan)
    whole = model_of(made, model)
    # one device has no cluster to be planned for: the plan's name of it is carried over
    alone = single_device(
        whole, Cluster(made.cluster, (), ()), batch=made.batch, seq=made.seq, dtype=made.dtype, optimizer=made.optimizer, num_microbatches=made.num_microbatches
    )
    return planner_lower.lower(whole, alone)


def simulate(
    plan: Plan | str | Path, cluster: Cluster | str | None = None, model: Model | None = None, steps: int = 3, ranks: Collection[int] | None = None
) -> Prediction:  # fmt: skip
    """What a plan will do on a cluster (the one that it was made for): timeline, memory ledger, step time.

    `ranks`: simulate these alone, at least one of each stage, for all of them; what they wait for others to do they find done. Without it, all ranks of a small
    plan, the representatives of a large one.
    Raises ClusterError when the cluster is another one than the plan's and has too few devices.
    """
    made = read_plan(plan)
    devices = cluster_of(made, cluster)
    whole = model_of(made, model)
    if ranks is None and made.num_ranks > ALL_RANKS:
        ranks = planner_lower.representatives(made, devices)
    program = planner_lower.lower(whole, made, ranks)
    timeline = simulate_program(program, CostModel(of_program(devices, program)), steps=steps)
    return Prediction(whole, devices, made, program, timeline, ledger(program, timeline, cluster=devices))


def explain(
    plan: Plan | str | Path, why_not: Mapping[str, str | int] | None = None, cluster: Cluster | str | None = None, model: Model | None = None, *,
    about: str | None = None, against: Plan | str | Path | None = None,
) -> Any:  # fmt: skip
    """What binds a plan, how it is cut, what its re-shards cost, and why another layout, `why_not={"tp": 8}`, would be slower, larger or illegal.

    `about="h.*.mlp.up"`: why an operator or parameter is not placed otherwise. `against`: another plan of the same model, compared tensor by tensor.
    """
    made = read_plan(plan)
    return planner_explain.explain(
        model_of(made, model), cluster_of(made, cluster), made, why_not=dict(why_not) if why_not else None, about=about,
        against=read_plan(against) if against is not None else None,
    )  # fmt: skip


# ---- what a plan refers to -------------------------------------------------------------------------------------------------------------------------


def read_plan(plan: Plan | str | Path) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.from_json(read_kind(plan, "plan"))


def cluster_reference(text: str) -> str:
    """What a plan calls its cluster, so that it is found again: the whole path of a document, or the name as it was given."""
    return str(Path(text).resolve()) if Path(text).is_file() else text


def model_of(plan: Plan, model: Model | None = None) -> Model:
    """The model of a plan, proved to be the one it was made for."""
    if model is None:
        path = Path(frontends.Tuning.split(plan.model)[0].partition("[")[0])
        if path.is_absolute() and not path.exists():
            raise PlanError(f"the plan is for the model in `{path}`, which is not there any more: put the config back, or plan again")
        model = load(plan.model)
    if model.fingerprint != plan.model_fingerprint:
        raise PlanError(
            f"the plan is for another model: it was made for `{plan.model}` with fingerprint {plan.model_fingerprint}, "
            f"`{model.name}` has {model.fingerprint}; plan again"
        )
    return model


def cluster_of(plan: Plan, cluster: Cluster | str | None = None) -> Cluster:
    """The cluster to look at a plan on: the given one if it has the devices, else the one that the plan names if it is still the same."""
    found = _cluster(plan.cluster if cluster is None else cluster, _silent)
    if found.num_devices < plan.num_ranks:
        raise ClusterError(f"the plan needs {plan.num_ranks} devices; cluster `{found.name}` has {found.num_devices}: plan for it again")
    if cluster is None and found.fingerprint != plan.cluster_fingerprint:
        raise PlanError(
            f"the plan is for cluster `{plan.cluster}` with fingerprint {plan.cluster_fingerprint}, which is now {found.fingerprint} "
            f"(measured again, or another release): plan again, or name the cluster"
        )
    return found


def default_dtype(cluster: Cluster) -> str:
    """The first of bfloat16, float16 and float32 that every device has."""
    return next(dtype for dtype in ("bfloat16", "float16", "float32") if dtype == "float32" or all(dtype in d.flops_per_s for d in cluster.devices))


def _model(model: Model | str) -> Model:
    return load(model) if isinstance(model, str) else model


def _cluster(cluster: Cluster | str, progress: Progress) -> Cluster:
    return load_cluster(cluster, progress) if isinstance(cluster, str) else cluster


__all__ = ["InputError", "explain", "load", "load_cluster", "lower", "plan", "simulate"]

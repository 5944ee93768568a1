"""The bill of a run: its works priced by the cost model, as arrays that a fit multiplies by its shares. Nothing in it depends on what is fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from ir.errors import InputError
from ir.units import DTYPE_BYTES
from planner.recipes import works
from planner.recipes.release import Release, release_of
from planner.recipes.run import Run
from planner.recipes.works import Kernels, Works
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.profile import gpu_profile

SHARES = ("compute", "low", "grouped", "attention", "misaligned", "memory", "link", "nic", "ep")
"""What a microbatch's seconds consist of, besides the gathers of fully sharded parameters."""

PARTS = ("layer", "embedding", "head")

KINDS = {"compute": "gemm", "low": "gemm", "grouped": "gemm", "attention": "attention", "misaligned": "attention", "memory": "memory"}
"""The kinds of kernels by which a release says how much slower they are beside a collective; collectives themselves are not."""

BUBBLES = {
    "none": (1.0, 1.0, 1.0), "gpipe": (1.0, 1.0, 1.0), "1f1b": (1.0, 1.0, 1.0), "interleaved": (1.0, 1.0, 1.0), "zb-1p": (1.0, 1.0, -1.0),
    "zb-2p": (1.0, 1.0, -2.0), "zb-v": (1.0, 1.0, -2.0),
}  # fmt: skip
"""Seconds of F, I and W of every rank but one that a schedule leaves idle: bubbles of 1F1B, ZB-H1 and ZB-H2 (arXiv:2401.10241, section 2); never below 0."""


@dataclass(frozen=True, slots=True)
class Bill:
    """Seconds of runs, priced with shares of 1. Arrays have one row a run [n], the same for every field, so that a fit takes all of them at once.

    `seconds` [n, part, pass, share]: of one layer (the mean of its kinds), the embedding, the head, in F, I, W. `fsdp` [n, part, pass]: gathers and reductions
    of fully sharded parameters. `parts` [n, kind, part]: layers, embeddings and heads on the first, a middle and the last rank of the pipeline, of which there
    are `ranks` [n, kind]. `idle` [n, pass] of `BUBBLES`; `microbatches`, `chunks`, `hops` (between one microbatch's stages, one way), `hop` seconds of one;
    `split` the part of collectives of `link` that hides behind the products; `reduce` [n, 2] seconds once a step of gradients and of parameters, inside nodes
    and between them, of which `tail` [n] cannot hide, `update` those of the optimizer; `host`, `host_backward` [n] layer passes that the host issues in F and
    in I + W of a layer; `beside` 1 where the reduction hides behind the last backward; `slower` [n, share] how many times as long kernels take beside a
    collective; `nodes`."""

    seconds: np.ndarray
    fsdp: np.ndarray
    parts: np.ndarray
    ranks: np.ndarray
    idle: np.ndarray
    microbatches: np.ndarray
    chunks: np.ndarray
    stages: np.ndarray
    hop: np.ndarray
    reduce: np.ndarray
    tail: np.ndarray
    update: np.ndarray
    host: np.ndarray
    host_backward: np.ndarray
    beside: np.ndarray
    split: np.ndarray
    slower: np.ndarray
    nodes: np.ndarray

    def __len__(self) -> int:
        return len(self.hop)

    @classmethod
    def stack(cls, bills: Sequence[Bill]) -> Bill:
        """Many bills as one."""
        if not bills:
            return cls(*(np.empty(0) for _ in fields(cls)))
        return cls(*(np.concatenate([getattr(b, f.name) for b in bills]) for f in fields(cls)))

    def take(self, which: np.ndarray) -> Bill:
        return Bill(*(getattr(self, f.name)[which] for f in fields(self)))


class Pricer:
    """Prices runs; clusters and what their devices and links cost are kept from run to run."""

    def __init__(self) -> None:
        self._costs: dict[str, CostModel] = {}

    def cost(self, run: Run) -> CostModel:
        """The cost model of a run's machine."""
        name = cluster_name(run)
        if name not in self._costs:
            self._costs[name] = CostModel(load_cluster(name))
        return self._costs[name]

    def bill(self, run: Run) -> Bill:
        """The bill of one run; InputError where the release or the GPU is not known, or the layout is not one that is priced."""
        return _Writer(run, _release(run), self.cost(run)).bill()


def cluster_name(run: Run) -> str:
    """The run's machine as a shorthand; InputError where its GPU is not known."""
    return f"{run.num_nodes}x{run.gpus_per_node}x{gpu_profile(run.gpu)[0]}" + (f"@{run.nic}" if run.nic and run.num_nodes > 1 else "")


def _release(run: Run) -> Release:
    found = release_of(run.release)
    if found is None:
        raise InputError(f"run `{run.id}`: release `{run.release}` has no profile; add one to simulator/profiles/runtimes")
    return found.running(run.gpu, run.options)


class _Writer:
    def __init__(self, run: Run, release: Release, cost: CostModel) -> None:
        if run.schedule not in BUBBLES:
            raise InputError(f"run `{run.id}`: schedule `{run.schedule}` has no closed form; known are {', '.join(BUBBLES)}")
        self.run = replace(run, sp=run.sp or (release.always_sp and run.tp > 1), zero=max(run.zero, release.least_zero))
        self.release, self.cost = release, cost
        self.width = DTYPE_BYTES[run.dtype]

    def bill(self) -> Bill:
        run, release = self.run, self.release
        layer, plain = self._layer()
        seconds = np.stack([layer, self._passes(works.embedding(run, release)), self._passes(works.head(run, release))])
        again = 1.0 if run.recompute == "full" else 0.0
        experts = run.shape.num_expert_layers / run.shape.layers
        slower = (release.softmax_plain_host if plain else 1.0) * (1.0 + (release.experts_host - 1.0) * experts)
        parts, ranks = self._pipeline()
        scalars = {
            "microbatches": run.num_microbatches, "chunks": run.vpp, "stages": run.num_stages, "hop": self._hop_s(),
            "update": self._update_s(parts), "host": slower, "host_backward": slower * (release.host_backward + again),
            "beside": float(release.reduces_beside_backward), "split": release.splits_link, "nodes": run.num_nodes,
        }  # fmt: skip
        reduce, tail = self._reduction(parts)
        arrays = {
            "seconds": seconds, "fsdp": self._fsdp(), "reduce": reduce, "tail": tail, "parts": parts, "ranks": ranks, "idle": BUBBLES[run.schedule],
            "slower": [release.slower[KINDS[share]] if share in KINDS else 1.0 for share in SHARES],
        }  # fmt: skip
        return Bill(**{k: np.asarray([v], float) for k, v in (arrays | scalars).items()})

    # ---- a microbatch ----------------------------------------------------------------------------------------------------------------------------------

    def _layer(self) -> tuple[np.ndarray, bool]:
        """The mean of dense layers and those with experts, and whether their softmax is not fused."""
        run, shape = self.run, self.run.shape
        share = shape.num_expert_layers / shape.layers
        kinds = [(weight, works.layer(run, self.release, experts)) for weight, experts in ((1 - share, False), (share, True)) if weight]
        return sum(weight * self._passes(w) for weight, w in kinds), kinds[0][1].plain_softmax  # type: ignore[return-value]

    def _passes(self, part: Works) -> np.ndarray:
        """[pass, share]"""
        return np.array([self._seconds(kernels) for kernels in (part.f, part.i, part.w)])

    def _seconds(self, kernels: Kernels) -> list[float]:
        found = dict.fromkeys(SHARES, 0.0)
        for k in kernels:
            if k.share in works.AXES:
                found["ep" if k.share == "ep" else self._crossed(k.share)] += self._collective_s(k.share, k.op, k.nbytes)
            else:
                found[k.share] += k.times * self.cost.compute_s(k.op, k.dtype, k.flops, k.nbytes, k.gemm)
        return list(found.values())

    def _crossed(self, axis: str) -> str:
        """`nic` where a group of the axis stands on several nodes, else `link`."""
        return "nic" if self.groups[axis][-1] // self.run.gpus_per_node else "link"

    def _fsdp(self) -> np.ndarray:
        """[part, pass]: all-gather forward and backward, reduce-scatter with the weight gradients; nothing below ZeRO-3."""
        out = np.zeros((3, 3))
        if not self._gathers:
            return out
        shape, run = self.run.shape, self.run
        layer = shape.num_params - shape.vocab * shape.hidden * (1 if shape.tied else 2)
        table = shape.vocab * shape.hidden / run.tp
        for part, params in enumerate((layer / shape.layers / run.tp, table, 0.0 if shape.tied else table)):
            if params:
                gather = self._collective_s("fsdp", "all_gather", params * self.width)
                out[part] = gather, gather, self._collective_s("fsdp", "reduce_scatter", params * self.release.grad_bytes)
        return out

    # ---- ranks -----------------------------------------------------------------------------------------------------------------------------------------

    @property
    def _gathers(self) -> bool:
        """Whether parameters are gathered in every pass."""
        return self.run.zero == 3 and (self.run.pp == 1 or self.release.gathers_every_pass)

    def _collective_s(self, axis: str, kind: str, nbytes: float) -> float:
        return self.cost.collective_s(kind, nbytes, self.groups[axis])

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The first group of each axis; ranks are numbered tp first, then cp, dp, pp. Experts lie on the ranks of tp, cp and dp in this order."""
        r = self.run
        replicas, expert_replicas = r.cp * r.dp, max(1, r.tp * r.cp * r.dp // r.ep)
        return {
            "tp": tuple(range(r.tp)), "cp": tuple(range(0, r.tp * r.cp, r.tp)), "dp": tuple(range(0, r.tp * replicas, r.tp)), "ep": tuple(range(r.ep)),
            "fsdp": tuple(range(0, r.tp * replicas, r.tp)), "edp": tuple(range(0, r.ep * expert_replicas, r.ep)),
        }  # fmt: skip

    def _pipeline(self) -> tuple[np.ndarray, np.ndarray]:
        """`Bill.parts` and `Bill.ranks`."""
        run, p = self.run, self.run.pp
        layers = (run.shape.layers + 2) / p if run.short_ends else run.shape.layers / p
        short = 1.0 if run.short_ends else 0.0
        if p == 1:
            return np.array([[run.shape.layers, 1, 1], [0, 0, 0], [0, 0, 0]], float), np.array([1.0, 0.0, 0.0])
        if run.schedule == "zb-v":
            return np.array([[layers - 2 * short, 1, 1], [layers, 0, 0], [0, 0, 0]], float), np.array([1.0, p - 1.0, 0.0])
        return np.array([[layers - short, 1, 0], [layers, 0, 0], [layers - short, 0, 1]], float), np.array([1.0, p - 2.0, 1.0])

    def _hop_s(self) -> float:
        """What no pass hides of one microbatch's activations to the next stage."""
        run = self.run
        if run.pp == 1:
            return 0.0
        nbytes = run.mbs * run.seq // run.cp * run.shape.hidden * self.width / (run.tp if run.sp else 1)
        return self.release.shown_hops * self.cost.p2p_s(nbytes, 0, run.num_gpus // run.pp)

    # ---- once a step -----------------------------------------------------------------------------------------------------------------------------------

    def _params(self, parts: np.ndarray) -> tuple[float, float]:
        """Parameters of the fullest rank: of its layers without experts and its tables, and of its experts."""
        run, shape = self.run, self.run.shape
        layers = float(parts[:, 0].max())
        experts = shape.num_expert_layers / shape.layers * shape.experts * shape.mlp_params(shape.moe_ffn) / run.ep
        all_layers = shape.num_params - shape.vocab * shape.hidden * (1 if shape.tied else 2)
        dense = (all_layers - shape.num_expert_layers * shape.experts * shape.mlp_params(shape.moe_ffn)) / shape.layers
        tables = shape.vocab * shape.hidden * (2 if run.pp == 1 and not shape.tied else 1)
        return (layers * dense + tables) / run.tp, layers * experts

    def _reduction(self, parts: np.ndarray) -> tuple[np.ndarray, float]:
        """[inside nodes, between nodes] seconds of reducing gradients and, where optimizer states are sharded, of gathering parameters; ZeRO-3 has both in its
        microbatches. And the share of them that is left when the backward ends: the last bucket.
        """
        out, last = np.zeros(2), 0.0
        if self._gathers:
            return out, 0.0
        kind = "reduce_scatter" if self.run.zero else "all_reduce"
        for axis, params in zip(("dp", "edp"), self._params(parts), strict=True):
            if params:
                pieces = self._buckets(axis, params)
                seconds = pieces * self._collective_s(axis, kind, params / pieces * self.release.grad_bytes)
                last += seconds / pieces if pieces > 1 else 0.0
                seconds += pieces * self._collective_s(axis, "all_gather", params / pieces * self.width) if self.run.zero else 0.0
                out[int(self._crossed(axis) == "nic")] += seconds
        return out, last / max(float(out.sum()), 1e-12)

    def _buckets(self, axis: str, params: float) -> int:
        """Collectives in which the gradients of so many parameters are reduced."""
        least, of_each = self.release.bucket
        return max(1, int(params // max(least, of_each * len(self.groups[axis]), 1.0))) if least else 1

    def _update_s(self, parts: np.ndarray) -> float:
        dense, experts = self._params(parts)
        sharded = self.run.zero > 0
        held = dense / (self.run.dp * self.run.cp if sharded else 1) + experts / (len(self.groups["edp"]) if sharded else 1)
        return self.cost.compute_s("update", self.run.dtype, 0.0, held * self.release.update_bytes)

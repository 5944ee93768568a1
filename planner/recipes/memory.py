"""The memory ledger of a run: what each pipeline rank holds, by class, in bytes, and when the most of it is there at once.

>>> from planner.recipes.run import Run, Shape
>>> shape = Shape("gpt", layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152, vocab=51200)
>>> run = Run("175b", "", "gpt3-175b", shape, seq=2048, gpu="A100-SXM-80GB", num_gpus=64, tp=8, pp=8, mbs=1, gbs=64, schedule="1f1b", recompute="full",
...           release="Megatron-LM 2021")
>>> found = ledger(run)
>>> print(found.peak_rank, found.peak_at, f"{found.peak_bytes / 2**30:.1f} GiB", found.fits)
0 backward of the first microbatch, 8 of 64 in flight 54.1 GiB yes
>>> sum(found.by_class.values()) == found.peak_bytes
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ir.units import DTYPE_BYTES, GIB
from planner.recipes.release import release_of
from planner.recipes.run import Run
from planner.recipes.saved import Saved, saved
from planner.recipes.states import Holding, Term, holding_of, holdings, terms
from planner.schedules import SCHEDULES, Schedule, schedule
from simulator.profile import bundled, gpu_profile

SCHEDULE = {"none": "gpipe", "zb-1p": "zb-h1", "zb-2p": "zb-h2"}
"""Schedules of runs whose orders stand under another name in `planner.schedules`."""

UNKNOWN = 1.0
"""The band where the microbatch size or the recomputation had to be assumed: twice the memory is possible."""


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes by class of every pipeline rank at its fullest moment, and that moment. `usable_bytes`: what the GPU offers. `host`: what each rank holds in the
    memory of its host.
    """

    ranks: tuple[Mapping[str, float], ...]
    moments: tuple[str, ...]
    usable_bytes: float
    band: float
    host: tuple[Mapping[str, float], ...] = field(default=())

    @property
    def peak_rank(self) -> int:
        """The first of the fullest ranks."""
        return max(range(len(self.ranks)), key=lambda r: (sum(self.ranks[r].values()), -r))

    @property
    def by_class(self) -> Mapping[str, float]:
        return self.ranks[self.peak_rank]

    @property
    def peak_bytes(self) -> float:
        return sum(self.by_class.values())

    @property
    def peak_at(self) -> str:
        return self.moments[self.peak_rank]

    @property
    def fits(self) -> str:
        """`no` where the peak is above what the GPU offers by more than the ledger errs, `yes` where it is below by more, else `tight`."""
        return fits(self.peak_bytes, self.usable_bytes, self.band)


def fits(peak_bytes: float, usable_bytes: float, band: float) -> str:
    """`yes`, `tight` or `no`: whether a predicted peak that errs by `band` stays below, may go above or goes above.

    >>> [fits(peak, 80.0, 0.06) for peak in (70.0, 78.0, 90.0)]
    ['yes', 'tight', 'no']
    """
    if peak_bytes * (1 + band) <= usable_bytes:
        return "yes"
    return "tight" if peak_bytes / (1 + band) <= usable_bytes else "no"


def known(run: Run) -> bool:
    """Whether the run has a ledger: its release, its schedule and its GPU are known."""
    names = {alias.lower() for name, gpu in bundled("gpus")["gpus"].items() for alias in (name, *gpu["aliases"])}
    released = any(run.release.startswith(start) for h in holdings() for start in h.releases)
    return released and SCHEDULE.get(run.schedule, run.schedule) in SCHEDULES and run.gpu.lower() in names


def ledger(run: Run, holding: Holding | None = None, usable_bytes: float | None = None, offload: Sequence[str] = ()) -> MemoryLedger:
    """The ledger of a run. `offload`: classes that lie in the host's memory (`parameters`, `states`, `activations`). `usable_bytes` where the GPU offers
    something else than its profile says. InputError where release, GPU or schedule is not known.
    """
    holding = holding or holding_of(run.release)
    usable = float(gpu_profile(run.gpu)[1]["usable_bytes"]) if usable_bytes is None else usable_bytes
    writer = _Writer(run, holding, terms(holding, run.zero, offload))
    found = [writer.rank(r) for r in range(run.pp)]
    band = max(holding.band, UNKNOWN) if any(word in text for text in run.assumed for word in ("microbatch size", "recomputation")) else holding.band
    away = {t.name for t in writer.terms if t.where == "host"} | {"activations"}.intersection(offload)
    device = tuple({k: v for k, v in classes.items() if k not in away} for classes, _ in found)
    host = tuple({k: v for k, v in classes.items() if k in away} for classes, _ in found)
    return MemoryLedger(device, tuple(moment for _, moment in found), usable, band, host)


def save_bytes(run: Run) -> float:
    """Bytes that gathering the whole state dict for a checkpoint adds on a device, where it is not written in shards: all parameters as they are held."""
    return holding_of(run.release).param * run.shape.num_params / (run.tp * run.pp)


class _Writer:
    def __init__(self, run: Run, holding: Holding, held: tuple[Term, ...]) -> None:
        name = SCHEDULE.get(run.schedule, run.schedule)
        run = replace(run, sp=run.sp or (holding.always_sp and run.tp > 1))
        self.run, self.holding, self.schedule, self.terms = run, holding, schedule(name), held
        self.width = DTYPE_BYTES[run.dtype]
        self.stages = stage_layers(run, self.schedule)
        release = release_of(run.release)
        attention = "flash" if release is None else release.attention
        self.keeps = [Saved.of(run, attention, "tensors" if "compile" in run.options else holding.keeps, experts) for experts in (False, run.shape.experts > 0)]

    def rank(self, rank: int) -> tuple[dict[str, float], str]:
        """Bytes by class, and the moment."""
        run, h = self.run, self.holding
        dense, expert, is_first, is_last = self.stages[rank]
        layers = dense + expert
        flight = min(self._flight(rank) * h.flight, run.num_microbatches)
        kinds = [(n, keeps) for n, keeps in zip((dense, expert), self.keeps, strict=True) if n]
        mode = "by-operator" if run.recompute == "selective" and h.keeps != "tensors" else run.recompute
        stored = sum(n * saved(keeps, mode) for n, keeps in kinds)
        again = max((saved(keeps, "none") - saved(keeps, mode) for _, keeps in kinds), default=0.0)
        tokens = run.mbs * run.seq / run.cp
        hidden = tokens * run.shape.hidden * self.width / (run.tp if run.sp else 1)
        held = self._static(dense, expert, is_first, is_last) | {
            "activations": h.slack * flight * stored,
            "hops": h.hops * (1.0 - 0.5 * is_first - 0.5 * is_last) * flight * hidden,
            "embedding": flight * hidden / self.width if is_first and run.shape.is_gpt else 0.0,
            "gathered": self._gathered(dense, expert, is_first, is_last),
            "communicators": h.group_gib * GIB * len(groups_of(run)),
            "fixed": h.fixed_gib * GIB,
        }
        moments = {
            "loss": {"logits": h.logits * (h.flight if run.pp > 1 else 1.0) * tokens * run.shape.vocab / run.tp if is_last else 0.0},
            "backward": {"recompute": h.rerun * again, "weight gradient": h.weight * largest_weight(run) if layers else 0.0},
        }
        if not h.planned:  # whoever computed the loss still holds its tensors
            moments = {"backward": moments["loss"] | moments["backward"]}
        moment, more = max(moments.items(), key=lambda pair: sum(pair[1].values()))
        return {k: v for k, v in (held | more).items() if v}, f"{moment} of the first microbatch, {flight:.3g} of {run.num_microbatches} in flight"

    def _flight(self, rank: int) -> float:
        run = self.run
        if run.pp == 1:
            return 1.0
        return self.schedule.memory(rank, run.pp, run.num_microbatches, run.vpp)

    def _static(self, dense_layers: float, expert_layers: float, is_first: bool, is_last: bool) -> dict[str, float]:
        run = self.run
        dense, experts = params_of(run, dense_layers, expert_layers, is_first, is_last)
        replicas, expert_replicas = run.dp * run.cp, max(1, run.tp * run.dp * run.cp // run.ep)
        copies = {"parameters": self.schedule.copies, "gradients": self.schedule.copies}
        splits = {t.name: dense / (replicas if t.split else 1) + experts / (expert_replicas if t.split else 1) for t in self.terms}
        return {t.name: t.nbytes * copies.get(t.name, 1) * splits[t.name] for t in self.terms}

    def _gathered(self, dense_layers: float, expert_layers: float, is_first: bool, is_last: bool) -> float:
        """Whole parameters and gradients of the units at work, or of all where a pipeline keeps them; nothing below ZeRO-3."""
        run, h = self.run, self.holding
        if run.zero < 3:
            return 0.0
        if run.pp > 1 and h.whole_in_pipeline:
            return (self.width + h.grad) * sum(params_of(run, dense_layers, expert_layers, is_first, is_last))
        unit = max(sum(params_of(run, *kind, False, False)) for kind in ((1.0, 0.0), (0.0, float(run.shape.experts > 0))))
        table = run.shape.vocab * run.shape.hidden / run.tp if is_first or is_last else 0.0
        return h.units * self.width * unit + 2 * self.width * table


def params_of(run: Run, dense_layers: float, expert_layers: float, is_first: bool, is_last: bool) -> tuple[float, float]:
    """Parameters on one device of a rank with so many layers without and with experts: of everything but experts, and of its experts."""
    shape = run.shape
    tables = shape.vocab * shape.hidden * (float(is_first) + float(is_last and not (shape.tied and is_first)))
    if is_first and shape.is_gpt:
        tables += run.seq * shape.hidden
    experts = shape.experts * shape.mlp_params(shape.moe_ffn)
    held_by_all = dense_layers * shape.dense_layer_params + (expert_layers * (shape.expert_layer_params - experts) if expert_layers else 0.0)
    return (held_by_all + tables) / run.tp, expert_layers * experts / run.ep


def groups_of(run: Run) -> tuple[str, ...]:
    """The axes along which devices communicate: one communicator on each device for each of them, however many layers use it; none for an axis of size 1.

    >>> from planner.recipes.run import Shape
    >>> groups_of(Run("", "", "", Shape("gpt", 1, 8, 1, 1, 8, 32, 64), seq=1, gpu="A100", num_gpus=8, dp=8))
    ('dp',)
    """
    return tuple(axis for axis in ("tp", "cp", "dp", "pp", "ep") if getattr(run, axis) > 1)


def largest_weight(run: Run) -> float:
    """Elements of the largest weight of a layer on one device: the MLP's first product, gate and value together, or that of one expert."""
    shape = run.shape
    parts = 2 if shape.gated else 1
    dense = parts * shape.hidden * shape.ffn / run.tp if shape.layers > shape.num_expert_layers else 0.0
    return max(dense, parts * shape.hidden * shape.moe_ffn) if shape.experts else dense


def stage_layers(run: Run, order: Schedule) -> tuple[tuple[float, float, bool, bool], ...]:
    """(layers without experts, layers with, holds the embedding, holds the head) of every pipeline rank."""
    stages, shape = run.num_stages, run.shape
    if run.short_ends:
        each = [(shape.layers + 2) / stages - float(s in (0, stages - 1)) for s in range(stages)]
    elif run.vpp == 1:
        whole, more = divmod(shape.layers, stages)
        each = [float(whole + (s < more)) for s in range(stages)]
    else:
        each = [shape.layers / stages] * stages
    place = [order.rank_of(s, run.pp) for s in range(stages)]
    begins = [sum(each[:s]) for s in range(stages)]
    plain = [min(n, max(0.0, shape.layers - shape.num_expert_layers - at)) for n, at in zip(each, begins, strict=True)]
    ranks = range(run.pp)
    dense = [math.fsum(n for s, n in enumerate(plain) if place[s] == r) for r in ranks]
    layers = [math.fsum(n for s, n in enumerate(each) if place[s] == r) for r in ranks]
    return tuple((dense[r], layers[r] - dense[r], place[0] == r, place[-1] == r) for r in ranks)

"""What a framework's release does with a step beyond its products: what is fused, the bytes that move, what overlaps. `simulator/profiles/runtimes/*.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from simulator.runtimes import documents, facts

Passes = tuple[float, float]
"""A figure of the forward and one of the backward."""


@dataclass(frozen=True, slots=True)
class Release:
    """One file of `simulator/profiles/runtimes`; a file may name another that it is `like` and then says only what differs.

    `attention`: `unfused` (scores are written to memory) or `flash`. `moved`: bytes that a memory-bound operator moves for every element of its output,
    forward and backward; `softmax` is the fused kernel, that runs where heads x mbs of a rank divide by `softmax_multiple` and the sequence is at most
    `softmax_max_seq`, `softmax_plain` what runs elsewhere, `softmax_plain_host` times the host's time. `causal`: the share of all pairs that attention
    computes. `flash_backward`: products of its backward over those of its forward. `flash_cost`: its seconds over those of the best kernels of the device.
    `grouped_cost`, `grouped_low_cost`: the same of the products of experts, in 16 bits and in fp8 or less. `grad_bytes`: of an element in the data-parallel
    reduction. `update_bytes`: that the optimizer moves for each parameter. `accumulate_bytes`: that adding a weight gradient moves for each parameter,
    every microbatch. `reduces_beside_backward`: the reduction hides behind the last microbatch's backward. `host_backward`: the host's time in a backward
    over that in a forward, `experts_host` in a layer with experts over that in one without. `always_sp`, `least_zero`: tensor parallelism comes with sequence
    parallelism, and optimizer states are sharded, said or not.
    `bucket`: parameters that one reduction beside the backward takes at least, and for each data-parallel rank; none where all are reduced at once.
    `slower`: how many times as long a kernel (`gemm`, `attention`, `memory`) takes while a collective runs.
    `shown_hops`: the part of messages between stages that no pass hides.
    `splits_link`: the part of tensor-parallel collectives that is cut up and hides behind their products. `low_as`: dtype whose speed products in fp8 have (""
    their own). `gathers_every_pass`: parameters of ZeRO-3 are gathered anew in every pass of a pipeline. `microbatch_a_stage`: a pipeline has as many
    microbatches as stages where nothing else is said. `options`: what changes where a run says such a word, `on`: on GPUs whose name begins so.
    """

    name: str
    releases: tuple[str, ...]
    attention: str
    moved: Mapping[str, Passes]
    softmax_multiple: int
    softmax_max_seq: int
    softmax_plain_host: float
    causal: float
    flash_backward: float
    grad_bytes: float
    update_bytes: float
    accumulate_bytes: float
    reduces_beside_backward: bool
    host_backward: float
    experts_host: float
    slower: Mapping[str, float]
    shown_hops: float
    bucket: Passes = (0.0, 0.0)
    flash_cost: float = 1.0
    grouped_cost: float = 1.0
    grouped_low_cost: float = 1.0
    always_sp: bool = False
    least_zero: int = 0
    splits_link: float = 0.0
    low_as: str = ""
    gathers_every_pass: bool = True
    microbatch_a_stage: bool = False
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: str = ""

    def running(self, gpu: str, words: tuple[str, ...]) -> Release:
        """The release as it runs on a GPU with these options; words that change nothing are passed over."""
        found = self
        for change in (*(c for start, c in self.on.items() if gpu.startswith(start)), *(self.options.get(word, {}) for word in words)):
            found = replace(found, **{**change, "moved": {**found.moved, **_moved(change.get("moved", {}))}})
        return found

    def fuses_softmax(self, batch: int, seq: int) -> bool:
        """Whether the fused kernel takes `batch` = heads x mbs of a rank."""
        return batch % self.softmax_multiple == 0 and seq <= self.softmax_max_seq


@cache
def releases() -> tuple[Release, ...]:
    """Every bundled release, by file name."""
    return tuple(_release(name) for name in documents())


def release_of(text: str) -> Release | None:
    """The bundled release of this name: the one with the longest beginning in common, None where there is none.

    >>> release_of("Megatron-LM 2021").name, release_of("a framework of my own")
    ('megatron-lm-2021', None)
    """
    found = [(len(start), r) for r in releases() for start in r.releases if text.startswith(start)]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _release(name: str) -> Release:
    said = {k: v for k, v in facts(name).items() if k in Release.__dataclass_fields__}
    return Release(**{**said, "name": name, "releases": tuple(said["releases"]), "moved": _moved(said["moved"])})


def _moved(table: Mapping[str, Any]) -> dict[str, Passes]:
    return {op: (float(forward), float(backward)) for op, (forward, backward) in table.items()}

"""A candidate sketched: what a step of it may take by formulas alone, what fitting into the memory costs included. No bound, no promise: it orders the work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ir.units import DTYPE_BYTES
from planner.bounds import Bounds, kernel_seconds
from planner.candidates import Candidate, block_layers, is_attention
from planner.dims import EXPERT_PRODUCTS
from planner.facts import analyse
from planner.footprint import Footprint
from planner.pricing import work_of

Array = NDArray[np.float64]

LEVELS = (0, 1, 2, 3)
"""Of ZeRO: what ranks that repeat a parameter share among them is nothing, its states, its gradient as well, itself as well."""

HIDDEN = 0.5
"""The share of what is reduced and gathered once a step that is taken to hide behind kernels."""

SATURATED = 8
"""Samples of a microbatch from which on kernels are taken to need as long for each further one."""

TALKS = 3
"""All-reduces of a layer whose parameters are cut that nothing hides: of two in the backward weight gradients hide one."""

OVERFULL = 2.0
"""The power of how many times too full a device is by which a sketch is lengthened: what is far from fitting comes last."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one candidate and one level of ZeRO, by stage: seconds of what is gathered and reduced in each microbatch and once a step, bytes held."""

    each_s: Array
    added_s: Array
    once_s: Array
    held: Array


@dataclass(frozen=True)
class Sketches:
    """Of the candidates of one search. `zero`: the level where it is fixed."""

    bounds: Bounds
    footprint: Footprint
    memory_fraction: float
    zero: int | None = None
    _seconds: dict[tuple[int, bool], tuple[Array, Array, Array]] = field(default_factory=dict)
    _known: dict[tuple[int, ...], Costs] = field(default_factory=dict)
    _talks: dict[tuple[str, float, int, int], float] = field(default_factory=dict)

    def step_s(self, c: Candidate) -> float:
        """Seconds of a step in the way, at the level of ZeRO, and with as much run again, at which it is fastest; longer where nothing fits."""
        return min(self._way_s(way, apart) for way, apart in self._ways(c))

    def _ways(self, c: Candidate) -> Iterator[tuple[Candidate, int]]:
        """What the ranks of `tp` may do: cut the layers, or all do everything, or cut the sequences, so that each holds all parameters of its stage, of experts
        only its part maybe. With it how far apart the ranks are that share the experts."""
        yield c, c.cp * c.tp
        if c.tp > 1:
            yield replace(c, tp=1), c.cp * c.tp
            whole = replace(c, tp=1, cp=c.cp * c.tp, context="gather")
            yield whole, c.cp * c.tp
            if self._num_experts and self._num_experts % (c.ep * c.tp) == 0:
                yield replace(whole, ep=c.ep * c.tp), c.cp

    def _way_s(self, c: Candidate, apart: int) -> float:
        starts = [a for a, _ in self.bounds.stages(c.pp)]
        kernels = np.add.reduceat(self._kernel_s(c), starts)
        spoken = np.add.reduceat(self._talk_s(c, apart), starts)
        levels = LEVELS if self.zero is None else (self.zero,)
        return min(self._at(c, starts, kernels, spoken, self._costs(c, level, starts)) for level in levels)

    def _costs(self, c: Candidate, level: int, starts: list[int]) -> Costs:
        """Kept for all microbatches and all that runs again."""
        key = (c.dp, c.tp, c.pp, c.ep, c.cp, level)
        if key not in self._known:
            self._known[key] = self._zero(c, level, starts)
        return self._known[key]

    def _at(self, c: Candidate, starts: list[int], kernels: Array, spoken: Array, zero: Costs) -> float:
        """`kernels`, `spoken`: by stage the seconds of a microbatch. All stages run as much again as the fullest needs, as equal layers are placed alike."""
        share, kept = c.mbs / (c.tp * c.cp), "full" if c.recompute == "full" else "none"
        saved, least = (share * np.add.reduceat(self._saved[kind], starts) * self._in_flight(c, len(starts)) for kind in (kept, "selective"))
        passing = share * float(self._saved["none"].max())
        usable = self.memory_fraction * self.bounds.cost.cluster.devices[0].usable_bytes
        room = usable - zero.held - passing
        again, full = 0.0, saved
        if c.recompute == "selective":
            dropped = np.clip((saved - room) / np.maximum(saved - least, 1.0), 0.0, 1.0).max()
            again, full = float(np.interp(dropped, *self._reruns)), saved - dropped * (saved - least)
        stage = np.maximum(kernels * (1.0 + again) + zero.added_s + spoken, zero.each_s)
        step_s = (c.num_microbatches - 1) * float(stage.max()) + float(stage.sum()) + float(zero.once_s.max()) + 2 * (c.pp - 1) * self._hop_s(c)
        overfull = float((zero.held + passing + full).max()) / usable
        return float(step_s * max(1.0, overfull) ** OVERFULL)

    # ---- time ------------------------------------------------------------------------------------------------------------------------------------------

    def _kernel_s(self, c: Candidate) -> Array:
        """By layer the kernels of a microbatch: what they take however few samples there are, and what ranks share that cut them. Experts on `ep` ranks see
        the samples of all of these."""
        fixed, shared, of_experts = self._kernels(c.mbs, c.recompute == "full")
        return fixed - of_experts * (1 - 1 / c.ep) + shared / (c.tp * c.cp)

    def _kernels(self, mbs: int, full: bool) -> tuple[Array, Array, Array]:
        """By layer the seconds of a microbatch that do not depend on the samples and those that do; of the former those of experts' products."""
        known = min(mbs, SATURATED)
        if (known, full) not in self._seconds:
            cost, layers = self.bounds.cost, block_layers(self.bounds.graph(1)) if full else ()
            one, two, these = (np.array(self.bounds.layer_s(n, full)) for n in (1, 2, known))
            experts = [np.array(kernel_seconds(self.bounds.graph(n), cost, layers, of=EXPERT_PRODUCTS)) for n in (1, 2)]
            fixed = np.maximum(0.0, 2 * one - two)
            self._seconds[known, full] = fixed, these - fixed, np.clip(2 * experts[0] - experts[1], 0.0, fixed)
        fixed, shared, of_experts = self._seconds[known, full]
        return fixed, shared * (mbs / known), of_experts

    def _talk_s(self, c: Candidate, apart: int) -> Array:
        """By layer what a microbatch says on the axes of tensors, experts and sequences, in both directions; once more where layers run again."""
        nbytes = c.mbs * self._stream / c.cp
        tensor_s = TALKS * self._spoken("all_reduce", nbytes, c.tp, 1)
        sent_s = self._spoken("all_to_all", c.mbs * self._slots / (c.cp * c.tp), c.ep, apart)
        gathered_s = self._spoken("all_gather", nbytes / c.tp * c.ep, c.ep, apart)
        keys_s = 3 * self._spoken("all_gather", c.mbs * self._keys / c.tp, c.cp, c.tp) if not c.context.startswith("ring") else 0.0
        once = self._is_block * (tensor_s + keys_s) + self._has_experts * 4 * min(sent_s, gathered_s)
        return once * (1.5 if c.recompute == "full" else 1.0)

    def _hop_s(self, c: Candidate) -> float:
        """Seconds in which a microbatch goes from one stage to the next."""
        if c.pp == 1:
            return 0.0
        key = ("hop", c.mbs * self._stream / (c.cp * c.tp), c.stage_ranks, 1)
        if key not in self._talks:
            self._talks[key] = self.bounds.cost.p2p_s(key[1], 0, c.stage_ranks)
        return self._talks[key]

    def _zero(self, c: Candidate, level: int, starts: list[int]) -> Costs:
        """Parameters, gradients and states at a level of ZeRO: what is split is gathered before each use, gradients reduced in each microbatch."""
        each_s, added_s, once_s, held = (np.zeros(len(starts)) for _ in range(4))
        for kind, parts, ranks, stride in (("dense", c.tp, c.dp * c.cp, c.tp), ("experts", c.tp * c.ep, c.dp * c.cp // c.ep, c.tp * c.ep)):
            kept = self.footprint.parts[kind]
            param, grad, states = (np.add.reduceat(kept[what], starts) / parts for what in ("param", "grad", "states"))
            num = np.maximum(1.0, np.add.reduceat(self._num_params[kind], starts))
            held += param / (ranks if level == 3 else 1) + grad / (ranks if level >= 2 else 1) + states / (ranks if level >= 1 else 1)
            k = int(param.argmax())
            reduced_s, gathered_s, whole_s = (
                num[k] * self._spoken(what, float(size[k] / num[k]), ranks, stride)
                for what, size in (("reduce_scatter", param), ("all_gather", param), ("reduce_scatter", grad))
            )
            each_s += (reduced_s if level >= 2 else 0.0) + (2 * gathered_s if level == 3 else 0.0)
            once_s += (1 - HIDDEN) * ((whole_s if level < 2 else 0.0) + (gathered_s if level < 3 else 0.0))
            once_s += num * self._added_s(float((states + grad)[k] / num[k]) / (ranks if level >= 1 else 1))
            added_s += num * self._added_s(float(grad[k] / num[k]) / (ranks if level >= 2 else 1))
        return Costs(each_s, added_s, once_s, held)

    def _added_s(self, nbytes: float) -> float:
        return self.bounds.cost.accumulate_s(nbytes, "float32", 0)

    def _spoken(self, kind: str, nbytes: float, num: int, stride: int) -> float:
        """Seconds of a collective among so many ranks, so far apart."""
        key = (kind, nbytes, num, stride)
        if key not in self._talks:
            self._talks[key] = self.bounds.cost.collective_s(kind, nbytes, tuple(range(0, num * stride, stride)))
        return self._talks[key]

    @staticmethod
    def _in_flight(c: Candidate, num_stages: int) -> Array:
        """By stage the microbatches that 1F1B keeps."""
        return np.minimum(c.num_microbatches, num_stages - np.arange(num_stages)).astype(float)

    # ---- the model -------------------------------------------------------------------------------------------------------------------------------------

    @cached_property
    def _stream(self) -> float:
        """Bytes of a sample's residual stream."""
        graph = self.bounds.graph(1)
        return float(graph.tensors[next(n for n in graph.nodes if n.layer == 1).inputs[0]].nbytes)

    @cached_property
    def _slots(self) -> float:
        """Bytes that a layer sends to its experts of a sample."""
        graph = self.bounds.graph(1)
        return max((float(graph.tensors[n.outputs[0]].nbytes) for n in graph.nodes if n.op == "dispatch"), default=0.0)

    @cached_property
    def _num_experts(self) -> int:
        """That divide into parts in every layer; 0 without experts."""
        graph = self.bounds.graph(1)
        return math.gcd(0, *(graph.sizes(n)["e"] for n in graph.nodes if n.op in EXPERT_PRODUCTS))

    @cached_property
    def _keys(self) -> float:
        graph = self.bounds.graph(1)
        return max((float(sum(graph.tensors[t].nbytes for t in n.inputs[1:3])) for n in graph.nodes if is_attention(n)), default=0.0)

    @cached_property
    def _is_block(self) -> Array:
        graph = self.bounds.graph(1)
        return np.isin(np.arange(graph.num_layers), block_layers(graph)).astype(float)

    @cached_property
    def _has_experts(self) -> Array:
        graph = self.bounds.graph(1)
        having = [n.layer for n in graph.nodes if n.op == "dispatch"]
        return np.isin(np.arange(graph.num_layers), having).astype(float)

    @cached_property
    def _num_params(self) -> Mapping[str, Array]:
        graph = self.bounds.graph(1)
        out = {kind: np.zeros(graph.num_layers) for kind in ("dense", "experts")}
        for p in graph.trained:
            reader = graph.consumers(p.name)[0][0]
            out["experts" if reader.op in EXPERT_PRODUCTS else "dense"][reader.layer] += 1
        return out

    @cached_property
    def _saved(self) -> Mapping[str, Array]:
        return {kind: np.array(self.footprint.saved(kind)) for kind in ("none", "selective", "full")}

    @cached_property
    def _reruns(self) -> tuple[Array, Array]:
        """(share of the bytes kept that is made again, share of the kernels' seconds that this takes), the cheapest first."""
        graph, cost, dtype = self.bounds.graph(1), self.bounds.cost, self.bounds.dtype
        facts = analyse(graph)
        nbytes, seconds = [0.0], [0.0]
        for n in graph.nodes:
            kept = sum(graph.tensors[t].nbytes for t in n.outputs if facts.saved[t])
            if kept and n.layer in block_layers(graph) and not graph.op(n).copies:
                op, sizes = facts.node[n.name].op, graph.sizes(n)
                nbytes.append(kept)
                seconds.append(cost.compute_s(op.name, dtype, *work_of(op, sizes, n.attrs, DTYPE_BYTES[dtype])))
        order = np.argsort(np.array(seconds[1:]) / np.array(nbytes[1:]), kind="stable") + 1
        order = np.concatenate([[0], order])
        x, y = np.array(nbytes)[order].cumsum(), np.array(seconds)[order].cumsum()
        return x / max(float(x[-1]), 1.0), y / sum(self.bounds.layer_s(1, False))


__all__ = ["Sketches"]

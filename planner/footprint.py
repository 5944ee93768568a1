"""The least memory that a candidate can do with, told before it is placed: what cannot fit needs no placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.units import DTYPE_BYTES
from planner.bounds import Bounds
from planner.candidates import Candidate, block_layers
from planner.chunks import in_chunks
from planner.dims import EXPERT_PRODUCTS
from planner.facts import analyse
from planner.optimizers import is_hidden, state_dtype, update_of
from planner.orders import OWN, is_plain, kept
from planner.schedules import schedule


@dataclass(frozen=True)
class Footprint:
    """Of the candidates of one search. No placement cuts a tensor into more parts than a stage has ranks, so every stage needs at least its even share."""

    bounds: Bounds
    optimizer: Mapping[str, Any]
    _saved: dict[tuple[str, bool], Sequence[float]] = field(default_factory=dict)

    def least_bytes(self, c: Candidate) -> float:
        """Bytes that some rank needs whatever the placement: parameters, gradients, optimizer states and what the schedule keeps from forward to backward."""
        state, saved = self.state(), self.saved(c.recompute, c.loss_chunks > 1)
        num_samples = c.mbs * c.dp
        stages = self.bounds.stages(c.pp, c.vpp, c.schedule)
        plain = is_plain(c.schedule, c.vpp)
        stashes = [schedule(c.schedule).memory(stage, c.pp, c.num_microbatches, 1) if plain else 1 for stage in range(len(stages))]
        held = self._held(c, [sum(state[a:b]) for a, b in stages])
        needs = (h + n * num_samples * sum(saved[a:b]) for h, n, (a, b) in zip(held, stashes, stages, strict=True))
        return max(needs) / c.stage_ranks

    def even_bytes(self, c: Candidate) -> float:
        """Bytes of a rank if all of them had the same share, of what the schedule keeps on its first rank as well: no bound, an order."""
        state, saved = sum(self.state()), sum(self.saved(c.recompute, c.loss_chunks > 1))
        num_kept = kept(c.schedule, c.pp, c.num_microbatches, c.vpp, c.pieces)
        return (state + num_kept * c.mbs * c.dp * saved) / (c.pp * c.stage_ranks)

    @staticmethod
    def _held(c: Candidate, stages: Sequence[float]) -> Sequence[float]:
        """By stage of the first copy what its rank holds of `stages`: another one too where each is there twice."""
        if c.schedule in OWN or schedule(c.schedule).copies == 1:
            return stages
        chosen = schedule(c.schedule)
        ranks = [chosen.rank_of(i, c.pp) for i in range(len(stages) * chosen.copies)]
        return [sum(stages[i % len(stages)] for i, r in enumerate(ranks) if r == rank) for rank in ranks[: len(stages)]]

    def saved(self, recompute: str, in_loss_chunks: bool = False) -> Sequence[float]:
        """Bytes of every layer that one more sample in a microbatch keeps from the forward to the backward; of selective recompute at least."""
        key = recompute, in_loss_chunks
        if key not in self._saved:
            one, two = (in_chunks(self.bounds.graph(num_samples), 1 + in_loss_chunks) for num_samples in (1, 2))
            facts = analyse(one, block_layers(one) if recompute == "full" else ())
            out = [0.0] * one.num_layers

            def keeps(tensor: str, layer: int) -> bool:
                # what a gradient of another layer reads is never made again for it
                uses = facts.saved[tensor]
                return any(name and one.node[name].layer != layer for name, _ in uses) if recompute == "selective" else bool(uses)

            for n in one.nodes:
                if one.op(n).copies:
                    continue  # whoever reads the copy reads the original
                out[n.layer] += sum(two.tensors[t].nbytes - one.tensors[t].nbytes for t in n.outputs if keeps(t, n.layer))
            self._saved[key] = out
        return self._saved[key]

    def state(self) -> Sequence[float]:
        """Bytes of every layer's parameters, of one gradient for each, and of what the optimizer keeps; a tied parameter counts where it is read first."""
        return self._state

    @cached_property
    def _state(self) -> Sequence[float]:
        rows = [row for kinds in self.parts.values() for row in kinds.values()]
        return [float(x) for x in np.sum(rows, axis=0)]

    @cached_property
    def parts(self) -> Mapping[str, Mapping[str, NDArray[np.float64]]]:
        """The same by layer for `dense` parameters and those of `experts`: `param`, `grad` and `states`."""
        graph = self.bounds.graph(1)
        out = {kind: {what: np.zeros(graph.num_layers) for what in ("param", "grad", "states")} for kind in ("dense", "experts")}
        for p in graph.params:
            reader = graph.consumers(p.name)[0][0]
            mine, wide = out["experts" if reader.op in EXPERT_PRODUCTS else "dense"], state_dtype(p.dtype)
            mine["param"][reader.layer] += p.nbytes
            if not p.frozen:
                mine["grad"][reader.layer] += p.num_elements * DTYPE_BYTES[wide]
                kept = update_of(self.optimizer, p, is_hidden(graph, p.name)).nbytes
                mine["states"][reader.layer] += kept + (p.num_elements * DTYPE_BYTES[wide] if wide != p.dtype else 0)
        return out

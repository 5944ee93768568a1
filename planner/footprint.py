"""The least memory that a candidate can do with, told before it is placed: what cannot fit needs no placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ir.units import DTYPE_BYTES
from planner.bounds import Bounds
from planner.candidates import Candidate, block_layers
from planner.facts import analyse
from planner.orders import is_plain
from planner.schedules import schedule
from planner.tables import num_optimizer_states, state_dtype


@dataclass(frozen=True)
class Footprint:
    """Of the candidates of one search. No placement cuts a tensor into more parts than a stage has ranks, so every stage needs at least its even share."""

    bounds: Bounds
    optimizer: str
    _saved: dict[bool, Sequence[float]] = field(default_factory=dict)
    _state: list[float] = field(default_factory=list)

    def least_bytes(self, c: Candidate) -> float:
        """Bytes that some rank needs whatever the placement: parameters, gradients, optimizer states and what the schedule keeps from forward to backward."""
        state, saved = self.state(), self.saved(c.recompute == "full")
        num_samples = c.mbs * c.dp
        stages = self.bounds.stages(c.pp, c.vpp, c.schedule)
        plain = is_plain(c.schedule, c.vpp)
        stashes = [schedule(c.schedule).memory(stage, c.pp, c.num_microbatches, 1) if plain else 1 for stage in range(len(stages))]
        needs = (sum(state[a:b]) + n * num_samples * sum(saved[a:b]) for n, (a, b) in zip(stashes, stages, strict=True))
        return max(needs) / (c.dp * c.tp)

    def saved(self, recompute: bool) -> Sequence[float]:
        """Bytes of every layer that one more sample in a microbatch keeps from the forward to the backward."""
        if recompute not in self._saved:
            one, two = (self.bounds.graph(num_samples) for num_samples in (1, 2))
            facts = analyse(one, block_layers(one) if recompute else ())
            out = [0.0] * one.num_layers
            for n in one.nodes:
                out[n.layer] += sum(two.tensors[t].nbytes - one.tensors[t].nbytes for t in n.outputs if facts.saved[t])
            self._saved[recompute] = out
        return self._saved[recompute]

    def state(self) -> Sequence[float]:
        """Bytes of every layer's parameters, of one gradient for each, and of what the optimizer keeps; a tied parameter counts where it is read first."""
        if not self._state:
            graph = self.bounds.graph(1)
            out = [0.0] * graph.num_layers
            for p in graph.params:
                wide = state_dtype(p.dtype)
                num_wide = 1 + num_optimizer_states(self.optimizer) + (wide != p.dtype)
                out[graph.consumers(p.name)[0][0].layer] += p.nbytes + num_wide * p.num_elements * DTYPE_BYTES[wide]
            self._state.extend(out)
        return self._state

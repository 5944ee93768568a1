"""What is known of a candidate before it is placed: a bound that no plan of it goes below, and a guess by which to order the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ir.graph import Graph
from ir.units import DTYPE_BYTES
from planner.candidates import Candidate, block_layers, is_attention
from planner.chunks import in_chunks
from planner.dims import EXPERT_PRODUCTS
from planner.facts import analyse
from planner.frontends.model import Model
from planner.orders import OWN, STAND_IN, is_plain, schedule_of
from planner.pricing import work_of
from planner.schedules import schedule
from planner.stages import cut_for_ranks
from simulator.cost import CostModel

GATHERED = 0.8
"""Share of a device that whole parameters and gradients may fill by the guess; above it they are split."""


@dataclass(frozen=True)
class Bounds:
    """Of the candidates for one model, sequence length and dtype on one cluster. Graphs and kernel times are kept from one question to the next.

    `given`: the stages, `rows`: the orders, where the user has given them.
    """

    model: Model
    seq: int
    dtype: str
    cost: CostModel
    given: tuple[tuple[int, int], ...] = ()
    rows: tuple[str, ...] = ()
    _graphs: dict[int, Graph] = field(default_factory=dict)
    _layers: dict[tuple[int, bool, bool], Sequence[float]] = field(default_factory=dict)
    _cuts: dict[tuple[int, ...], tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def graph(self, microbatch: int) -> Graph:
        """The forward graph of one microbatch of so many samples."""
        if microbatch not in self._graphs:
            self._graphs[microbatch] = self.model.graph(microbatch, self.seq, self.dtype)
        return self._graphs[microbatch]

    def graph_of(self, c: Candidate) -> Graph:
        """That of the candidate's microbatch, its loss over chunks of tokens if so."""
        return in_chunks(self.graph(c.mbs * c.dp), c.loss_chunks, c.tp)

    def stages(self, num_ranks: int, num_chunks: int = 1, name: str = "1f1b") -> tuple[tuple[int, int], ...]:
        """[first, last) of every stage, cut by the layers' floating point operations, so that ranks that hold several are even; as the user says, if so."""
        if self.given:
            return self.given
        chosen = schedule_of(STAND_IN if name == "auto" else name, self.rows)
        rank = tuple(chosen.rank_of(i, num_ranks) for i in range(num_ranks * num_chunks))
        if rank not in self._cuts:
            self._cuts[rank] = cut_for_ranks(layer_flops(self.graph(1)), rank)
        return self._cuts[rank]

    def layer_s(self, mbs: int, recompute: bool, floor: bool = False) -> Sequence[float]:
        """Kernel seconds of every layer, forward and backward, of `mbs` samples on one device; `floor`: what no way of cutting them goes below."""
        if (mbs, recompute, floor) not in self._layers:
            graph = self.graph(mbs)
            self._layers[mbs, recompute, floor] = kernel_seconds(graph, self.cost, block_layers(graph) if recompute else (), floor)
        return self._layers[mbs, recompute, floor]

    def lower_bound_s(self, c: Candidate) -> float:
        """The heaviest stage's kernels, each as fast as any part of it, and the pipeline's fill and drain; no communication, no optimizer."""
        return self._pipeline_s(c, floor=True)

    def _pipeline_s(self, c: Candidate, floor: bool) -> float:
        weights = [s / (c.tp * c.cp) for s in self.layer_s(c.mbs, c.recompute == "full", floor)]
        if not is_plain(c.schedule, c.vpp):
            # what fills such a pipeline is another schedule's business: only the work of the busiest rank is sure
            copies = 1 if c.schedule in OWN else schedule(c.schedule).copies
            return c.num_microbatches * max(sum(weights) / c.pp, max(weights) / copies)
        stages = [sum(weights[a:b]) for a, b in self.stages(c.pp)]
        return c.num_microbatches * max(stages) + sum(stages) - max(stages)

    def guess_s(self, c: Candidate) -> float:
        """The kernels as they are uncut, two all-reduces a block and direction (or every rank doing all, where that is faster), half of the gradients'
        reduction, the gathering of parameters that do not fit. No bound, no promise.
        """
        graph = self.graph(1)
        stream = next(n for n in graph.nodes if n.layer == 1).inputs[0]
        nbytes = c.mbs * graph.tensors[stream].num_elements * DTYPE_BYTES[self.dtype] / c.cp
        tensor_s = 4 * self.cost.collective_s("all_reduce", nbytes, tuple(range(c.tp))) * len(block_layers(graph)) if c.tp > 1 else 0.0
        of_experts = sum(graph.tensors[n.inputs[1]].num_elements for n in graph.nodes if n.op in EXPERT_PRODUCTS)
        spread = sum(p.num_elements for p in graph.trained) - of_experts * (1.0 - 1.0 / c.ep)
        held, group = spread / (c.tp * c.pp), tuple(range(0, c.stage_ranks, c.tp))
        reduce_s = self.cost.collective_s("all_reduce", held * max(4, DTYPE_BYTES[self.dtype]), group)
        passes = c.num_microbatches + c.pp - 1
        computed_s = self._pipeline_s(c, floor=False) + tensor_s / c.pp * passes
        if c.tp > 1:
            computed_s = min(computed_s, self._pipeline_s(replace(c, tp=1), floor=False))
        computed_s += (self._experts_s(c) + self._context_s(c)) / c.pp * passes
        if held * (DTYPE_BYTES[self.dtype] + 4) < GATHERED * self.cost.cluster.devices[0].usable_bytes:
            return computed_s + 0.5 * reduce_s
        # parameters and gradients do not fit unless they are split: gathered there and back, reduced, in every microbatch
        gathered_s = 2 * self.cost.collective_s("all_gather", held * DTYPE_BYTES[self.dtype], group)
        return max(computed_s, c.num_microbatches * (gathered_s + self.cost.collective_s("reduce_scatter", held * DTYPE_BYTES[self.dtype], group)))

    def _context_s(self, c: Candidate) -> float:
        """Seconds in which a microbatch's keys and values come to all who need them, twice, and their gradients back; a ring is taken to hide them."""
        if c.cp == 1 or c.context.startswith("ring"):
            return 0.0
        graph, ranks = self.graph(1), tuple(range(0, c.cp * c.tp, c.tp))
        keys = [c.mbs * sum(graph.tensors[t].nbytes for t in n.inputs[1:3]) / c.tp for n in graph.nodes if is_attention(n)]
        return 3 * sum(self.cost.collective_s("all_gather", nbytes, ranks) for nbytes in keys)

    def _experts_s(self, c: Candidate) -> float:
        """Seconds in which a microbatch's tokens go to their experts and back, in both directions."""
        if c.ep == 1:
            return 0.0
        graph = self.graph(1)
        ranks = tuple(range(0, c.ep * c.cp * c.tp, c.cp * c.tp))
        tokens = [c.mbs * graph.tensors[n.outputs[0]].nbytes / c.tp for n in graph.nodes if n.op == "dispatch"]
        return 4 * sum(self.cost.collective_s("all_to_all", nbytes, ranks) for nbytes in tokens)


def kernel_seconds(graph: Graph, cost: CostModel, recompute: Sequence[int] = (), floor: bool = False) -> list[float]:
    """Seconds of the kernels of every layer of the chain, forward and backward, on one device, or their floor; equal kernels are priced once."""
    price = cost.floor_s if floor else cost.compute_s
    facts = analyse(graph, recompute)
    out = [0.0] * graph.num_layers
    known: dict[tuple[Any, ...], float] = {}
    for n in graph.nodes:
        fact, sizes, dtype = facts.node[n.name], graph.sizes(n), graph.tensors[n.outputs[0]].dtype
        times = 2 if n.name in facts.rerun else 1
        key = (n.op, times, tuple(sizes.items()), tuple(op.name for op in fact.grads))
        if key not in known:
            ops = (*(fact.op,) * times, *fact.grads)
            known[key] = sum(price(o.name, dtype, *work_of(o, sizes, n.attrs, DTYPE_BYTES[dtype])) for o in ops if not o.copies)
        out[n.layer] += known[key]
    return out


def layer_flops(graph: Graph) -> list[float]:
    """Forward floating point operations of every layer of the chain."""
    out = [0.0] * graph.num_layers
    for n in graph.nodes:
        out[n.layer] += graph.op(n).flops_of(graph.sizes(n), n.attrs)
    return out

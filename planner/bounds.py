"""What is known of a candidate before it is placed: the time of its kernels uncut, and a bound that no plan of it goes below."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ir.graph import Graph
from ir.units import DTYPE_BYTES
from planner.candidates import Candidate, block_layers
from planner.chunks import in_chunks
from planner.facts import analyse
from planner.frontends.model import Model
from planner.orders import OWN, STAND_IN, is_plain, schedule_of
from planner.pricing import work_of
from planner.schedules import schedule
from planner.stages import cut_for_ranks
from simulator.cost import CostModel


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
        weights = [s / (c.tp * c.cp) for s in self.layer_s(c.mbs, c.recompute == "full", floor=True)]
        if not is_plain(c.schedule, c.vpp):
            # what fills such a pipeline is another schedule's business: only the work of the busiest rank is sure
            copies = 1 if c.schedule in OWN else schedule(c.schedule).copies
            return c.num_microbatches * max(sum(weights) / c.pp, max(weights) / copies)
        stages = [sum(weights[a:b]) for a, b in self.stages(c.pp)]
        return c.num_microbatches * max(stages) + sum(stages) - max(stages)


def kernel_seconds(graph: Graph, cost: CostModel, recompute: Sequence[int] = (), floor: bool = False, of: Collection[str] = ()) -> list[float]:
    """Seconds of the kernels of every layer of the chain, forward and backward, on one device, or their floor; `of` these operators alone, if any are named.

    Equal kernels are priced once.
    """
    price = cost.floor_s if floor else cost.compute_s
    facts = analyse(graph, recompute)
    out = [0.0] * graph.num_layers
    known: dict[tuple[Any, ...], float] = {}
    for n in graph.nodes:
        if of and n.op not in of:
            continue
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

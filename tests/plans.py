"""Plans for tests: a layout asked for by its numbers, placed by the real search, with the rest of the decisions open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ir.cluster import Cluster
from ir.mesh import Mesh
from ir.plan import Plan, Stage
from planner.candidates import Candidate, block_layers
from planner.chunks import in_chunks
from planner.frontends.model import Model
from planner.optimizers import with_defaults
from planner.placement import search
from planner.pricing import MeshPricing
from planner.schedules import schedule
from planner.single import single_device
from planner.space import Space, layout_space
from planner.stages import cut
from simulator.clusters import load_cluster
from simulator.cost import CostModel


@dataclass(frozen=True, slots=True)
class Layout:
    """What a parity test asks for. `zero` and `sp` None: left to the search. `vpp` 1: as many stages a rank as the schedule takes at least.

    `pieces`: tokens of the pieces of a sequence, none where it runs whole; `loss_chunks` as of `Plan`.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    num_microbatches: int = 1
    zero: int | None = None
    sp: bool | None = None
    recompute: bool = False
    schedule: str = "1f1b"
    vpp: int = 1
    pieces: tuple[int, ...] = ()
    ep: int = 1
    loss_chunks: int = 1

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp * self.pp


def cluster() -> Cluster:
    return load_cluster("1x8xH100-SXM")


def plan_for(
    model: Model, want: Layout, *, batch: int, seq: int, dtype: str = "float64", memory_price: float = 0.0, optimizer: str | Mapping[str, Any] = "adamw",
    selective: bool = False, space: Space | None = None,
) -> Plan:  # fmt: skip
    """The plan of this layout with the cheapest placement in `space`; `selective`: of the operators that run again, too."""
    devices = cluster()
    graph = in_chunks(model.graph(batch // want.num_microbatches, seq, dtype), want.loss_chunks, want.tp)
    mesh = Mesh(*Candidate(want.dp, want.tp, want.pp, 1, 1, "1f1b", "none", ep=want.ep).mesh, tuple(range(want.dp * want.tp)))
    recompute = block_layers(graph) if want.recompute else ()
    placed = search(
        graph, mesh.axes, mesh.shape, MeshPricing(CostModel(devices), mesh), num_microbatches=want.num_microbatches, memory_price=memory_price,
        recompute=recompute, selective=selective, optimizer=optimizer, space=layout_space(graph, mesh.axes, zero=want.zero, sp=want.sp) & (space or Space()),
    )  # fmt: skip
    base = single_device(model, devices, batch=batch, seq=seq, dtype=dtype, optimizer=with_defaults(optimizer), num_microbatches=want.num_microbatches)
    return replace(
        base, axes=mesh.axes, mesh_shape=mesh.shape, stages=stages_of(want, graph.num_layers), schedule=want.schedule, recompute=placed.recompute,
        rules=placed.rules, hubs=placed.hubs, params=placed.params, reboxed=placed.reboxed,
        pieces=want.pieces, loss_chunks=want.loss_chunks,
    )  # fmt: skip


def stages_of(want: Layout, num_layers: int) -> tuple[Stage, ...]:
    """Equal runs of layers, on the ranks where the schedule runs them."""
    chosen, size = schedule(want.schedule), want.dp * want.tp
    cuts = cut([1.0] * num_layers, want.pp * chosen.num_chunks(want.vpp)) * chosen.copies
    sites = [chosen.rank_of(i, want.pp) for i in range(len(cuts))]
    return tuple(Stage(a, b, tuple(range(site * size, (site + 1) * size))) for site, (a, b) in zip(sites, cuts, strict=True))


def legal(want: Layout, batch: int) -> bool:
    """Whether the numbers go together: at most 8 ranks, batch divisible, ZeRO only with data and sequence parallelism only with tensor parallelism."""
    return (
        want.num_ranks <= 8
        and batch % (want.dp * want.num_microbatches) == 0
        and (want.dp > 1 or want.zero in (None, 0))
        and (want.tp > 1 or want.sp is not True)
        and (want.pp > 1 or want.schedule == "1f1b")
    )


def layouts(values: Mapping[str, Sequence[Any]], batch: int) -> Iterator[Layout]:
    """Every legal layout of these values."""
    found = [Layout()]
    for name, options in values.items():
        found = [replace(w, **{name: v}) for w in found for v in options]
    return (w for w in found if legal(w, batch))


def pairwise(every: Sequence[Layout], names: Sequence[str]) -> list[Layout]:
    """A subset in which every pair of values that some layout has is had by one; greedy, the first best each time."""

    def pairs(w: Layout) -> set[tuple[Any, ...]]:
        return {(a, getattr(w, a), b, getattr(w, b)) for i, a in enumerate(names) for b in names[i + 1 :]}

    of = [pairs(w) for w in every]
    open_ = set().union(*of)
    chosen = []
    while open_:
        best = max(range(len(every)), key=lambda i: (len(of[i] & open_), -i))
        chosen.append(every[best])
        open_ -= of[best]
    return chosen

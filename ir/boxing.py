"""Boxing: how a tensor goes from one placement to another.

On one mesh axis every pair (source, destination) is one step: nothing, a local step (slice, zero, pad) or a collective. A collective may also run over the
ranks of two axes at once: an exchange where both are split before and after, a gather, a reduction. An nd boxing is the cheapest chain of such steps, found by
Dijkstra over the placements of the mesh. A step may touch a dim on an axis only while no inner axis that keeps its placement splits that dim: else the pieces
that move would not be slices.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ir.errors import SbpError
from ir.mesh import JOINED, Mesh
from ir.sbp import P_MAX, B, NdSbp, S, Sbp, local_region, local_shape

LOCAL = ("slice", "zero", "pad", "keep")
COLLECTIVE = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class Step:
    """One change on one mesh axis or two: `kind` moves `src` to `dst` (whole nd placements that differ on the axes of these numbers alone)."""

    axes: tuple[int, ...]
    kind: str
    src: NdSbp
    dst: NdSbp

    def over(self, names: Sequence[str]) -> str:
        """The axes by name, as `ir.mesh.Mesh.group` takes them."""
        return JOINED.join(names[axis] for axis in self.axes)

    def num_ranks(self, mesh_shape: Sequence[int]) -> int:
        return math.prod(mesh_shape[axis] for axis in self.axes)

    @property
    def is_local(self) -> bool:
        return self.kind in LOCAL


def kind_1d(src: Sbp, dst: Sbp) -> str:
    """The name of the step between two placements on one axis, `none` where they are equal.

    >>> from ir.sbp import P
    >>> [kind_1d(*pair) for pair in ((P, B), (P, S(0)), (S(0), B), (S(0), S(1)), (B, S(0)), (B, P), (S(0), P))]
    ['all_reduce', 'reduce_scatter', 'all_gather', 'all_to_all', 'slice', 'zero', 'pad']
    """
    if src == dst:
        return "none"
    if src.is_partial:
        if dst.is_partial:
            raise SbpError(f"{src!r} cannot become {dst!r}: a sum is no maximum")
        return "all_reduce" if dst.is_broadcast else "reduce_scatter"
    if dst == P_MAX:
        if src.is_split:
            raise SbpError(f"{src!r} cannot become {dst!r}: what is absent would have to be minus infinity")
        return "keep"
    if src.is_broadcast:
        return "slice" if dst.is_split else "zero"
    return "all_gather" if dst.is_broadcast else "pad" if dst.is_partial else "all_to_all"


def legal(shape: Sequence[int], nd: NdSbp, mesh_shape: Sequence[int]) -> bool:
    """Whether every rank holds something: each dim is at least as long as the number of its slices, axis by axis."""
    for dim in {s.dim for s in nd if s.is_split}:
        if dim >= len(shape) or shape[dim] < math.prod(n for s, n in zip(nd, mesh_shape, strict=True) if s == S(dim)):
            return False
    return True


def may_step(src: NdSbp, dst: NdSbp, *axes: int) -> bool:
    """Whether one step may change `axes`: no other axis, inner to one of them, splits a dim that the step cuts or joins there."""
    for axis in axes:
        touched = {s.dim for s in (src[axis], dst[axis]) if s.is_split}
        if any(s.is_split and s.dim in touched for i, s in enumerate(src[axis + 1 :], axis + 1) if i not in axes):
            return False
    return True


def joint_kind(src: NdSbp, dst: NdSbp) -> str:
    """The name of the collective over two axes at once, empty where there is none.

    >>> from ir.sbp import P
    >>> [joint_kind(*pair) for pair in (((S(0), S(0)), (S(1), S(1))), ((P, P), (S(0), S(1))), ((S(0), S(1)), (B, B)), ((P, S(0)), (B, B)))]
    ['all_to_all', 'reduce_scatter', 'all_gather', '']
    """
    if all(s.is_split for s in src):
        return "all_gather" if dst == (B, B) else "all_to_all" if all(s.is_split for s in dst) and src != dst else ""
    if src[0] == src[1] and src[0].is_partial:
        return "all_reduce" if dst == (B, B) else "reduce_scatter" if all(s.is_split for s in dst) else ""
    return ""


def step_nbytes(step: Step, shape: Sequence[int], mesh_shape: Sequence[int], itemsize: int) -> tuple[int, int]:
    """(bytes a rank reads, bytes a rank writes) in this step, for the rank that has most."""
    return (math.prod(local_shape(shape, step.src, mesh_shape)) * itemsize, math.prod(local_shape(shape, step.dst, mesh_shape)) * itemsize)


Price = Callable[[Step], float]
"""Seconds, or any other non-negative price, of one step."""


Link = tuple[float, float]
"""What a collective costs on one mesh axis, or on two at once: (latency_s, seconds per byte that crosses a link)."""


def axis_sets(num_axes: int) -> tuple[tuple[int, ...], ...]:
    """What a step may run over, in the order of the `links` of a plan: every axis, then every two.

    >>> axis_sets(3)
    ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2))
    """
    return (*((axis,) for axis in range(num_axes)), *itertools.combinations(range(num_axes), 2))


def bytes_moved(shape: Sequence[int], mesh_shape: Sequence[int], itemsize: int, links: Sequence[Link] = ()) -> Price:
    """A price without a machine: bytes that cross a link per rank, and for local steps a twentieth of the bytes written, never 0.

    With `links`, one for each of `axis_sets`, seconds: the inner axis of a fast network is then used before the outer one of a slow network.
    """
    sets = axis_sets(len(mesh_shape))
    known = dict(zip(sets, tuple(links) or ((1e-6, 1.0),) * len(sets), strict=True))
    local_s_per_byte = min((per_byte for _, per_byte in known.values() if per_byte), default=1.0) / 20

    def price(step: Step) -> float:
        read, written = step_nbytes(step, shape, mesh_shape, itemsize)
        n = step.num_ranks(mesh_shape)
        if step.is_local:
            return written * local_s_per_byte + 1e-9
        latency_s, per_byte = known[step.axes]
        return (2 * written if step.kind == "all_reduce" else max(read, written)) * (n - 1) / n * per_byte + latency_s

    return price


def chain(src: NdSbp, dst: NdSbp, shape: Sequence[int], mesh_shape: Sequence[int], price: Price) -> tuple[Step, ...]:
    """The cheapest steps from `src` to `dst`; ties go to fewer collectives, then to the lexically first.

    Raises SbpError where no chain exists (P to P(max)) or a placement is not legal for the shape.
    """
    for nd in (src, dst):
        if len(nd) != len(mesh_shape) or not legal(shape, nd, mesh_shape):
            raise SbpError(f"placement {nd} is not legal for shape {tuple(shape)} on a mesh of {tuple(mesh_shape)}")
    if src == dst:
        return ()
    counter = itertools.count()
    done: set[NdSbp] = set()
    queue: list[tuple[float, int, tuple[tuple[tuple[int, ...], str], ...], int, NdSbp, tuple[Step, ...]]] = [(0.0, 0, (), next(counter), src, ())]
    while queue:
        cost, collectives, _, _, here, steps = heapq.heappop(queue)
        if here == dst:
            return steps
        if here in done:
            continue
        done.add(here)
        for step in _moves(here, tuple(shape), tuple(mesh_shape), dst):
            if step.dst not in done:
                lexical = tuple((s.axes, s.kind) for s in (*steps, step))
                heapq.heappush(queue, (cost + price(step), collectives + (not step.is_local), lexical, next(counter), step.dst, (*steps, step)))
    raise SbpError(f"no boxing leads from {src} to {dst}")


@lru_cache(maxsize=65536)
def cached_chain(src: NdSbp, dst: NdSbp, shape: tuple[int, ...], mesh_shape: tuple[int, ...], itemsize: int, links: tuple[Link, ...] = ()) -> tuple[Step, ...]:
    """`chain` priced by `bytes_moved`: what a plan is lowered with. Equal layers ask the same again and again."""
    return chain(src, dst, shape, mesh_shape, bytes_moved(shape, mesh_shape, itemsize, links))


@lru_cache(maxsize=4096)
def _moves(here: NdSbp, shape: tuple[int, ...], mesh_shape: tuple[int, ...], goal: NdSbp) -> tuple[Step, ...]:
    found = []
    for axis, size in enumerate(mesh_shape):
        targets = [B, *map(S, range(len(shape)))] + ([goal[axis]] if goal[axis].is_partial else [])
        for target in targets:
            src = here[axis]
            if target == src or (src.is_split and target == P_MAX) or (src.is_partial and target.is_partial):
                continue
            dst = (*here[:axis], target, *here[axis + 1 :])
            if size > 1 and not may_step(here, dst, axis):
                continue
            if legal(shape, dst, mesh_shape):
                found.append(Step((axis,), kind_1d(src, target), here, dst))
    return (*found, *joint_steps(here, shape, mesh_shape))


def joint_steps(here: NdSbp, shape: Sequence[int], mesh_shape: Sequence[int]) -> Iterator[Step]:
    """Every collective over two axes at once. Where one axis alone may change, it does so by itself, with fewer bytes."""
    splits = tuple(map(S, range(len(shape))))
    for a, b in itertools.combinations([axis for axis, n in enumerate(mesh_shape) if n > 1], 2):
        for pair in ((B, B), *itertools.product(splits, repeat=2)):
            kind = joint_kind((here[a], here[b]), pair)
            dst = tuple(pair[0] if i == a else pair[1] if i == b else s for i, s in enumerate(here))
            alone = [axis for axis in (a, b) if here[axis] != dst[axis]]
            if kind and may_step(here, dst, a, b) and not (len(alone) == 1 and may_step(here, dst, *alone)) and legal(shape, dst, mesh_shape):
                yield Step((a, b), kind, here, dst)


# ---- between meshes ----------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """One p2p message: `region` of the whole tensor from rank `src` to rank `dst`."""

    src: int
    dst: int
    region: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor's way from one mesh to another: box to `leave` on the source mesh, send the pieces, box from `enter` on the destination mesh."""

    leave: NdSbp
    pieces: tuple[Piece, ...]
    enter: NdSbp


def crossing_ends(src: NdSbp, src_mesh: Mesh, dst: NdSbp, dst_mesh: Mesh, shape: Sequence[int]) -> tuple[NdSbp, NdSbp]:
    """(`leave`, `enter`) of the `crossing`, without its pieces."""
    leave = _sliced(src, src_mesh, shape)
    return leave, leave if src_mesh.shape == dst_mesh.shape else _sliced(dst, dst_mesh, shape)


def crossing(src: NdSbp, src_mesh: Mesh, dst: NdSbp, dst_mesh: Mesh, shape: Sequence[int]) -> Crossing:
    """How a tensor that is `src` on one mesh comes to be `dst` on another, every byte crossing once.

    P is reduce-scattered before it leaves and B is sliced; on the far side B is gathered again. Where no dim is long enough to slice, P becomes B and one
    copy is sent to every rank that needs it.
    """
    leave, enter = crossing_ends(src, src_mesh, dst, dst_mesh, shape)
    pieces = []
    for to in dst_mesh.ranks:
        wanted = local_region(shape, enter, dst_mesh.shape, dst_mesh.coords(to))
        seen: set[tuple[tuple[int, int], ...]] = set()
        for source in _nearest_first(src_mesh, dst_mesh, to):
            have = local_region(shape, leave, src_mesh.shape, src_mesh.coords(source))
            region = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, have, strict=True))
            if all(start < stop for start, stop in region) and region not in seen:
                seen.add(region)
                pieces.append(Piece(source, to, region))
    return Crossing(leave, tuple(pieces), enter)


def _nearest_first(src_mesh: Mesh, dst_mesh: Mesh, to: int) -> list[int]:
    """Source ranks, the one at the same place of the mesh first, so that copies are fetched from distinct sources."""
    place = dst_mesh.ranks.index(to) % src_mesh.size
    return [*src_mesh.ranks[place:], *src_mesh.ranks[:place]]


def _sliced(nd: NdSbp, mesh: Mesh, shape: Sequence[int]) -> NdSbp:
    """`nd` with every B and P axis split on a dim that divides, outer axes first; B where none does."""
    out = list(nd)
    for axis, sbp in enumerate(nd):
        if sbp.is_split or mesh.shape[axis] == 1:
            continue
        out[axis] = B
        inner = {s.dim for s in out[axis + 1 :] if s.is_split}
        for dim in range(len(shape)):
            held = math.prod(n for s, n in zip(out, mesh.shape, strict=True) if s == S(dim))
            if dim not in inner and shape[dim] % (held * mesh.shape[axis]) == 0:
                out[axis] = S(dim)
                break
    return tuple(out)


__all__ = [
    "COLLECTIVE",
    "LOCAL",
    "Crossing",
    "Link",
    "Piece",
    "Price",
    "Step",
    "axis_sets",
    "bytes_moved",
    "cached_chain",
    "chain",
    "crossing",
    "crossing_ends",
    "joint_kind",
    "joint_steps",
    "kind_1d",
    "legal",
    "may_step",
    "step_nbytes",
]

"""How data changes rank: which part of a collective each member does, from regions alone, whatever carries the bytes.

Every member does its own share, at once with the others and without waiting for them. The Machine starts the members of a rendezvous together, so all that
a share reads is there and all that it writes is free; and no member's action ends before every share is done, so nothing is overwritten while a neighbour
reads it.

* `all_gather`, `all_to_all`: member i puts its own destination together from what the members hold.
* `reduce_scatter`: member i reduces over all members what its own destination holds.
* `all_reduce`: member i reduces the i-th chunk of the destination and writes it to every member.
* `shift`: member i copies what the member before it holds, the first what the last one holds.
* p2p: the receiver copies.
* Of a small collective the first member does the shares of all.

Reductions run over the members element by element, the one that reduces first, then the others in the order of the group: a sum never depends on who came
first, and may be written where that member's operand lies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Protocol

from executor.buffers import Region, as_slices
from ir.errors import ProgramError
from ir.program import Actor
from ir.sbp import split_sizes

SMALL = 8192
"""Elements that a member reads or writes up to which another member's help costs more than it saves."""

BLOCK = 1 << 16
"""Elements of an all-reduce done at a time, so that a reduced block is still in cache when it is copied to the other members."""


Index = tuple[slice | EllipsisType, ...]
"""A part of an array; without dims it is the array itself."""


@dataclass(frozen=True, slots=True)
class Move:
    """Combine the `sources`, in order, and write the result to every one of `targets`; each is (member, index into that member's array).

    `flat`: the indices are into the array seen as one dim.
    """

    sources: tuple[tuple[int, Index], ...]
    targets: tuple[tuple[int, Index], ...]
    flat: bool = False


class Transport(Protocol):
    """What carries data between ranks."""

    def bind(self, actor: Actor) -> Callable[[int, int], None]:
        """This actor's share of its rendezvous: `share(step, microbatch)`."""


def members_of(actor: Actor, channel: Sequence[Actor]) -> tuple[Actor, ...]:
    """The actors of a channel in the order of their group: source and destination, or the members of the collective."""
    if actor.work.kind in ("send", "recv"):
        pair = {a.work.kind: a for a in channel}
        if len(channel) != 2 or set(pair) != {"send", "recv"}:
            raise ProgramError(f"channel `{actor.channel}` needs one send and one recv, it has {', '.join(f'{a.name} ({a.work.kind})' for a in channel)}")
        return pair["send"], pair["recv"]
    by_rank = {a.rank: a for a in channel}
    if set(by_rank) != set(actor.work.group) or len(channel) != len(actor.work.group):
        raise ProgramError(f"channel `{actor.channel}` is a collective of ranks {actor.work.group}, its actors are on ranks {sorted(by_rank)}")
    return tuple(by_rank[rank] for rank in actor.work.group)


def idle(step: int, microbatch: int) -> None:
    """A share without any work: whoever makes it ready may tick it off, its own thread sleeps on."""


def share(actor: Actor, members: Sequence[Actor]) -> tuple[Move, ...]:
    """What `actor` does of its rendezvous. Of a small collective the first member does all, which costs less than waking the others."""
    if actor.work.kind == "send":
        return ()
    if actor.work.kind == "recv":
        return (Move(((0, (...,)),), ((1, (...,)),)),)
    me = next(i for i, a in enumerate(members) if a.name == actor.name)
    if max(_size(_region(a, key)) for a in members for key in ("src_region", "dst_region")) > SMALL:
        return _own(me, members)
    return () if me else tuple(move for i in range(len(members)) for move in _own(i, members))


def _own(me: int, members: Sequence[Actor]) -> tuple[Move, ...]:
    """The moves that belong to member `me`."""
    actor = members[me]
    sources = [_region(a, "src_region") for a in members]
    target = _region(actor, "dst_region")
    if actor.work.op == "all_reduce":
        for a in members:
            if _region(a, "dst_region") != target or _region(a, "src_region") != target:
                raise ProgramError(f"all_reduce `{a.name}` must read and write {target}, the region of `{actor.name}`")
        return _chunk(me, len(members), _size(target))
    if actor.work.op == "reduce_scatter":
        for a, source in zip(members, sources, strict=True):
            if _overlap(source, target) != target:
                raise ProgramError(f"reduce_scatter `{actor.name}` writes {target}, member `{a.name}` contributes {source} only")
        everything = tuple((i, as_slices(target, sources[i])) for i in _first(me, len(members)))
        return (Move(everything, ((me, as_slices(target, target)),)),)
    if actor.work.op == "shift":
        return (Move((((me - 1) % len(members), (...,)),), ((me, (...,)),)),)
    if actor.work.op in ("all_gather", "all_to_all"):
        return _assembled(actor, me, sources, target)
    raise ProgramError(f"actor `{actor.name}`: no collective is called `{actor.work.op}`")


def _size(region: Region) -> int:
    return math.prod(b - a for a, b in region)


def _chunk(me: int, num_members: int, num_elements: int) -> tuple[Move, ...]:
    sizes = split_sizes(num_elements, num_members)
    start = sum(sizes[:me])
    cuts = [*range(start, start + sizes[me], BLOCK), start + sizes[me]]
    order = _first(me, num_members)
    return tuple(
        Move(tuple((i, (slice(a, b),)) for i in order), tuple((i, (slice(a, b),)) for i in order), flat=True) for a, b in itertools.pairwise(cuts) if a < b
    )


def _first(me: int, num_members: int) -> list[int]:
    return [me, *(i for i in range(num_members) if i != me)]


def _assembled(actor: Actor, me: int, sources: Sequence[Region], target: Region) -> tuple[Move, ...]:
    """One copy for each member that holds something of `target` which no member before it holds; the own piece first."""
    moves, taken = [], []
    for i in _first(me, len(sources)):
        piece = _overlap(sources[i], target)
        if piece is not None and piece not in taken:
            taken.append(piece)
            moves.append(Move(((i, as_slices(piece, sources[i])),), ((me, as_slices(piece, target)),)))
    if not _covers(taken, target):
        raise ProgramError(f"{actor.work.op} `{actor.name}` writes {target}, but the members hold {sources} only")
    return tuple(moves)


def _region(actor: Actor, key: str) -> Region:
    if key not in actor.work.attrs:
        raise ProgramError(f"actor `{actor.name}` ({actor.work.op}) has no attribute {key}")
    return tuple((int(a), int(b)) for a, b in actor.work.attrs[key])


def _overlap(one: Region, other: Region) -> Region | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(a < b for a, b in both) else None


def _covers(pieces: Sequence[Region], target: Region) -> bool:
    """Whether the pieces together hold every element of `target`: looked at cell by cell of the grid that their edges cut."""
    grid = [sorted({edge for piece in (*pieces, target) for edge in piece[dim]}) for dim in range(len(target))]
    cells: Any = itertools.product(*(list(itertools.pairwise(edges)) for edges in grid))
    return all(any(_overlap(cell, piece) == cell for piece in pieces) for cell in cells if _overlap(cell, target) == cell)

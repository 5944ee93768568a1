"""Transport between threads of one process: every member's slots are at hand, so a share is a handful of array operations on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from executor.backend import Array, Backend
from executor.buffers import Buffers
from executor.slots import Access, firing_table
from executor.transport import Index, Move, idle, members_of, share
from ir.errors import ProgramError
from ir.program import Actor, Program


class ThreadTransport:
    """Collectives and p2p among the ranks of one process; numpy's and cupy's arrays alike."""

    def __init__(self, program: Program, backend: Backend, buffers: Buffers, access: Access) -> None:
        self.program = program
        self.backend = backend
        self.buffers = buffers
        self.access = access

    def bind(self, actor: Actor) -> Callable[[int, int], None]:
        members = members_of(actor, self.program.channels[actor.channel])
        readers = [a for a in members if a.reads]
        writers = [a for a in members if a.writes]
        if any(len(a.reads) + len(a.writes) != (1 if a.work.kind in ("send", "recv") else 2) for a in members):
            raise ProgramError(f"channel `{actor.channel}`: each member reads one register and writes one, a send only reads, a recv only writes")
        moves = share(actor, members)
        if not moves:
            return idle

        def make(step: int, microbatch: int) -> Callable[[], None]:
            sources = {members.index(a): self.access.array(a, a.reads[0], step, microbatch) for a in readers}
            targets = {members.index(a): self.access.array(a, a.writes[0], step, microbatch) for a in writers}
            adds = [a.name for a in writers if self.access.adds(a, a.writes[0], microbatch)]
            if adds and len(adds) != len(writers):
                raise ProgramError(f"channel `{actor.channel}`: microbatch {microbatch} is the first for some members and adds for {', '.join(adds)}")
            operations = [o for move in moves for o in self._operations(actor, move, sources, targets, bool(adds))]
            return operations[0] if len(operations) == 1 else partial(_all, operations)

        return firing_table(self.program, members, make)

    def _operations(self, actor: Actor, move: Move, sources: dict[int, Array], targets: dict[int, Array], adds: bool) -> list[Callable[[], Any]]:
        xp = self.backend.xp
        reads = [_part(sources[i], index, move.flat) for i, index in move.sources]
        outs = [_part(targets[i], index, move.flat) for i, index in move.targets]
        fold = xp.maximum if actor.work.attrs.get("reduce") == "max" else xp.add
        if len(reads) == 1 and not adds:
            return [partial(xp.copyto, out, reads[0]) for out in outs]
        if len(reads) == 1:
            return [partial(xp.add, out, reads[0], out=out) for out in outs]
        if not adds:
            total, others = outs[0], outs[1:]
        else:
            total, others = self.access.scratch_like(actor, reads[0]), outs
        folds = [partial(fold, reads[0], reads[1], out=total), *(partial(fold, total, read, out=total) for read in reads[2:])]
        finish = [partial(xp.add, out, total, out=out) if adds else partial(xp.copyto, out, total) for out in others]
        return [*folds, *finish]


def _part(array: Array, index: Index, flat: bool) -> Array:
    """A view; an array without dims stays an array."""
    return array.reshape(-1)[index] if flat else array if ... in index else array[(*index, ...)]


def _all(operations: list[Callable[[], Any]]) -> None:
    for operation in operations:
        operation()

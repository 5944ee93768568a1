"""Which slot of a register a firing meets, whether it adds to what is there, and callables made once for every combination that can occur."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from executor.backend import Array, Backend
from executor.buffers import SLOT_ALIGNMENT, Buffers
from ir.machine import Action, Machine
from ir.program import Actor, Program

MAX_TABLE = 4096
"""Combinations of one actor that are made before the first step; more are made when they occur."""


class Access:
    """Slots of the firings of one program, as its Machine numbers them, and the scratch arrays of accumulation."""

    def __init__(self, machine: Machine, backend: Backend, buffers: Buffers) -> None:
        self.program = machine.program
        self.machine = machine
        self.backend = backend
        self.buffers = buffers
        self.index = {a.name: i for i, a in enumerate(machine.actors)}
        self._scratch = {queue: backend.allocate(nbytes) for queue, nbytes in _scratch_sizes(self.program).items()}

    def slot(self, actor: Actor, name: str, step: int, microbatch: int) -> int:
        """The slot of register `name` that this firing reads, writes or updates."""
        return self.machine.slot(Action(self.index[actor.name], step, microbatch), name)

    def array(self, actor: Actor, name: str, step: int, microbatch: int) -> Array:
        return self.buffers.slots[name][self.slot(actor, name, step, microbatch)]

    def previous(self, actor: Actor, name: str, step: int) -> Array:
        """The newest item of a register that this firing updates: in its own slot, but of stale weights, with a slot more, in the slot before."""
        slots = self.buffers.slots[name]
        return slots[(self.slot(actor, name, step, 0) - 1) % len(slots)]

    def adds(self, actor: Actor, name: str, microbatch: int) -> bool:
        """Whether this firing adds to the item: a microbatch actor that writes a step register, at any firing but the first of the step."""
        return actor.clock == "microbatch" and self.program.register[name].clock == "step" and self.program.opens[name] != (actor.name, microbatch)

    def scratch(self, actor: Actor, name: str) -> Array:
        """A temporary array like register `name`, which `actor` adds to; it belongs to the actor's queue, whose actions never overlap."""
        offset = 0
        for written in actor.writes:
            register = self.program.register[written]
            if written == name:
                return self.backend.view(self._scratch[actor.rank, actor.queue], offset, register.shape, register.dtype)
            offset += _aligned(register.nbytes)
        raise AssertionError(name)

    def scratch_like(self, actor: Actor, array: Array) -> Array:
        """A temporary array of the shape and dtype of `array`, a part of what a member of `actor`'s collective adds to."""
        return self.backend.view(self._scratch[actor.rank, actor.queue], 0, array.shape, str(array.dtype))


def firing_table(program: Program, actors: Sequence[Actor], make: Callable[[int, int], Callable[[], None]]) -> Callable[[int, int], None]:
    """`perform(step, microbatch)` that calls what `make(step, microbatch)` returned for the same slots.

    The slots of `actors` repeat after `period` steps, so `make` is called for the steps of one period alone.
    """
    period = _period(program, actors)
    num = program.num_microbatches if any(a.clock == "microbatch" for a in actors) else 1
    if period * num > MAX_TABLE:
        late: dict[tuple[int, int], Callable[[], None]] = {}

        def perform_late(step: int, microbatch: int) -> None:
            key = (step % period, microbatch)
            if key not in late:
                late[key] = make(*key)
            late[key]()

        return perform_late
    table = [[make(step, m) for m in range(num)] for step in range(period)]
    if period == 1:
        only = table[0]

        def perform_same(step: int, microbatch: int) -> None:
            only[microbatch]()

        return perform_same

    def perform(step: int, microbatch: int) -> None:
        table[step % period][microbatch]()

    return perform


def _period(program: Program, actors: Sequence[Actor]) -> int:
    """Steps after which every register of these actors is met at the same slots again."""
    out = 1
    for actor in actors:
        for name in (*actor.takes, *actor.writes, *actor.updates):
            register = program.register[name]
            out = math.lcm(out, register.credits if register.clock == "step" else register.credits // math.gcd(register.credits, program.num_microbatches))
    return out


def _scratch_sizes(program: Program) -> dict[tuple[int, str], int]:
    """Bytes for each queue: what the largest actor that adds to step registers writes in one firing; of a collective, what any of its members does."""
    sizes: dict[tuple[int, str], int] = {}
    for a in program.actors:
        if a.clock == "microbatch" and any(program.register[w].clock == "step" for w in a.writes):
            written = [w for member in program.channels.get(a.channel, (a,)) for w in member.writes]
            sizes_of = [_aligned(program.register[w].nbytes) for w in written]
            need = max(sizes_of) if a.channel else sum(sizes_of)
            sizes[a.rank, a.queue] = max(sizes.get((a.rank, a.queue), 0), need)
    return sizes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

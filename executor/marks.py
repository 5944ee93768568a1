"""On an asynchronous backend: which marks a firing's work must wait for on the device, when the host has only issued what comes before it."""

from __future__ import annotations

from typing import Any

from executor.backend import Mark
from executor.slots import Access
from executor.transport import members_of
from ir.machine import Action
from ir.program import Actor


class Marks:
    """For every slot the marks of the work that wrote it and of the work that has read it since.

    The Machine lets a firing start once what it waits for is *issued*; the marks carry the same waits to the device. They are exactly the edges of the Machine:
    a read waits for the writers of its item, a write for the readers and writers of the item that lay in its slot.
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        program = access.program
        self.actors = program.actors
        self._members = {a.name: members_of(a, program.channels[a.channel]) if a.channel else (a,) for a in program.actors}
        self._writers: dict[tuple[str, int], tuple[Mark, ...]] = {}
        self._readers: dict[tuple[str, int], dict[Any, Mark]] = {}

    def before(self, action: Action) -> tuple[Mark, ...]:
        """What the work of this firing waits for: for a rendezvous, what any member waits for, since every share touches all members' slots."""
        found: list[Mark] = []
        for actor in self._members[self.actors[action.actor].name]:
            for name, slot, is_read in self._slots(actor, action):
                found += self._writers.get((name, slot), ())
                if not is_read:
                    found += self._readers.get((name, slot), {}).values()
        return tuple(dict.fromkeys(found))

    def after(self, action: Action, marks: tuple[Mark, ...]) -> None:
        """Remembers the marks of a firing's work, of all shares of a rendezvous; called before the Machine hears that it has finished."""
        for name, slot, is_read in self._slots(self.actors[action.actor], action):
            key = (name, slot)
            if is_read:
                # of one stream only its last read counts, or a register that nothing ever writes would gather marks for ever
                self._readers[key] = {**self._readers.get(key, {}), **{mark.stream: mark for mark in marks}}
            else:
                self._writers[key], self._readers[key] = marks, {}

    def _slots(self, actor: Actor, action: Action) -> list[tuple[str, int, bool]]:
        _, step, microbatch = action
        m = 0 if actor.clock == "step" else microbatch
        return [
            (name, self.access.slot(actor, name, step, m), is_read)
            for names, is_read in ((actor.takes, True), (actor.writes, False), (actor.updates, False))
            for name in names
        ]

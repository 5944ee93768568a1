"""The slow, obvious twin of the Machine: the rules of `ir/program.py` read word by word, every queue asked again after every firing.

It shares no code with `ir.net`, `ir.machine` and `ir.proof`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ir.program import Actor, Program, Queue


@dataclass
class Item:
    number: int
    published: bool = False
    released_by: set[str] = field(default_factory=set)


class TokenGame:
    """`slots[register][i]` is the item that lies in slot i, or None."""

    def __init__(self, program: Program, steps: int) -> None:
        self.program, self.steps = program, steps
        self.place: dict[Queue, int] = dict.fromkeys(program.orders, 0)
        self.running: dict[Queue, bool] = dict.fromkeys(program.orders, False)
        self.readers = {r.name: {a.name for a in program.actors if r.name in a.reads} for r in program.registers}
        self.writer = {r: a for a in program.actors for r in (*a.writes, *a.updates)}
        self.slots: dict[str, list[Item | None]] = {r.name: [None] * r.credits for r in program.registers}
        for r in program.registers:
            for i in range(r.initial):
                self.slots[r.name][i] = Item(i, published=True)
        for name in self.slots:
            self._sweep(name)
        self.fired: list[tuple[str, int, int]] = []

    def head(self, queue: Queue) -> tuple[Actor, int, int] | None:
        """(actor, step, microbatch) next on the queue."""
        order = self.program.orders[queue]
        step, i = divmod(self.place[queue], len(order))
        return None if step == self.steps else (self.program.actor[order[i][0]], step, order[i][1])

    def number(self, name: str, actor: Actor, step: int, mb: int) -> int:
        """The number of the item that a firing meets in the register."""
        register = self.program.register[name]
        if register.clock == "step":
            return step + (register.initial if name in (*actor.writes, *actor.updates) else 0)
        writer = self.writer[name]
        turns = [m for a, m in self.program.orders[writer.rank, writer.queue] if a == writer.name]
        return step * len(turns) + turns.index(mb)

    def is_first_write(self, name: str, actor: Actor, mb: int) -> bool:
        return self._writes(name, actor)[0] == (actor.name, mb)

    def is_last_write(self, name: str, actor: Actor, mb: int) -> bool:
        return self._writes(name, actor)[-1] == (actor.name, mb)

    def _writes(self, name: str, actor: Actor) -> list[tuple[str, int]]:
        """The firings of a step that write a register, in order; all on one queue."""
        return [f for f in self.program.orders[actor.rank, actor.queue] if name in self.program.actor[f[0]].writes]

    def is_last(self, actor: Actor, mb: int) -> bool:
        return [m for a, m in self.program.orders[actor.rank, actor.queue] if a == actor.name][-1] == mb

    def ready_alone(self, queue: Queue) -> bool:
        """Whether the head of the queue has its items and its slots."""
        here = self.head(queue)
        if here is None or self.running[queue]:
            return False
        actor, step, mb = here
        for name in actor.reads:
            if name not in self.writer:
                continue
            number = self.number(name, actor, step, mb)
            item = self.slots[name][number % len(self.slots[name])]
            if item is None or item.number != number or not item.published:
                return False
        for name in actor.writes:
            if self._opens(name, actor, mb) and self.slots[name][self.number(name, actor, step, mb) % len(self.slots[name])] is not None:
                return False
        for name in actor.updates:
            old = self.slots[name][step % len(self.slots[name])]
            if old is None or old.number != step or old.released_by != self.readers[name]:
                return False
        return True

    def may_start(self, queue: Queue) -> bool:
        """Whether the head is ready and every other member of its channel is ready too, or has already started this firing."""
        if not self.ready_alone(queue):
            return False
        actor, step, mb = self.head(queue)
        for partner in self.program.channels.get(actor.channel, ()):
            other = (partner.rank, partner.queue)
            if partner.name != actor.name and (partner.name, step, mb) not in self.fired:
                there = self.head(other)
                if there is None or there[0].name != partner.name or there[1:] != (step, mb):
                    return False
                if not self.running[other] and not self.ready_alone(other):
                    return False
        return True

    def start(self, queue: Queue) -> None:
        assert self.may_start(queue), f"{queue} cannot start"
        actor, step, mb = self.head(queue)
        self.running[queue] = True
        for name in actor.writes:
            if self._opens(name, actor, mb):
                number = self.number(name, actor, step, mb)
                self.slots[name][number % len(self.slots[name])] = Item(number)

    def finish(self, queue: Queue) -> None:
        assert self.running[queue], f"{queue} does not run"
        actor, step, mb = self.head(queue)
        for name in actor.writes:
            if self.program.register[name].clock == "microbatch" or self.is_last_write(name, actor, mb):
                self._item(name, self.number(name, actor, step, mb)).published = True
        for name in actor.updates:
            number = self.number(name, actor, step, mb)
            self.slots[name][number % len(self.slots[name])] = Item(number, published=True)
        for name in actor.reads:
            if name in self.writer and (self.program.register[name].clock == "microbatch" or self.is_last(actor, mb)):
                self._item(name, self.number(name, actor, step, mb)).released_by.add(actor.name)
        for name in {*actor.reads, *actor.writes}:
            self._sweep(name)
        self.running[queue] = False
        self.place[queue] += 1
        self.fired.append((actor.name, step, mb))

    def play(self) -> bool:
        """Fires whatever can fire until all is done (True) or nothing can (False)."""
        moved = True
        while moved:
            moved = False
            for queue in self.program.orders:
                while self.may_start(queue):
                    self.start(queue)
                    self.finish(queue)
                    moved = True
        return all(self.head(q) is None for q in self.program.orders)

    def _opens(self, name: str, actor: Actor, mb: int) -> bool:
        return self.program.register[name].clock == "microbatch" or self.is_first_write(name, actor, mb)

    def _item(self, name: str, number: int) -> Item:
        item = self.slots[name][number % len(self.slots[name])]
        assert item is not None, f"{name}: nothing lies in the slot of item {number}"
        assert item.number == number, f"{name}: item {item.number} lies in the slot of item {number}"
        return item

    def _sweep(self, name: str) -> None:
        """Frees the slots whose item everyone has released; an item that is updated in place stays for the updater."""
        if name not in self.writer or name in self.writer[name].updates:
            return
        for i, item in enumerate(self.slots[name]):
            if item is not None and item.published and item.released_by == self.readers[name]:
                self.slots[name][i] = None

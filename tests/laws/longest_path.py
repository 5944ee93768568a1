"""The slow, obvious twin of the event engine: the rules of `ir/program.py` as equations between times, solved by going round until nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

from ir.program import Actor, Program, Register

Firing = tuple[str, int, int]
"""(actor, step, microbatch)"""


def longest_path(program: Program, seconds: Sequence[float], steps: int) -> dict[Firing, tuple[float, float]]:
    """(start, end) of every firing of a live program whose actors take these seconds, members of a channel the same."""
    twin = _Times(program, seconds, steps)
    while twin.sweep():
        pass
    return {f: (start, start + twin.seconds[f[0]]) for f, start in twin.start.items()}


class _Times:
    def __init__(self, program: Program, seconds: Sequence[float], steps: int) -> None:
        self.program, self.steps = program, steps
        self.seconds = {a.name: s for a, s in zip(program.actors, seconds, strict=True)}
        self.lists = {q: [(name, k, m) for k in range(steps) for name, m in order] for q, order in program.orders.items()}
        self.start: dict[Firing, float] = {f: 0.0 for order in self.lists.values() for f in order}
        self.maker = {name: a for a in program.actors for name in (*a.writes, *a.updates)}
        self.readers = {r.name: [a for a in program.actors if r.name in a.reads] for r in program.registers}

    def sweep(self) -> bool:
        moved = False
        for order in self.lists.values():
            for i, firing in enumerate(order):
                after = [self.end(order[i - 1])] if i else []
                at = max([self.start[firing], *after, *self.waits(firing)])
                for member in self.members(firing):
                    if self.start[member] < at:
                        self.start[member], moved = at, True
        return moved

    def end(self, firing: Firing) -> float:
        return self.start[firing] + self.seconds[firing[0]]

    def members(self, firing: Firing) -> list[Firing]:
        actor = self.program.actor[firing[0]]
        return [(a.name, *firing[1:]) for a in self.program.channels[actor.channel]] if actor.channel else [firing]

    def firings(self, actor: Actor, step: int) -> list[Firing]:
        """The actor's firings of a step, in the order of its queue."""
        return [f for f in self.lists[actor.rank, actor.queue] if f[0] == actor.name and f[1] == step]

    def waits(self, firing: Firing) -> list[float]:
        name, step, m = firing
        actor, out = self.program.actor[name], []
        for r in map(self.program.register.__getitem__, actor.reads):
            if r.name in self.maker:
                out += self.published(r, step, m)
        for r in map(self.program.register.__getitem__, (*actor.writes, *actor.updates)):
            if r.clock == "microbatch" or firing == self.firings(actor, step)[0]:
                out += self.freed(r, step, m)
        return out

    def published(self, r: Register, step: int, m: int) -> list[float]:
        maker = self.maker[r.name]
        if r.clock == "microbatch":
            return [self.end((maker.name, step, m))]
        return [self.end(f) for f in self.firings(maker, step - r.initial)]

    def freed(self, r: Register, step: int, m: int) -> list[float]:
        """Ends of the readers of the item that lay in the slot which item number n takes: number n - credits."""
        maker = self.maker[r.name]
        if r.clock == "step":
            old = step + r.initial - r.credits
            return [self.end(f) for a in self.readers[r.name] for f in self.firings(a, old)]
        made = [f for k in range(self.steps) for f in self.firings(maker, k)]
        old = made.index((maker.name, step, m)) - r.credits
        return [self.end((a.name, *made[old][1:])) for a in self.readers[r.name]] if old >= 0 else []

"""Small Programs for tests: pipelines under the three classical orders, and random ones of which some live and some do not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ir.program import Actor, Firing, Program, Queue, Register
from ir.work import Work

ITEM = (4,)


def compute(op: str = "scale", flops: float = 100.0) -> Work:
    return Work("compute", op, "float32", flops=flops, nbytes=48.0)


def order_1f1b(stage: int, stages: int, m: int) -> list[tuple[str, int]]:
    warm = min(stages - stage - 1, m)
    steady = [pair for i in range(m - warm) for pair in (("F", warm + i), ("B", i))]
    return [*(("F", i) for i in range(warm)), *steady, *(("B", i) for i in range(m - warm, m))]


def order_gpipe(stage: int, stages: int, m: int) -> list[tuple[str, int]]:
    return [*(("F", i) for i in range(m)), *(("B", i) for i in range(m))]


def order_serial(stage: int, stages: int, m: int) -> list[tuple[str, int]]:
    return [pair for i in range(m) for pair in (("F", i), ("B", i))]


ORDERS = {"1f1b": order_1f1b, "gpipe": order_gpipe, "serial": order_serial}
LEAST_STASH = {"1f1b": lambda s, p, m: min(p - s, m), "gpipe": lambda s, p, m: m, "serial": lambda s, p, m: 1}
"""Stash credits that stage s of p needs for m microbatches."""


class Builder:
    """Collects actors, registers and orders; the order of a queue is the order in which firings are added to it."""

    def __init__(self, num_microbatches: int) -> None:
        self.m = num_microbatches
        self.actors: list[Actor] = []
        self.registers: list[Register] = []
        self.orders: dict[Queue, list[Firing]] = {}

    def register(self, name: str, rank: int, clock: str = "microbatch", credits: int = 1, initial: int = 0, memory: str = "activation") -> str:
        self.registers.append(Register(name, rank, ITEM, "float32", 16, clock, credits, initial, memory))
        return name

    def actor(
        self, name: str, rank: int, queue: str, reads: Sequence[str] = (), writes: Sequence[str] = (), updates: Sequence[str] = (), clock: str = "microbatch",
        work: Work | None = None, channel: str = "", phase: str = "F", fire: bool = True,
    ) -> str:  # fmt: skip
        self.actors.append(Actor(name, rank, queue, clock, work or compute(), tuple(reads), tuple(writes), tuple(updates), (), channel, name, phase))
        if fire:
            for i in range(self.m if clock == "microbatch" else 1):
                self.fire(name, i)
        return name

    def fire(self, name: str, microbatch: int = 0) -> None:
        actor = next(a for a in self.actors if a.name == name)
        self.orders.setdefault((actor.rank, actor.queue), []).append((name, microbatch))

    def hop(self, name: str, src: int, dst: int, read: str, write: str, phase: str) -> None:
        for kind, rank, regs in (("send", src, {"reads": (read,)}), ("recv", dst, {"writes": (write,)})):
            work = Work(kind, kind, "float32", nbytes=16.0, group=(src, dst))
            self.actor(f"{kind}.{name}", rank, f"p2p.{kind}.{phase}", work=work, channel=name, phase=phase, **regs)

    def build(self, name: str, **meta: object) -> Program:
        return Program(name, self.m, tuple(self.actors), tuple(self.registers), {q: tuple(o) for q, o in self.orders.items()}, meta)


def pipeline(stages: int, m: int, schedule: str = "1f1b", stash: Sequence[int] | None = None, hop_credits: int = 1) -> Program:
    """One rank a stage: F, B with an accumulating gradient, an optimizer that updates in place, hops as rendezvous. `stash`: credits of each stage."""
    b = Builder(m)
    for s in range(stages):
        n = LEAST_STASH[schedule](s, stages, m) if stash is None else stash[s]
        b.register(f"w{s}", s, "step", initial=1, memory="parameter")
        b.register(f"g{s}", s, "step", memory="gradient")
        b.register(f"stash{s}", s, credits=n, memory="saved")
        if s == 0:
            b.register("x", 0, credits=hop_credits, memory="input")
            b.actor("load", 0, "load", writes=("x",), work=Work("load", "tokens", "float32", nbytes=16.0))
        else:
            b.register(f"in{s}", s, credits=hop_credits)
            b.register(f"gout{s}", s, credits=hop_credits)
        if s < stages - 1:
            b.register(f"out{s}", s, credits=hop_credits)
            b.register(f"gin{s}", s, credits=hop_credits)
    for s in range(stages):
        first, last = s == 0, s == stages - 1
        b.actor(f"F{s}", s, "compute", ("x" if first else f"in{s}", f"w{s}"), (f"stash{s}",) if last else (f"stash{s}", f"out{s}"), fire=False)
        b.actor(f"B{s}", s, "compute", (f"stash{s}", f"w{s}") if last else (f"stash{s}", f"w{s}", f"gin{s}"),
                (f"g{s}",) if first else (f"g{s}", f"gout{s}"), phase="B", fire=False, work=compute(flops=200.0))  # fmt: skip
        for kind, i in ORDERS[schedule](s, stages, m):
            b.fire(f"{kind}{s}", i)
        b.actor(f"opt{s}", s, "compute", (f"g{s}",), (), (f"w{s}",), clock="step", phase="U")
    for s in range(stages - 1):
        b.hop(f"act{s}", s, s + 1, f"out{s}", f"in{s + 1}", "F")
        b.hop(f"grad{s + 1}", s + 1, s, f"gout{s + 1}", f"gin{s}", "B")
    return b.build(f"{schedule}-p{stages}-m{m}")


def with_credits(program: Program, credits: Mapping[str, int]) -> Program:
    return replace(program, registers=tuple(replace(r, credits=credits.get(r.name, r.credits)) for r in program.registers))


def with_order(program: Program, queue: Queue, order: Sequence[Firing]) -> Program:
    return replace(program, orders={q: tuple(order) if q == queue else o for q, o in program.orders.items()})


def random_program(seed: int) -> Program:
    """A random well-formed program; odd seeds have rendezvous and collectives, often crossed. Roughly half of all live.

    Actors come in three phases of a step: step actors, microbatch actors, step actors; each reads what earlier ones wrote. Orders start from one that could
    live and are then disturbed now and then; credits are drawn small.
    """
    rng = random.Random(seed)
    b = _RandomBuilder(rng, rng.randint(1, 4), rng.randint(2, 3) if seed % 2 else rng.randint(1, 2), rng.randint(1, 3))
    for _ in range(rng.randint(0, 2)):
        b.add_parameter()
    for phase, count in ((0, rng.randint(0, 1)), (1, rng.randint(3, 7)), (2, rng.randint(0, 2))):
        for _ in range(count):
            if seed % 2 and rng.random() < 0.5:
                b.add_channel(phase)
            else:
                b.add_actor(phase, rng.randrange(b.ranks))
    b.add_updates()
    return b.finish(f"random-{seed}")


class _RandomBuilder:
    def __init__(self, rng: random.Random, m: int, ranks: int, queues: int) -> None:
        self.rng, self.ranks, self.queues = rng, ranks, queues
        self.b = Builder(m)
        self.phase_of: dict[str, int] = {}
        self.made: list[tuple[str, int, str, int]] = []  # register, rank, clock, phase from which it may be read
        self.params: list[tuple[str, int, int]] = []
        self.tied = rng.random() < 0.75
        self.generous = rng.random() < 0.5

    def credits(self) -> int:
        return self.rng.randint(1, self.b.m + 1) if self.generous else self.rng.choice((1, 1, 1, 2, 3))

    def add_parameter(self) -> None:
        """Its item of step k is there before the step: updated in place at the end of each, written anew, or constant."""
        rank, credits = self.rng.randrange(self.ranks), self.rng.choice((1, 1, 2, 3))
        name = self.b.register(f"w{len(self.b.registers)}", rank, "step", credits, initial=1)
        self.params.append((name, rank, credits))
        self.made.append((name, rank, "step", 0))

    def add_actor(self, phase: int, rank: int, channel: str = "", members: tuple[int, ...] = ()) -> None:
        rng, clock = self.rng, "microbatch" if phase == 1 else "step"
        legal = [r for r, at, c, since in self.made if at == rank and since <= phase and (c == "step" or clock == "microbatch")]
        reads = rng.sample(legal, min(len(legal), rng.choice((0, 1, 1, 2, 3))))
        if reads and rng.random() < 0.1:
            reads.append(reads[0])
        name, writes = f"a{len(self.b.actors)}", []
        for _ in range(rng.choice((0, 1, 1, 2))):
            sums = phase == 1 and rng.random() < 0.2
            kind = "step" if sums or phase != 1 else "microbatch"
            writes.append(self.b.register(f"r{len(self.b.registers)}", rank, kind, self.credits()))
            self.made.append((writes[-1], rank, kind, 2 if sums else phase))
        work = Work("collective", "all_reduce", "float32", nbytes=16.0, group=members) if channel else None
        self.b.actor(name, rank, f"q{rng.randrange(self.queues)}", reads, writes, clock=clock, channel=channel, fire=False, work=work)
        self.phase_of[name] = phase

    def add_channel(self, phase: int) -> None:
        members = tuple(sorted(self.rng.sample(range(self.ranks), self.rng.randint(2, self.ranks))))
        channel = f"c{len(self.b.actors)}"
        for rank in members:
            self.add_actor(phase, rank, channel, members)

    def add_updates(self) -> None:
        for name, rank, credits in self.params:
            if self.rng.random() < 0.8:
                legal = [r for r, at, c, _ in self.made if at == rank and c == "step" and r != name]
                reads, queue = self.rng.sample(legal, min(1, len(legal))), f"q{self.rng.randrange(self.queues)}"
                made = ((), (name,)) if credits == 1 and self.rng.random() < 0.7 else ((name,), ())
                actor = self.b.actor(f"a{len(self.b.actors)}", rank, queue, reads, *made, "step", fire=False)
                self.phase_of[actor] = 2

    def finish(self, name: str) -> Program:
        rng, m = self.rng, self.b.m
        slope = rng.choice((1.0, 1.0, 3.0, 100.0))
        keyed = []
        for i, a in enumerate(self.b.actors):
            phase = self.phase_of[a.name]
            for mb in range(m if a.clock == "microbatch" else 1):
                keyed.append(((phase, slope * mb + i if phase == 1 else float(i)), a.name, mb))
        for _, actor, mb in sorted(keyed):
            self.b.fire(actor, mb)
        for order in self.b.orders.values():
            if rng.random() < 0.3:
                for _ in range(rng.randint(1, 3)):
                    i = rng.randrange(len(order))
                    j = min(len(order) - 1, i + rng.randint(1, 3))
                    order[i], order[j] = order[j], order[i]
        return self.b.build(name)

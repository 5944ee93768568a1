"""What one stage of a pipeline costs, told from a program of few layers: seconds of its passes, what comes once a step, bytes of every kind of life.

Stages with the same layers are one kind. Of a run of equal layers four are lowered, and three: what the fourth adds, every further one adds as well (law: a
folded plan costs what the whole one does). Seconds are those of a rank that runs its passes one after another, each on its own, as in `simulator.estimate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ir.graph import Graph
from ir.program import Actor, Program, Register
from planner.folding import runs
from simulator.cost import CostModel
from simulator.engine import price
from simulator.estimate import COMPUTE, step_seconds, wait_free_s

LOWERED = 4
"""Layers of a run that are lowered. A parameter is gathered two layers ahead, a gradient added two layers behind, so the fourth is like all that follow."""

PASS_OF = {"F": "F", "R": "I", "I": "I", "W": "W"}
"""The pass in which an actor of each phase fires."""


class Life(NamedTuple):
    """Where a microbatch's value is written and read, whether a transfer fills or empties it meanwhile, its class in the ledger, and whether nothing but the
    compute queue touches it.
    """

    written: str
    read: tuple[str, ...]
    in_transit: bool
    memory: str
    computed: bool

    @property
    def later(self) -> tuple[str, ...]:
        """Other passes that read it."""
        return tuple(p for p in self.read if p != self.written)


class Held(NamedTuple):
    """Bytes of a class that stay for a whole step."""

    memory: str


class Busy(NamedTuple):
    """Seconds of a queue, once a microbatch or once a step."""

    clock: str
    queue: str


Key = str | Life | Held | Busy

StageCost = Mapping[Key, float]
"""Seconds: `F`, `I`, `W`, `B` (I and W as one pass), `first W` and `first B` (of a step's first microbatch, which adds to no other's gradients), `arrival F`
and `arrival I` (of what another stage has sent), `begin`, `reduce`, `update`, each Busy. Bytes: each Held, `arena`, one slot of each Life, and `sent` to the
next stage."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Stages that are alike but for the length of their longest run: the layers that are lowered, and those of the shorter program."""

    layers: tuple[int, ...]
    shorter: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """The stages of a pipeline by kind: `kinds` in order of first occurrence, `kind[s]` the number of that of stage s, `extra[s]` its layers left out."""

    kinds: tuple[Kind, ...]
    kind: tuple[int, ...]
    extra: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether no stage leaves a layer out."""
        return not any(self.extra)

    def layers(self, shorter: bool = False) -> tuple[int, ...]:
        """The layers of the chain of one stage of each kind."""
        return tuple(layer for k in self.kinds for layer in (k.shorter if shorter else k.layers))

    def stages(self, shorter: bool = False) -> tuple[tuple[int, int], ...]:
        """[first, last) of each kind in that chain."""
        out, at = [], 0
        for k in self.kinds:
            n = len(k.shorter if shorter else k.layers)
            out.append((at, at + n))
            at += n
        return tuple(out)


def fold_stages(classes: Sequence[int], stages: Sequence[tuple[int, int]]) -> Folded:
    """The kinds of stages of a chain of layers with these classes.

    >>> fold_stages((0, 1, 1, 1, 1, 1, 1, 1, 1, 2), ((0, 4), (4, 6), (6, 8), (8, 10))).kind
    (0, 1, 1, 2)
    """
    kinds: dict[object, int] = {}
    found: list[Kind] = []
    kind, extra = [], []
    for first, last in stages:
        a, b = max(((first + x, first + y) for x, y in runs(classes[first:last])), key=lambda run: (run[1] - run[0], -run[0]))
        layers, shorter = ((*range(first, min(a + n, b)), *range(b, last)) for n in (LOWERED, LOWERED - 1))
        key = (first == 0, last == len(classes), tuple(classes[i] for i in layers))
        if key not in kinds:
            kinds[key] = len(found)
            found.append(Kind(layers, shorter))
        kind.append(kinds[key])
        extra.append(max(0, b - a - LOWERED))
    return Folded(tuple(found), tuple(kind), tuple(extra))


def stage_costs(program: Program, cost: CostModel, graph: Graph, stages: Sequence[tuple[int, tuple[int, int]]]) -> tuple[StageCost, ...]:
    """For each (rank, [first, last) layers) what the stage costs. Of what a rank with several stages does once a step, each has that of its parameters."""
    prices = price(program, cost)
    added = prices.added or [0.0] * len(program.actors)
    seconds = {a.name: (s if a.channel else s + prices.firing_s, more) for a, s, more in zip(program.actors, prices.seconds, added, strict=True)}
    writer = {w: a.name for a in program.actors for w in (*a.writes, *a.updates)}
    of_param = {p.name: graph.consumers(p.name)[0][0].layer for p in graph.params}
    ranks = [rank for rank, _ in stages]
    out = []
    for i, (rank, (first, last)) in enumerate(stages):
        fallback = first if rank not in ranks[:i] else -1
        alone = ranks.count(rank) == 1
        actors = [a for a in program.actors if a.rank == rank]
        held = [layers for r, layers in stages if r == rank]
        mine = [a for a in actors if a.clock == "microbatch" and _stage_of(a, held) == (first, last)]
        once = [a for a in actors if a.clock == "step" and (alone or first <= of_param.get(_param(a.origin), fallback) < last)]
        here = {a.name for a in (*mine, *once)}
        order = [name for name, _ in program.orders.get((rank, COMPUTE), ()) if name in here]
        registers = [r for r in program.registers if r.rank == rank and writer.get(r.name, "") in here]
        out.append({**_seconds(mine, once, order, seconds), **_nbytes(registers, mine)})
    return tuple(out)


def _stage_of(actor: Actor, held: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The stage that an actor works for: that of its layer; what comes from another stage's layer is for the next one in the direction of its pass."""
    if actor.phase == "F":
        return next((s for s in held if actor.layer < s[1]), held[-1])
    return next((s for s in reversed(held) if actor.layer >= s[0]), held[0])


def _param(origin: str) -> str:
    """The parameter that an actor of the update is for: its origin is the parameter, or a gradient of it.

    >>> _param("d.wte.weight@wte.dtable@acc")
    'wte.weight'
    """
    return origin.removeprefix("d.").partition("@")[0]


def _seconds(mine: Sequence[Actor], once: Sequence[Actor], order: Sequence[str], seconds: Mapping[str, tuple[float, float]]) -> dict[Key, float]:
    """The passes of one microbatch and what comes once a step."""
    timed = [(a, sum(seconds[a.name])) for a in mine]
    plain = [(a, seconds[a.name][0]) for a in mine]
    back = [(a, s) for a, s in timed if PASS_OF[a.phase] != "F"]
    out: dict[Key, float] = {p: wait_free_s([(a, s) for a, s in timed if PASS_OF[a.phase] == p]) for p in "FIW"}
    out |= {"B": wait_free_s(back), "first B": wait_free_s([(a, s) for a, s in plain if PASS_OF[a.phase] != "F"])}
    out |= {"first W": wait_free_s([(a, s) for a, s in plain if PASS_OF[a.phase] == "W"])}
    out |= {f"arrival {p}": _arrival_s([(a, s) for a, s in plain if PASS_OF[a.phase] == p]) for p in "FI"}
    begin_s, reduce_s, update_s = step_seconds(plain, [(a, seconds[a.name][0]) for a in once], order)
    out |= {"begin": begin_s, "reduce": reduce_s, "update": update_s}
    for clock, actors in (("microbatch", mine), ("step", once)):
        for a in actors:
            key = Busy(clock, a.queue)
            out[key] = out.get(key, 0.0) + seconds[a.name][0]
    out["sent"] = sum(a.work.nbytes for a in mine if a.work.kind == "send" and a.phase == "F")
    return out


def _arrival_s(firings: Sequence[tuple[Actor, float]]) -> float:
    """Seconds that collectives take on what has just been received, before any kernel can read it."""
    fresh: set[str] = set()
    total = 0.0
    for a, seconds in firings:
        if a.work.kind == "recv":
            fresh.update(a.writes)
        elif a.work.kind == "collective" and a.reads and fresh.issuperset(a.reads):
            fresh.update(a.writes)
            total += seconds
    return total


def _nbytes(registers: Iterable[Register], actors: Sequence[Actor]) -> dict[Key, float]:
    """Bytes of one slot of every register, by life."""
    writer = {w: a for a in actors for w in a.writes}
    readers: dict[str, list[Actor]] = {}
    for a in actors:
        for name in a.takes:
            readers.setdefault(name, []).append(a)
    out: dict[Key, float] = {"arena": 0.0}
    for r in (r for r in registers if not r.inside):
        source = writer.get(r.name)
        if r.arena and not r.offsets:
            out["arena"] = max(out["arena"], float(r.offset + r.nbytes))
        elif r.clock == "step" or source is None:
            held = Held(r.memory)
            out[held] = out.get(held, 0.0) + r.nbytes * r.credits
        else:
            users = readers.get(r.name, [])
            transit = source.work.kind in ("load", "recv") or any(a.work.kind == "send" for a in users)
            computed = all(a.queue == COMPUTE for a in (source, *users))
            life = Life(PASS_OF[source.phase], tuple(sorted({PASS_OF[a.phase] for a in users})), transit, r.memory, computed)
            out[life] = out.get(life, 0.0) + r.nbytes
    return out


def lengthened(lowered: StageCost, shorter: StageCost | None, extra: int) -> StageCost:
    """The cost of a stage with `extra` layers more than were lowered, each adding what the last of them did; to the memory that passes share none does."""
    if not extra or shorter is None:
        return lowered
    return {key: x if key == "arena" else max(0.0, x + extra * (x - shorter.get(key, 0.0))) for key, x in lowered.items()}

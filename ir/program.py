"""A Program: actors, registers and one frozen order for each queue; what the simulator and the executor both perform.

Two clocks: an actor fires once a microbatch or once a step; a register holds one item a microbatch or one a step. With M microbatches, step k and microbatch
m, a microbatch register's item number is k*M + m, a step register's is k. How an actor meets a register follows from the two clocks:

| actor fires each | register's clock | as a read | as a write |
|---|---|---|---|
| microbatch | microbatch | the item of this firing | the item of this firing |
| microbatch | step | needs item k from its first firing on, frees it at its last | takes the slot at its first firing, adds after, publishes at its last |
| step | step | item k | item k |

`Actor.updates` are in place: the actor waits until item k of the register is there and every reader of it has released it; the same slot is then item k + 1.
A register has exactly one writer or updater and any number of readers, all on its own rank; data changes rank in actors that share a `channel` alone. Only a
step register may have several writers that fire each microbatch, all on one queue: the first of their firings takes the slot, the last publishes. One
with an initial item may have no writer: a constant, whose item is there in every step. Initial items come before the written ones: with n of them, a reader
of step k meets what was written in step k - n. Slots are taken in turn, in the order in which the writer opens the items.
An action (actor, step, microbatch) may start when it heads its queue's order, its items exist, a slot is free for each item it opens, and every other actor of
its channel may start as well. It frees and publishes when it finishes; the actors of a channel may start together, and
each frees and publishes, on its own rank, when its own part of the transfer is over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ir.errors import ProgramError
from ir.work import Work

if TYPE_CHECKING:
    from ir.net import Net

SCHEMA_VERSION = 1
CLOCKS = ("microbatch", "step")
MEMORY_CLASSES = ("parameter", "gradient", "optimizer", "saved", "activation", "logits", "buffer", "input")


@dataclass(frozen=True, slots=True)
class Register:
    """Slots for one tensor's shard on one rank, sized once and allocated once.

    `credits` slots; `initial` items are there before the first step (1 for parameters and optimizer state). `tensor` and `region` say which part of which
    logical tensor it is, `init` how its initial item starts. `memory` is the class it counts for in the ledger. `replica`: this rank holds a copy that another
    rank holds too and that counts there (norms, checkpoints). Registers of one rank with the same `arena` share memory: slot i lies at `offset` + i * nbytes,
    or where `offsets`, one for each slot, say. `inside`: another register in whose memory its one slot lies, at `offset`, because its writer writes over what
    it reads there.
    """

    name: str
    rank: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    clock: str = "microbatch"
    credits: int = 1
    initial: int = 0
    memory: str = "activation"
    tensor: str = ""
    region: tuple[tuple[int, int], ...] = ()
    init: Mapping[str, Any] = field(default_factory=dict)
    replica: bool = False
    arena: str = ""
    offset: int = 0
    offsets: tuple[int, ...] = ()
    inside: str = ""

    @property
    def places(self) -> tuple[int, ...]:
        """Where in its arena each slot lies."""
        return self.offsets or tuple(self.offset + i * self.nbytes for i in range(self.credits))


@dataclass(frozen=True, slots=True)
class Actor:
    """One piece of work that fires over and over on one queue of one rank.

    `reads` and `writes` name registers in the order of the operator's sentence; `updates` are changed in place and follow the reads in it.
    `waits` name registers whose item must be there and is released like a read one, but is not looked at: they hold back what
    could run too far ahead.
    `channel`: actors with the same channel are one rendezvous: the two ends of a p2p, the members of a collective.
    """

    name: str
    rank: int
    queue: str
    clock: str
    work: Work
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    channel: str = ""
    origin: str = ""
    phase: str = "F"
    layer: int = 0

    @property
    def takes(self) -> tuple[str, ...]:
        """The registers whose items it needs and releases."""
        return (*self.reads, *self.waits)


T = TypeVar("T")

Firing = tuple[str, int]
"""(actor, microbatch); the microbatch of a step actor is 0."""

Queue = tuple[int, str]
"""(rank, queue name)."""


@dataclass(frozen=True)
class Program:
    """Actors, registers, and for each queue one step's firings in order, repeated every step."""

    name: str
    num_microbatches: int
    actors: tuple[Actor, ...]
    registers: tuple[Register, ...]
    orders: Mapping[Queue, tuple[Firing, ...]]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def actor(self) -> Mapping[str, Actor]:
        return {a.name: a for a in self.actors}

    @cached_property
    def register(self) -> Mapping[str, Register]:
        return {r.name: r for r in self.registers}

    @cached_property
    def holders(self) -> Mapping[str, tuple[Register, ...]]:
        """The registers that hold a part of each logical tensor."""
        found: dict[str, list[Register]] = {}
        for r in self.registers:
            if r.tensor:
                found.setdefault(r.tensor, []).append(r)
        return {t: tuple(held) for t, held in found.items()}

    @cached_property
    def updated(self) -> frozenset[str]:
        """Names of the registers that an actor changes in place."""
        return frozenset(u for a in self.actors for u in a.updates)

    @cached_property
    def written(self) -> frozenset[str]:
        """Names of the registers that an actor writes."""
        return frozenset(w for a in self.actors for w in a.writes)

    @cached_property
    def opens(self) -> Mapping[str, Firing]:
        """By written register the first firing of its writers in their queue's order: of a step register, the one that writes where the later ones add."""
        writes = {a.name: a.writes for a in self.actors}
        found: dict[str, Firing] = {}
        for order in self.orders.values():
            for firing in order:
                for name in writes.get(firing[0], ()):
                    found.setdefault(name, firing)
        return found

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({a.rank for a in self.actors}))

    @cached_property
    def channels(self) -> Mapping[str, tuple[Actor, ...]]:
        """The actors of every rendezvous, in order of rank."""
        found: dict[str, list[Actor]] = {}
        for a in self.actors:
            if a.channel:
                found.setdefault(a.channel, []).append(a)
        return {c: tuple(sorted(members, key=lambda a: a.rank)) for c, members in found.items()}

    @cached_property
    def net(self) -> Net:
        """The marked graph of a well-formed program."""
        from ir.net import compile_net

        return compile_net(self)

    def firings(self, actor: Actor) -> int:
        """How often the actor fires in a step."""
        return self.num_microbatches if actor.clock == "microbatch" else 1

    def check(self) -> Program:
        """Proves that the program is well formed and live for ever; returns it, or raises ProgramError or Deadlock with the sentence."""
        from ir.proof import prove

        prove(self)
        return self

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.dumps().encode()).hexdigest()[:16]

    # ---- text --------------------------------------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION, "kind": "program", "name": self.name, "num_microbatches": self.num_microbatches, "meta": dict(self.meta),
            "registers": [sparse(r) for r in self.registers],
            "actors": [sparse(a) | {"work": sparse(a.work)} for a in self.actors],
            "orders": [{"rank": rank, "queue": queue, "firings": [list(f) for f in order]} for (rank, queue), order in self.orders.items()],
        }  # fmt: skip

    def __str__(self) -> str:
        """The program as text, one line a register, actor and queue (see `ir.program_text`); `Program.parse` reads it back."""
        from ir.program_text import dump

        return dump(self)

    @classmethod
    def parse(cls, text: str) -> Program:
        """Reads `str(program)`; raises ProgramError with the line that it cannot read."""
        from ir.program_text import parse

        return parse(text)

    def dumps(self) -> str:
        return json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Program:
        """Reads `to_json`; raises ProgramError when the document is of another kind or version, or misses a key."""
        if not isinstance(data, Mapping) or data.get("kind") != "program":
            raise ProgramError("this document is no program; `headrace lower plan.json -o program.json` writes one")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ProgramError(f"program of schema version {data.get('schema_version')}; this headrace reads version {SCHEMA_VERSION}: lower the plan again")
        try:
            registers = tuple(_typed(Register(**tuples(r))) for r in data["registers"])
            actors = tuple(_typed(Actor(**(tuples(a) | {"work": _typed(Work(**tuples(a["work"])))}))) for a in data["actors"])
            orders = {(o["rank"], o["queue"]): tuple((f[0], f[1]) for f in o["firings"]) for o in data["orders"]}
            return cls(data["name"], data["num_microbatches"], actors, registers, orders, tuples(data["meta"]))
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise ProgramError(f"the program document is incomplete or damaged ({error!r}); lower the plan again") from error


def sparse(value: Any) -> dict[str, Any]:
    """The fields that differ from their default."""
    out = {}
    for name, spec in value.__dataclass_fields__.items():
        here = getattr(value, name)
        default = spec.default_factory() if callable(spec.default_factory) else spec.default
        if here != default and name != "work":
            out[name] = here
    return out


_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "float": (int, float), "bool": bool, "tuple": tuple, "Mapping": Mapping, "Work": Work,
}  # fmt: skip


def _typed(value: T) -> T:
    """The value, if each of its fields has the type that it is declared with; else TypeError naming the field."""
    for name, spec in value.__dataclass_fields__.items():  # type: ignore[attr-defined]
        here = getattr(value, name)
        outer, _, inner = str(spec.type).partition("[")
        items = here if outer == "tuple" and isinstance(here, tuple) and inner in ("str, ...]", "int, ...]") else ()
        if not isinstance(here, _TYPES[outer]) or not all(isinstance(x, _TYPES[inner[:3]]) for x in items):
            raise TypeError(f"{type(value).__name__} {name} = {here!r} is no {spec.type}")
    return value


def tuples(value: Any) -> Any:
    """The value with tuples for lists, however deep: what JSON made of it, as it was."""
    if isinstance(value, Mapping):
        return {k: tuples(v) for k, v in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value

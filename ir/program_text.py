"""A Program as text that people read, compare and edit: one line a register, an actor, a queue; `parse(dump(program)) == program`.

    program NAME, N microbatches [meta={...}]
    register NAME @RANK DTYPE[DIM DIM] NBYTES [field=value ...]
    actor NAME @RANK/QUEUE CLOCK KIND OP DTYPE (READ, READ; UPDATE) [-> WRITE, WRITE] [field=value ...]
    order @RANK/QUEUE: ACTOR#MICROBATCH ACTOR

Fields that have their default are left out; values are JSON without spaces. In an order, an actor that fires once a step stands without `#`. A name of other
characters than letters, digits and . _ - + ~ * @ is written as a JSON string. Empty lines and lines that start with `//` are passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from ir.errors import ProgramError
from ir.program import Actor, Firing, Program, Queue, Register, sparse, tuples
from ir.work import Work

_BARE = re.compile(r"[\w.\-+~*@]+")
_HEADS = {
    "register": ("name", "rank", "dtype", "shape", "nbytes"),
    "actor": ("name", "rank", "queue", "clock", "work", "reads", "writes", "updates", "kind", "op", "dtype"),
}
"""Fields that stand at the head of a line, without their names."""
_WORK_FIELDS = frozenset(f.name for f in fields(Work))


def dump(program: Program) -> str:
    """The text; ends with a line break."""
    return "\n".join(_lines(program)) + "\n"


def _lines(program: Program) -> Iterator[str]:
    meta = {"meta": dict(program.meta)} if program.meta else {}
    yield f"program {_word(program.name)}, {program.num_microbatches} microbatches{_fields(meta)}"
    for r in program.registers:
        rest = {k: v for k, v in sparse(r).items() if k not in _HEADS["register"]}
        yield f"register {_word(r.name)} @{r.rank} {r.dtype}[{' '.join(map(str, r.shape))}] {r.nbytes}{_fields(rest)}"
    for a in program.actors:
        rest = {k: v for k, v in (sparse(a) | sparse(a.work)).items() if k not in _HEADS["actor"]}
        taken = _words(a.reads) + (f"; {_words(a.updates)}" if a.updates else "")
        work = f"{_word(a.work.kind)} {_word(a.work.op)} {_word(a.work.dtype)}"
        made = f" -> {_words(a.writes)}" if a.writes else ""
        yield f"actor {_word(a.name)} @{a.rank}/{_word(a.queue)} {a.clock} {work} ({taken}){made}{_fields(rest)}"
    for (rank, queue), order in program.orders.items():
        yield f"order @{rank}/{_word(queue)}: {' '.join(_firing(program, f) for f in order)}".rstrip()


def _firing(program: Program, firing: Firing) -> str:
    name, m = firing
    is_step = name in program.actor and program.actor[name].clock == "step"
    return _word(name) if is_step and not m else f"{_word(name)}#{m}"


def _word(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _words(names: Iterable[str]) -> str:
    return ", ".join(map(_word, names))


def _fields(values: Mapping[str, Any]) -> str:
    return "".join(f" {k}={json.dumps(v, separators=(',', ':'), sort_keys=True)}" for k, v in values.items())


def parse(text: str) -> Program:
    """Reads what `dump` wrote; raises ProgramError with the line and the form that it should have."""
    head: tuple[str, int, Mapping[str, Any]] | None = None
    registers, actors, orders = list[Register](), list[Actor](), dict[Queue, tuple[Firing, ...]]()
    for number, line in enumerate(text.splitlines(), start=1):
        reader = _Reader(line, number)
        if not line.strip() or line.startswith("//"):
            continue
        kind = reader.word("program, register, actor or order")
        if kind == "program":
            head = _read_head(reader)
        elif kind == "register":
            registers.append(_read_register(reader))
        elif kind == "actor":
            actors.append(_read_actor(reader))
        elif kind == "order":
            queue, order = _read_order(reader)
            orders[queue] = order
        else:
            raise reader.wrong("program, register, actor or order")
    if head is None:
        raise ProgramError("the text has no line `program NAME, N microbatches`")
    return Program(head[0], head[1], tuple(actors), tuple(registers), orders, head[2])


class _Reader:
    """One line, read from left to right."""

    def __init__(self, line: str, number: int) -> None:
        self.line, self.number, self.at = line, number, 0

    def wrong(self, wanted: str) -> ProgramError:
        return ProgramError(f"line {self.number} of the program text: `{self.line[self.at :][:40]}` stands where {wanted} should")

    def skip(self, literal: str, wanted: str = "") -> None:
        if not self.has(literal):
            raise self.wrong(wanted or f"`{literal.strip()}`")

    def has(self, literal: str) -> bool:
        """Passes over the literal if it stands here."""
        here = self.line.startswith(literal, self.at)
        self.at += len(literal) if here else 0
        return here

    def word(self, wanted: str) -> str:
        while self.has(" "):
            pass
        if self.line.startswith('"', self.at):
            return str(self.value(wanted))
        match = _BARE.match(self.line, self.at)
        if match is None:
            raise self.wrong(wanted)
        self.at = match.end()
        return match.group()

    def words(self, wanted: str) -> tuple[str, ...]:
        """Names with commas between them, or none."""
        if self.at == len(self.line) or self.line[self.at] in " );":
            return ()
        found = [self.word(wanted)]
        while self.has(", "):
            found.append(self.word(wanted))
        return tuple(found)

    def integer(self, wanted: str) -> int:
        match = re.compile(r"\d+").match(self.line, self.at)
        if match is None:
            raise self.wrong(wanted)
        self.at = match.end()
        return int(match.group())

    def value(self, wanted: str) -> Any:
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.line, self.at)
        except json.JSONDecodeError as error:
            raise self.wrong(wanted) from error
        return value

    def fields(self, legal: Iterable[str]) -> dict[str, Any]:
        """The rest of the line: field=value, each of them legal."""
        found: dict[str, Any] = {}
        legal = tuple(legal)
        while self.has(" "):
            start = self.at
            name = self.word("a field")
            if name not in legal:
                self.at = start
                raise self.wrong(f"a field ({', '.join(legal)})")
            self.skip("=")
            found[name] = self.value("a JSON value")
        if self.at < len(self.line):
            raise self.wrong("the end of the line")
        return found


def _read_head(reader: _Reader) -> tuple[str, int, Mapping[str, Any]]:
    name = reader.word("the program's name")
    reader.skip(", ")
    num = reader.integer("the number of microbatches")
    reader.skip(" microbatches")
    return name, num, tuples(reader.fields(("meta",)).get("meta", {}))


def _read_register(reader: _Reader) -> Register:
    name = reader.word("the register's name")
    reader.skip(" @")
    rank = reader.integer("the rank")
    dtype = reader.word("a dtype")
    reader.skip("[")
    shape = list[int]()
    while not reader.has("]"):
        reader.has(" ")
        shape.append(reader.integer("a dim"))
    reader.skip(" ")
    nbytes = reader.integer("the number of bytes")
    rest = reader.fields(f.name for f in fields(Register) if f.name not in _HEADS["register"])
    return Register(name, rank, tuple(shape), dtype, nbytes, **{k: tuples(v) for k, v in rest.items()})


def _read_queue(reader: _Reader) -> Queue:
    reader.skip(" @")
    rank = reader.integer("the rank")
    reader.skip("/")
    return rank, reader.word("the queue")


def _read_actor(reader: _Reader) -> Actor:
    name = reader.word("the actor's name")
    rank, queue = _read_queue(reader)
    clock = reader.word("the clock")
    kind, op, dtype = (reader.word(f"the work's {what}") for what in ("kind", "op", "dtype"))
    reader.skip(" (")
    reads = reader.words("a register that is read")
    updates = reader.words("a register that is updated") if reader.has("; ") else ()
    reader.skip(")")
    writes = reader.words("a register that is written") if reader.has(" -> ") else ()
    legal = [f.name for f in (*fields(Actor), *fields(Work)) if f.name not in _HEADS["actor"]]
    rest = {k: tuples(v) for k, v in reader.fields(legal).items()}
    done = {k: v for k, v in rest.items() if k in _WORK_FIELDS}
    return Actor(name, rank, queue, clock, Work(kind, op, dtype, **done), reads, writes, updates, **{k: v for k, v in rest.items() if k not in _WORK_FIELDS})


def _read_order(reader: _Reader) -> tuple[Queue, tuple[Firing, ...]]:
    queue = _read_queue(reader)
    reader.skip(":")
    order = list[Firing]()
    while reader.at < len(reader.line):
        name = reader.word("an actor")
        order.append((name, reader.integer("a microbatch") if reader.has("#") else 0))
    return queue, tuple(order)

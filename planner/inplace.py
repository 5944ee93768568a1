"""Where a gradient is reduced, its sum lies in the buffer that it was added up in: no second one is needed.

A reduction may write over what it reads if nobody else reads it, and if all who write there in the next step come after all who read the sum in this one. So it
is where both are on the compute queue, whose frozen order has them so: the backward adds up a gradient, it is reduced once that is published, and the end of
the step, all of it before the next step's first pass, reads the sum. An all-reduce lies on its operand, what is scattered or sliced inside it if it is one run
of its bytes. (Each element is read and written by one member of a collective alone, see `executor.transport`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ir.program import Actor, Register

REDUCING = ("all_reduce", "reduce_scatter", "box.slice")


def in_place(registers: Sequence[Register], actors: Iterable[Actor]) -> list[Register]:
    """The registers of one rank, those of reduced gradients inside those where they were added up."""
    register = {r.name: r for r in registers}
    writers: dict[str, list[Actor]] = {}
    readers: dict[str, list[Actor]] = {}
    for a in actors:
        for name in (*a.writes, *a.updates):
            writers.setdefault(name, []).append(a)
        for name in a.takes:
            readers.setdefault(name, []).append(a)
    found: dict[str, Register] = {}
    for name, source in register.items():
        if source.memory != "gradient" or any(a.queue != "compute" or a.clock != "microbatch" for a in writers.get(name, [])):
            continue
        found |= {r.name: replace(r, inside=name) for r in _chain(source, register, readers)}
    return [found.get(r.name, r) for r in registers]


def _chain(source: Register, register: dict[str, Register], readers: dict[str, list[Actor]]) -> list[Register]:
    """What may lie in `source`, one made of the other, each with its offset; the last one is read by the compute queue alone."""
    out: list[Register] = []
    here, at = source, 0
    while len(users := readers.get(here.name, [])) == 1 and users[0].work.op in REDUCING and len(users[0].writes) == 1:
        there = register[users[0].writes[0]]
        start = _start(here, there)
        if there.memory != "gradient" or there.clock != "step" or start is None:
            break
        here, at = there, at + start
        out.append(replace(there, offset=at))
    return out if all(a.queue == "compute" for a in readers.get(here.name, [])) else []


def _start(outer: Register, inner: Register) -> int | None:
    """The byte of `outer` at which `inner` begins, if it is a run of its bytes."""
    if outer.dtype != inner.dtype or outer.region[1:] != inner.region[1:]:
        return None
    if outer.region == inner.region:
        return 0
    (first, last), (a, b) = outer.region[0], inner.region[0]
    return (a - first) * (outer.nbytes // (last - first)) if first <= a and b <= last else None


__all__ = ["in_place"]

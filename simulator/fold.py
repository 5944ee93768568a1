"""Ranks that do the same: one of each kind is simulated for all of them.

A collective is priced by its whole `work.group`, whoever of it is present, and its members are of few kinds; so a Program that holds one rank of each kind,
and of every p2p both ends, runs like the whole as long as ranks of one kind keep in step. They do: they start alike, and all that they ever wait for is of one
kind. A folded Program is for the simulator alone: its collectives miss members, so `check()` refuses it; check the whole, or trust the lowering.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ir.errors import ProgramError
from ir.program import Program
from simulator.cost import CostModel


def kinds(program: Program, cost: CostModel) -> tuple[tuple[int, ...], ...]:
    """The ranks in classes that cannot be told apart: the same work at the same prices in the same orders, on the same registers, with partners that are alike.

    Classes are refined by the classes of their partners until nothing changes, and stand in order of their first rank.
    """
    label = _numbered(_looks(program, cost))
    meetings = _meetings(program)
    while True:
        refined = _numbered({rank: (label[rank], _partners(meetings[rank], label)) for rank in program.ranks})
        if len(set(refined.values())) == len(set(label.values())):
            break
        label = refined
    out: dict[int, list[int]] = {}
    for rank in program.ranks:
        out.setdefault(label[rank], []).append(rank)
    return tuple(map(tuple, out.values()))


def representatives(program: Program, cost: CostModel) -> tuple[int, ...]:
    """Ranks of which at least one is of each kind; every p2p of theirs has both ends among them, every collective a member of each kind it has.

    >>> from simulator.clusters import shorthand
    >>> representatives(Program("none", 1, (), (), {}), CostModel(shorthand("1xH100")))
    ()
    """
    classes = kinds(program, cost)
    kind_of = {rank: i for i, ranks in enumerate(classes) for rank in ranks}
    meetings = _meetings(program)
    chosen: list[int] = []
    for ranks in classes:
        if not any(kind_of[r] == kind_of[ranks[0]] for r in chosen):
            _close(meetings, kind_of, ranks[0], chosen)
    return tuple(sorted(chosen))


def fold(program: Program, ranks: Collection[int]) -> Program:
    """The part of a Program on `ranks`, to be simulated for the whole. ProgramError where a p2p would lose one of its ends."""
    kept = frozenset(ranks)
    unknown = sorted(kept.difference(program.ranks))
    if unknown:
        raise ProgramError(f"program `{program.name}` has no rank {', '.join(map(str, unknown))}; it has {program.ranks}")
    for a in program.actors:
        if a.rank in kept and a.work.kind in ("send", "recv") and not kept.issuperset(a.work.group):
            raise ProgramError(f"folding to ranks {sorted(kept)} cuts p2p `{a.name}` between ranks {a.work.group}; keep both ends")
    actors = tuple(a for a in program.actors if a.rank in kept)
    registers = tuple(r for r in program.registers if r.rank in kept)
    orders = {q: order for q, order in program.orders.items() if q[0] in kept}
    return Program(program.name, program.num_microbatches, actors, registers, orders, program.meta)


Meeting = tuple[bool, tuple[int, ...]]
"""A channel as one of its members sees it: whether it is a p2p, and the ranks of its members, of a p2p the source first."""


def _meetings(program: Program) -> dict[int, list[Meeting]]:
    """For each rank its channels, in the order of its actors."""
    met: dict[str, Meeting] = {}
    for name, members in program.channels.items():
        is_p2p = members[0].work.kind in ("send", "recv")
        met[name] = (is_p2p, members[0].work.group if is_p2p else tuple(m.rank for m in members))
    out: dict[int, list[Meeting]] = {rank: [] for rank in program.ranks}
    for a in program.actors:
        if a.channel:
            out[a.rank].append(met[a.channel])
    return out


def _close(meetings: Mapping[int, list[Meeting]], kind_of: Mapping[int, int], rank: int, chosen: list[int]) -> None:
    """Adds `rank` and all that its channels call for."""
    open_ranks = [rank]
    while open_ranks:
        here = open_ranks.pop()
        if here in chosen:
            continue
        chosen.append(here)
        for is_p2p, ranks in dict.fromkeys(meetings[here]):
            present = {kind_of[r] for r in ranks if r in chosen or r in open_ranks}
            for r in ranks:
                if is_p2p or kind_of[r] not in present:
                    present.add(kind_of[r])
                    open_ranks.append(r)


def _looks(program: Program, cost: CostModel) -> dict[int, object]:
    """All that a rank is by itself, with its actors and registers by their place among its own."""
    number: dict[str, int] = {}
    registers: dict[int, list[object]] = {rank: [] for rank in program.ranks}
    for r in program.registers:
        number[r.name] = len(registers.setdefault(r.rank, []))
        registers[r.rank].append((r.nbytes, r.clock, r.credits, r.initial, r.memory))
    actors: dict[int, list[object]] = {rank: [] for rank in program.ranks}
    place: dict[str, int] = {}
    for a in program.actors:
        place[a.name] = len(actors[a.rank])
        uses = tuple(tuple(map(number.__getitem__, use)) for use in (a.reads, a.writes, a.updates, a.waits))
        actors[a.rank].append((a.queue, a.clock, a.work.kind, cost.work_s(a.work, a.rank), len(a.work.group), uses))
    orders: dict[int, list[object]] = {rank: [] for rank in program.ranks}
    for (rank, queue), order in sorted(program.orders.items()):
        if order:
            orders[rank].append((queue, tuple((place[name], m) for name, m in order)))
    return {rank: (tuple(actors[rank]), tuple(registers[rank]), tuple(orders[rank])) for rank in program.ranks}


def _partners(meetings: Sequence[Meeting], label: Mapping[int, int]) -> object:
    """The labels of those whom a rank meets: of a p2p in order, of a collective as a multiset."""
    seen: dict[Meeting, tuple[int, ...]] = {}
    for meeting in meetings:
        if meeting not in seen:
            labels = [label[r] for r in meeting[1]]
            seen[meeting] = tuple(labels if meeting[0] else sorted(labels))
    return tuple(seen[m] for m in meetings)


def _numbered(looks: Mapping[int, object]) -> dict[int, int]:
    numbers: dict[object, int] = {}
    return {rank: numbers.setdefault(look, len(numbers)) for rank, look in looks.items()}

"""Ranks that do the same: one of each kind is simulated for all of them.

A collective is priced by its whole `work.group`, whoever of it is present, and its members are of few kinds; so a Program that holds one rank of each kind,
and of every p2p both ends, runs like the whole as long as ranks of one kind keep in step. They do: they start alike, and all that they ever wait for is of one
kind. A folded Program is for the simulator alone: its collectives miss members, so `check()` refuses it; check the whole, or trust the lowering.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ir.errors import ProgramError
from ir.program import Actor, Program
from simulator.cost import CostModel


def kinds(program: Program, cost: CostModel) -> tuple[tuple[int, ...], ...]:
    """The ranks in classes that cannot be told apart: the same work at the same prices in the same orders, on the same registers, with partners that are alike.

    Classes are refined by the classes of their partners until nothing changes, and stand in order of their first rank.
    """
    names = {rank: _local_names(program, rank) for rank in program.ranks}
    label = _numbered({rank: _looks(program, cost, rank, names[rank]) for rank in program.ranks})
    while True:
        refined = _numbered({rank: (label[rank], _partners(program, rank, label)) for rank in program.ranks})
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
    chosen: list[int] = []
    for ranks in classes:
        if not any(kind_of[r] == kind_of[ranks[0]] for r in chosen):
            _close(program, kind_of, ranks[0], chosen)
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


def _close(program: Program, kind_of: dict[int, int], rank: int, chosen: list[int]) -> None:
    """Adds `rank` and all that its channels call for."""
    open_ranks = [rank]
    while open_ranks:
        here = open_ranks.pop()
        if here in chosen:
            continue
        chosen.append(here)
        for members in _channels_of(program, here):
            if members[0].work.kind in ("send", "recv"):
                open_ranks += [m.rank for m in members]
                continue
            present = {kind_of[m.rank] for m in members if m.rank in chosen or m.rank in open_ranks}
            for m in members:
                if kind_of[m.rank] not in present:
                    present.add(kind_of[m.rank])
                    open_ranks.append(m.rank)


def _channels_of(program: Program, rank: int) -> list[tuple[Actor, ...]]:
    return [program.channels[a.channel] for a in program.actors if a.rank == rank and a.channel]


def _local_names(program: Program, rank: int) -> dict[str, int]:
    """Actors and registers of a rank by their place in the program."""
    actors = {a.name: i for i, a in enumerate(a for a in program.actors if a.rank == rank)}
    registers = {r.name: -1 - i for i, r in enumerate(r for r in program.registers if r.rank == rank)}
    return actors | registers


def _looks(program: Program, cost: CostModel, rank: int, names: dict[str, int]) -> object:
    actors = tuple(
        (a.queue, a.clock, a.work.kind, cost.work_s(a.work, rank), len(a.work.group), *(tuple(names[r] for r in use) for use in (a.reads, a.writes, a.updates)))
        for a in program.actors
        if a.rank == rank
    )
    registers = tuple((r.nbytes, r.clock, r.credits, r.initial, r.memory) for r in program.registers if r.rank == rank)
    orders = tuple((q[1], tuple((names[name], m) for name, m in order)) for q, order in sorted(program.orders.items()) if q[0] == rank)
    return actors, registers, orders


def _partners(program: Program, rank: int, label: dict[int, int]) -> object:
    """For each channel of the rank the labels of its members: of a p2p in order, of a collective as a multiset."""
    out: list[Sequence[int]] = []
    for members in _channels_of(program, rank):
        labels = [label[m.rank] for m in members]
        out.append(labels if members[0].work.kind in ("send", "recv") else sorted(labels))
    return tuple(map(tuple, out))


def _numbered(looks: dict[int, object]) -> dict[int, int]:
    numbers: dict[object, int] = {}
    return {rank: numbers.setdefault(look, len(numbers)) for rank, look in looks.items()}

"""Proofs about a Program before it runs: it is well formed, its channels match, it lives for ever; and how many credits its order needs."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ir.errors import Deadlock, ProgramError
from ir.net import Edge, Net, consumption, edges, needed, order_edges, production, register_edges
from ir.program import CLOCKS, MEMORY_CLASSES, Actor, Program, Register
from ir.story import cycle_lines
from ir.work import KINDS


def prove(program: Program) -> None:
    """Proves that `program` is well formed, that its channels match and that it is live for ever, in time linear in its firings.

    Raises ProgramError, or Deadlock with the cycle of waits, credits that suffice and the raise that breaks this cycle.
    """
    well_formed(program)
    matched(program)
    net = program.net
    if not _has_order(net, net.waits):
        raise Deadlock(_sentence(net))


def well_formed(program: Program) -> None:
    """Raises ProgramError naming the first rule of `ir.program` that this program breaks."""
    if not _is_whole(program.num_microbatches, 1):
        raise ProgramError(f"program `{program.name}` has {program.num_microbatches!r} microbatches; give 1 or more")
    for what, names in (("actor", [a.name for a in program.actors]), ("register", [r.name for r in program.registers])):
        if len(set(names)) < len(names):
            twice = next(n for i, n in enumerate(names) if n in names[:i])
            raise ProgramError(f"two {what}s are called `{twice}`; names are unique in a program")
    for register in program.registers:
        _check_register(register)
        if register.inside:
            _check_inside(register, program)
    for actor in program.actors:
        _check_actor(program, actor)
    _check_producers(program)
    for channel, members in program.channels.items():
        _check_channel(program, channel, members)
    _check_orders(program)


def _is_whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _check_register(r: Register) -> None:
    def wrong(found: str, do: str) -> ProgramError:
        return ProgramError(f"register `{r.name}` has {found}; {do}")

    for field, low in (("credits", 1), ("initial", 0), ("nbytes", 0)):
        value = getattr(r, field)
        if not _is_whole(value, low):
            raise wrong(f"{field} {value!r}", f"give a whole number, {low} or more")
    if not all(_is_whole(n, 0) for n in r.shape):
        raise wrong(f"shape {r.shape}", "dims are whole numbers, 0 or more")
    if len(r.offsets) not in (0, r.credits):
        raise wrong(f"{len(r.offsets)} offsets for {r.credits} credits", "give one for each slot, or none")
    if r.clock not in CLOCKS:
        raise wrong(f"clock `{r.clock}`", f"legal are {', '.join(CLOCKS)}")
    if r.memory not in MEMORY_CLASSES:
        raise wrong(f"memory class `{r.memory}`", f"legal are {', '.join(MEMORY_CLASSES)}")
    if r.initial and r.clock != "step":
        raise wrong(f"{r.initial} initial items on the microbatch clock", "only step registers carry items over steps")
    if r.initial > r.credits:
        raise wrong(f"{r.initial} initial items in {r.credits} credits", f"give it {r.initial} credits")


def _check_actor(program: Program, a: Actor) -> None:
    if a.clock not in CLOCKS:
        raise ProgramError(f"actor `{a.name}` has clock `{a.clock}`; legal are {', '.join(CLOCKS)}")
    if a.work.kind not in KINDS:
        raise ProgramError(f"actor `{a.name}` has work of kind `{a.work.kind}`; legal are {', '.join(KINDS)}")
    for what, value in (("flops", a.work.flops), ("nbytes", a.work.nbytes)):
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise ProgramError(f"actor `{a.name}` has work of {value!r} {what}; give a finite number, 0 or more")
    alone = not set(program.ranks).issuperset(a.work.group)  # its partners are represented, not present
    if a.work.kind in ("collective", "send", "recv") and not a.channel and not alone:
        raise ProgramError(f"actor `{a.name}` is a {a.work.kind} without channel; name the channel that it shares with its partners")
    produced = (*a.writes, *a.updates)
    if len(set(produced)) < len(produced) or set(produced) & set(a.takes):
        twice = next(r for i, r in enumerate((*a.takes, *produced)) if i >= len(a.takes) and r in (*a.takes, *produced)[:i])
        raise ProgramError(f"actor `{a.name}` changes register `{twice}` and uses it once more; read, write and update distinct registers")
    for name in (*a.takes, *produced):
        _check_access(a, name, program.register.get(name))


def _check_inside(r: Register, program: Program) -> None:
    host = program.register.get(r.inside)
    if host is None or host.inside or host.arena or host.rank != r.rank:
        raise ProgramError(f"register `{r.name}` lies inside `{r.inside}`, which is no register with memory of its own on rank {r.rank}; name one that is")
    if r.arena or r.initial or (r.credits, host.credits) != (1, 1) or r.offset + r.nbytes > host.nbytes:
        raise ProgramError(
            f"register `{r.name}` ({r.nbytes} bytes at {r.offset}, {r.credits} credits) does not fit into `{host.name}` ({host.nbytes} bytes, {host.credits} "
            "credits); both need one credit, and neither an arena nor an initial item"
        )  # fmt: skip


def _check_access(a: Actor, name: str, register: Register | None) -> None:
    if register is None:
        raise ProgramError(f"actor `{a.name}` uses register `{name}`, which does not exist")
    if register.rank != a.rank:
        raise ProgramError(f"actor `{a.name}` on rank {a.rank} uses register `{name}` of rank {register.rank}; data changes rank through a channel alone")
    if a.clock == "step" and register.clock == "microbatch":
        raise ProgramError(f"actor `{a.name}` fires once a step, its register `{name}` holds an item each microbatch; give both one clock")
    if name in a.updates and (a.clock != "step" or not register.initial):
        raise ProgramError(
            f"actor `{a.name}` (clock {a.clock}) updates register `{name}` (initial {register.initial}); updates are made once a step, of an item that is there"
        )


def _check_producers(program: Program) -> None:
    made: dict[str, Actor] = {}
    for actor in program.actors:
        for name in (*actor.writes, *actor.updates):
            first = made.setdefault(name, actor)
            if first is not actor and not _add_up(first, actor, program.register[name]):
                raise ProgramError(
                    f"register `{name}` has two writers, `{first.name}` and `{actor.name}`; give each its own register (only what is added up "
                    f"over a step, each microbatch and on one queue, may have several writers)"
                )
    updated = {name for actor in program.actors for name in actor.updates}
    for r in program.registers:
        if r.name not in made and not r.initial:
            raise ProgramError(f"register `{r.name}` has no writer and no initial item; nobody could ever read it")
        if r.name in updated and r.credits != r.initial:
            raise ProgramError(f"register `{r.name}` is updated in place and has {r.credits} credits, {r.initial} initial items; give it as many of both")
        if r.name in updated and r.credits > 1 and not program.meta.get("stale_weights"):
            raise ProgramError(f"parameter `{r.name}` has {r.credits} credits: its readers would see stale weights; give it 1, or say so in meta stale_weights")


def _add_up(a: Actor, b: Actor, register: Register) -> bool:
    """Whether two actors may write one register: both add to the item of the step, and one queue says who opens it and who is last."""
    return register.clock == "step" and a.clock == b.clock == "microbatch" and a.queue == b.queue and not a.channel and not b.channel


def _check_channel(program: Program, channel: str, members: Sequence[Actor]) -> None:
    ranks = [a.rank for a in members]
    names = ", ".join(f"`{a.name}` (rank {a.rank})" for a in members)
    if len(members) < 2:
        raise ProgramError(f"channel `{channel}` has one member, {names}; a rendezvous needs two or more")
    if len(set(ranks)) < len(ranks):
        raise ProgramError(f"channel `{channel}` has two members on one rank: {names}")
    if len({a.clock for a in members}) > 1:
        raise ProgramError(f"channel `{channel}` joins actors of different clocks: {names}; they could not fire equally often")
    kinds = sorted({a.work.kind for a in members})
    if "collective" in kinds or not set(kinds) & {"send", "recv"}:
        if len({(a.work.kind, a.work.op, a.work.group) for a in members}) > 1:
            told = "; ".join(f"`{a.name}`: {a.work.kind} {a.work.op} of group {a.work.group}" for a in members)
            raise ProgramError(f"the members of channel `{channel}` do not do the same: {told}")
        present = sorted(set(members[0].work.group).intersection(program.ranks))  # those who are not here are represented
        if kinds == ["collective"] and present != ranks:
            raise ProgramError(f"channel `{channel}` is a collective of group {members[0].work.group}, its members are on ranks {tuple(ranks)}")
        return
    ends = {a.work.kind: a for a in members}
    if kinds != ["recv", "send"] or len(members) != 2:
        raise ProgramError(f"channel `{channel}` joins {', '.join(a.work.kind for a in members)}: {names}; a p2p is one send and one recv")
    pair = (ends["send"].rank, ends["recv"].rank)
    if any(a.work.group != pair for a in members):
        raise ProgramError(f"channel `{channel}` goes from rank {pair[0]} to rank {pair[1]}, its works say {members[0].work.group} and {members[1].work.group}")
    if members[0].work.nbytes != members[1].work.nbytes:
        raise ProgramError(f"channel `{channel}`: `{members[0].name}` moves {members[0].work.nbytes:g} bytes, `{members[1].name}` {members[1].work.nbytes:g}")


def _check_orders(program: Program) -> None:
    where: dict[tuple[str, int], tuple[int, str]] = {}
    for queue, order in program.orders.items():
        for name, m in order:
            actor = program.actor.get(name)
            if actor is None:
                raise ProgramError(f"the order of queue {queue} names actor `{name}`, which does not exist")
            if (actor.rank, actor.queue) != queue:
                raise ProgramError(f"actor `{name}` belongs to queue {(actor.rank, actor.queue)} and stands in the order of {queue}")
            if not (_is_whole(m, 0) and m < program.firings(actor)):
                raise ProgramError(f"queue {queue}: `{name}` fires {program.firings(actor)} times a step, its order has microbatch {m!r}")
            if (name, m) in where:
                raise ProgramError(f"queue {queue}: `{name}` microbatch {m} stands twice in the order")
            where[name, m] = queue
    for actor in program.actors:
        for m in range(program.firings(actor)):
            if (actor.name, m) not in where:
                raise ProgramError(f"`{actor.name}` microbatch {m} is missing in the order of queue {(actor.rank, actor.queue)}")


# ---- matching ------------------------------------------------------------------------------------------------------------------------------------------


def matched(program: Program) -> None:
    """The members of channels that meet on the same queues meet there in the same sequence; raises Deadlock at the first that do not."""
    meets: dict[tuple[Any, ...], list[str]] = {}
    for channel, members in program.channels.items():
        meets.setdefault(tuple((a.rank, a.queue) for a in members), []).append(channel)
    table = {channel: queues for queues, channels in meets.items() for channel in channels}
    sequences: dict[tuple[tuple[Any, ...], tuple[int, str]], list[tuple[str, int]]] = {}
    for queue, order in program.orders.items():
        for name, m in order:
            channel = program.actor[name].channel
            if channel:
                sequences.setdefault((table[channel], queue), []).append((channel, m))
    for queues in meets:
        first = sequences[queues, queues[0]]
        for other in queues[1:]:
            here = sequences[queues, other]
            if here != first:
                raise Deadlock(_mismatch(program, queues[0], other, first, here))


def _mismatch(program: Program, a: tuple[int, str], b: tuple[int, str], first: Sequence[tuple[str, int]], second: Sequence[tuple[str, int]]) -> str:
    at = next(i for i, (x, y) in enumerate(zip(first, second, strict=True)) if x != y)
    told = []
    for (rank, queue), (channel, m) in ((a, first[at]), (b, second[at])):
        actor = next(x for x in program.channels[channel] if (x.rank, x.queue) == (rank, queue))
        told.append(f"rank {rank} ({queue}) comes to `{actor.name}` microbatch {m} on channel `{channel}`")
    what = "collectives" if program.channels[first[at][0]][0].work.kind == "collective" else "messages"
    return f"{what} are not in the same order on both sides: as number {at} {told[0]}, {told[1]}; give both queues one order"


# ---- liveness ------------------------------------------------------------------------------------------------------------------------------------------


def _has_order(net: Net, found: Iterable[tuple[int, int, int]]) -> bool:
    """Whether one step's groups can be put in an order that respects the edges of offset 0."""
    return len(_sorted_groups(net, found, [0] * len(net.members))) == len(net.members)


def _sorted_groups(net: Net, found: Iterable[tuple[int, int, int]], priority: Sequence[int]) -> list[int]:
    """Groups in an order that respects the edges of offset 0, least priority first, as far as one exists."""
    after, before = _links(net, found)
    heap = [(priority[g], g) for g, count in enumerate(before) if not count]
    heapq.heapify(heap)
    out = []
    while heap:
        _, group = heapq.heappop(heap)
        out.append(group)
        for nxt in after[group]:
            before[nxt] -= 1
            if not before[nxt]:
                heapq.heappush(heap, (priority[nxt], nxt))
    return out


def _links(net: Net, found: Iterable[tuple[int, int, int]]) -> tuple[list[list[int]], list[int]]:
    """(groups that wait for each group in the same step, number of groups that each waits for), queue orders included."""
    after: list[list[int]] = [[] for _ in net.members]
    before = [0] * len(net.members)
    here = ((src, dst) for src, dst, offset in found if not offset)
    for src, dst in (*((e.src, e.dst) for e in order_edges(net) if not e.offset), *here):
        after[net.group[src]].append(net.group[dst])
        before[net.group[dst]] += 1
    return after, before


def _find_cycle(net: Net, found: Iterable[Edge]) -> list[Edge]:
    """A short cycle of edges of offset 0, from wait to wait, among the firings at which the queues would come to stand; empty when they would not.

    An `order` edge in it may skip firings: its dst stands behind its src, where the queue has stopped.
    """
    zero = [e for e in found if not e.offset]
    ordered = set(_sorted_groups(net, ((e.src, e.dst, 0) for e in zero if e.kind != "order"), [0] * len(net.members)))
    nodes = (node for node in range(net.num_nodes) if net.group[node] not in ordered)
    heads: dict[int, int] = {}
    for node in nodes:
        heads.setdefault(net.queue[node], node)
    waits = _waits_of_heads(net, heads, [e for e in zero if net.group[e.src] not in ordered])
    if not waits:
        return []
    queue, walked = min(waits), list[int]()
    while queue not in walked:
        walked.append(queue)
        queue = waits[queue][0][1]
    ways = [_way_back(waits, q) for q in walked[walked.index(queue) :]]
    return min(ways, key=len)


Wait = tuple[tuple[Edge, ...], int]
"""(edges from a queue's head to the head of another queue, or of the same, that it waits for; that queue)."""


def _waits_of_heads(net: Net, heads: Mapping[int, int], found: Iterable[Edge]) -> dict[int, list[Wait]]:
    by_group: dict[int, list[Edge]] = {net.group[node]: [] for node in heads.values()}
    for edge in found:
        if edge.kind != "order" and net.group[edge.dst] in by_group:
            by_group[net.group[edge.dst]].append(edge)
    out: dict[int, list[Wait]] = {}
    for queue, node in heads.items():
        late = [m for m in net.members[net.group[node]] if heads[net.queue[m]] != m]
        causes = [*by_group[net.group[node]], *(Edge(heads[net.queue[m]], m, 0, "order") for m in late)]
        out[queue] = []
        for edge in sorted(causes, key=lambda e: e.dst != node):
            other = net.queue[edge.src]
            behind = () if heads[other] == edge.src else (Edge(heads[other], edge.src, 0, "order"),)
            out[queue].append(((edge, *behind), other))
    return out


def _way_back(waits: Mapping[int, Sequence[Wait]], goal: int) -> list[Edge]:
    """The edges of the fewest waits that lead from this queue back to it."""
    line: deque[tuple[int, tuple[Edge, ...]]] = deque([(goal, ())])
    seen = set[int]()
    while line:
        queue, way = line.popleft()
        for path, other in waits[queue]:
            if other == goal:
                return [*way, *path]
            if other not in seen:
                seen.add(other)
                line.append((other, (*way, *path)))
    raise AssertionError(f"queue {goal} is on no cycle of waits")


def _sentence(net: Net) -> str:
    cycle = _find_cycle(net, edges(net))
    lines = [f"program `{net.program.name}` would stand still: these wait for each other", *cycle_lines(net, cycle)]
    return "\n".join([*lines, *_advice(net, cycle)])


def _advice(net: Net, cycle: Sequence[Edge]) -> Iterator[str]:
    """What would help: the single raise that breaks this cycle, and credits that suffice for the whole order."""
    try:
        enough = _sufficient(net)
    except Deadlock:
        yield "  no number of credits helps: the orders of the queues contradict each other"
        return
    registers = net.program.registers
    short = {i: enough[i] for i, r in enumerate(registers) if enough[i] > r.credits}
    raises = []
    for i in dict.fromkeys(e.register for e in cycle if e.kind == "credit"):
        credits, live = _least_raise(net, i, short.get(i, registers[i].credits + 1), short)
        raises.append((not live, (credits - registers[i].credits) * registers[i].nbytes, registers[i].name, credits, live))
    if raises:
        _, _, name, credits, live = min(raises)
        yield f"  {credits} credits on {name} would {'let this order run for ever' if live else 'break this cycle; others remain'}"
    if short and not (raises and min(raises)[4]):
        yield f"  these suffice for this order: {', '.join(f'{registers[i].name} {n}' for i, n in short.items())}"


def _least_raise(net: Net, index: int, most: int, short: Mapping[int, int]) -> tuple[int, bool]:
    """(credits of this register, whether they alone make the program live): the least that do, or else `most`."""
    others = [e for e in edges(net) if e.register != index]
    low, high = net.program.registers[index].credits + 1, max(most, net.program.registers[index].credits + 1)
    if not _has_order(net, needed(net, [*others, *register_edges(net, index, high)])):
        return high, False
    while low < high:
        middle = (low + high) // 2
        if _has_order(net, needed(net, [*others, *register_edges(net, index, middle)])):
            high = middle
        else:
            low = middle + 1
    return low, True


def sufficient_credits(program: Program) -> Mapping[str, int]:
    """For each register, credits with which this order lives for ever: the most slots in use at once in one run of a step without limits.

    The run is the one in which each firing that opens an item comes as late as what needs it allows. Registers that are updated in place keep theirs. Where
    producer and readers share a queue the number is the least possible; over several queues it suffices, and another run might do with less of one register.
    Raises Deadlock where no number of credits helps.
    """
    well_formed(program)
    matched(program)
    found = _sufficient(program.net)
    return {r.name: found[i] for i, r in enumerate(program.registers)}


def _sufficient(net: Net) -> list[int]:
    kept = [e for e in edges(net) if e.kind != "credit"]
    links = needed(net, kept)
    priority = _lateness(net, links)
    order = _sorted_groups(net, links, priority)
    if len(order) < len(net.members):
        cycle = _find_cycle(net, kept)
        title = f"program `{net.program.name}` would stand still with any number of credits: these wait for each other"
        raise Deadlock("\n".join([title, *cycle_lines(net, cycle)]))
    moment = [0] * len(net.members)
    for i, group in enumerate(order):
        moment[group] = i
    return [_peak(net, i, r, moment) for i, r in enumerate(net.program.registers)]


def _lateness(net: Net, links: Iterable[tuple[int, int, int]]) -> list[int]:
    """Priorities by which what opens no item comes at once, and the rest in order of its longest way to the end of the step."""
    links = list(links)
    after, _ = _links(net, links)
    depth = [0] * len(net.members)
    for group in reversed(_sorted_groups(net, links, [0] * len(net.members))):
        depth[group] = max((depth[g] + 1 for g in after[group]), default=0)
    opening = set[int]()
    for i, producers in enumerate(net.producers):
        if producers:
            opening.update(net.group[n] for n in production(net, i)[0])
    most = max(depth, default=0)
    return [most - d if g in opening else -1 for g, d in enumerate(depth)]


def _peak(net: Net, index: int, register: Register, moment: Sequence[int]) -> int:
    """Slots, taken in turn, that the items of one step occupy at most when groups fire at these moments."""
    producers = net.producers[index]
    if not producers or register.name in net.program.actors[producers[0]].updates:
        return register.credits
    if not net.readers[index]:
        return max(1, register.initial)
    opens = [moment[net.group[n]] for n in production(net, index)[0]]
    ends = [consumption(net, index, reader)[1] for reader in net.readers[index]]
    closes = [max(moment[net.group[nodes[p]]] for nodes in ends) for p in range(len(opens))]
    if register.clock == "step":
        return max(1, register.initial + (opens[0] < closes[0]))
    peak, oldest = 1, 0
    for p, opened in enumerate(opens):
        while oldest < p and closes[oldest] < opened:
            oldest += 1
        peak = max(peak, p - oldest + 1)
    return peak

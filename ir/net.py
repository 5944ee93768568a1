"""The marked graph of a Program: which firing waits for which, and for the one of how many steps before.

A frozen Program makes no choice, so everything that its registers and orders mean can be said in edges over one step's firings: `dst` of step k waits until
`src` of step k - `offset` has finished. Four kinds of edge: `order` (the firing before in the queue), `item` (the producer's firing that publishes the item),
`credit` (the reader's firing that frees the slot), `update` (the same, of a register that is changed in place). The firings of one channel and microbatch
are one *group*: they start together. Actors that write one step register together, on one queue, are its producers: one of them opens it, one publishes.

A register's slots are taken in turn: its n-th item, counted as the producer opens them, lies in slot n % credits, and may be opened once the item that lay
there is released by every reader. An update in step k opens item k + initial, so with credits = initial it waits for the readers of item k.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from ir.program import Program, Queue, Register


class Edge(NamedTuple):
    """`dst` of step k waits until `src` of step k - `offset` has finished; `register` is an index, -1 for order."""

    src: int
    dst: int
    offset: int
    kind: str
    register: int = -1


@dataclass(frozen=True)
class Net:
    """A Program in integers, not to be changed. A *node* is one firing of a step; nodes of a queue are consecutive, in the queue's order.

    `start[q] .. start[q + 1]`: nodes of queue q. `actor`, `microbatch`, `queue`, `group`: by node. `nodes`: by actor, then microbatch; empty where the actor's
    rank is not held. `members`: nodes of every group, in order of rank. `producers` and `readers`: actors, by register.
    """

    program: Program
    queues: tuple[Queue, ...]
    start: list[int]
    actor: list[int]
    microbatch: list[int]
    queue: list[int]
    group: list[int]
    nodes: list[list[int]]
    members: list[list[int]]
    producers: list[list[int]]
    readers: list[list[int]]

    @property
    def num_nodes(self) -> int:
        return len(self.actor)

    def next_in_queue(self, node: int) -> tuple[int, int]:
        """(the node after this one in its queue, 1 where that is in the next step)."""
        queue = self.queue[node]
        return (node + 1, 0) if node + 1 < self.start[queue + 1] else (self.start[queue], 1)

    @cached_property
    def waits(self) -> list[tuple[int, int, int]]:
        """(src, dst, offset) of all edges that the orders of the queues do not already imply."""
        found = (_register_edges(self, i, r.credits) for i, r in enumerate(self.program.registers))
        return needed(self, chain.from_iterable(found))


def compile_net(program: Program, ranks: Collection[int] | None = None) -> Net:
    """The integers of a well-formed program, or of the part of it that lies on `ranks`."""
    held = [ranks is None or a.rank in ranks for a in program.actors]
    index = {a.name: i for i, a in enumerate(program.actors)}
    nodes = [[-1] * program.firings(a) if here else [] for a, here in zip(program.actors, held, strict=True)]
    queues = tuple(q for q, order in program.orders.items() if order and (ranks is None or q[0] in ranks))
    start, actor, microbatch, queue = [0], list[int](), list[int](), list[int]()
    for i, name in enumerate(queues):
        for firing, m in program.orders[name]:
            a = index[firing]
            nodes[a][m] = len(actor)
            actor.append(a)
            microbatch.append(m)
            queue.append(i)
        start.append(len(actor))
    group, members = _groups(program, actor, microbatch)
    producers, readers = _users(program, held)
    return Net(program, queues, start, actor, microbatch, queue, group, nodes, members, producers, readers)


def _groups(program: Program, actor: list[int], microbatch: list[int]) -> tuple[list[int], list[list[int]]]:
    group, members = list[int](), list[list[int]]()
    met: dict[tuple[str, int], int] = {}
    for node, a in enumerate(actor):
        channel = program.actors[a].channel
        g = met.setdefault((channel, microbatch[node]), len(members)) if channel else len(members)
        if g == len(members):
            members.append([])
        group.append(g)
        members[g].append(node)
    for nodes in members:
        if len(nodes) > 1:
            nodes.sort(key=lambda n: program.actors[actor[n]].rank)
    return group, members


def _users(program: Program, held: list[bool]) -> tuple[list[list[int]], list[list[int]]]:
    index = {r.name: i for i, r in enumerate(program.registers)}
    producers, readers = [list[int]() for _ in index], [list[int]() for _ in index]
    for i, actor in enumerate(program.actors):
        if held[i]:
            for name in dict.fromkeys(actor.takes):
                readers[index[name]].append(i)
            for name in (*actor.writes, *actor.updates):
                producers[index[name]].append(i)
    return producers, readers


def order_edges(net: Net) -> Iterator[Edge]:
    """Every firing waits for the one before it in its queue; the first, for the last of the step before."""
    for node in range(net.num_nodes):
        after, offset = net.next_in_queue(node)
        yield Edge(node, after, offset, "order")


def register_edges(net: Net, index: int, credits: int) -> Iterator[Edge]:
    """The item and credit edges of one register with this number of credits.

    Without readers there are none: an item that nobody reads is released as it is published, on the producer's own queue.
    """
    return map(Edge._make, _register_edges(net, index, credits))


def _register_edges(net: Net, index: int, credits: int) -> Iterator[tuple[int, int, int, str, int]]:
    register, producers = net.program.registers[index], net.producers[index]
    if not producers:
        return
    opens, publishes = production(net, index)
    width = len(opens)
    kind = "update" if register.name in net.program.actors[producers[0]].updates else "credit"
    for needs, releases in (consumption(net, index, reader) for reader in net.readers[index]):
        for p in range(width):
            yield publishes[p], needs[p], register.initial, "item", index
        for p in range(width):
            steps, freed = divmod(p + register.initial - credits, width)
            yield releases[freed], opens[p], -steps, kind, index


def production(net: Net, index: int) -> tuple[list[int], list[int]]:
    """(nodes that open, nodes that publish) the items of one step, in the order in which they are opened."""
    made = [node for producer in net.producers[index] for node in net.nodes[producer]]
    if net.program.registers[index].clock == "step":
        return [min(made)], [max(made)]
    opens = sorted(made)
    return opens, opens


def consumption(net: Net, index: int, reader: int) -> tuple[list[int], list[int]]:
    """(nodes of this reader that first need, nodes that last hold) the items of one step, in the order in which they are opened."""
    read = net.nodes[reader]
    if net.program.registers[index].clock == "step":
        return [min(read)], [max(read)]
    needs = [read[net.microbatch[node]] for node in production(net, index)[0]]
    return needs, needs


def edges(net: Net, credits: Mapping[int, int] | None = None) -> Iterator[Edge]:
    """All edges of the program, labelled; `credits` replaces those of single registers, by index."""
    yield from order_edges(net)
    for i, register in enumerate(net.program.registers):
        yield from register_edges(net, i, register.credits if credits is None else credits.get(i, register.credits))


def needed(net: Net, found: Iterable[tuple[int, int, int, str, int]]) -> list[tuple[int, int, int]]:
    """(src, dst, offset) of the edges that the orders of the queues do not already imply.

    An edge within a queue is implied unless it points backwards in one step. From one queue to another, a firing need not wait for what an earlier firing
    of its own queue has waited for: each keeps its edges in rising order of src. Order edges themselves are left out.
    """
    between: dict[tuple[int, int], dict[int, int]] = {}
    out, queue = list[tuple[int, int, int]](), net.queue
    lengths = [b - a for a, b in pairwise(net.start)]
    for src, dst, offset, kind, _ in found:
        a, b = queue[src], queue[dst]
        if a == b:
            if src >= dst and offset <= 0 and kind != "order":
                out.append((src, dst, offset))
        elif kind != "order":
            late = src - offset * lengths[a]
            keep = between.get((a, b))
            if keep is None:
                between[a, b] = {dst: late}
            elif keep.get(dst, late) <= late:
                keep[dst] = late
    for (a, _), keep in between.items():
        start, length = net.start[a], net.start[a + 1] - net.start[a]
        latest = max(keep.values()) - length
        for dst in sorted(keep):
            if keep[dst] > latest:
                latest = keep[dst]
                steps, place = divmod(latest - start, length)
                out.append((start + place, dst, -steps))
    return out


def awaited(net: Net) -> list[list[tuple[int, int]]]:
    """For each node the (src, offset) in other queues of its rank that it waits for, as far as no queue's order implies them."""
    out: list[list[tuple[int, int]]] = [[] for _ in range(net.num_nodes)]
    for src, dst, offset in net.waits:
        out[dst].append((src, offset))
    return out


def item_number(net: Net, index: int, register: Register, node: int, step: int, produces: bool) -> int:
    """The number of the item that this firing of this step meets, counted as the producer opens them."""
    if register.clock == "step":
        return step + (register.initial if produces else 0)
    (producer,) = net.producers[index]
    made = sorted(net.nodes[producer])
    return step * len(made) + made.index(net.nodes[producer][net.microbatch[node]])


def opening(program: Program) -> list[int]:
    """By actor the microbatch of its first firing in a step; -1 where the item of the step that it writes is opened by another actor."""
    first: dict[str, int] = {}
    for order in program.orders.values():
        for name, microbatch in order:
            first.setdefault(name, microbatch)
    held = {w: program.opens[w][0] for w in program.written if program.register[w].clock == "step" and w in program.opens}
    return [-1 if any(held.get(w, a.name) != a.name for w in a.writes) else first.get(a.name, 0) for a in program.actors]

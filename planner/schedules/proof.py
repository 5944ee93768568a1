"""Whether orders can run: written out as a small Program without bytes, whose `check` proves it or names who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ir.errors import Deadlock, PlanError
from ir.machine import Machine
from ir.program import Actor, Firing, Program, Queue, Register
from ir.work import Work
from planner.schedules.slot import Orders, Slot, gives, waits_for
from planner.schedules.text import MESSAGES, Message, Table, passes

SENDS = ("stream", "blocking", "buffered")
"""How messages run. stream: one after the other beside the passes, as on one communicator; blocking: in one line with the passes; buffered: each by itself. In
the first two a send waits for its receive."""

Item = tuple[str, int, int]


def check_orders(
    table: Table | Orders, rank_of: Callable[[int], int] | None, num_microbatches: int, sends: str = "stream", copies: int = 1, pieces: int = 1
) -> Orders:  # fmt: skip
    """The passes of `table`, proved: every stage runs F and then B, or I and then W, of every microbatch once, on its rank, and no rank waits for ever.

    `rank_of` says where stages lie; without it every microbatch of a stage lies where its forward stands. `copies`: so many pipelines run the microbatches
    between them, the stages of each counting on from those of the one before. `pieces`: so many microbatches in a row are the pieces of one sequence. Raises
    PlanError naming the pass that is dropped, doubled or misplaced, or Deadlock with the cycle of waits.
    """
    orders = passes(table)
    _once(orders, num_microbatches, copies)
    _in_place(orders, rank_of)
    program_of(table, sends, copies, pieces).check()
    return orders


def _once(orders: Orders, num_microbatches: int, copies: int) -> None:
    at: dict[Slot, tuple[int, int]] = {}
    for rank, order in enumerate(orders):
        for number, slot in enumerate(order, 1):
            if slot.microbatch >= num_microbatches:
                raise PlanError(f"rank {rank} runs {slot}; there are {num_microbatches} microbatches, 0 to {num_microbatches - 1}")
            if slot in at:
                raise PlanError(f"{slot} stands twice: as number {at[slot][1]} of rank {at[slot][0]} and as number {number} of rank {rank}")
            at[slot] = rank, number
    if not at:
        raise PlanError("the table runs nothing; give one line a rank, as in `0F0,0F1,0B0,0B1`")
    num_stages = (1 + max(slot.stage for slot in at)) // copies
    pipes: list[set[int]] = [set() for _ in range(num_microbatches)]
    for slot in at:
        pipes[slot.microbatch].add(slot.stage // num_stages)
    for m, pipe in enumerate(pipes):
        if len(pipe) > 1:
            raise PlanError(f"microbatch {m} runs through copies {', '.join(map(str, sorted(pipe)))} of the pipeline; each microbatch takes one of them")
        first = num_stages * min(pipe, default=0)
        for stage in range(first, first + num_stages):
            _one_pass([k for k in "FIWB" if Slot(stage, k, m) in at], stage, m)


def _one_pass(kinds: list[str], stage: int, m: int) -> None:
    if "B" in kinds and len(kinds) > 2:
        raise PlanError(f"stage {stage} runs microbatch {m} as {', '.join(kinds)}; B is the whole backward, I and W are its two parts")
    if kinds not in (["F", "B"], ["F", "I", "W"]):
        missing = "F" if "F" not in kinds else "W" if "I" in kinds else "I" if "W" in kinds else "B"
        raise PlanError(f"no rank runs {Slot(stage, missing, m)}; every stage runs F and B, or F, I and W, of every microbatch once")


def _in_place(orders: Orders, rank_of: Callable[[int], int] | None) -> None:
    forward = {(s.stage, s.microbatch): rank for rank, order in enumerate(orders) for s in order if s.kind == "F"}
    for rank, order in enumerate(orders):
        for slot in order:
            right = rank_of(slot.stage) if rank_of else forward[slot.stage, slot.microbatch]
            if rank != right:
                raise PlanError(f"{slot} stands on rank {rank}; stage {slot.stage} lies on rank {right}")


def program_of(table: Table | Orders, sends: str = "stream", copies: int = 1, pieces: int = 1) -> Program:
    """The Program of a table: an actor that fires once a step for every pass, send and receive, and registers without bytes for what they hand on.

    A message that the table does not list runs by itself. Raises PlanError where it lists one that no pass waits for, or one end of it alone.
    """
    return _Writer(table, sends, copies, pieces).program("orders")


class _Writer:
    def __init__(self, table: Table | Orders, sends: str, copies: int, pieces: int) -> None:
        if sends not in SENDS:
            raise PlanError(f"sends are {', '.join(SENDS)}, not `{sends}`")
        self.table, self.sends, self.pieces = table, sends, pieces
        self.orders = passes(table)
        self.num_stages = (1 + max(s.stage for order in self.orders for s in order)) // copies
        self.maker: dict[Item, int] = {g: rank for rank, order in enumerate(self.orders) for g in map(gives, order) if g}
        self.needs: list[tuple[int, Slot, Item]] = [
            (rank, slot, item) for rank, order in enumerate(self.orders) for slot in order for item in self._waits(slot)
        ]
        self.used = {item for _, _, item in self.needs}
        self.hops: dict[str, tuple[Item, int, int]] = {}
        for rank, slot, item in self.needs:
            if self.maker[item] != rank:
                self.hops[_channel(slot)] = (item, self.maker[item], rank)
        self.listed = {str(a): rank for rank, row in enumerate(table) for a in row if isinstance(a, Message) and a.kind in MESSAGES}

    def _waits(self, slot: Slot) -> tuple[Item, ...]:
        return tuple(item for item in waits_for(slot, self.num_stages, self.pieces) if item in self.maker)

    def program(self, name: str) -> Program:
        self._check_messages()
        actors, registers = self._passes()
        for channel, (item, src, dst) in self.hops.items():
            for rank, kind, end in ((src, "send", 0), (dst, "recv", 1)):
                who = channel.split(">")[end]
                reads, writes = ((_at(item, src),), ()) if kind == "send" else ((), (_at(item, dst),))
                actors.append(Actor(who, rank, self._queue(who), "step", Work(kind, kind, "float32", group=(src, dst)), reads, writes, channel=channel))
            registers.append(_register(item, dst))
        return Program(name, 1, tuple(actors), tuple(registers), self._orders(actors))

    def _passes(self) -> tuple[list[Actor], list[Register]]:
        actors, registers = [], []
        for rank, order in enumerate(self.orders):
            for slot in order:
                gift = gives(slot)
                writes = (_at(gift, rank),) if gift in self.used and gift is not None else ()
                reads = tuple(_at(item, rank) for item in self._waits(slot))
                actors.append(Actor(str(slot), rank, "compute", "step", Work("compute", "pass", "float32"), reads, writes))
                registers += [_register(gift, rank)] if writes and gift is not None else []
        return actors, registers

    def _queue(self, message: str) -> str:
        if message not in self.listed or self.sends == "buffered":
            return message
        return "p2p" if self.sends == "stream" else "compute"

    def _orders(self, actors: Sequence[Actor]) -> Mapping[Queue, tuple[Firing, ...]]:
        known = {a.name: a for a in actors}
        found: dict[Queue, list[Firing]] = {}
        for rank, row in enumerate(self.table):
            for action in row:
                if str(action) in known:
                    found.setdefault((rank, known[str(action)].queue), []).append((str(action), 0))
        for a in actors:
            found.setdefault((a.rank, a.queue), [(a.name, 0)])
        return {queue: tuple(order) for queue, order in found.items()}

    def _check_messages(self) -> None:
        seen: set[str] = set()
        ends = {who: (channel, rank) for channel, (_, *ranks) in self.hops.items() for who, rank in zip(channel.split(">"), ranks, strict=True)}
        for rank, row in enumerate(self.table):
            for action in map(str, (a for a in row if isinstance(a, Message) and a.kind in MESSAGES)):
                if action not in ends:
                    raise PlanError(f"rank {rank} lists {action}, which no pass waits for; leave it out")
                if ends[action][1] != rank:
                    raise PlanError(f"{action} stands on rank {rank}; it belongs on rank {ends[action][1]}")
                if action in seen:
                    raise PlanError(f"{action} stands twice on rank {rank}; a message is sent and received once")
                seen.add(action)
        for action in ends:
            if seen and action not in seen:
                raise PlanError(f"the table lists messages, and {action} is not among them; list every send and receive, or none")


def _channel(slot: Slot) -> str:
    """The two ends of the message that brings a pass what it waits for from the stage before or after."""
    if slot.kind == "F":
        return f"{slot.stage - 1}SEND_F{slot.microbatch}>{slot.stage}RECV_F{slot.microbatch}"
    return f"{slot.stage + 1}SEND_B{slot.microbatch}>{slot.stage}RECV_B{slot.microbatch}"


def _at(item: Item, rank: int) -> str:
    return f"{item[0]}{item[1]}.{item[2]}@{rank}"


def _register(item: Item, rank: int) -> Register:
    return Register(_at(item, rank), rank, (), "float32", 0, "step")


def with_messages(orders: Orders, copies: int = 1, pieces: int = 1) -> Table:
    """The orders with every send right after the pass that makes it possible, and its receive listed at the same moment on the other rank.

    Both ends join their lists together, in an order in which everything can run: so no two lists can contradict each other. Raises Deadlock where none can.

    >>> from planner.schedules.text import read, write
    >>> print(write(with_messages(read("0F0,0B0\\n1F0,1B0"))), end="")
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    """
    program = program_of(orders, "buffered", copies, pieces).check()
    slots = {str(s): s for order in orders for s in order}
    ends = {a.name: _message(a.name) for a in program.actors if a.channel}
    machine = Machine(program, steps=1)
    rows: list[list[Slot | Message]] = [[] for _ in orders]
    wave = list(machine.startable)
    while wave:
        actions = [machine.start(queue) for queue in wave]
        for a in (machine.actors[action.actor] for action in actions):
            if a.name in slots:
                rows[a.rank].append(slots[a.name])
            elif a.work.kind == "send":
                rows[a.rank].append(ends[a.name])
                rows[a.work.group[1]].append(ends[a.channel.split(">")[1]])
        wave = sorted(queue for action in actions for queue in machine.finish(action))
    if not machine.done:
        raise Deadlock("the orders stand still")
    return tuple(tuple(row) for row in rows)


def _message(name: str) -> Message:
    head, kind, _ = next(name.partition(k) for k in MESSAGES if k in name)
    return Message(int(head), kind, int(name.rpartition(kind)[2]))

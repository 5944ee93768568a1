"""What a Program means: the one reader of order, readiness and credits, without clock, thread or device.

The Machine plays the marked graph of `ir.net`. A firing is *startable* when it heads its queue, its items are there, its slots are free and, on a channel,
all of this holds for every member. That can never be taken back, since nothing competes for anything: so drivers hear of each startable queue exactly once,
from `startable` at the beginning, then from the `finish` (or `arrive`) that made it so.

The members of a channel become startable together. Each is started and finished by itself, by the thread that drives its queue, once its part of the transfer
is over; what it publishes and frees then are registers of its own rank. The firing after it in the same queue follows its finish, not that of its partners.

A Machine may hold only some `ranks`. When all its members of a channel are ready but others are absent, it puts an `Arrival` for each of its members into
`outbox`; the driver carries it to the machines of the other members and hands it to their `arrive`. Arrivals of one member must be delivered once each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import chain
from typing import NamedTuple

from ir.errors import ProgramError
from ir.net import awaited, compile_net, item_number
from ir.program import Actor, Program, Queue
from ir.story import tell


class Action(NamedTuple):
    """One firing of one step: `actor` indexes `machine.actors`; the microbatch of a step actor is 0."""

    actor: int
    step: int
    microbatch: int


class Arrival(NamedTuple):
    """The member of `channel` on `rank` is ready for this firing."""

    channel: str
    step: int
    microbatch: int
    rank: int


class Machine:
    """Performs `steps` steps (for ever where None) of a program that passed `check()`, or of its part on `ranks`.

    Queues and actors are integers here: `queues[q]` is the (rank, name), `queue_index` leads back; `actors[a]` is the Actor. Not thread-safe: hold a lock.

    >>> from ir.work import Work
    >>> from ir.program import Register
    >>> work = Work("compute", "scale", "float32")
    >>> x = Register("x", 0, (4,), "float32", 16)
    >>> make, use = Actor("make", 0, "load", "microbatch", work, writes=("x",)), Actor("use", 0, "compute", "microbatch", work, reads=("x",))
    >>> order = {(0, "load"): (("make", 0), ("make", 1)), (0, "compute"): (("use", 0), ("use", 1))}
    >>> machine = Machine(Program("tiny", 2, (make, use), (x,), order).check(), steps=1)
    >>> ready = list(machine.startable)
    >>> while ready:
    ...     action = machine.start(ready.pop())
    ...     print(machine.actors[action.actor].name, action.microbatch, "slot", machine.slot(action, "x"))
    ...     ready += machine.finish(action)
    make 0 slot 0
    use 0 slot 0
    make 1 slot 0
    use 1 slot 0
    >>> machine.done
    True
    """

    def __init__(self, program: Program, steps: int | None = None, ranks: Collection[int] | None = None) -> None:
        if steps is not None and steps < 0:
            raise ProgramError(f"a machine cannot perform {steps} steps; give 0 or more, or None for ever")
        self.program = program
        self.steps = steps
        self.net = net = program.net if ranks is None else compile_net(program, ranks)
        self.actors: tuple[Actor, ...] = program.actors
        self.queues: tuple[Queue, ...] = net.queues
        self.queue_index: dict[Queue, int] = {q: i for i, q in enumerate(net.queues)}
        self.outbox: deque[Arrival] = deque()
        self._first, self._end = net.start[:-1], net.start[1:]
        self._actor, self._microbatch, self._queue, self._nodes = net.actor, net.microbatch, net.queue, net.nodes
        self._head = list(self._first)
        self._lap = [0] * len(self.queues)
        self._ready = [False] * len(self.queues)
        self._running = [-1] * len(self.queues)
        self._left = -1 if steps is None else steps * net.num_nodes
        self._register_index = {r.name: i for i, r in enumerate(program.registers)}
        self._awaited: list[list[tuple[int, int]]] | None = None
        self._slots: dict[tuple[int, str], tuple[int, int, int]] = {}
        self._compile_tokens()
        self._compile_absent()
        woken: list[int] = []
        for group, missing in enumerate(self._missing):
            if not missing:
                self._satisfied(group, woken)
        self.startable: tuple[int, ...] = tuple(woken)
        """Queues that can start at the beginning."""

    def _compile_tokens(self) -> None:
        """Tokens on the edges that no queue order implies; a queue's own order is one edge more for each firing."""
        net = self.net
        self._tokens: list[int] = []
        self._out: list[list[tuple[int, int]]] = [[] for _ in range(net.num_nodes)]
        self._in: list[list[int]] = [[] for _ in net.members]
        self._missing = [0] * len(net.members)
        self._started = [0] * len(net.members)
        order = ((node, *net.next_in_queue(node)) for node in range(net.num_nodes))
        for src, dst, offset in chain(order, net.waits):
            group, edge = net.group[dst], len(self._tokens)
            self._tokens.append(offset)
            self._out[src].append((edge, group))
            self._in[group].append(edge)
            self._missing[group] += not offset
        self._queues_of = [[net.queue[node] for node in nodes] for nodes in net.members]

    def _compile_absent(self) -> None:
        """For groups with members elsewhere: the arrivals of each absent rank that are not used up yet."""
        net, self._absent = self.net, dict[int, dict[int, int]]()
        self._waiting: set[int] = set()
        self._group_of: dict[tuple[str, int], int] = {}
        for group, nodes in enumerate(net.members):
            channel = self.actors[net.actor[nodes[0]]].channel
            if channel and len(self.program.channels[channel]) > len(nodes):
                here = {self.actors[net.actor[n]].rank for n in nodes}
                self._absent[group] = {a.rank: 0 for a in self.program.channels[channel] if a.rank not in here}
                self._group_of[channel, net.microbatch[nodes[0]]] = group

    # ---- what a driver asks ----------------------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every firing of every step has finished."""
        return not self._left

    def head(self, queue: int) -> Action | None:
        """The action that runs on this queue, or is next on it; None when the queue has finished its last step."""
        return None if self._lap[queue] == self.steps else self._action(self._head[queue], self._lap[queue])

    def can_start(self, queue: int) -> bool:
        return self._ready[queue]

    def start(self, queue: int) -> Action:
        """Starts the head of a startable queue."""
        if not self._ready[queue]:
            raise ProgramError(f"queue {self.queues[queue]} cannot start anything now; {self._state(queue)}")
        self._ready[queue] = False
        node = self._head[queue]
        self._running[queue] = node
        return Action(self._actor[node], self._lap[queue], self._microbatch[node])

    def finish(self, action: Action) -> list[int]:
        """Publishes and frees what this running action published and held; returns the queues that became startable by it."""
        actor, step, microbatch = action
        node = self._nodes[actor][microbatch]
        queue = self._queue[node]
        if self._running[queue] != node or self._lap[queue] != step:
            raise ProgramError(f"{self._name(action)} cannot finish: it does not run; {self._state(queue)}")
        self._running[queue] = -1
        self._left -= 1
        if node + 1 < self._end[queue]:
            self._head[queue] = node + 1
        else:
            self._head[queue] = self._first[queue]
            self._lap[queue] += 1
        woken: list[int] = []
        tokens, missing = self._tokens, self._missing
        for edge, group in self._out[node]:
            if tokens[edge]:
                tokens[edge] += 1
                continue
            tokens[edge] = 1
            missing[group] -= 1
            if not missing[group]:
                self._satisfied(group, woken)
        return woken

    def arrive(self, channel: str, step: int, microbatch: int, rank: int) -> list[int]:
        """Takes the arrival of an absent member; returns the queues that became startable by it. Unknown arrivals raise ProgramError."""
        group = self._group_of.get((channel, microbatch))
        if group is None or rank not in self._absent[group]:
            raise ProgramError(f"arrival at `{channel}` microbatch {microbatch} of step {step} from rank {rank}: no channel held here lacks it")
        self._absent[group][rank] += 1
        woken: list[int] = []
        if group in self._waiting:
            self._meet(group, woken)
        return woken

    def slot(self, action: Action, register: str) -> int:
        """Which of the register's slots the action meets: its item's number, counted as the producer opens them, modulo the credits."""
        node = self.net.nodes[action.actor][action.microbatch]
        found = self._slots.get((node, register))
        if found is None:
            found = self._slots[node, register] = self._slot_rule(node, register)
        base, per_step, credits = found
        return (base + per_step * action.step) % credits

    def waits_for(self, action: Action) -> list[Action]:
        """The actions of other queues of its rank that must have finished before this one, as far as the orders of the queues do not imply them.

        A driver whose queues are streams of a device may issue ahead, and finish an action as it is issued, if each waits on the device for the events of
        these. Actions of steps before the first are left out; of a channel, each member has its own.
        """
        if self._awaited is None:
            self._awaited = awaited(self.net)
        node = self.net.nodes[action.actor][action.microbatch]
        return [self._action(src, action.step - offset) for src, offset in self._awaited[node] if offset <= action.step]

    def story(self) -> str:
        """Who waits for what, held by whom; a cycle of waits first, if there is one."""
        return tell(self.net, self._head, self._lap, self._running, self._ready, self.steps, self._absent)

    # ---- inside ----------------------------------------------------------------------------------------------------------------------------------

    def _satisfied(self, group: int, woken: list[int]) -> None:
        """All that this machine knows of holds for the group's next firing: uses it up, and the members may start or, where others are absent, arrive."""
        step = self._started[group]
        if step == self.steps:
            return
        self._started[group] = step + 1
        tokens, missing = self._tokens, 0
        for edge in self._in[group]:
            left = tokens[edge] = tokens[edge] - 1
            if not left:
                missing += 1
        self._missing[group] = missing
        if group in self._absent:
            for node in self.net.members[group]:
                actor = self.actors[self.net.actor[node]]
                self.outbox.append(Arrival(actor.channel, step, self.net.microbatch[node], actor.rank))
            self._waiting.add(group)
            self._meet(group, woken)
        else:
            for queue in self._queues_of[group]:
                self._ready[queue] = True
                woken.append(queue)

    def _meet(self, group: int, woken: list[int]) -> None:
        arrived = self._absent[group]
        if all(arrived.values()):
            for rank in arrived:
                arrived[rank] -= 1
            self._waiting.remove(group)
            for queue in self._queues_of[group]:
                self._ready[queue] = True
                woken.append(queue)

    def _slot_rule(self, node: int, name: str) -> tuple[int, int, int]:
        actor, register = self.actors[self.net.actor[node]], self.program.register.get(name)
        if register is None or name not in (*actor.takes, *actor.writes, *actor.updates):
            raise ProgramError(f"actor `{actor.name}` does not use register `{name}`; it uses {', '.join((*actor.reads, *actor.writes, *actor.updates))}")
        index = self._register_index[name]
        if not self.net.producers[index]:
            return 0, 0, register.credits
        produces = name not in actor.takes
        base = item_number(self.net, index, register, node, 0, produces)
        return base, item_number(self.net, index, register, node, 1, produces) - base, register.credits

    def _action(self, node: int, step: int) -> Action:
        return Action(self.net.actor[node], step, self.net.microbatch[node])

    def _name(self, action: Action) -> str:
        actor = self.actors[action.actor]
        return f"{actor.name} microbatch {action.microbatch} of step {action.step} (rank {actor.rank}, {actor.queue})"

    def _state(self, queue: int) -> str:
        head = self.head(queue)
        if head is None:
            return "its queue has finished its last step"
        return f"{self._name(head)} {'runs' if self._running[queue] >= 0 else 'is next'} on its queue"

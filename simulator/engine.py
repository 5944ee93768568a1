"""The event simulation: virtual devices that perform a Program on the Machine, action by action."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ir.errors import Deadlock
from ir.machine import Action, Machine
from ir.program import Actor, Program
from ir.timeline import Span, Timeline
from simulator.contention import Cores, Links
from simulator.cost import CostModel
from simulator.routes import Edge
from simulator.sweep import compile_sweep


class Event(NamedTuple):
    """One action in time: `issued_s` when it came to the head of its queue, `start_s` when it could run, `end_s` when it published."""

    action: Action
    issued_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Prices:
    """What the engine needs to know of each actor, by its index in `program.actors`.

    `seconds` alone on the machine; members of a channel have the longest of theirs. `channel` is a number, -1 for none, with its `sizes`. An actor with `links`
    shares them, one with `cores` shares the cores; one with neither runs at its own speed. `added` is what a firing takes longer that adds to a step's item,
    `opens` the microbatch whose firing opens it and so does not add. `firing_s` passes before an action that is no message, `wake_s` more where its queue had
    been waiting.
    """

    seconds: Sequence[float]
    channel: Sequence[int]
    sizes: Sequence[int]
    cores: Sequence[float]
    links: Sequence[Mapping[Edge, float] | None]
    added: Sequence[float] = ()
    opens: Sequence[int] = ()
    num_cores: float = 0.0
    firing_s: float = 0.0
    wake_s: float = 0.0

    @property
    def are_fixed(self) -> bool:
        """Whether an action takes the same whatever else runs."""
        return not (self.firing_s or self.wake_s or any(self.cores) or any(self.links))


def simulate(program: Program, cost: CostModel, steps: int = 3, share_links: bool = False) -> Timeline:
    """The predicted Timeline of `steps` steps of a program that passed `check()`; the same bytes for the same input.

    Links are shared as `CostModel` says, by neighbours that always do the same; with `share_links` by the transfers that really meet, each slowed by its
    fullest link. Where the cluster's devices are threads, they share its cores. Deadlock with the Machine's story where nothing can run any more.
    """
    prices = price(program, cost, share_links)
    spans = swept(program, prices, steps) if steps and prices.are_fixed else performed(program, prices, steps)
    return Timeline("predicted", spans, {"program": program.fingerprint, "cluster": cost.cluster.name, "cluster_fingerprint": cost.cluster.fingerprint})


def performed(program: Program, prices: Prices, steps: int) -> tuple[Span, ...]:
    """The spans of `events`."""
    actors = program.actors
    return tuple(
        Span(actors[a.actor].name, a.step, a.microbatch, actors[a.actor].rank, actors[a.actor].queue, issued_s, start_s, end_s)
        for a, issued_s, start_s, end_s in events(program, prices, steps)
    )


def swept(program: Program, prices: Prices, steps: int) -> tuple[Span, ...]:
    """The same spans where prices are fixed, without events."""
    sweep = compile_sweep(program, steps)
    start, end = sweep.times(prices.seconds, prices.added or None)
    num, net = sweep.num_firings, program.net
    before = np.arange(num) - 1
    before[net.start[:-1]] = np.array(net.start[1:]) - 1
    issued = end[:, before]
    issued[1:, net.start[:-1]] = issued[:-1, net.start[:-1]]
    issued[0, net.start[:-1]] = 0.0
    order = np.lexsort((np.arange(steps * num), start.ravel(), end.ravel()))
    step, firing = np.divmod(order, num)
    names, ranks, queues = ([getattr(a, field) for a in program.actors] for field in ("name", "rank", "queue"))
    actor = sweep.actor[firing].tolist()
    columns = (step, sweep.microbatch[firing], issued.ravel()[order], start.ravel()[order], end.ravel()[order])
    steps_, microbatches, *times = (c.tolist() for c in columns)
    rows = zip([names[a] for a in actor], steps_, microbatches, [ranks[a] for a in actor], [queues[a] for a in actor], *times, strict=True)
    return tuple(map(Span._make, rows))


def price(program: Program, cost: CostModel, share_links: bool = False) -> Prices:
    """Prices of every actor. `share_links`: transfers are priced alone and slow each other as they meet, instead of as their neighbours always would."""
    num_cores = cost.num_cores
    channels = {name: i for i, name in enumerate(program.channels)}
    seconds, links, cores = [], list[Mapping[Edge, float] | None](), []
    for a in program.actors:
        used = cost.transfer(a.work, a.rank) if share_links else None
        seconds.append(cost.work_s(a.work, a.rank) if used is None else used[0])
        links.append(None if used is None else used[1])
        cores.append(_num_threads(a.work.kind) if num_cores else 0.0)
    channel = [channels.get(a.channel, -1) for a in program.actors]
    seconds = _longest(seconds, channel)
    added = _longest([_added_s(program, a, cost) for a in program.actors], channel)
    sizes = [len(members) for members in program.channels.values()]
    return Prices(seconds, channel, sizes, cores, links, added, _opens(program), num_cores, cost.runtime.firing_s, cost.runtime.wake_s)


def _longest(seconds: Sequence[float], channel: Sequence[int]) -> list[float]:
    """Every member of a channel takes what the longest takes."""
    longest: dict[int, float] = {}
    for c, s in zip(channel, seconds, strict=True):
        longest[c] = max(longest.get(c, 0.0), s)
    return [longest[c] if c >= 0 else s for c, s in zip(channel, seconds, strict=True)]


def _added_s(program: Program, actor: Actor, cost: CostModel) -> float:
    if actor.clock != "microbatch":
        return 0.0
    written = [program.register[w] for w in actor.writes]
    return sum(cost.accumulate_s(r.nbytes, r.dtype, actor.rank) for r in written if r.clock == "step" and r.nbytes)


def _opens(program: Program) -> list[int]:
    """By actor the microbatch that comes first in its queue."""
    first: dict[str, int] = {}
    for order in program.orders.values():
        for name, microbatch in order:
            first.setdefault(name, microbatch)
    return [first.get(a.name, 0) for a in program.actors]


def _num_threads(kind: str) -> float:
    """Threads that work: a sender waits while the receiver copies."""
    return 0.0 if kind == "send" else 1.0


def events(program: Program, prices: Prices, steps: int) -> tuple[Event, ...]:
    """Every action of `steps` steps in the order in which they finish; at one moment, in that in which they start, then by step and place in `ir.net`.

    Deadlock with the Machine's story where nothing can run any more.
    """
    return _Run(program, prices, steps).run()


@dataclass(slots=True)
class _Run:
    """One run of the events. `jobs`: by number, actions that start and end together, each with the moment it was issued, and their start."""

    program: Program
    prices: Prices
    steps: int
    machine: Machine = field(init=False)
    heap: list[tuple[float, int]] = field(default_factory=list)
    jobs: dict[int, tuple[list[tuple[Action, float]], float]] = field(default_factory=dict)
    waiting: dict[int, list[tuple[Action, float]]] = field(default_factory=dict)
    head_s: list[float] = field(init=False)
    queue_of: list[int] = field(init=False)
    cores: Cores = field(init=False)
    links: Links = field(default_factory=Links)
    pools: list[Cores | Links] = field(init=False)
    number: int = 0

    def __post_init__(self) -> None:
        self.machine = Machine(self.program, self.steps)
        self.head_s = [0.0] * len(self.machine.queues)
        self.queue_of = [self.machine.queue_index.get((a.rank, a.queue), -1) for a in self.program.actors]
        self.cores = Cores(self.prices.num_cores)
        self.pools = [pool for pool, used in ((self.cores, any(self.prices.cores)), (self.links, any(self.prices.links))) if used]

    def run(self) -> tuple[Event, ...]:
        done: list[Event] = []
        self._begin(self.machine.startable, 0.0, -1)
        finish, head_s, queue_of = self.machine.finish, self.head_s, self.queue_of
        while self.jobs:
            now_s, number = self._next()
            actions, start_s = self.jobs.pop(number)
            woken = []
            for action, issued_s in actions:
                queue = queue_of[action.actor]
                head_s[queue] = now_s
                done.append(Event(action, issued_s, start_s, now_s))
                woken.append((finish(action), queue))
            for queues, by in woken:
                if queues:
                    self._begin(queues, now_s, by)
        if not self.machine.done:
            raise Deadlock(self.machine.story())
        nodes = self.machine.net.nodes
        done.sort(key=lambda e: (e.end_s, e.start_s, e.action.step, nodes[e.action.actor][e.action.microbatch]))
        return tuple(done)

    def _next(self) -> tuple[float, int]:
        """The next job to end and when; at equal times the heap first, then cores, then links."""
        now_s = self.heap[0][0] if self.heap else float("inf")
        pool: Cores | Links | None = None
        for one in self.pools:
            if (next_s := one.next_s()) < now_s:
                now_s, pool = next_s, one
        return heapq.heappop(self.heap) if pool is None else (now_s, pool.pop())

    def _begin(self, queues: Sequence[int], now_s: float, by: int) -> None:
        prices, start = self.prices, self.machine.start
        for queue in queues:
            action = start(queue)
            channel = prices.channel[action.actor]
            member = (action, self.head_s[queue])
            if channel < 0:
                self._launch([member], now_s, queue != by)
                continue
            met = self.waiting.setdefault(channel, [])
            met.append(member)
            if len(met) == prices.sizes[channel]:
                self._launch(self.waiting.pop(channel), now_s, True)

    def _launch(self, actions: list[tuple[Action, float]], now_s: float, woken: bool) -> None:
        prices, number = self.prices, self.number
        self.number += 1
        actor = actions[0][0].actor
        start_s = now_s if prices.channel[actor] >= 0 else now_s + prices.firing_s + (prices.wake_s if woken else 0.0)
        seconds = prices.seconds[actor]
        if prices.added and prices.added[actor] and actions[0][0].microbatch != prices.opens[actor]:
            seconds += prices.added[actor]
        self.jobs[number] = actions, start_s
        links = prices.links[actor]
        if links:
            self.links.add(now_s, number, start_s - now_s + seconds, links)
        elif prices.num_cores and (demand := sum(prices.cores[a.actor] for a, _ in actions)):
            self.cores.add(now_s, number, start_s - now_s + seconds, demand)
        else:
            heapq.heappush(self.heap, (start_s + seconds, number))

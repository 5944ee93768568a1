"""The event simulation: virtual devices that perform a Program on the Machine, action by action."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ir.errors import Deadlock
from ir.machine import Action, Machine
from ir.net import opening
from ir.program import Actor, Program
from ir.timeline import Span, Timeline
from simulator.contention import Cores, Links
from simulator.cost import CostModel
from simulator.overlap import slowed_s
from simulator.routes import Edge
from simulator.sweep import Sweep, compile_sweep


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
    shares them, one with `cores` shares the cores; one with neither runs at its own speed, of which it loses `lost` while its rank is
    in a collective of full `crowding`. `added` is what a firing takes longer that adds to a step's item,
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
    lost: Sequence[float] = ()
    crowding: Sequence[float] = ()

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
    if steps and any(prices.lost):
        prices = beside(program, prices, compile_sweep(program, steps))
    spans = swept(program, prices, steps) if steps and prices.are_fixed else performed(program, prices, steps)
    return Timeline("predicted", spans, {"program": program.fingerprint, "cluster": cost.cluster.name, "cluster_fingerprint": cost.cluster.fingerprint})


def beside(program: Program, prices: Prices, sweep: Sweep) -> Prices:
    """The prices once kernels are slowed by the collectives beside them."""
    return replace(prices, seconds=slowed_s(sweep, program, prices.seconds, prices.added or None, prices.lost, prices.crowding), lost=())


def performed(program: Program, prices: Prices, steps: int) -> tuple[Span, ...]:
    """The spans of `events`."""
    return _spans(program, _Run(program, prices, steps).run())


def swept(program: Program, prices: Prices, steps: int) -> tuple[Span, ...]:
    """The same spans where prices are fixed, without events."""
    sweep = compile_sweep(program, steps)
    start, end = sweep.times(prices.seconds, prices.added or None)
    heads, tails = program.net.start[:-1], np.array(program.net.start[1:], np.intp) - 1
    issued = np.empty_like(end)
    issued[:, 1:] = end[:, :-1]
    issued[1:, heads], issued[0, heads] = end[:-1, tails], 0.0
    step, firing = np.divmod(np.arange(end.size), sweep.num_firings)
    return _spans(program, _ordered(firing, step, issued.ravel(), start.ravel(), end.ravel()))


class _Columns(NamedTuple):
    """Actions in order, column by column. `firing`: its place in `ir.net`."""

    firing: Sequence[int]
    step: Sequence[int]
    issued_s: Sequence[float]
    start_s: Sequence[float]
    end_s: Sequence[float]


def _ordered(firing: ArrayLike, step: ArrayLike, issued: ArrayLike, start: ArrayLike, end: ArrayLike) -> _Columns:
    columns = [np.asarray(column) for column in (firing, step, issued, start, end)]
    order = np.lexsort((columns[0], columns[1], columns[3], columns[4]))
    return _Columns(*(column[order].tolist() for column in columns))


def _spans(program: Program, columns: _Columns) -> tuple[Span, ...]:
    net = program.net
    actors = [program.actors[a] for a in net.actor]
    names, ranks, queues = ([getattr(a, field) for a in actors] for field in ("name", "rank", "queue"))
    looks = (map(by_firing.__getitem__, columns.firing) for by_firing in (names, net.microbatch, ranks, queues))
    name, microbatch, rank, queue = looks
    return tuple(map(Span._make, zip(name, columns.step, microbatch, rank, queue, *columns[2:], strict=True)))


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
    slows = bool(cost.runtime.slower)
    lost = [cost.lost(a.work) for a in program.actors] if slows else []
    channel = [channels.get(a.channel, -1) for a in program.actors]
    seconds = _longest(seconds, channel)
    crowding = [cost.crowding(a.work, a.rank, s) for a, s in zip(program.actors, seconds, strict=True)] if slows else []
    added = _longest([_added_s(program, a, cost) for a in program.actors], channel)
    sizes = [len(members) for members in program.channels.values()]
    return Prices(seconds, channel, sizes, cores, links, added, opening(program), num_cores, cost.runtime.firing_s, cost.runtime.wake_s, lost, crowding)


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


def _num_threads(kind: str) -> float:
    """Threads that work: a sender waits while the receiver copies."""
    return 0.0 if kind == "send" else 1.0


def events(program: Program, prices: Prices, steps: int) -> tuple[Event, ...]:
    """Every action of `steps` steps in the order in which they finish; at one moment, in that in which they start, then by step and place in `ir.net`.

    Deadlock with the Machine's story where nothing can run any more.
    """
    columns, net = _Run(program, prices, steps).run(), program.net
    actions = (Action(net.actor[f], step, net.microbatch[f]) for f, step in zip(columns.firing, columns.step, strict=True))
    return tuple(map(Event, actions, *columns[2:]))


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
    cores: Cores = field(init=False)
    links: Links = field(default_factory=Links)
    pools: list[Cores | Links] = field(init=False)
    number: int = 0

    def __post_init__(self) -> None:
        self.machine = Machine(self.program, self.steps)
        self.head_s = [0.0] * len(self.machine.queues)
        self.cores = Cores(self.prices.num_cores)
        self.pools = [pool for pool, used in ((self.cores, any(self.prices.cores)), (self.links, any(self.prices.links))) if used]

    def run(self) -> _Columns:
        """Columns of numbers: an object for each action would have the garbage collector visit all of them over and over."""
        firing, step, issued, start, end = list[int](), list[int](), list[float](), list[float](), list[float]()
        finish, head_s, nodes, queue_of = self.machine.finish, self.head_s, self.machine.net.nodes, self.machine.net.queue
        self._begin(self.machine.startable, 0.0, -1)
        while self.jobs:
            now_s, number = self._next()
            actions, start_s = self.jobs.pop(number)
            woken = []
            for action, issued_s in actions:
                node = nodes[action.actor][action.microbatch]
                firing.append(node)
                step.append(action.step)
                issued.append(issued_s)
                start.append(start_s)
                end.append(now_s)
                queue = queue_of[node]
                head_s[queue] = now_s
                woken.append((finish(action), queue))
            for queues, by in woken:
                if queues:
                    self._begin(queues, now_s, by)
        if not self.machine.done:
            raise Deadlock(self.machine.story())
        return _ordered(firing, step, issued, start, end)

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

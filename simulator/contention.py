"""What actions share while they run, as a fluid: every action slows by the load of the fullest thing it uses.

Cores: threads of one machine, `demand` of them an action, all slowed alike once more are wanted than there are. Links: transfers, each slowed by its fullest
link. Both hold jobs by number, in seconds they would take alone, and finish ties in order of number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from simulator.routes import Edge

INFINITY = math.inf


class Cores:
    """Equal sharing of `capacity` cores, in virtual time: its clock runs at `min(1, capacity / demand)`, so a job ends at a virtual time fixed when it starts.

    >>> cores = Cores(2)
    >>> for job in range(3):
    ...     cores.add(0.0, job, 2.0, 1)
    >>> cores.next_s(), cores.pop(), cores.next_s()
    (3.0, 0, 3.0)
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self._heap: list[tuple[float, int, float]] = []
        self._demand = 0.0
        self._rate = 1.0
        self._now_s = 0.0
        self._virtual_s = 0.0

    def add(self, now_s: float, job: int, seconds: float, demand: float) -> None:
        self._virtual_s += (now_s - self._now_s) * self._rate
        self._now_s = now_s
        heapq.heappush(self._heap, (self._virtual_s + seconds, job, demand))
        self._load(self._demand + demand)

    def next_s(self) -> float:
        return self._now_s + (self._heap[0][0] - self._virtual_s) / self._rate if self._heap else INFINITY

    def pop(self) -> int:
        self._now_s = self.next_s()
        self._virtual_s, job, demand = heapq.heappop(self._heap)
        self._load(self._demand - demand if self._heap else 0.0)
        return job

    def _load(self, demand: float) -> None:
        self._demand = demand
        self._rate = self.capacity / demand if demand > self.capacity else 1.0


class Links:
    """Transfers over links: `demand[link]` is the share of the link that a transfer uses while alone; over 1 in sum, all that cross it slow in proportion.

    >>> links, nic = Links(), ("nic0", "fabric")
    >>> links.add(0.0, 0, 1.0, {nic: 1.0})
    >>> links.add(0.5, 1, 1.0, {nic: 1.0})
    >>> links.next_s(), links.pop(), links.next_s()
    (1.5, 0, 2.0)
    """

    def __init__(self) -> None:
        self._jobs: dict[int, _Transfer] = {}
        self._on: dict[Edge, dict[int, float]] = {}
        self._load: dict[Edge, float] = {}
        self._heap: list[tuple[float, int]] = []

    def add(self, now_s: float, job: int, seconds: float, demand: Mapping[Edge, float]) -> None:
        for edge, share in demand.items():
            self._on.setdefault(edge, {})[job] = share
        self._jobs[job] = _Transfer(demand, seconds, now_s)
        self._settle(now_s, demand, job)

    def next_s(self) -> float:
        """When the next job ends; what a job was thought to end at before its rate changed is dropped on the way."""
        heap, jobs = self._heap, self._jobs
        while heap:
            end_s, job = heap[0]
            if job in jobs and jobs[job].end_s == end_s:
                return end_s
            heapq.heappop(heap)
        return INFINITY

    def pop(self) -> int:
        now_s = self.next_s()
        _, job = heapq.heappop(self._heap)
        demand = self._jobs.pop(job).demand
        for edge in demand:
            del self._on[edge][job]
        self._settle(now_s, demand)
        return job

    def _settle(self, now_s: float, changed: Iterable[Edge], new: int | None = None) -> None:
        """Gives every job whose rate changes, as the loads of these links have, its new end; the others keep theirs to the bit."""
        touched = {} if new is None else {new: None}
        for edge in changed:
            on, before = self._on[edge], self._load.get(edge, 0.0)
            load = self._load[edge] = sum(on.values())
            if load != before and (load > 1.0 or before > 1.0):
                touched.update(dict.fromkeys(on))
        for job in touched:
            self._retime(now_s, job, self._jobs[job])

    def _retime(self, now_s: float, job: int, transfer: _Transfer) -> None:
        slowness = 1.0
        for edge in transfer.demand:
            slowness = max(slowness, self._load[edge])
        if slowness != transfer.slowness:
            transfer.left_s -= (now_s - transfer.since_s) / transfer.slowness
            transfer.since_s, transfer.slowness = now_s, slowness
            transfer.end_s = now_s + transfer.left_s * slowness
            heapq.heappush(self._heap, (transfer.end_s, job))


@dataclass(slots=True)
class _Transfer:
    """A job on links: `left_s` seconds alone were left to it at `since_s`, from when on it takes `slowness` times as long and so ends at `end_s`."""

    demand: Mapping[Edge, float]
    left_s: float
    since_s: float
    slowness: float = INFINITY
    end_s: float = INFINITY

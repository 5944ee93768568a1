"""What actions share while they run, as a fluid: every action slows by the load of the fullest thing it uses.

Cores: threads of one machine, `demand` of them an action, all slowed alike once more are wanted than there are. Links: transfers, each slowed by its fullest
link. Both hold jobs by number, in seconds they would take alone, and finish ties in order of number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

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
        self._now_s = 0.0
        self._virtual_s = 0.0

    def add(self, now_s: float, job: int, seconds: float, demand: float) -> None:
        self._advance(now_s)
        heapq.heappush(self._heap, (self._virtual_s + seconds, job, demand))
        self._demand += demand

    def next_s(self) -> float:
        return self._now_s + (self._heap[0][0] - self._virtual_s) / self._rate() if self._heap else INFINITY

    def pop(self) -> int:
        self._advance(self.next_s())
        end, job, demand = heapq.heappop(self._heap)
        self._virtual_s = end
        self._demand = self._demand - demand if self._heap else 0.0
        return job

    def _rate(self) -> float:
        return min(1.0, self.capacity / self._demand) if self._demand else 1.0

    def _advance(self, now_s: float) -> None:
        self._virtual_s += (now_s - self._now_s) * self._rate()
        self._now_s = now_s


class Links:
    """Transfers over links: `demand[link]` is the share of the link that a transfer uses while alone; over 1 in sum, all that cross it slow in proportion.

    >>> links, nic = Links(), ("nic0", "fabric")
    >>> links.add(0.0, 0, 1.0, {nic: 1.0})
    >>> links.add(0.5, 1, 1.0, {nic: 1.0})
    >>> links.next_s(), links.pop(), links.next_s()
    (1.5, 0, 2.0)
    """

    def __init__(self) -> None:
        self._left_s: dict[int, float] = {}
        self._demand: dict[int, Mapping[Edge, float]] = {}
        self._load: dict[Edge, float] = {}
        self._rate: dict[int, float] = {}
        self._now_s = 0.0

    def add(self, now_s: float, job: int, seconds: float, demand: Mapping[Edge, float]) -> None:
        self._advance(now_s)
        self._left_s[job], self._demand[job] = seconds, demand
        for edge, share in demand.items():
            self._load[edge] = self._load.get(edge, 0.0) + share
        self._settle()

    def next_s(self) -> float:
        return self._now_s + min((left / self._rate[job] for job, left in self._left_s.items()), default=INFINITY)

    def pop(self) -> int:
        job = min(self._left_s, key=lambda j: (self._left_s[j] / self._rate[j], j))
        self._advance(self._now_s + self._left_s[job] / self._rate[job])
        del self._left_s[job]
        for edge, share in self._demand.pop(job).items():
            self._load[edge] -= share
        self._settle()
        return job

    def _settle(self) -> None:
        self._rate = {job: 1.0 / max((1.0, *(self._load[e] for e in self._demand[job]))) for job in self._left_s}

    def _advance(self, now_s: float) -> None:
        for job in self._left_s:
            self._left_s[job] -= (now_s - self._now_s) * self._rate[job]
        self._now_s = now_s

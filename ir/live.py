"""Memory that lives: an item lies in its slot from the start of the firing that opens it to the end of the last that reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ir.net import Net, consumption, production
from ir.program import Program
from ir.timed import check_belongs

if TYPE_CHECKING:
    from ir.timeline import Timeline

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LiveMemory:
    """One rank's bytes over time: `by_class[c][i]` bytes of memory class c live from `times_s[i]` on.

    A register that is changed in place, or constant, lives all the time; one inside another from when it has been written: until then the other lives there.
    What is allocated is more: credits times nbytes of every register.
    """

    rank: int
    times_s: Floats
    by_class: Mapping[str, Floats]

    @property
    def total(self) -> Floats:
        return sum(self.by_class.values(), np.zeros(len(self.times_s)))

    @property
    def peak_bytes(self) -> float:
        return float(self.total.max(initial=0.0))

    @property
    def peak_s(self) -> float:
        """The first moment at which the peak is reached."""
        return float(self.times_s[int(self.total.argmax())]) if len(self.times_s) else 0.0

    @property
    def at_peak(self) -> dict[str, float]:
        """Bytes by class at that moment, largest first."""
        if not len(self.times_s):
            return {}
        here = {c: float(v[int(self.total.argmax())]) for c, v in self.by_class.items()}
        return dict(sorted(here.items(), key=lambda item: (-item[1], item[0])))


def live_memory(timeline: Timeline, program: Program) -> tuple[LiveMemory, ...]:
    """Every rank's memory over the whole timeline, in order of rank. Raises InputError where the timeline is of another program."""
    check_belongs(timeline, program)
    net = program.net
    lives: dict[int, list[tuple[float, str, int]]] = {rank: [] for rank in sorted({*program.ranks, *(r.rank for r in program.registers)})}
    for rank, memory, opened, closed, nbytes in _lives(timeline, net):
        lives[rank] += [(opened, memory, nbytes), (closed, memory, -nbytes)]
    return tuple(_curve(rank, events) for rank, events in lives.items())


def _curve(rank: int, events: list[tuple[float, str, int]]) -> LiveMemory:
    times, at = np.unique(np.array([t for t, _, _ in events], dtype=np.float64), return_inverse=True)
    found: dict[str, tuple[list[int], list[int]]] = {}
    for moment, (_, memory, change) in zip(at.tolist(), events, strict=True):
        moments, changes = found.setdefault(memory, ([], []))
        moments.append(moment)
        changes.append(change)
    return LiveMemory(rank, times, {c: np.cumsum(np.bincount(found[c][0], found[c][1], len(times))) for c in sorted(found)})


def _lives(timeline: Timeline, net: Net) -> Iterator[tuple[int, str, float, float, int]]:
    """(rank, memory class, opened, closed, bytes) of every item of every step; what is not seen to end lives to the end."""
    program = net.program
    node = {a.name: net.nodes[i] for i, a in enumerate(program.actors)}
    first, last = min((s.start_s for s in timeline.spans), default=0.0), max((s.end_s for s in timeline.spans), default=0.0)
    starts: dict[int, list[float | None]] = {k: [None] * net.num_nodes for k in sorted({s.step for s in timeline.spans})}
    closes = {k: [last] * net.num_nodes for k in starts}
    for s in timeline.spans:
        here = node[s.actor][s.microbatch]
        starts[s.step][here], closes[s.step][here] = s.start_s, s.end_s
    for i, r in enumerate(program.registers):
        if r.initial:
            yield r.rank, r.memory, first, last, r.nbytes * r.credits
            continue
        opens, publishes = production(net, i)
        ends = [consumption(net, i, reader)[1] for reader in net.readers[i]] or [publishes]
        for k, opened in starts.items():
            closed = closes[k]
            for p, opening in enumerate(opens):
                if (moment := (closes[k] if r.inside else opened)[opening]) is not None:
                    yield r.rank, r.memory, moment, max([closed[nodes[p]] for nodes in ends]), r.nbytes

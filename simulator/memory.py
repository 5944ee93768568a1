"""The memory ledger: what every rank allocates for a Program by class, and what of it is alive when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ir.cluster import Cluster
from ir.program import Program, Register
from ir.timeline import Timeline
from ir.units import nbytes

SAFE_FRACTION = 0.95
"""Above this share of the usable memory a plan fits on paper and may fail in practice: fragments, libraries' workspaces, other processes."""


@dataclass(frozen=True, slots=True)
class Live:
    """The most that was alive on a rank at one moment: `nbytes` at `time_s`, while `actor` started."""

    nbytes: float
    time_s: float
    actor: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes that a Program allocates: `ranks[rank][class]`. Registers in one arena share its bytes, which count for the class that fills most of it.

    `live`, where a timeline was given: by rank the peak of what is really in use, never more than what is allocated. `usable`: bytes a device offers, by rank.
    """

    ranks: Mapping[int, Mapping[str, float]]
    live: Mapping[int, Live]
    usable: Mapping[int, float]
    safe_fraction: float = SAFE_FRACTION

    def total(self, rank: int) -> float:
        return sum(self.ranks[rank].values())

    @property
    def peak_rank(self) -> int:
        """The rank that is nearest to its limit, or has most where no limit is known; the first of several."""
        return max(self.ranks, key=lambda r: (self.total(r) / self.usable.get(r, 1.0), -r))

    @property
    def peak_bytes(self) -> float:
        return self.total(self.peak_rank)

    @property
    def by_class(self) -> Mapping[str, float]:
        """Bytes by class of the peak rank; together they are `peak_bytes`."""
        return self.ranks[self.peak_rank]

    @property
    def usable_bytes(self) -> float | None:
        return self.usable.get(self.peak_rank)

    @property
    def peak_at(self) -> str:
        """The moment of the peak rank's live peak, as a sentence."""
        live = self.live.get(self.peak_rank)
        if live is None:
            return f"rank {self.peak_rank}, allocated before the first step"
        return f"rank {self.peak_rank}, {live.time_s:.6g} s, as {live.actor} starts ({nbytes(live.nbytes)} alive)"

    @property
    def fits(self) -> str:
        """`yes`; `tight` above the safe fraction of what a device offers; `no` where it does not fit; `yes` where nothing is known of the devices."""
        if self.usable_bytes is None:
            return "yes"
        share = self.peak_bytes / self.usable_bytes
        return "yes" if share <= self.safe_fraction else "tight" if share <= 1.0 else "no"

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_bytes": self.peak_bytes, "peak_rank": self.peak_rank, "peak_at": self.peak_at, "usable_bytes": self.usable_bytes,
            "by_class": dict(self.by_class), "by_rank": {str(r): dict(c) for r, c in self.ranks.items()},
        }  # fmt: skip


def ledger(
    program: Program, timeline: Timeline | None = None, cluster: Cluster | None = None, framework_bytes: float = 0.0, safe_fraction: float = SAFE_FRACTION
) -> Ledger:  # fmt: skip
    """What `program` allocates on every rank; with a timeline of it also what is alive, with a cluster whether it fits.

    `framework_bytes` are added to every rank under the class `framework`.
    """
    ranks: dict[int, dict[str, float]] = {rank: {} for rank in program.ranks}
    for rank, memory, size in _allocations(program.registers):
        held = ranks.setdefault(rank, {})
        held[memory] = held.get(memory, 0.0) + size
    if framework_bytes:
        for held in ranks.values():
            held["framework"] = framework_bytes
    usable = {} if cluster is None else {rank: cluster.devices[rank].usable_bytes for rank in ranks}
    return Ledger(ranks, {} if timeline is None else _live(program, timeline), usable, safe_fraction)


def _allocations(registers: Iterable[Register]) -> Iterable[tuple[int, str, float]]:
    """(rank, class, bytes): of registers by themselves, and of arenas as a whole; what lies inside another register takes nothing."""
    arenas: dict[tuple[int, str], list[Register]] = {}
    for r in registers:
        if r.arena:
            arenas.setdefault((r.rank, r.arena), []).append(r)
        elif not r.inside:
            yield r.rank, r.memory, float(r.nbytes * r.credits)
    for (rank, _), shared in arenas.items():
        share: dict[str, int] = defaultdict(int)
        for r in shared:
            share[r.memory] += r.nbytes * r.credits
        yield rank, max(share, key=lambda c: share[c]), float(max(place + r.nbytes for r in shared for place in r.places))


def _live(program: Program, timeline: Timeline) -> Mapping[int, Live]:
    """By rank the live peak, and the actor whose start at that moment opened the last item."""
    peaks = {m.rank: (m.peak_bytes, m.peak_s) for m in timeline.live_memory(program)}
    starts: dict[int, str] = {}
    for s in timeline.spans:
        if s.start_s == peaks[s.rank][1]:
            starts.setdefault(s.rank, s.actor)
    return {rank: Live(peak_bytes, peak_s, starts.get(rank, "the run")) for rank, (peak_bytes, peak_s) in peaks.items()}

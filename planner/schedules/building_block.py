"""Schedules from a building block: the passes of one microbatch, repeated every six units and then drawn together without more memory than that needs.

A block says when each rank of a V (two stages a rank, down and up again) runs F and the backward of both its stages, in units in which F = I = W = 1. Its
lifespans over the period of six units are the activations that it keeps: short ways back keep few (Qi et al., 2024, arXiv:2405.15362, sections 3 and 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from planner.schedules.schedule import Schedule, vee
from planner.schedules.slot import Orders, Slot, gives, waits_for

PERIOD = 6

Block = Sequence[Sequence[int]]
"""Units at which F down, F up, backward up and backward down (rows) start on every rank (columns)."""

Timetable = dict[int, Slot]
"""When a rank starts what."""


def block(p: int, strides: tuple[int, int, int, int], backward: int = 1) -> Block:
    """Each row `stride` units after the rank before it, or as soon after that as the rank has nothing else to do in any period.

    `backward` is the number of units of a backward.

    >>> block(2, (1, 1, 1, 1))
    [[0, 1], [3, 2], [4, 5], [7, 6]]
    """
    taken: list[set[int]] = [set() for _ in range(p)]
    rows, end = [], 0
    for row, stride in enumerate(strides):
        length = backward if row > 1 else 1
        times = [0] * p
        for n, rank in enumerate(range(p) if row in (0, 2) else reversed(range(p))):
            at = end + (stride - length if n else 0)
            while any((at + k) % PERIOD in taken[rank] for k in range(length)):
                at += 1
            taken[rank].update((at + k) % PERIOD for k in range(length))
            times[rank], end = at, at + length
        rows.append(times)
    return rows


def repeating(name: str, rows: Callable[[int], Block], backward: str = "I") -> Schedule:
    """The schedule of a V whose block of p ranks is `rows(p)`; `backward` is I with W apart, or B. It has no closed form of its time."""

    @cache
    def orders(p: int, m: int, v: int) -> Orders:
        return drawn_together(rows(p), m, backward)

    @cache
    def memory(rank: int, p: int, m: int, v: int) -> float:
        return min(most_kept(rows(p), backward) / 2, m)

    return Schedule(name, "arXiv:2405.15362", orders, None, memory, vee, chunks=2, splits=backward == "I")


def drawn_together(block: Block, m: int, backward: str) -> Orders:
    """The orders of `m` microbatches: the block repeated, W in the first units that are free after I, then each pass as early as it can run in the room of it.

    `backward` is I, or B, which then takes two units.
    """
    tables, room = _repeated(block, m, backward), most_kept(block, backward)
    tables = _earlier(tables, room)
    if backward == "I":
        tables = [{t: s for t, s in table.items() if s.kind != "W"} for table in tables]
        tables = [_with_weights(table) for table in _earlier(tables, room, apart=1)]
    return tuple(tuple(_in_time(table)) for table in tables)


def most_kept(block: Block, backward: str) -> int:
    """Activations of one stage and microbatch that the busiest rank keeps when the block repeats for ever, freed by W."""
    periods = max(block[3]) // PERIOD + 2
    return max(_Line(table).most for table in _repeated(block, 2 * periods, backward))


def _in_time(table: Timetable) -> list[Slot]:
    return [slot for _, slot in sorted(table.items())]


def _length(slot: Slot) -> int:
    return 2 if slot.kind == "B" else 1


def _repeated(block: Block, m: int, backward: str) -> list[Timetable]:
    p = len(block[0])
    tables: list[Timetable] = []
    for rank in range(p):
        stages = (rank, 2 * p - 1 - rank)
        kinds = (("F", stages[0]), ("F", stages[1]), (backward, stages[1]), (backward, stages[0]))
        table = {block[row][rank] + PERIOD * i: Slot(stage, kind, i) for row, (kind, stage) in enumerate(kinds) for i in range(m)}
        tables.append(_with_weights(table) if backward == "I" else table)
    return tables


def _with_weights(table: Timetable) -> Timetable:
    """The table with the W of every I in the first unit that is free after it, first come, first served."""
    full, waiting = dict(table), list[Slot]()
    now, last = min(table), max(table)
    while now <= last or waiting:
        slot = table.get(now)
        if slot is None and waiting:
            full[now] = waiting.pop(0)
        elif slot is not None and slot.kind == "I":
            waiting.append(Slot(slot.stage, "W", slot.microbatch))
        now += 1
    return full


class _Line:
    """One rank's timetable while its passes move: what it keeps, and how many W wait for a free unit where the table does not list them, before every unit."""

    def __init__(self, table: Timetable) -> None:
        self.table = dict(table)
        self.full = any(slot.kind == "W" for slot in table.values())
        self.end = max(table) + 1
        self.states = [(0, 0)] * (self.end + 1)
        self.most = 0
        for now in range(self.end):
            self.states[now + 1] = self._after(now, *self.states[now])
            self.most = max(self.most, self.states[now + 1][0])

    def _after(self, now: int, live: int, waiting: int) -> tuple[int, int]:
        slot = self.table.get(now)
        if slot is None:
            return (live - 1, waiting - 1) if waiting else (live, waiting)
        return live + (slot.kind == "F") - (slot.kind in ("W", "B")), waiting + (slot.kind == "I" and not self.full)

    def move(self, now: int, ready: int, room: int) -> int:
        """Where the pass at `now` starts when it moves to the first free unit from `ready` on with which the rank keeps no more than `room`.

        The earlier a forward the more is kept: what does not fit at one unit fits at none before it.
        """
        slot = self.table.pop(now)
        free = [t for t in range(ready, now) if self._is_free(t, _length(slot))]
        low, high = 0, len(free)
        while low < high:
            middle = (low + high) // 2 if slot.kind == "F" else low
            self.table[free[middle]] = slot
            fit = self._run(free[middle], now, room) is not None
            del self.table[free[middle]]
            low, high = (low, middle) if fit else (middle + 1, high)
        start = free[low] if low < len(free) else now
        self.table[start] = slot
        self._settle(start, now, room)
        return start

    def _is_free(self, at: int, length: int) -> bool:
        before = self.table.get(at - 1)
        return (before is None or _length(before) == 1) and all(at + k not in self.table for k in range(length))

    def _run(self, start: int, now: int, room: int) -> list[tuple[int, int]] | None:
        """The states after `start` until they are again what they were, some time after `now`; None where the rank would keep too much."""
        state, states = self.states[start], list[tuple[int, int]]()
        for t in range(start, self.end):
            if t > now and state == self.states[t]:
                break
            state = self._after(t, *state)
            if state[0] > room:
                return None
            states.append(state)
        return states

    def _settle(self, start: int, now: int, room: int) -> None:
        states = self._run(start, now, room) if start < now else []
        assert states is not None
        self.states[start + 1 : start + 1 + len(states)] = states


def _earlier(tables: Sequence[Timetable], room: int, apart: int = 0) -> list[Timetable]:
    """Every pass, in the order of the tables, at the first free unit at which what it waits for is there and its rank keeps no more than `room`.

    A forward stays so many units `apart` from the end of what another rank sends it, so that a hop finds time between them.
    """
    num_stages = 2 * len(tables)
    lines = [_Line(table) for table in tables]
    made: dict[tuple[str, int, int], tuple[int, int]] = {}
    for now, rank, slot in sorted((t, rank, slot) for rank, table in enumerate(tables) for t, slot in table.items()):
        needs = (made[item] for item in waits_for(slot, num_stages))
        ready = max((end + apart * (slot.kind == "F" and maker != rank) for end, maker in needs), default=0)
        start = lines[rank].move(now, ready, room)
        gift = gives(slot)
        if gift is not None:
            made[gift] = start + _length(slot), rank
    return [line.table for line in lines]

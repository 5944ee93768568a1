"""The timing of a frozen Program without events: its marked graph as arrays, gone through once in an order in which everything comes after what it waits for.

A frozen Program makes no choice, so with fixed durations a firing starts at the latest end of what it waits for: a longest path. The firings of a channel are
one *group*, since they start and end together. A group of step k waits for groups of step k - offset; laid out step after step in the same order, each
predecessor lies a fixed distance back, whatever the step, and what would lie before the first step has ended at 0. Maxima are exact and every end is one sum,
`start + seconds`, so the sweep and the event engine give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ir.errors import Deadlock, InputError, ProgramError
from ir.machine import Machine
from ir.net import Net, opening
from ir.program import Program
from simulator.batch import Batch, by_degree, compile_batch, latest, predecessors

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

WIDE = 24
"""Groups a level from which on arrays are quicker than a list for one timing: a level costs some 3.5 µs, an entry of a list 0.2 µs."""

BATCH = 256
"""Timings that are gone through at once: rows of 2 KiB, long enough to pay for a call, short enough for the cache."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """A live Program, compiled to time `steps` steps of it for any durations.

    By firing of a step, in the order of `ir.net`: `actor` (index in `program.actors`), `microbatch`, and `place`, where its group stands in the order of
    computation. By place: `unit`, whose duration it takes (a channel or a lone actor; `units` lists their actors), and `adds`, whether it is not the first of
    its actor in a step. `distance[begin[i] .. begin[i + 1]]`: how far back the predecessors of place i lie, nearest first; `window` is the furthest.

    `bounds` cuts the places into blocks. In a level none waits for another (`by_level`); in a run each after the first waits for the one before it alone.
    `ends`: places of the firings with which the queues end a step.

    >>> from ir.work import Work
    >>> from ir.program import Actor, Program, Register
    >>> work = Work("compute", "scale", "float32")
    >>> x = Register("x", 0, (4,), "float32", 16)
    >>> make, use = Actor("make", 0, "load", "microbatch", work, writes=("x",)), Actor("use", 0, "compute", "microbatch", work, reads=("x",))
    >>> order = {(0, "load"): (("make", 0), ("make", 1)), (0, "compute"): (("use", 0), ("use", 1))}
    >>> sweep = compile_sweep(Program("tiny", 2, (make, use), (x,), order).check(), steps=1)
    >>> start, end = sweep.times([1.0, 2.0])
    >>> start.tolist(), end.tolist()
    ([[0.0, 3.0, 1.0, 4.0]], [[1.0, 4.0, 3.0, 6.0]])
    >>> sweep.makespan([[1.0, 2.0], [3.0, 1.0]]).tolist()
    [6.0, 8.0]
    """

    steps: int
    actor: Ints
    microbatch: Ints
    place: Ints
    unit: Ints
    adds: NDArray[np.bool_]
    units: tuple[tuple[int, ...], ...]
    begin: Ints
    distance: Ints
    bounds: Ints
    by_level: bool
    ends: Ints

    @property
    def num_firings(self) -> int:
        """Firings of a step."""
        return len(self.actor)

    @property
    def is_wide(self) -> bool:
        """Whether one timing is quicker by levels."""
        return self.by_level and len(self.unit) >= WIDE * (len(self.bounds) - 1)

    @cached_property
    def window(self) -> int:
        return int(self.distance.max(initial=0))

    def times(self, seconds: ArrayLike, added: ArrayLike | None = None) -> tuple[Floats, Floats]:
        """(start, end) of every firing, of shape (steps, firings of a step).

        `seconds` by actor; of a channel the longest of its members counts. `added` by actor: what a firing that is not the first of its actor in a step takes
        longer. InputError where they are of another shape, negative or not finite.
        """
        taken = self._by_place(self._table(np.asarray(seconds, np.float64)[None], added))[:, 0]
        start, end = self._by_levels(taken) if self.is_wide else self._by_list(taken)
        return start[:, self.place], end[:, self.place]

    def makespan(self, seconds: ArrayLike, added: ArrayLike | None = None) -> Floats:
        """When the last step is complete, for each of a batch of timings: `seconds` of shape (timings, actors), see `times`."""
        return self.complete(seconds, added)[:, -1]

    def complete(self, seconds: ArrayLike, added: ArrayLike | None = None) -> Floats:
        """When each step is complete, of shape (timings, steps)."""
        batch = np.asarray(seconds, np.float64)
        out = np.empty((len(batch), self.steps))
        for i in range(0, len(batch), BATCH):
            table = self._table(batch[i : i + BATCH], added)
            self._batch.complete(table, self._rows(table), out[i : i + BATCH].T)
        return out

    # ---- durations ---------------------------------------------------------------------------------------------------------------------------------

    def _table(self, seconds: Floats, added: ArrayLike | None) -> Floats:
        """Rows of durations: of the units, then, where something is added, of the units once more with it. Columns are timings."""
        taken = self._of_units(seconds)
        return taken if added is None else np.concatenate([taken, taken + self._of_units(np.asarray(added, np.float64)[None])])

    def _of_units(self, seconds: Floats) -> Floats:
        num_actors = len(self._members[0])
        if seconds.ndim != 2 or seconds.shape[1] != num_actors:
            raise InputError(f"durations of shape {seconds.shape}; the program has {num_actors} actors: give one for each")
        if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
            raise InputError("durations are seconds, finite and 0 or more; give no others")
        members, starts = self._members
        rows = np.ascontiguousarray(seconds.T)[members]
        return rows if len(starts) == len(rows) else np.maximum.reduceat(rows, starts, axis=0)

    @cached_property
    def _members(self) -> tuple[Ints, Ints]:
        """(actors of all units, where each unit begins among them)."""
        starts = np.cumsum([0, *map(len, self.units)])[:-1]
        return np.array([a for u in self.units for a in u], np.intp), starts

    def _rows(self, table: Floats) -> Ints:
        """By place its row in the table."""
        return self.unit + len(self.units) * self.adds if len(table) > len(self.units) else self.unit

    def _by_place(self, table: Floats) -> Floats:
        return table[self._rows(table)]

    # ---- sweeps ------------------------------------------------------------------------------------------------------------------------------------

    @cached_property
    def _back(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """By place, its predecessors as negative places of a list that ends just before it: two, and what more there are."""
        first, last = self.begin[:-1], self.begin[1:] - 1
        more: list[tuple[int, ...]] = [()] * len(first)
        for i in np.flatnonzero(last - first > 1).tolist():
            more[i] = tuple((-self.distance[first[i] + 1 : last[i]]).tolist())
        return list(zip((-self.distance[first]).tolist(), (-self.distance[last]).tolist(), more, strict=True))

    @cached_property
    def _levels(self) -> list[tuple[int, int, tuple[Ints, ...]]]:
        """(first place, last place, rows of the predecessors by `by_degree`) of each level; row 0 is place -window."""
        rows, bounds = self.window + predecessors(self.begin, self.distance), self.bounds.tolist()
        return [(a, b, by_degree(self.begin[a : b + 1], rows)) for a, b in pairwise(bounds)]

    @cached_property
    def _batch(self) -> Batch:
        return compile_batch(self.begin, self.distance, self.bounds, self.by_level, self.ends)

    def _by_list(self, taken: Floats) -> tuple[Floats, Floats]:
        ends, starts = [0.0] * self.window, list[float]()
        durations = taken.tolist()
        for _ in range(self.steps):
            for (one, other, more), seconds in zip(self._back, durations, strict=True):
                start = ends[one]
                if ends[other] > start:
                    start = ends[other]
                for back in more:
                    if ends[back] > start:
                        start = ends[back]
                starts.append(start)
                ends.append(start + seconds)
        shape = (self.steps, len(taken))
        return np.array(starts).reshape(shape), np.array(ends[self.window :]).reshape(shape)

    def _by_levels(self, taken: Floats) -> tuple[Floats, Floats]:
        num, kept = len(taken), self.window
        ends, starts = np.zeros(kept + self.steps * num), np.empty((self.steps, num))
        for k in range(self.steps):
            here = ends[k * num : (k + 1) * num + kept]
            for first, last, before in self._levels:
                start = starts[k, first:last]
                latest(here, before, start)
                np.add(start, taken[first:last], out=here[kept + first : kept + last])
        return starts, ends[kept:].reshape(self.steps, num)


# ---- compilation -----------------------------------------------------------------------------------------------------------------------------------


def compile_sweep(program: Program, steps: int = 1) -> Sweep:
    """The Sweep of a well-formed program over `steps` steps, 1 or more. Deadlock with the Machine's story where nothing could run any more."""
    if steps < 1:
        raise ProgramError(f"a sweep cannot time {steps} steps; give 1 or more")
    net = program.net
    src, dst, offset = _edges(net)
    level = _levels(len(net.members), src[offset == 0], dst[offset == 0])
    if level is None:
        raise Deadlock(_story(program))
    by_level, order, bounds = _order(level, src, dst, offset)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    at, distance = place[dst], place[dst] + offset * len(order) - place[src]
    begin = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=len(order)))])
    actor, microbatch, group = (np.array(x, np.intp) for x in (net.actor, net.microbatch, net.group))
    heads = np.array([members[0] for members in net.members], np.intp)[order]
    ends = place[group[np.array(net.start[1:], np.intp) - 1]]
    units, unit_of = _units(program)
    unit, adds, distance = unit_of[actor[heads]], ~_opens(net)[heads], distance[np.lexsort((distance, at))]
    return Sweep(steps, actor, microbatch, place[group], unit, adds, units, begin, distance, bounds, by_level, ends)


def _edges(net: Net) -> tuple[Ints, Ints, Ints]:
    """(src, dst, offset) between groups, of each pair the latest: what ended a step earlier than another firing of the same group is implied."""
    after = np.arange(1, net.num_nodes + 1)
    wraps = np.zeros(net.num_nodes, np.intp)
    ends = np.array(net.start[1:], np.intp) - 1
    after[ends], wraps[ends] = net.start[:-1], 1
    waits = np.array(net.waits, np.intp).reshape(-1, 3)
    group = np.array(net.group, np.intp)
    src = group[np.concatenate([np.arange(net.num_nodes), waits[:, 0]])]
    dst = group[np.concatenate([after, waits[:, 1]])]
    offset = np.concatenate([wraps, waits[:, 2]])
    order = np.lexsort((offset, src, dst))
    src, dst, offset = src[order], dst[order], offset[order]
    kept = np.concatenate([[True], (np.diff(src) != 0) | (np.diff(dst) != 0)])[: len(src)]
    return src[kept], dst[kept], offset[kept]


def _levels(num: int, src: Ints, dst: Ints) -> Ints | None:
    """By group the number of edges on the longest path to it; None where there is a cycle."""
    by_src = np.argsort(src, kind="stable")
    begin = np.searchsorted(src[by_src], np.arange(num + 1)).tolist()
    targets = dst[by_src].tolist()
    missing = np.bincount(dst, minlength=num).tolist()
    level = [0] * num
    ready = [g for g in range(num) if not missing[g]]
    for g in ready:
        here = level[g] + 1
        for t in targets[begin[g] : begin[g + 1]]:
            if level[t] < here:
                level[t] = here
            missing[t] -= 1
            if not missing[t]:
                ready.append(t)
    return np.array(level, np.intp) if len(ready) == num else None


def _order(level: Ints, src: Ints, dst: Ints, offset: Ints) -> tuple[bool, Ints, Ints]:
    """(whether by levels, groups in order of computation, where each block of them begins and the last ends), with as few blocks as can be."""
    degree = np.bincount(dst, minlength=len(level))
    follower = _followers(degree, src, dst, offset)
    heads = np.setdiff1d(np.arange(len(level)), follower)
    num_levels = int(level.max(initial=-1)) + 1
    if num_levels <= len(heads):
        order = np.lexsort((-degree, level))
        return True, order, np.searchsorted(level[order], np.arange(num_levels + 1))
    after, chained, bounds = follower.tolist(), list[int](), [0]
    for g in heads[np.argsort(level[heads], kind="stable")].tolist():
        while g >= 0:
            chained.append(g)
            g = after[g]
        bounds.append(len(chained))
    return False, np.array(chained, np.intp), np.array(bounds, np.intp)


def _followers(degree: Ints, src: Ints, dst: Ints, offset: Ints) -> Ints:
    """By group the one that comes next in its run: it waits, in the same step, for this group alone; -1 where there is none. Of several the nearest."""
    alone = np.flatnonzero((degree[dst] == 1) & (offset == 0))
    alone = alone[np.argsort(-np.abs(dst[alone] - src[alone]), kind="stable")]
    out = np.full(len(degree), -1, np.intp)
    out[src[alone]] = dst[alone]
    return out


def _units(program: Program) -> tuple[tuple[tuple[int, ...], ...], Ints]:
    """(actors of every channel and lone actor, by actor its unit)."""
    found: dict[object, list[int]] = {}
    for i, a in enumerate(program.actors):
        found.setdefault(a.channel or i, []).append(i)
    unit_of = np.empty(len(program.actors), np.intp)
    for u, members in enumerate(found.values()):
        unit_of[members] = u
    return tuple(map(tuple, found.values())), unit_of


def _opens(net: Net) -> NDArray[np.bool_]:
    """Which firings open the step's item that they write, and so do not add to it."""
    opens: NDArray[np.bool_] = np.array(opening(net.program), np.intp)[net.actor] == np.array(net.microbatch, np.intp)
    return opens


def _story(program: Program) -> str:
    """Who waits for what once nothing can run any more."""
    machine = Machine(program, 1)
    ready = list(machine.startable)
    while ready:
        ready += machine.finish(machine.start(ready.pop()))
    return machine.story()

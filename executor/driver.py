"""Threads on a Machine: one for each queue; whoever finishes an action advances the Machine and wakes only the queues that this made ready.

The Machine is passive behind one lock; there is no dispatcher. The members of a collective and the ends of a p2p each do their share on their own thread,
and the last of them finishes the action for all, so that no slot is freed while a neighbour still reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from executor.backend import Backend, Mark, Stream
from executor.marks import Marks
from executor.transport import idle
from ir.errors import Deadlock, ExecutionError
from ir.machine import Action, Machine
from ir.program import Actor

Record = tuple[Action, float, Mark]
"""(action, when it came to the head of its queue, the mark of its work)."""


@dataclass(slots=True)
class Lane:
    """One queue's thread: `gate` is a closed lock at which it parks, `head_s` when its next action came to the head."""

    index: int
    rank: int
    queue: str
    stream: Stream
    left: int
    gate: Any
    parked: bool = False
    action: Action | None = None
    head_s: float = 0.0
    records: list[Record] = field(default_factory=list)


class Driver:
    """Performs a Machine to its end.

    `performs[actor index](step, microbatch)` does an actor's work. `values()` iterates over what `report` was given while the threads run, and ends with them;
    it raises ExecutionError with rank, actor and message when a thread failed, Deadlock with the Machine's story when nothing can run any more.
    """

    def __init__(self, machine: Machine, backend: Backend, watchdog_s: float, marks: Marks | None = None) -> None:
        if machine.steps is None:
            raise ExecutionError("a driver needs a number of steps; this machine goes on for ever")
        self.machine = machine
        self.performs: Sequence[Callable[[int, int], None]] = ()
        self.watchdog_s = watchdog_s
        self.marks = marks
        self.lock = threading.Lock()
        self.inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.stopping = False
        self.num_running = 0
        self.num_finished = 0
        self.start_s = 0.0
        self._waiting: dict[str, list[tuple[Lane, Action, Mark]]] = {}
        self._threads: list[threading.Thread] = []
        self.lanes = [
            Lane(i, rank, queue, backend.stream(rank, queue), machine.steps * len(machine.program.orders[rank, queue]), _closed_gate())
            for i, (rank, queue) in enumerate(machine.queues)
        ]

    def report(self, value: Any) -> None:
        """Hands a value to whoever iterates over `values()`; called by the threads."""
        self.inbox.put(("value", value))

    def values(self) -> Iterator[Any]:
        self._start()
        try:
            alive = len(self._threads)
            while alive:
                word, content = self._next_message()
                if word == "value":
                    yield content
                elif word == "failed":
                    raise content
                alive -= word == "ended"
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends every thread after the action that it is in."""
        with self.lock:
            self.stopping = True
            for lane in self.lanes:
                if lane.parked:
                    lane.parked = False
                    lane.gate.release()
        for thread in self._threads:
            thread.join(self.watchdog_s)

    # ---- the main thread -----------------------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.num_running = len(self.machine.startable)
        if not self.num_running and not self.machine.done:
            raise Deadlock(self.machine.story())
        self.start_s = perf_counter()
        for lane in self.lanes:
            lane.head_s = self.start_s
            thread = threading.Thread(target=self._guarded, args=(lane,), name=f"rank {lane.rank} {lane.queue}", daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def _next_message(self) -> tuple[str, Any]:
        """The next word of a thread; Deadlock when for `watchdog_s` nothing has finished and nothing runs."""
        while True:
            before = self.num_finished
            try:
                return self.inbox.get(timeout=self.watchdog_s)
            except Empty:
                with self.lock:
                    if not self.num_running and self.num_finished == before and not self.machine.done:
                        raise Deadlock(f"nothing has run for {self.watchdog_s:g} s\n{self.machine.story()}") from None

    # ---- the threads ---------------------------------------------------------------------------------------------------------------------------------

    def _guarded(self, lane: Lane) -> None:
        try:
            lane.stream.bind()
            self._run(lane)
        except BaseException as error:
            self.inbox.put(("failed", self._failure(lane, error)))
        self.inbox.put(("ended", lane))

    def _run(self, lane: Lane) -> None:
        machine, performs, marks, lock, index = self.machine, self.performs, self.marks, self.lock, lane.index
        mark: Mark = None
        after: Sequence[Mark] = ()
        while lane.left and not self.stopping:
            with lock:
                startable = machine.can_start(index)
                if startable:
                    lane.action = action = machine.start(index)
                else:
                    lane.parked = True
            if not startable:
                lane.gate.acquire()
                if self.stopping or not lane.left:
                    return
                with lock:
                    lane.action = action = machine.start(index)
            actor, step, microbatch = action
            if marks is not None:
                after = marks.before(action)
            mark = lane.stream.perform(performs[actor], step, microbatch, after)
            lane.left -= 1
            with lock:
                self._finish(lane, action, mark)

    def _finish(self, lane: Lane, action: Action, mark: Mark) -> None:
        """Ends an action, or the whole rendezvous if this was its last share; the lock is held."""
        actor = self.machine.actors[action.actor]
        if not actor.channel:
            if self.marks is not None:
                self.marks.after(action, (mark,))
            self._advance(lane, action, mark)
            return
        met = self._waiting.setdefault(actor.channel, [])
        met.append((lane, action, mark))
        if len(met) == self._num_members(actor):
            del self._waiting[actor.channel]
            together = tuple(m for _, _, m in met)
            for member, its_action, its_mark in met:
                if self.marks is not None:
                    self.marks.after(its_action, together)
                self._advance(member, its_action, its_mark)

    def _advance(self, lane: Lane, action: Action, mark: Mark) -> None:
        lane.records.append((action, lane.head_s, mark))
        lane.head_s = perf_counter()
        lane.action = None
        woken = self.machine.finish(action)
        self.num_finished += 1
        self.num_running += len(woken) - 1
        for index in woken:
            if self.lanes[index].parked:
                self._wake(self.lanes[index])
        if not self.num_running and not self.machine.done:
            raise Deadlock(self.machine.story())

    def _wake(self, lane: Lane) -> None:
        """Opens the gate of a parked lane, or ticks its next action off where that has no work and lets the thread sleep on."""
        action = self.machine.head(lane.index)
        if self.marks is None and action is not None and self.performs[action.actor] is idle:
            self.machine.start(lane.index)
            lane.left -= 1
            self._finish(lane, action, lane.stream.perform(idle, action.step, action.microbatch, ()))
            if lane.left:
                return
        if lane.parked:
            lane.parked = False
            lane.gate.release()

    def _num_members(self, actor: Actor) -> int:
        return len(self.machine.program.channels[actor.channel])

    def _failure(self, lane: Lane, error: BaseException) -> Exception:
        if isinstance(error, Deadlock):
            return error
        where = f"rank {lane.rank}, queue {lane.queue}"
        if lane.action is not None:
            actor = self.machine.actors[lane.action.actor]
            where = f"rank {lane.rank}, actor `{actor.name}` ({actor.work.op}), step {lane.action.step}, microbatch {lane.action.microbatch}"
        failure = ExecutionError(f"{where} failed: {type(error).__name__}: {error}; the other ranks were stopped")
        failure.__cause__ = error
        return failure


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate

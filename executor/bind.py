"""One callable for each actor, `perform(step, microbatch)`, made before the first step: kernel, arrays and context are looked up then and never again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from executor.backend import Array, Backend
from executor.buffers import Region
from executor.data import Data
from executor.slots import Access, firing_table
from executor.transport import Transport
from ir.errors import ExecutionError, ProgramError
from ir.op import Context, Op
from ir.ops import catalogue
from ir.program import Actor, Program
from ir.zigzag import runs

Perform = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run adds to a program: the seed, the number of the first step (after a resume), the learning rate of a step (None: the program's own)."""

    seed: int = 0
    first_step: int = 0
    rate: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class Binder:
    """Everything an actor can need. `report(actor, step, microbatch, value)` takes what `store` actors read."""

    program: Program
    backend: Backend
    access: Access
    transport: Transport
    data: Data
    settings: Settings
    report: Callable[[Actor, int, int, float], None]

    def bind(self, actor: Actor) -> Perform:
        kinds = {"compute": self._compute, "load": self._load, "store": self._store}
        if actor.work.kind in ("collective", "send", "recv"):
            return self.transport.bind(actor)
        if actor.work.kind not in kinds:
            raise ProgramError(f"actor `{actor.name}`: no work is of kind `{actor.work.kind}`")
        return kinds[actor.work.kind](actor)

    # ---- compute -------------------------------------------------------------------------------------------------------------------------------------

    def _compute(self, actor: Actor) -> Perform:
        op = catalogue(actor.work.op)
        outputs = actor.updates if actor.updates else actor.writes
        if len(actor.reads) + len(actor.updates) != len(op.inputs) or len(outputs) != len(op.outputs) + (op.room is not None):
            raise ProgramError(f"actor `{actor.name}`: {op.sentence} does not fit reads {actor.reads}, updates {actor.updates}, writes {actor.writes}")
        if actor.updates and actor.writes:
            raise ProgramError(f"actor `{actor.name}` both updates {actor.updates} and writes {actor.writes}; an actor does one or the other")
        if op.random or op.stepped or actor.updates:
            return self._stepped(actor, op)

        def make(step: int, microbatch: int) -> Callable[[], None]:
            arrays, after = self._arrays(actor, step, microbatch)
            kernel = partial(op.kernel, self._context(actor, microbatch), *arrays)
            return partial(_then, kernel, after) if after else kernel

        return firing_table(self.program, (actor,), make)

    def _stepped(self, actor: Actor, op: Op) -> Perform:
        """For kernels that know the step: random numbers and optimizers."""
        settings = self.settings
        contexts: list[Context] = []

        def make(step: int, microbatch: int) -> Callable[[], None]:
            arrays, after = self._arrays(actor, step, microbatch)

            def run() -> None:
                op.kernel(contexts[0], *arrays)
                for add in after:
                    add()

            return run

        table = firing_table(self.program, (actor,), make)
        base = [self._context(actor, m) for m in range(self.program.firings(actor))]

        def perform(step: int, microbatch: int) -> None:
            now = settings.first_step + step
            rate = settings.rate(now) if settings.rate else None
            contexts[:] = (dataclasses.replace(base[microbatch], step=now, lr=rate),)
            table(step, microbatch)

        return perform

    def _arrays(self, actor: Actor, step: int, microbatch: int) -> tuple[list[Array], list[Callable[[], Any]]]:
        """(the kernel's arrays, what to add to the registers afterwards where the firing accumulates)."""
        arrays = [self.access.array(actor, name, step, microbatch) for name in actor.reads]
        arrays += [self.access.previous(actor, name, step) for name in actor.updates]
        after: list[Callable[[], Any]] = []
        for name in actor.updates if actor.updates else actor.writes:
            slot = self.access.array(actor, name, step, microbatch)
            if name in actor.writes and self.access.adds(actor, name, microbatch):
                scratch = self.access.scratch(actor, name)
                after.append(partial(self.backend.xp.add, slot, scratch, out=slot))
                arrays.append(scratch)
            else:
                arrays.append(slot)
        return arrays, after

    def _context(self, actor: Actor, microbatch: int) -> Context:
        work = actor.work
        at = dict(work.at)
        if work.batch_stride:
            at["b"] = at.get("b", 0) + microbatch * work.batch_stride
        return Context(self.backend.xp, work.attrs, work.sizes, work.total, at, self.settings.seed, self.settings.first_step)

    # ---- in and out ----------------------------------------------------------------------------------------------------------------------------------

    def _load(self, actor: Actor) -> Perform:
        (name,) = actor.writes
        region = _load_region(actor)

        def perform(step: int, microbatch: int) -> None:
            shift = microbatch * actor.work.batch_stride
            here = ((region[0][0] + shift, region[0][1] + shift), *region[1:])
            out = self.access.array(actor, name, step, microbatch)
            value = self._piece(actor, self.settings.first_step + step, here)
            if value.shape != out.shape:
                raise ExecutionError(f"input `{actor.work.op}`: the data has a piece of shape {value.shape}, the program loads {out.shape}")
            self.backend.put(out, value)

        return perform

    def _piece(self, actor: Actor, step: int, region: Region) -> np.ndarray:
        """The data of a region, whose tokens may lie in zig-zag order."""
        num_ranks = actor.work.attrs.get("zigzag", 0)
        if not num_ranks:
            return self.data.piece(actor.work.op, step, region)
        found = runs(*region[1], actor.work.attrs["length"], num_ranks)
        return np.concatenate([self.data.piece(actor.work.op, step, (region[0], run, *region[2:])) for run in found], axis=1)

    def _store(self, actor: Actor) -> Perform:
        (name,) = actor.reads

        def perform(step: int, microbatch: int) -> None:
            value = self.backend.get(self.access.array(actor, name, step, microbatch))
            self.report(actor, step, microbatch, float(np.sum(value)))

        return perform


def _load_region(actor: Actor) -> Region:
    region = actor.work.attrs.get("dst_region")
    if not region:
        raise ProgramError(f"load `{actor.name}` has no attribute dst_region")
    return tuple((int(a), int(b)) for a, b in region)


def _then(kernel: Callable[[], None], after: list[Callable[[], Any]]) -> None:
    kernel()
    for add in after:
        add()

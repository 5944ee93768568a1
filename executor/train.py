"""A run: a Program performed for some steps on data, and what came of it: losses, timeline, tensors."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from executor.backend import Backend
from executor.backends import open_backend
from executor.bind import Binder, Settings
from executor.blas import one_thread
from executor.buffers import Buffers, tensor_names
from executor.data import ArrayData, Data, text_data
from executor.driver import Driver
from executor.marks import Marks
from executor.measured import hidden_share, timeline
from executor.slots import Access
from executor.threads import ThreadTransport
from ir.errors import InputError
from ir.machine import Machine
from ir.program import Actor, Program
from ir.timeline import Timeline

Progress = Callable[[int, int, float], None]
"""`progress(step, steps, loss)` after each step whose loss is known; a step counts from 1."""


@dataclass(frozen=True)
class Run:
    """What a run gave. `loss[k]` is the loss of step k, `interrupted` says whether it was stopped before its end; then everything holds for what was done."""

    program: Program
    steps: int
    first_step: int
    loss: list[float]
    timeline: Timeline
    buffers: Buffers
    nbytes: int
    interrupted: bool = False

    @property
    def step_s(self) -> float:
        """Seconds of a steady step: the median distance between the ends of two steps; how long the only step took where there is one."""
        ends = [end_s for _, end_s in sorted(self.timeline.complete_s.items())]
        lengths = [b - a for a, b in itertools.pairwise(ends)] or ends
        return statistics.median(lengths) if lengths else 0.0

    @property
    def overlap(self) -> float:
        """The share of the communication that ran while its rank computed; 1 where there is none."""
        return hidden_share(self.timeline, self.program)

    @property
    def messages(self) -> dict[str, float]:
        """Collectives and p2p of the whole run, and the bytes that they moved: of a collective what each of its members reads or writes, whichever is more."""
        counts = {"collectives": 0, "p2p": 0, "nbytes": 0}
        for members in self.program.channels.values():
            times = self.program.firings(members[0]) * self.steps
            counts["p2p" if members[0].work.kind in ("send", "recv") else "collectives"] += times
            counts["nbytes"] += times * int(members[0].work.nbytes) * (1 if members[0].work.kind in ("send", "recv") else len(members))
        return dict(counts)

    def tensor(self, name: str) -> np.ndarray:
        """The whole logical tensor at the end of the run, put together from all ranks: a parameter `wte`, its last gradient `d.wte`, optimizer state."""
        return self.buffers.tensor(name, self.steps)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every name that `tensor` takes and that outlasts a step."""
        return tensor_names(self.program)


@dataclass(slots=True)
class Losses:
    """Sums what the `store` actors report of each step; a step's loss is known once all have.

    A store that fires once a step gives the loss itself; one that fires once a microbatch gives the mean of its microbatches. Where several ranks
    store the same value, the one of the lowest rank counts.
    """

    program: Program
    name: str = "loss"
    values: dict[int, list[float]] = field(default_factory=dict)
    done: list[float] = field(default_factory=list)

    @property
    def actor(self) -> Actor | None:
        stores = [a for a in self.program.actors if a.work.kind == "store" and a.work.op == self.name]
        return min(stores, key=lambda a: a.rank) if stores else None

    def take(self, step: int, value: float) -> bool:
        """Returns whether that completed the step."""
        actor = self.actor
        assert actor is not None
        here = self.values.setdefault(step, [])
        here.append(value)
        if len(here) < self.program.firings(actor):
            return False
        self.done.append(sum(self.values.pop(step)) / self.program.firings(actor))
        return True


def run(
    program: Program, *, data: Data | str | None = None, steps: int = 10, lr: float | None = None, warmup: int = 0, seed: int = 0,
    backend: str | Backend = "numpy", watchdog_s: float = 30.0, progress: Progress | None = None, initial: Mapping[str, np.ndarray] | None = None,
    first_step: int = 0, check: bool = True,
) -> Run:  # fmt: skip
    """Performs `steps` steps of a program in this process, every rank on threads of its own.

    `data`: where inputs come from, the path of a text file, or None for the interpreter's own library sources. `lr` replaces the learning rate of the program's
    optimizer; it grows linearly over the first `warmup` steps. `initial`: weights and optimizer state by logical tensor, whole; the others start as
    the program says, drawn with `seed`. `first_step`: how many steps the state has seen (after a resume). Everything is a function of these.

    An interrupt (Ctrl-C) gives a Run of what was done until then, `interrupted` set. Raises Deadlock, ExecutionError (a rank failed), InputError.
    """
    if steps < 1:
        raise InputError(f"{steps} steps were asked for; give 1 or more")
    if check:
        program.check()
    device = open_backend(backend) if isinstance(backend, str) else backend
    source = _data(program, data, seed) if device.has_arrays else ArrayData({})
    with one_thread():
        machine = Machine(program, steps)
        buffers = Buffers(program, device)
        access = Access(machine, device, buffers)
        if device.has_arrays:
            buffers.fill(seed, initial or {})
        losses = Losses(program)
        stored = losses.actor
        driver = Driver(machine, device, watchdog_s, Marks(access) if device.asynchronous else None)

        def report(actor: Actor, step: int, microbatch: int, value: float) -> None:
            if actor is stored:
                driver.report((step, value))

        if device.has_arrays:
            settings = Settings(seed, first_step, learning_rate(program, lr, warmup))
            binder = Binder(program, device, access, ThreadTransport(program, device, buffers, access), source, settings, report)
            driver.performs = [binder.bind(a) for a in program.actors]
        else:
            driver.performs = [_nothing] * len(program.actors)
        device.synchronize()
        interrupted = False
        try:
            for step, value in driver.values():
                if losses.take(step, value) and progress is not None:
                    progress(len(losses.done), steps, losses.done[-1])
        except KeyboardInterrupt:
            interrupted = True
            driver.stop()
        device.synchronize()
        driver.performs = []  # they hold the driver's own report, and with it the buffers, in a circle
    return Run(program, steps, first_step, losses.done, timeline(driver, device), buffers, buffers.nbytes, interrupted)


def learning_rate(program: Program, lr: float | None, warmup: int) -> Callable[[int], float] | None:
    """The learning rate of a step: `lr` (or the program's own) times (step + 1) / warmup over the first `warmup` steps. None: the program's, unchanged.

    Raises InputError for a rate that is not above 0, or a warmup below 0.
    """
    if warmup < 0 or (lr is not None and not lr > 0):
        raise InputError(f"lr {lr} and warmup {warmup}: give a learning rate above 0 and 0 or more steps of warmup")
    if lr is None and not warmup:
        return None
    rates = dict.fromkeys(float(a.work.attrs["lr"]) for a in program.actors if a.updates and "lr" in a.work.attrs)
    if lr is None and len(rates) != 1:
        raise InputError(f"a warmup needs one learning rate, the program has {list(rates) or 'none'}; give --lr")
    base = lr if lr is not None else next(iter(rates))

    def rate(step: int) -> float:
        return base * min(1.0, (step + 1) / warmup) if warmup else base

    return rate


def _data(program: Program, data: Data | str | None, seed: int) -> Data:
    if data is not None and not isinstance(data, str):
        return data
    if "seq" not in program.meta:
        raise InputError(f"program `{program.name}` does not say its sequence length (meta `seq`); lower the plan again, or give the data as arrays")
    return text_data(data, int(program.meta["seq"]), seed, _vocab(program))


def _vocab(program: Program) -> int:
    """How many entries the table that looks bytes up has over all ranks; a byte above would be looked up nowhere."""
    typed = {r.name for r in program.registers if r.tensor == "token_types"}
    sizes = [a.work.total["v"] for a in program.actors if a.work.op == "embedding" and "v" in a.work.total and not typed.intersection(a.reads)]
    return min([*sizes, 256])


def _nothing(step: int, microbatch: int) -> None:
    pass


__all__ = ["Run", "learning_rate", "run"]

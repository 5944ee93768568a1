"""Tiny programs that do nothing but fire and exchange, to time the runtime itself."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, process_time

from executor.backend import Backend
from executor.buffers import Buffers
from executor.driver import Driver
from executor.null_backend import NullBackend
from executor.numpy_backend import NumpyBackend
from executor.slots import Access
from executor.threads import ThreadTransport
from ir.machine import Machine
from ir.program import Actor, Program, Register
from ir.work import Work


def firing_s(firings: int = 4000) -> float:
    """Seconds that the runtime takes for one firing that does nothing, one after the other on one queue; processor time."""
    actors = tuple(Actor(f"a{i}", 0, "compute", "step", Work("compute", "add", "float64")) for i in range(20))
    program = Program("firings", 1, actors, (), {(0, "compute"): tuple((a.name, 0) for a in actors)})
    steps = firings // len(actors)
    return _seconds(program, steps, NullBackend())[1] / (steps * len(actors))


def hop_s(steps: int = 200, tries: int = 3) -> float:
    """Seconds from a message's readiness to the next action on the far side: a token goes to and fro between two ranks; the best of some tries."""
    registers = (_register("x0", 0, 8, initial=1), _register("x1", 1, 8))
    actors = (*_message("there", 0, 1, "x0", "x1"), *_message("back", 1, 0, "x1", "x0"))
    return min(_seconds(_program(actors, registers), steps, NumpyBackend())[0] for _ in range(tries)) / steps / 2


def exchange_s(num_ranks: int, nbytes: int, steps: int = 30) -> float:
    """Seconds that one of the ranks is busy when all send `nbytes` to their neighbour at once; processor time."""
    size = max(1, nbytes // 8)
    registers = [_register(f"x{r}", r, size, initial=1) for r in range(num_ranks)] + [_register(f"y{r}", r, size) for r in range(num_ranks)]
    actors = [a for r in range(num_ranks) for a in _message(f"ring{r}", r, (r + 1) % num_ranks, f"x{r}", f"y{(r + 1) % num_ranks}")]
    return _seconds(_program(actors, registers), steps, NumpyBackend())[1] / steps / num_ranks


def _register(name: str, rank: int, size: int, initial: int = 0) -> Register:
    return Register(name, rank, (size,), "float64", 8 * size, clock="step", initial=initial)


def _message(name: str, src: int, dst: int, read: str, write: str) -> tuple[Actor, Actor]:
    send, recv = (Work(kind, "p2p", "float64", group=(src, dst)) for kind in ("send", "recv"))
    return (
        Actor(f"{name}.send", src, "send", "step", send, reads=(read,), channel=name),
        Actor(f"{name}.recv", dst, "recv", "step", recv, writes=(write,), channel=name),
    )


def _program(actors: Sequence[Actor], registers: Sequence[Register]) -> Program:
    orders: dict[tuple[int, str], tuple[tuple[str, int], ...]] = {}
    for a in actors:
        orders[a.rank, a.queue] = (*orders.get((a.rank, a.queue), ()), (a.name, 0))
    return Program("exchange", 1, tuple(actors), tuple(registers), orders).check()


def _seconds(program: Program, steps: int, device: Backend) -> tuple[float, float]:
    """(seconds by the clock, seconds of processor time) of a run without data."""
    machine = Machine(program, steps)
    driver = Driver(machine, device, 30.0)
    if device.has_arrays:
        buffers = Buffers(program, device)
        transport = ThreadTransport(program, device, buffers, Access(machine, device, buffers))
        driver.performs = [transport.bind(a) for a in program.actors]
    else:
        driver.performs = [_nothing] * len(program.actors)
    start_s, start_cpu_s = perf_counter(), process_time()
    for _ in driver.values():
        pass
    return perf_counter() - start_s, process_time() - start_cpu_s


def _nothing(step: int, microbatch: int) -> None:
    pass

"""What would make room for a model that does not fit, tried one change at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ir.units import nbytes
from planner.candidates import Candidate, bases
from planner.evaluate import Evaluated, Evaluator
from planner.optimizers import OPTIMIZERS

NUM_WAYS = 3
SHORTEST_SEQ = 128


def ways_out(evaluator: Evaluator) -> tuple[str, ...]:
    """Up to three changes after which something fits, the one with most tokens a second first; where that is fewer, how many devices hold the states."""
    found: list[tuple[float, str]] = []
    for words, changed in _changes(evaluator):
        fitting = _smallest(changed)
        if fitting is not None:
            token_s = fitting.estimate_s / (changed.batch * changed.bounds.seq)
            found.append((token_s, f"{words} ({fitting.candidate}: {nbytes(fitting.memory.peak_bytes)})"))
    ways = [words for _, words in sorted(found)[:NUM_WAYS]]
    state = sum(evaluator.footprint.state())
    num = math.ceil(state / (evaluator.memory_fraction * evaluator.cluster.devices[0].usable_bytes))
    if len(ways) < NUM_WAYS and num > evaluator.cluster.num_devices:
        ways.append(f"more devices (parameters, gradients and optimizer states are {nbytes(state)}: {num} such devices at the very least)")
    return tuple(ways)


def _changes(evaluator: Evaluator) -> Iterator[tuple[str, Evaluator]]:
    """(what to change, the question so changed), one change each."""
    is_open = not (evaluator.bounds.given or evaluator.bounds.rows)  # what a layout or a table decides cannot be left open alone
    for key, value in evaluator.fix.items() if is_open else ():
        yield f"leave {key}={value} open", replace(evaluator, fix={k: v for k, v in evaluator.fix.items() if k != key})
    if evaluator.memory_fraction < 1.0:
        yield "fill all usable memory (--memory-fraction 1)", replace(evaluator, memory_fraction=1.0)
    seq = evaluator.bounds.seq // 2
    while seq >= SHORTEST_SEQ:
        shorter = _with_seq(evaluator, seq)
        if any(map(shorter.may_fit, _space(shorter))):
            yield f"--seq {seq}", shorter
            break
        seq //= 2
    if evaluator.optimizer["name"] == "adamw":
        yield "--optimizer sgd", replace(evaluator, optimizer=OPTIMIZERS["sgd"])


def _with_seq(evaluator: Evaluator, seq: int) -> Evaluator:
    bounds = evaluator.bounds
    return replace(evaluator, bounds=replace(bounds, seq=seq, _graphs={}, _layers={}, _cuts={}))


def _space(evaluator: Evaluator) -> list[Candidate]:
    found = list(bases(evaluator.fix, evaluator.cluster.num_devices, evaluator.batch, evaluator.bounds.graph(1)))
    return found if "loss_chunks" in evaluator.fix else [*found, *(c for c in map(evaluator.in_loss_chunks, found) if c.loss_chunks > 1)]


def _smallest(evaluator: Evaluator) -> Evaluated | None:
    """The candidate that needs least by its bound, evaluated, if it fits."""
    space = [c for c in _space(evaluator) if evaluator.may_fit(c)]
    if not space:
        return None
    this = evaluator.evaluate(min(space, key=lambda c: (evaluator.footprint.least_bytes(c), str(c))))
    return this if this.fits(evaluator.memory_fraction) else None

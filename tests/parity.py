"""Any plan against one device: three steps of both, and how far their losses, gradients and states lie apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from executor.buffers import state_names
from executor.data import text_data
from executor.train import run
from executor.verify import Seen, compare, relative, root_mean_square, seen
from ir.plan import Plan
from ir.program import Program
from planner.frontends.model import Model
from planner.lower import lower
from planner.optimizers import with_defaults
from planner.schedules import SCHEDULES
from planner.single import single_device
from tests.models import BATCH, SEQ, gpt, llama
from tests.plans import Layout, cluster, plan_for

VALUES = {
    "dp": (1, 2, 4), "tp": (1, 2, 4), "pp": (1, 2, 4), "num_microbatches": (1, 2, 4), "zero": (0, 1, 2, 3), "sp": (False, True, None),
    "recompute": (False, True), "schedule": ("1f1b", "gpipe"),
}  # fmt: skip
"""What a layout may be; `sp` None: whatever the search finds."""

MODELS = {"gpt": gpt(), "llama": llama()}
DEEP = "gpt6"
"""Six layers: with embedding and head one layer for each stage of four ranks that hold two."""
LIMIT = 1e-10
"""The largest relative difference that rounding explains in float64."""

CUTS = ((6, 6), (5, 4, 3), (4, 3, 3, 2))
"""Where sequences of `SEQ` tokens are cut."""

OPTIONS: dict[str, Any] = {"data": text_data(None, SEQ, vocab=259), "lr": 1e-3, "warmup": 2, "seed": 3, "watchdog_s": 20.0}
COMPARED = ("loss_max_rel", "grad_max_rel", "state_max_rel")
STEPS = 3


@cache
def model(family: str) -> Model:
    return gpt(num_layers=6) if family == DEEP else MODELS[family]


@dataclass(frozen=True, slots=True)
class Ended:
    """What is compared of a run of three steps: every loss and the last gradients, and by name, whole, what outlasts it.

    The optimizer's states hold what all steps' gradients have left in them: a step that differs shows at the end.
    """

    seen: Seen
    states: Mapping[str, np.ndarray]


def ended(program: Program, **more: Any) -> Ended:
    """Three steps in one run, so that the next step begins before all ranks have ended the one before; `more` takes the place of `OPTIONS`."""
    done = run(program, steps=STEPS, check=False, **{**OPTIONS, **more})
    return Ended(seen(done), {name: done.tensor(name) for name in state_names(program)})


Settings = str | tuple[tuple[str, Any], ...]
"""An optimizer by name, or all that is said of it, which a cache can hold."""


def settings(optimizer: Settings) -> Mapping[str, Any]:
    return with_defaults(optimizer if isinstance(optimizer, str) else dict(optimizer))


@cache
def on_one_device(family: str, optimizer: Settings, batch: int = BATCH) -> Ended:
    """What every plan must give again."""
    whole = model(family)
    single = single_device(whole, cluster(), batch=batch, seq=SEQ, dtype="float64", optimizer=settings(optimizer))
    return ended(lower(whole, single))


def planned(family: str, want: Layout, optimizer: Settings = "adamw", memory_price: float = 0.0, batch: int = BATCH) -> Plan:
    return plan_for(model(family), want, batch=batch, seq=SEQ, memory_price=memory_price, optimizer=settings(optimizer))


def apart(family: str, want: Layout, optimizer: Settings = "adamw", memory_price: float = 0.0, batch: int = BATCH) -> dict[str, Any]:
    """`between` a plan of this layout and one device, dropout on, gradients clipped."""
    program = lower(model(family), planned(family, want, optimizer, memory_price, batch))
    return between(ended(program), on_one_device(family, optimizer, batch))


def between(ours: Ended, theirs: Ended) -> dict[str, Any]:
    """`loss_max_rel`, `grad_max_rel`, `grad_worst` as of `executor.verify`, and `state_max_rel` of parameters and of each of the optimizer's states alike."""
    assert ours.states.keys() == theirs.states.keys()
    kinds: dict[str, list[str]] = {}
    for name in theirs.states:
        kinds.setdefault(name.partition("@")[2], []).append(name)
    states = {}
    for names in kinds.values():
        average = root_mean_square(theirs.states[name] for name in names)
        states |= {name: relative(ours.states[name], theirs.states[name], average) for name in names}
    worst = max(states, key=lambda name: states[name])
    return {**compare(ours.seen, theirs.seen), "state_max_rel": states[worst], "state_worst": worst}


def pipelines() -> Iterator[Layout]:
    """Every schedule on 2 and 4 ranks with p - 1, p, 2p and 3p + 1 microbatches, where legal; where two copies share them, with 2p + 2 as well.

    A schedule that cuts sequences with two equal pieces, three and four unequal ones.
    """
    for chosen in SCHEDULES.values():
        for p in (2, 4):
            for m in (p - 1, p, 2 * p, 3 * p + 1, *((2 * p + 2,) if chosen.copies > 1 else ())):
                if not chosen.refuse(p, m, chosen.num_chunks()):
                    for pieces in CUTS if chosen.pieces > 1 else ((),):
                        yield Layout(pp=p, num_microbatches=m, schedule=chosen.name, pieces=pieces)


def apart_in_time(want: Layout) -> dict[str, Any]:
    """`apart` of a GPT with tied embeddings under one of the `pipelines`, one sample for each microbatch on each data-parallel rank."""
    return apart(DEEP, want, batch=want.dp * want.num_microbatches)


def same(found: dict[str, Any]) -> bool:
    """Whether they agree to rounding."""
    return max(found[what] for what in COMPARED) <= LIMIT

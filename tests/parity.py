"""Any plan against one device: three steps of both, and how far their losses and gradients lie apart."""

from __future__ import annotations

from functools import cache
from typing import Any

from executor.data import text_data
from executor.verify import Seen
from headrace.running import differences, step_by_step
from planner.lower import lower
from planner.single import OPTIMIZERS, single_device
from tests.models import BATCH, SEQ, gpt, llama
from tests.plans import Layout, cluster, plan_for

VALUES = {
    "dp": (1, 2, 4), "tp": (1, 2, 4), "pp": (1, 2, 4), "num_microbatches": (1, 2, 4), "zero": (0, 1, 2, 3), "sp": (False, True, None),
    "recompute": (False, True), "schedule": ("1f1b", "gpipe"),
}  # fmt: skip
"""What a layout may be; `sp` None: whatever the search finds."""

MODELS = {"gpt": gpt(), "llama": llama()}
LIMIT = 1e-10
"""The largest relative difference that rounding explains in float64."""

OPTIONS = {"data": text_data(None, SEQ, vocab=259), "lr": 1e-3, "warmup": 2, "seed": 3, "watchdog_s": 20.0}
START: dict[str, Any] = {"initial": None, "first_step": 0}
STEPS = 3


@cache
def on_one_device(family: str, optimizer: str) -> tuple[Seen, ...]:
    """The three steps that every plan is compared with."""
    model = MODELS[family]
    single = single_device(model, cluster(), batch=BATCH, seq=SEQ, dtype="float64", optimizer=OPTIMIZERS[optimizer])
    return tuple(step_by_step(lower(model, single), STEPS, START, OPTIONS))


def apart(family: str, want: Layout, optimizer: str = "adamw", memory_price: float = 0.0) -> dict[str, Any]:
    """`loss_max_rel`, `grad_max_rel` and `grad_worst` of three steps, dropout on."""
    program = lower(MODELS[family], plan_for(MODELS[family], want, batch=BATCH, seq=SEQ, memory_price=memory_price, optimizer=optimizer))
    return differences(step_by_step(program, STEPS, START, OPTIONS), on_one_device(family, optimizer), STEPS)


def same(found: dict[str, Any]) -> bool:
    """Whether they agree to rounding."""
    return max(found["loss_max_rel"], found["grad_max_rel"]) <= LIMIT

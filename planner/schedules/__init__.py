"""The order in which the ranks of a pipeline run their stages' microbatches, one file a schedule.

`slot` a pass and how orders are spelled, `schedule` what every schedule has, then the schedules: `gpipe`, `one_f_one_b`, `eager_1f1b`, `interleaved`,
`looped_bfs`, `zb_h1`, `zb_h2`, `interleaved_zb`, `zb_v`, `dualpipe_v`, `dualpipe`, `seq_1f1b`; from a `building_block` `v_zb`, `v_half`, `v_min`,
`one_f_one_b_v`. Then `text` PyTorch's CSV, `proof` whether orders can run, `own` a user's table as a schedule. Last `auto`, the search for the best orders:
`pipe` its problem, `retime` and `bound` what orders take and at least take, `dispatch` and `climb` how they are found, `certificate` how they are proved.
"""

from __future__ import annotations

from collections.abc import Mapping

from ir.errors import PlanError
from planner.schedules import (
    dualpipe,
    dualpipe_v,
    eager_1f1b,
    gpipe,
    interleaved,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    one_f_one_b_v,
    seq_1f1b,
    v_half,
    v_min,
    v_zb,
    zb_h1,
    zb_h2,
    zb_v,
)
from planner.schedules.schedule import Schedule, Times, peak
from planner.schedules.slot import Orders, Slot

__all__ = ["SCHEDULES", "Orders", "Schedule", "Slot", "Times", "peak", "schedule"]

SCHEDULES: Mapping[str, Schedule] = {
    s.name: s
    for s in (
        gpipe.SCHEDULE, one_f_one_b.SCHEDULE, eager_1f1b.SCHEDULE, interleaved.SCHEDULE, interleaved.MEGATRON, looped_bfs.SCHEDULE, zb_h1.SCHEDULE,
        zb_h2.SCHEDULE, interleaved_zb.SCHEDULE, zb_v.SCHEDULE, v_zb.SCHEDULE, v_half.SCHEDULE, v_min.SCHEDULE, one_f_one_b_v.SCHEDULE,
        dualpipe.SCHEDULE, dualpipe_v.SCHEDULE, seq_1f1b.SCHEDULE,
    )
}  # fmt: skip


def schedule(name: str, pieces: int = 0) -> Schedule:
    """The schedule of this name, with sequences cut into so many pieces (0: as it does by itself); PlanError with the names there are."""
    if name not in SCHEDULES:
        raise PlanError(f"schedule `{name}` is not known; known are {', '.join(SCHEDULES)}")
    return SCHEDULES[name].in_pieces(pieces)

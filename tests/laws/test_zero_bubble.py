"""The bubbles that the zero-bubble paper publishes (Qi et al., 2023, arXiv:2401.10241): its schedules to four decimals, its searched orders met or beaten."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from planner.schedules import Times, schedule
from planner.schedules.auto import Effort, Limits, StageTimes, search_orders
from planner.schedules.proof import check_orders
from tests.schedules import longest_path

SEQ = 1024
"""Tokens of a microbatch's sequences in all settings of the paper."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Ranks, microbatches, measured microseconds of F, I, W and a hop, width and heads of the model; then published bubbles.

    Of 1F1B, ZB-H1 and ZB-1p the makespan counts; of ZB-H2 and ZB-2p each rank counts from its first start to its last end.
    """

    p: int
    m: int
    f: int
    i: int
    w: int
    hop: int
    hidden: int
    heads: int
    one_f_one_b: float
    h1: float
    h2: float
    one_p: float
    two_p: float

    def __str__(self) -> str:
        return f"p{self.p}m{self.m}h{self.hidden}"

    @property
    def freed_at_i(self) -> float:
        """The share of a microbatch's activations that the gradient of the input frees: of 34 h + 5 a s bytes a token the weights' needs 32 h (section 3)."""
        return 1.0 - 32 * self.hidden / (34 * self.hidden + 5 * self.heads * SEQ)

    def bubble(self, seconds: float) -> float:
        return 1.0 - self.m * (self.f + self.i + self.w) / seconds


SETTINGS = [
    Setting(*row)
    for row in (
        (8, 24, 18522, 18086, 9337, 601, 2304, 24, 0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
        (8, 32, 18513, 18086, 9331, 626, 2304, 24, 0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
        (8, 64, 18546, 18097, 9321, 762, 2304, 24, 0.1240, 0.0674, 0.0444, 0.0674, 0.0026),
        (8, 24, 29718, 29444, 19927, 527, 4096, 32, 0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
        (8, 32, 29802, 29428, 19530, 577, 4096, 32, 0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
        (8, 64, 29935, 29621, 19388, 535, 4096, 32, 0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
        (16, 48, 11347, 11248, 8132, 377, 5120, 40, 0.2552, 0.1397, 0.0672, 0.1397, 0.0066),
        (16, 64, 11307, 11254, 8101, 379, 5120, 40, 0.2082, 0.1088, 0.0516, 0.1088, 0.0054),
        (16, 128, 11325, 11308, 8109, 378, 5120, 40, 0.1251, 0.0576, 0.0266, 0.0576, 0.0028),
        (32, 96, 10419, 10207, 7715, 408, 6144, 48, 0.2646, 0.1421, 0.0641, 0.1421, 0.0038),
        (32, 128, 10408, 10204, 7703, 408, 6144, 48, 0.2168, 0.1106, 0.0490, 0.1106, 0.0029),
        (32, 256, 10402, 10248, 7698, 460, 6144, 48, 0.1352, 0.0594, 0.0257, 0.0594, 0.0018),
    )
]  # fmt: skip


@pytest.mark.parametrize("s", SETTINGS, ids=str)
def test_the_schedules_to_four_decimals(s: Setting) -> None:
    found = []
    for name, by_rank in (("1f1b", False), ("zb-h1", False), ("zb-h2", True)):
        timed = longest_path(schedule(name).orders(s.p, s.m), s.p, 1, Times(s.f, s.i, s.w), s.hop)
        assert timed is not None
        found.append(round(s.bubble(timed[by_rank]), 4))
    assert found == [s.one_f_one_b, s.h1, s.h2]


@pytest.mark.parametrize("s", SETTINGS, ids=str)
@pytest.mark.parametrize("twice", [False, True], ids=["1p", "2p"])
def test_the_search_meets_what_the_authors_search_found(s: Setting, twice: bool) -> None:
    """With the memory of p microbatches on every rank, and of 2p; what is better is better in all four decimals."""
    times = StageTimes.equal(s.p, s.f, s.i, s.w, s.hop)
    limits = Limits.units(times, 2 * s.p if twice else s.p, s.freed_at_i)
    effort = Effort(passes=8_000_000 if s.p == 8 and twice else 0)
    found = search_orders(times, s.m, limits, effort=effort, rolling=twice)
    assert round(s.bubble(found.makespan_s), 4) <= (s.two_p if twice else s.one_p)
    if s.p == 8:
        check_orders(found.orders, lambda stage: stage, s.m)
    timed = longest_path(found.orders, s.p, 1, Times(s.f, s.i, s.w), s.hop)
    assert timed is not None
    assert timed[twice] == pytest.approx(found.makespan_s, rel=1e-9)
    freed = {"F": 1.0, "I": -s.freed_at_i, "W": s.freed_at_i - 1.0}
    for order in found.orders:
        live = most = 0.0
        for slot in order:
            live += freed[slot.kind]
            most = max(most, live)
        assert most <= limits.memory[0] + 1e-6

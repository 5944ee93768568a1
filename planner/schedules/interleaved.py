"""Interleaved 1F1B: a rank holds v stages and runs groups of microbatches through each in turn (Narayanan et al., 2021, arXiv:2104.04473).

Two rules of grouping: Megatron-LM's takes groups of p and needs m to be a multiple of p; PyTorch's takes max(1, m // p) equal groups, and m must be a multiple
of their number. Where both are legal, the orders are the same.
With equal stages the step takes m(F + B) + (p - 1)(F + B) / v. Rank r keeps ((v - 1) g + 2(p - 1 - r) + 1) / v microbatches, g the size of a group, at most m.

>>> print(show(SCHEDULE.orders(2, 2, 2)))
0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
>>> MEGATRON.legal(4, 10, 2)
Traceback (most recent call last):
ir.errors.PlanError: schedule `interleaved-megatron` cannot run 10 microbatches on pp = 4 ranks: m must be a multiple of pp = 4; nearest legal are 4, 8, 12
>>> SCHEDULE.legal(4, 10, 2)
>>> SCHEDULE.legal(4, 9, 2)
Traceback (most recent call last):
ir.errors.PlanError: schedule `interleaved` cannot run 9 microbatches on pp = 4 ranks: m // pp = 2 groups do not divide m; nearest legal are 7, 8, 10
"""

from __future__ import annotations

from dataclasses import replace

from planner.schedules.schedule import Schedule, Times
from planner.schedules.slot import Orders, show, spell, weave

__all__ = ["MEGATRON", "SCHEDULE", "group_size", "show", "stages_in_turn", "unequal_groups"]


def group_size(p: int, m: int) -> int:
    """Microbatches that run through a stage before the next stage of the rank has its turn."""
    return m // max(1, m // p)


def unequal_groups(p: int, m: int, v: int) -> str:
    rounds = max(1, m // p)
    return f"m // pp = {rounds} groups do not divide m" if m % rounds else ""


def no_multiple(p: int, m: int, v: int) -> str:
    return f"m must be a multiple of pp = {p}" if m % p else ""


def stages_in_turn(rank: int, p: int, m: int, v: int) -> list[int]:
    """The stages of a rank in the order of its forwards, one entry a slot: a group through each."""
    group = group_size(p, m)
    return [chunk * p + rank for _ in range(m // group) for chunk in range(v) for _ in range(group)]


def ahead(rank: int, p: int, m: int, v: int) -> int:
    """Forwards before the first backward joins in."""
    return min((v - 1) * group_size(p, m) + 2 * (p - 1 - rank), m * v)


def order(rank: int, p: int, m: int, v: int) -> list[tuple[str, int]]:
    turns = stages_in_turn(rank, p, m, v)
    back = [(v - 1 - s // p) * p + rank for s in turns]
    return weave(turns, back, ahead(rank, p, m, v))


def orders(p: int, m: int, v: int) -> Orders:
    return tuple(spell(order(r, p, m, v), m) for r in range(p))


def time(p: int, m: int, v: int, t: Times) -> float:
    return (m + (p - 1) / v) * t.total


def memory(rank: int, p: int, m: int, v: int) -> float:
    return min((v - 1) * group_size(p, m) + 2 * (p - 1 - rank) + 1, m * v) / v


SCHEDULE = Schedule("interleaved", "arXiv:2104.04473; torch 2.13 ScheduleInterleaved1F1B", orders, time, memory, chunks=None, refuse=unequal_groups)
MEGATRON = replace(SCHEDULE, name="interleaved-megatron", source="arXiv:2104.04473", refuse=no_multiple)

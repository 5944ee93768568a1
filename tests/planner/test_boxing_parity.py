"""Every re-shard on a mesh of two axes, run: a parameter that one operator reads in one placement and the next in another, against one device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from executor.data import ArrayData
from ir.graph import Builder, Graph
from ir.op import ALL_B, Rule
from ir.plan import Hub, ParamPlacement, Plan, Stage
from ir.program import Program
from ir.sbp import B, NdSbp, P, S, Sbp
from planner.lower import lower
from planner.optimizers import with_defaults
from tests.parity import Ended, between, ended, same

RULES = {S(0): Rule("split", "b"), S(1): Rule("split", "s"), B: ALL_B, P: Rule("linear", "x")}
PAIRS = tuple(itertools.product(RULES, repeat=2))
AXES = ("dp", "cp", "tp")


@dataclass(frozen=True)
class Twice:
    """The sum of squares of a parameter of this shape."""

    shape: tuple[int, int]
    name: str = "twice"

    def graph(self, batch: int, seq: int, dtype: str) -> Graph:
        build = Builder(self.name)
        build.tensor("w", self.shape, dtype, "param", {"init": "normal", "std": 1.0})
        build.node("scale", ("w",), name="one", attrs={"factor": 1.5})
        build.node("mul", ("one", "one"), name="two")
        build.node("total", ("two",), name="loss", attrs={"factor": 0.5})
        return build.graph(("loss",))


def cotangent(nd: NdSbp) -> NdSbp:
    return tuple(s if s.is_split else B for s in nd)


def plan(shape: tuple[int, int], mesh: tuple[int, ...], src: NdSbp, dst: NdSbp) -> Plan:
    axes, everywhere = (AXES if len(mesh) == 3 else AXES[::2])[: len(mesh)], (B,) * len(mesh)
    rules = {"one": tuple(RULES[s] for s in src), "two": tuple(RULES[s] for s in dst), "loss": (ALL_B,) * len(mesh)}
    hubs = {"one": Hub(src, cotangent(src)), "two": Hub(dst, cotangent(dst)), "loss": Hub(everywhere, everywhere)}
    ranks = tuple(range(int(np.prod(mesh))))
    return Plan(
        "twice", "", "", "", 1, 1, "float64", with_defaults("sgd"), axes, mesh, (Stage(0, 1, ranks),), "1f1b", 1, (), rules, hubs,
        {"w": ParamPlacement(everywhere, everywhere, everywhere)},
    )  # fmt: skip


@cache
def alone(shape: tuple[int, int]) -> Ended:
    return ended(lower(Twice(shape), plan(shape, (), (), ())), data=ArrayData({}))


def queues(program: Program) -> set[str]:
    return {a.queue for a in program.actors if a.work.kind == "collective"}


@pytest.mark.parametrize("src", PAIRS, ids=str)
def test_every_pair_of_placements_on_two_axes_is_one_device(src: NdSbp) -> None:
    """And back: of the cotangent. One split is uneven."""
    for dst in PAIRS:
        program = lower(Twice((7, 6)), plan((7, 6), (2, 3), src, dst))
        assert same(between(ended(program, data=ArrayData({})), alone((7, 6)))), (src, dst)
        changes = all(s.is_split for s in (*src, *dst)) and sum(a != b for a, b in zip(src, dst, strict=True)) == 2
        assert "comm.dp+tp" in queues(program) or not changes


@pytest.mark.parametrize(
    ("src", "dst", "axes"),
    [((S(0), B, S(0)), (S(1), B, S(1)), "dp+tp"), ((S(0), S(0), S(1)), (S(1), S(1), S(1)), "dp+cp"), ((P, P, S(0)), (B, B, S(0)), "dp+cp"),
     ((S(0), S(1), S(1)), (S(0), B, B), "cp+tp"), ((S(0), S(0), S(0)), (S(1), S(0), S(1)), ""), ((P, S(1), P), (S(0), S(1), S(0)), "dp+tp")],
)  # fmt: skip
def test_two_of_three_axes(src: tuple[Sbp, ...], dst: tuple[Sbp, ...], axes: str) -> None:
    program = lower(Twice((8, 8)), plan((8, 8), (2, 2, 2), src, dst))
    assert same(between(ended(program, data=ArrayData({})), alone((8, 8))))
    assert not axes or f"comm.{axes}" in queues(program)

"""The sites of a plan as they are written: which values there are, and the tasks that make them, re-shards among them.

All ranks of a site (a pipeline rank: one stage, or several virtual ones) do the same tasks on their own shards (SPMD), so a site is one list. A task belongs to
a part of the step: `begin` (once, before the first microbatch), `F`, `I` and `W` (once a microbatch: forward, recomputation and input gradients, weight
gradients), `end` (once, after the last). A value is a tensor in one placement on one site; a re-shard makes a new value of the same tensor, and whoever needs
the same placement in the same part of the same stage reads the same value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ir.boxing import Step, cached_chain
from ir.graph import Node, Tensor
from ir.mesh import Mesh
from ir.op import ALL_B, LEADING, Rule
from ir.plan import Plan
from ir.sbp import NdSbp, Sbp, format_nd
from ir.units import DTYPE_BYTES

PARTS = ("begin", "F", "I", "W", "end")

READS_FROM = {"begin": ("begin",), "F": ("F",), "I": ("I",), "W": ("W", "I"), "end": ("end",)}
"""In each part, the parts whose re-shards it reads: weight gradients may run much later than input gradients, never before them."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in one placement on one stage. `clock` and `memory` as of `ir.program.Register`; `initial`: there before the first step.

    `share`: how much of it is filled, 1 but for stacks with fewer members than slots.
    """

    name: str
    tensor: Tensor
    nd: NdSbp
    clock: str = "microbatch"
    memory: str = "activation"
    initial: bool = False
    counted_elsewhere: bool = False
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """What each rank of a stage does once a microbatch, or once a step in the parts `begin` and `end`.

    `waits`: values that must be there though they are not looked at. `kind`: compute (operator `op` under `rules`), box (one step on mesh axes `axes`),
    shift (to the next rank on mesh axis `axes`), send and recv (between the two stages in `peers`), load, store, join (a sum over the stages in `peers`,
    rank by rank; over all ranks when `everyone`).
    `first`: where its tokens start in the sequence, None where sequences are whole or it has none.
    """

    name: str
    part: str
    queue: str
    kind: str
    op: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    axes: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    everyone: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    phase: str = "F"
    layer: int = 0
    clock: str = "microbatch"
    stage: int = 0
    number: int = 0
    first: int | None = None


@dataclass
class SiteTasks:
    """What one pipeline rank holds: its mesh, values by name, and the tasks of its stages by part. `Task.number` tells the order in which they were written."""

    mesh: Mesh
    values: dict[str, Value] = field(default_factory=dict)
    tasks: dict[str, list[Task]] = field(default_factory=lambda: {part: [] for part in PARTS})


class Sites:
    """What `planner.place` and `planner.ending` write on. A stage stands for its site.

    `holders`: for each parameter the stages, one a site, that read it. `made`: by (stage, tensor, placement, part) the value that is there.
    """

    def __init__(self, plan: Plan, params: Iterable[str]) -> None:
        self.plan = plan
        self.all = tuple(SiteTasks(plan.mesh([s.ranks for s in plan.stages].index(ranks))) for ranks in plan.sites)
        self.site_of = tuple(plan.sites.index(s.ranks) for s in plan.stages)
        self.holders: dict[str, list[int]] = {name: [] for name in params}
        self.made: dict[tuple[int, str, NdSbp, str], str] = {}
        self.wide = DTYPE_BYTES[plan.dtype] < 4
        self.state_dtype = "float32" if self.wide else plan.dtype
        self.num_tasks = 0

    def add(self, stages: list[int], stage: int) -> None:
        """Adds a stage to those of which each stands for its site."""
        if self.site_of[stage] not in [self.site_of[i] for i in stages]:
            stages.append(stage)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first stage of every site."""
        return tuple(self.site_of.index(site) for site in range(len(self.all)))

    def is_counted_elsewhere(self, stage: int, param: str) -> bool:
        """Whether another site holds the parameter, too, and comes first."""
        return self.site_of[stage] != self.site_of[min(self.holders[param])]

    def at(self, stage: int) -> SiteTasks:
        return self.all[self.site_of[stage]]

    def value(self, stage: int, tensor: Tensor, nd: NdSbp, part: str, **more: Any) -> str:
        """A new value; the first of a tensor on a site has the tensor's name."""
        values = self.at(stage).values
        name = tensor.name
        if name in values:
            name = f"{tensor.name}{format_nd(nd, self.plan.axes)}"
        base = name
        k = 1
        while name in values:
            k += 1
            name = f"{base}.{k}"
        values[name] = Value(name, tensor, nd, **more)
        self.made[self.key(stage, part), tensor.name, nd, part] = name
        return name

    def key(self, stage: int, part: str) -> int:
        """What happens once a step belongs to the site, whose first stage stands for it; the passes of its stages do not read each other's re-shards."""
        return self.site_of.index(self.site_of[stage]) if part in ("begin", "end") else stage

    def found(self, stage: int, tensor: str, nd: NdSbp, part: str) -> str | None:
        """The value of a tensor in a placement that this part may read, if there is one."""
        return next((self.made[key] for p in READS_FROM[part] if (key := (self.key(stage, p), tensor, nd, p)) in self.made), None)

    def task(self, stage: int, part: str, kind: str, op: str, name: str, **more: Any) -> None:
        clock = "step" if part in ("begin", "end") else "microbatch"
        self.num_tasks += 1
        self.at(stage).tasks[part].append(Task(name, part, more.pop("queue", "compute"), kind, op, clock=clock, stage=stage, number=self.num_tasks, **more))

    def box(
        self, stage: int, tensor: Tensor, have: str, want: NdSbp, part: str, like: Node | None, *, clock: str = "microbatch", memory: str = "buffer",
        waits: tuple[str, ...] = (),
    ) -> str:  # fmt: skip
        """The value of `tensor` in placement `want`, re-sharded step by step from the value called `have`."""
        for step in self._steps(stage, tensor, have, want):
            known = self.found(stage, tensor.name, step.dst, part)
            if known is None:
                share = self.at(stage).values[have].share
                known = self.value(stage, tensor, step.dst, part, clock=clock, memory=memory, share=share)
                self._step(stage, tensor, have, known, step, part, like, waits)
            have = known
        return have

    def _steps(self, stage: int, tensor: Tensor, have: str, want: NdSbp) -> tuple[Step, ...]:
        mesh, src = self.at(stage).mesh, self.at(stage).values[have].nd
        return cached_chain(src, want, tensor.shape, mesh.shape, DTYPE_BYTES[tensor.dtype], self.plan.links)

    def _step(self, stage: int, tensor: Tensor, have: str, to: str, step: Step, part: str, like: Node | None, waits: tuple[str, ...] = ()) -> None:
        """The task that re-shards the value `have` into the value `to`."""
        queue = "compute" if step.is_local else f"comm.{step.over(self.plan.axes)}"
        self.task(
            stage, part, "box", step.kind, f"{to}.{step.kind}.{part}", reads=(have,), writes=(to,), waits=waits, axes=step.axes, queue=queue,
            origin=like.name if like else tensor.name, phase=like.phase if like else "U", layer=like.layer if like else 0,
        )  # fmt: skip


def sum_rule(sbp: Sbp) -> Rule:
    """The rule under which `add(x, y)` and other sums act on operands in this placement."""
    if sbp.is_split:
        return Rule("split", LEADING[sbp.dim])
    return Rule("linear", "x+y") if sbp.is_partial else ALL_B


def identity_rules(nd: NdSbp) -> tuple[Rule, ...]:
    """The rules of an elementwise operator on operands in this placement; a P operand is read as it is."""
    return tuple(Rule("split", LEADING[s.dim]) if s.is_split else ALL_B for s in nd)


__all__ = ["PARTS", "SiteTasks", "Sites", "Task", "Value", "identity_rules", "sum_rule"]

"""The verbs of a run: run a plan or a program, lay its timeline on the predicted one, measure this machine. Nothing here needs scipy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import headrace
from executor import checkpoint as checkpoints
from executor import train, verify
from executor.buffers import state_names
from headrace.documents import SCHEMA_VERSION, read_kind
from headrace.local import local_path, measure_local
from headrace.timelines import read_timeline
from ir.cluster import Cluster
from ir.errors import InputError
from ir.plan import Plan
from ir.program import Program
from ir.timeline import Diff, Timeline
from ir.timeline import diff as diff_timelines

Progress = Callable[..., None]
VERIFIED_STEPS = 3
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2}
"""How far a plan may be from one device, relative: rounding differs with the order of sums."""


@dataclass(frozen=True)
class Outcome:
    """A run, and how far it was from the same steps on one device (`verified`: loss_max_rel, grad_max_rel, grad_worst, steps), where that was asked."""

    run: train.Run
    backend: str
    verified: Mapping[str, Any] | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing was verified, or all of it within the tolerance of the dtype."""
        limit = TOLERANCE.get(str(self.run.program.meta.get("dtype")), 1e-2)
        return self.verified is None or max(self.verified["loss_max_rel"], self.verified["grad_max_rel"]) <= limit

    def document(self) -> dict[str, Any]:
        meta = self.run.program.meta
        return {
            "schema_version": SCHEMA_VERSION, "kind": "run", "model": {"name": meta.get("model"), "fingerprint": meta.get("model_fingerprint")},
            "cluster": {"name": meta.get("cluster"), "fingerprint": meta.get("cluster_fingerprint")}, "backend": self.backend,
            "steps": len(self.run.loss), "first_step": self.run.first_step, "loss": list(self.run.loss), "step_s": self.run.step_s,
            "predicted_step_s": meta.get("predicted_step_s"), "verified": dict(self.verified) if self.verified is not None else None,
            "overlap": self.run.overlap, "messages": dict(self.run.messages), "interrupted": self.run.interrupted,
        }  # fmt: skip


def run(
    what: Plan | Program | str | Path, *, steps: int = 10, data: str | None = None, lr: float | None = None, warmup: int = 0, seed: int = 0,
    backend: str = "numpy", verify: bool = False, checkpoint: str | None = None, resume: str | None = None, model: Any = None, progress: Progress | None = None,
) -> Outcome:  # fmt: skip
    """Trains for `steps` steps on the bytes of the text file `data` (the sources of Python's library), every rank on threads of this process.

    `what`: a plan, a program, or the file of one. `verify` first runs three steps on one device too, which takes a plan. `resume` starts from a
    checkpoint, `checkpoint` writes one at the end. Raises InputError, PlanError, ProgramError, ExecutionError.
    """
    plan, program = _program(what, model)
    state = checkpoints.load(resume) if resume else None
    options: dict[str, Any] = {"data": data, "lr": lr, "warmup": warmup, "seed": seed, "backend": backend}
    start: dict[str, Any] = {"initial": state.tensors, "first_step": state.step} if state else {"initial": None, "first_step": 0}
    verified = None
    if verify:
        if plan is None:
            raise InputError("--verify compares with the plan of one device, and a program does not say which model it is of: give the plan")
        single = headrace.lower_single(plan, model)
        verified = compare(program, single, min(steps, VERIFIED_STEPS), start, options, progress)
    done = train.run(program, steps=steps, progress=progress, **start, **options)
    if checkpoint and not done.interrupted:
        checkpoints.save(done, checkpoint, model=program.meta.get("model"), model_fingerprint=program.meta.get("model_fingerprint"), seed=seed)
    return Outcome(done, backend, verified)


def compare(program: Program, single: Program, steps: int, start: Mapping[str, Any], options: Mapping[str, Any], progress: Progress | None) -> dict[str, Any]:
    """The largest relative differences of `steps` steps of both programs: every loss, and every gradient after each step."""
    return differences(step_by_step(program, steps, start, options), step_by_step(single, steps, start, options), steps, progress)


def step_by_step(program: Program, steps: int, start: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[verify.Seen]:
    """What is compared of every step, each a run that goes on from the state of the one before: a run keeps the gradients of its last step only.

    Between two steps nothing but the state is kept, so that two programs compared in turn never hold their memory both.
    """
    state = dict(start)
    for _ in range(steps):
        seen, state = _one_step(program, state, options)
        yield seen


def _one_step(program: Program, start: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[verify.Seen, dict[str, Any]]:
    """What is compared of one step, and where the next one starts."""
    done = train.run(program, steps=1, check=False, **start, **options)
    if done.interrupted:
        raise KeyboardInterrupt
    tensors: dict[str, np.ndarray] = {name: done.tensor(name) for name in state_names(program)}
    return verify.seen(done), {"initial": tensors, "first_step": done.first_step + 1}


def differences(ours: Iterable[verify.Seen], theirs: Iterable[verify.Seen], steps: int, progress: Progress | None = None) -> dict[str, Any]:
    """What `compare` gives, of two programs step by step."""
    found: dict[str, Any] = {"loss_max_rel": 0.0, "grad_max_rel": 0.0, "grad_worst": "", "steps": steps}
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        here = verify.compare(a, b)
        found["loss_max_rel"] = max(found["loss_max_rel"], here["loss_max_rel"])
        if here["grad_max_rel"] >= found["grad_max_rel"]:
            found |= {"grad_max_rel": here["grad_max_rel"], "grad_worst": here["grad_worst"]}
        if progress is not None:
            progress(k, steps, a.loss[-1], "verified")
    return found


def read_pair(predicted: Timeline | str | Path, measured: Timeline | str | Path, program: Program | None = None) -> tuple[Timeline, Timeline, Program]:
    """Two timelines, from files where they are files, and their program. InputError when they are swapped, or no program is given and no file holds it."""
    pair = []
    for what in (predicted, measured):
        if isinstance(what, Timeline):
            pair.append(what)
        else:
            timeline, held = read_timeline(what)
            pair.append(timeline)
            program = program or held
    if [t.kind for t in pair] != ["predicted", "measured"]:
        raise InputError(f"a predicted and a measured timeline were expected, in this order; these are {pair[0].kind} and {pair[1].kind}")
    if program is None:
        raise InputError("two timelines in memory are compared through their program: give it")
    return pair[0], pair[1], program


def diff(predicted: Timeline | str | Path, measured: Timeline | str | Path, program: Program | None = None) -> Diff:
    """Lays a measured timeline on a predicted one, firing by firing; from files, or from memory with their program. Raises InputError."""
    return diff_timelines(*read_pair(predicted, measured, program))


def measure(output: str | Path | None = None, progress: Progress | None = None) -> Cluster:
    """Measures this machine (under 30 s) and keeps it as `local`, or writes it to `output`. Raises ExecutionError when the machine is too busy."""
    return measure_local(Path(output) if output is not None else local_path(), progress or _silent)


def _silent(*_: Any) -> None:
    pass


def _program(what: Plan | Program | str | Path, model: Any) -> tuple[Plan | None, Program]:
    if isinstance(what, Program):
        return None, what
    if not isinstance(what, Plan):
        data = read_kind(what, "plan", "program")
        if data["kind"] == "program":
            return None, Program.from_json(data)
        what = Plan.from_json(data)
    # through the package: the planner is imported only where there is a plan to lower
    return what, headrace.lower(what, model)

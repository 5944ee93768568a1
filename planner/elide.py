"""Tasks that only copy are left out, and whoever reads the copy reads the original: values never change once they are published."""

from __future__ import annotations

from dataclasses import replace

from ir.ops import catalogue
from planner.place import StageTasks, Task


def elide_copies(stage: StageTasks) -> StageTasks:
    """The same stage without the compute tasks whose operator copies its one operand. What adds into a step's value stays."""
    original: dict[str, str] = {}
    tasks: dict[str, list[Task]] = {}
    for part, listed in stage.tasks.items():
        kept = tasks.setdefault(part, [])
        for t in listed:
            reads, waits = (tuple(original.get(v, v) for v in taken) for taken in (t.reads, t.waits))
            if t.kind == "compute" and catalogue(t.op).copies and all(stage.values[w].clock == stage.values[r].clock for w in t.writes for r in reads):
                original[t.writes[0]] = reads[0]
            else:
                kept.append(replace(t, reads=reads, waits=waits))
    return StageTasks(stage.mesh, {k: v for k, v in stage.values.items() if k not in original}, tasks)

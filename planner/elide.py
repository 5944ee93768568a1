"""Tasks that only copy are left out, and whoever reads the copy reads the original: values never change once they are published."""

from __future__ import annotations

from dataclasses import replace

from ir.ops import catalogue
from planner.sites import SiteTasks, Task


def elide_copies(site: SiteTasks) -> SiteTasks:
    """The same site without the compute tasks whose operator copies its one operand. What adds into a step's value stays."""
    original: dict[str, str] = {}
    tasks: dict[str, list[Task]] = {}
    for part, listed in site.tasks.items():
        kept = tasks.setdefault(part, [])
        for t in listed:
            reads, waits = (tuple(original.get(v, v) for v in taken) for taken in (t.reads, t.waits))
            if t.kind == "compute" and catalogue(t.op).copies and all(site.values[w].clock == site.values[r].clock for w in t.writes for r in reads):
                original[t.writes[0]] = reads[0]
            else:
                kept.append(replace(t, reads=reads, waits=waits))
    return SiteTasks(site.mesh, {k: v for k, v in site.values.items() if k not in original}, tasks)

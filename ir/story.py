"""Sentences on who waits for what, held by whom: for a proof that fails, and for a watchdog that looks at a Machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ir.net import Edge, Net, edges

MAX_LINES = 24
"""More waits than this are counted, not told."""


def firing(net: Net, node: int) -> str:
    actor = net.program.actors[net.actor[node]]
    return f"{actor.name} microbatch {net.microbatch[node]}" if actor.clock == "microbatch" else actor.name


def placed(net: Net, node: int) -> str:
    rank, queue = net.queues[net.queue[node]]
    return f"{firing(net, node)} (rank {rank}, {queue})"


def reason(net: Net, edge: Edge) -> str:
    """What `edge.dst` waits for, and who would end it."""
    if edge.kind == "order":
        return f"it stands behind {firing(net, edge.src)}"
    register = net.program.registers[edge.register]
    if edge.kind == "item":
        which = f" of microbatch {net.microbatch[edge.src]}" if register.clock == "microbatch" else ""
        return f"{register.name} has no item{which}   <- written by {firing(net, edge.src)}"
    if edge.kind == "update":
        return f"{register.name} is still to be read   <- read by {firing(net, edge.src)}"
    return f"{register.name} has no free credit (of {register.credits})   <- freed by {firing(net, edge.src)}"


def cycle_lines(net: Net, cycle: Sequence[Edge]) -> list[str]:
    """One line a wait: each edge's src is, or starts together with, the next edge's dst."""
    lines = []
    for edge, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        lines.append(f"  {placed(net, edge.dst)} waits: {reason(net, edge)}")
        if edge.src != after.dst:
            lines.append(f"  {placed(net, edge.src)} waits: its partner {placed(net, after.dst)} does not start")
    return lines


@dataclass(slots=True)
class _State:
    """What a Machine knows of its queues at one moment."""

    net: Net
    head: Sequence[int]
    lap: Sequence[int]
    running: Sequence[int]
    ready: Sequence[bool]
    steps: int | None
    absent: Mapping[int, Mapping[int, int]]

    def is_over(self, queue: int) -> bool:
        return self.lap[queue] == self.steps

    def finished(self, node: int) -> int:
        """How many steps' firings of this node have finished."""
        queue = self.net.queue[node]
        return self.lap[queue] + (node < self.head[queue])


def tell(
    net: Net, head: Sequence[int], lap: Sequence[int], running: Sequence[int], ready: Sequence[bool], steps: int | None, absent: Mapping[int, Mapping[int, int]]
) -> str:
    """The story of a Machine in this state: the cycle of waits first if there is one, then every queue that is not done."""
    state = _State(net, head, lap, running, ready, steps, absent)
    waits = {q: _waits_of(state, q, incoming) for q, incoming in _incoming(state).items()}
    over = sum(map(state.is_over, range(len(net.queues))))
    lines = [f"{sum(n >= 0 for n in running)} of {len(net.queues)} queues run, {sum(ready)} may start, {over} are done"]
    cycle = _cycle(waits)
    if cycle:
        lines.append("these wait for each other:")
        lines += [waits[q][0] for q in cycle]
    others = [q for q in range(len(net.queues)) if q not in cycle and not state.is_over(q)]
    for q in others[:MAX_LINES]:
        name = f"  {placed(net, head[q])} of step {lap[q]}"
        lines.append(f"{name} runs" if running[q] >= 0 else f"{name} may start" if ready[q] else waits[q][0])
    if len(others) > MAX_LINES:
        lines.append(f"  and {len(others) - MAX_LINES} more queues")
    return "\n".join(lines)


def _incoming(state: _State) -> dict[int, list[Edge]]:
    """For every queue that waits, the register edges into its head."""
    blocked = {
        state.head[q]: q for q in range(len(state.net.queues)) if state.running[q] < 0 and not state.ready[q] and not state.is_over(q)
    }  # fmt: skip
    found: dict[int, list[Edge]] = {q: [] for q in blocked.values()}
    for edge in edges(state.net):
        if edge.kind != "order" and edge.dst in blocked:
            found[blocked[edge.dst]].append(edge)
    return found


def _waits_of(state: _State, queue: int, incoming: Sequence[Edge]) -> tuple[str, int]:
    """(the sentence of what this queue's head waits for, the queue that would end it, -1 where it is not here)."""
    net, node, step = state.net, state.head[queue], state.lap[queue]
    name = f"  {placed(net, node)} of step {step}"
    for edge in incoming:
        if state.finished(edge.src) < step - edge.offset + 1:
            return f"{name} waits: {reason(net, edge)}{_of_step(step, edge.offset)}", net.queue[edge.src]
    for partner in net.members[net.group[node]]:
        other = net.queue[partner]
        if partner != node and (state.head[other] != partner or state.lap[other] != step):
            here = "has finished its last step" if state.is_over(other) else f"is at {firing(net, state.head[other])} of step {state.lap[other]}"
            return f"{name} waits: its partner {firing(net, partner)} is not at the head of its queue {net.queues[other]}, which {here}", other
    for partner in net.members[net.group[node]]:
        if partner != node:
            return f"{name} waits: its partner {placed(net, partner)} is not ready", net.queue[partner]
    missing = [rank for rank, count in state.absent.get(net.group[node], {}).items() if not count]
    return f"{name} waits: no arrival from rank {', '.join(map(str, missing)) or 'any'} on channel {net.program.actors[net.actor[node]].channel}", -1


def _of_step(step: int, offset: int) -> str:
    return f" of step {step - offset}" if offset else ""


def _cycle(waits: Mapping[int, tuple[str, int]]) -> list[int]:
    """The queues of one cycle of waits, or none."""
    for first in waits:
        path: dict[int, int] = {}
        queue = first
        while queue in waits and queue not in path:
            path[queue] = len(path)
            queue = waits[queue][1]
        if queue in path:
            return list(path)[path[queue] :]
    return []

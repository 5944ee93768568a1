"""Closed forms: the makespan of a pipeline where one is known, and bounds that no simulation goes below.

A pipeline of p stages runs m microbatches. Stage s needs `forward_s[s]` and `input_s[s]` (gradient of its input) a microbatch, `weight_s[s]` for the gradient
of its weights, which nothing waits for but the end; `hop_s[s]` lies between stages s and s + 1, on links that carry one message at a time each way.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ir.errors import PlanError
from ir.program import Actor, Program, Queue
from simulator.cost import CostModel
from simulator.engine import Prices, price

COMPUTE = "compute"
"""The queue on which a lowered rank runs its kernels."""

MEETING = "comm.world"
"""The queue on which all ranks meet, to clip by the norm of all gradients."""


def pipeline_lower_bound(
    forward_s: Sequence[float], input_s: Sequence[float], num_microbatches: int, weight_s: Sequence[float] = (), hop_s: Sequence[float] = (),
    once_s: Sequence[float] = (),
) -> float:  # fmt: skip
    """Seconds below which no order of one step stays that runs every stage's microbatches in turn and its forwards before their backwards.

    A stage s cannot start before the first microbatch has come to it and has all its work to do from then on:
    `sum(F + hop, stages before s) + m (F + I + W)`. At its end stand the gradients of a microbatch, which must still come down to every stage i before it:
    `- W + sum(hop + I, stages s-1 to i) + W[i]`. Then comes `once_s` (reduction, optimizer) of the stage that is looked at. The largest of these is the bound.
    It is the makespan of GPipe and of 1F1B on uniform stages without hops, `(m + p - 1) (F + B)` (Narayanan et al., 2021, section 2.2), where `weight_s` is 0.

    >>> pipeline_lower_bound([1, 1, 1, 1], [2, 2, 2, 2], 8)
    33.0
    """
    p, m = len(forward_s), num_microbatches
    forward, back, weight, hops, once = _checked(forward_s, input_s, num_microbatches, weight_s, hop_s, once_s)
    best = 0.0
    for s in range(p):
        arrival = sum(forward[:s]) + sum(hops[:s])
        end = arrival + m * (forward[s] + back[s] + weight[s])
        best = max(best, end + once[s])
        at = end - weight[s]
        for i in range(s - 1, -1, -1):
            at += hops[i] + back[i]
            best = max(best, at + weight[i] + once[i])
    return best


def estimate(program: Program, cost: CostModel) -> float:
    """Seconds of one step of a lowered pipeline, in closed form and never more than its simulation.

    On a rank the compute queue runs passes one after another: the time that one pass alone takes from its first compute firing to its last, with everything
    there that does not wait for a kernel of the pass, is a bound of every pass. `pipeline_lower_bound` joins the stages, each position of the mesh for itself.
    The end of the step (reduction, optimizer) counts with what of it the last backward cannot hide, and on the way through the pipeline for the first stage
    alone: the others may still be at it when the next step has begun. No queue does its work in less time than it takes.
    """
    prices = price(program, cost)
    seconds = [s if a.channel else s + prices.firing_s for a, s in zip(program.actors, prices.seconds, strict=True)]
    positions: list[dict[frozenset[int], _Times]] = []
    for rank in program.ranks:
        mine = [(a, s) for a, s in zip(program.actors, seconds, strict=True) if a.rank == rank]
        layers = frozenset(a.layer for a, _ in mine if a.clock == "microbatch" and a.queue == COMPUTE)
        position = next((p for p in positions if layers not in p), None)
        if position is None:
            positions.append(position := {})
        position[layers] = _times(mine, [name for name, _ in program.orders.get((rank, COMPUTE), ())], program.meta.get("cuts", ()))
    sent = [(a.layer, s) for a, s in zip(program.actors, seconds, strict=True) if a.work.kind == "send" and a.phase == "F"]
    _, busiest_s = busiest_queue(program, prices)
    return max(busiest_s, *(_position_s(position, sent, program) for position in positions))


class _Times(NamedTuple):
    """Seconds of one rank: a forward pass, a backward pass, and what comes once a step outside of the passes."""

    forward_s: float
    back_s: float
    once_s: float


def _times(mine: Sequence[tuple[Actor, float]], order: Sequence[str], cuts: Sequence[int]) -> _Times:
    """Of one rank's actors with their seconds, and the names in the order of its compute queue; `cuts` are the first layers of the stages.

    Of several stages each runs its own passes. What comes once a step may then overlap with all but the last backward.
    """
    passes = [(a, s) for a, s in mine if a.clock == "microbatch"]
    forward, back = (_by_stage([(a, s) for a, s in passes if (a.phase == "F") is is_forward], cuts) for is_forward in (True, False))
    begin, end = _before_and_after([(a, s) for a, s in mine if a.clock == "step"], {a.name for a, _ in passes}, {w for a, _ in passes for w in a.writes}, order)
    stage_of = {a.name: stage for stage, firings in back.items() for a, _ in firings}
    last = back[next((stage_of[name] for name in reversed(order) if name in stage_of), min(back))] if back else []
    once_s = wait_free_s([*last, *end]) - wait_free_s(last) + sum(s for a, s in begin if a.queue == COMPUTE)
    return _Times(sum(map(wait_free_s, forward.values())), sum(map(wait_free_s, back.values())), once_s)


def _by_stage(firings: Sequence[tuple[Actor, float]], cuts: Sequence[int]) -> Mapping[int, list[tuple[Actor, float]]]:
    """The firings of every stage, by its number in order of layers."""
    found: dict[int, list[tuple[Actor, float]]] = {}
    for a, s in firings:
        found.setdefault(bisect(cuts, a.layer), []).append((a, s))
    return found


def _position_s(stages: Mapping[frozenset[int], _Times], sent: Sequence[tuple[int, float]], program: Program) -> float:
    """The bound of one rank of every stage, its stages by the layers that they run; `sent`: (layer, seconds) of the forward hops."""
    num_microbatches = program.num_microbatches
    busy = max(num_microbatches * (t.forward_s + t.back_s) + t.once_s for t in stages.values())
    if not program.meta.get("chained", True):
        return busy  # virtual stages and weight gradients held back fill the pipeline otherwise
    order = sorted(stages, key=min)
    times = [stages[layers] for layers in order]
    hops = [min((s for layer, s in sent if layer in layers), default=0.0) for layers in order[:-1]]
    through = pipeline_lower_bound(
        [t.forward_s for t in times], [t.back_s for t in times], num_microbatches, hop_s=hops, once_s=[times[0].once_s, *[0.0] * (len(times) - 1)]
    )
    return max(through, busy)


def wait_free_s(firings: Sequence[tuple[Actor, float]]) -> float:
    """The span of the compute firings when these actors fire once, each queue in this order.

    What waits for no compute firing among them may have been done before, and counts as there at time 0.
    """
    free: dict[str, float] = {}
    written: dict[str, float] = {}
    first, last = None, 0.0
    for a, seconds in firings:
        starts = [written[r] for r in a.takes if r in written]
        if a.queue in free:
            starts.append(free[a.queue])
        if a.queue != COMPUTE and not starts:
            continue
        start = max(starts, default=0.0)
        free[a.queue] = end = start + seconds
        written.update(dict.fromkeys((*a.writes, *a.updates), end))
        if a.queue == COMPUTE:
            first, last = (start if first is None else first), end
    return last - (first or 0.0)


def step_seconds(passes: Sequence[tuple[Actor, float]], once: Sequence[tuple[Actor, float]], order: Sequence[str]) -> tuple[float, float, float]:
    """Seconds of what one rank does once a step: before the passes, after them until all ranks must meet (the gradients' norm), and from then on.

    `passes` and `once` are its actors with their seconds, `order` the names in the order of its compute queue.
    """
    begin, end = _before_and_after(once, {a.name for a, _ in passes}, {w for a, _ in passes for w in a.writes}, order)
    meets = next((i for i, (a, _) in enumerate(end) if a.queue == MEETING), len(end))
    back = [(a, s) for a, s in passes if a.phase != "F"]
    back_s, reduced_s, all_s = (wait_free_s([*back, *part]) for part in ((), end[:meets], end))
    return sum(s for a, s in begin if a.queue == COMPUTE), reduced_s - back_s, all_s - reduced_s


def _before_and_after(
    once: Sequence[tuple[Actor, float]], passes: Collection[str], gradients: Collection[str], order: Sequence[str]
) -> tuple[list[tuple[Actor, float]], list[tuple[Actor, float]]]:
    """Of what happens once a step, what comes before the passes and what after: compute by its order, all else by whether it waits for gradients."""
    first = next((i for i, name in enumerate(order) if name in passes), len(order))
    before, after = set(order[:first]), set(gradients)
    begin, end = [], []
    for a, s in once:
        if a.name not in before and (a.queue == COMPUTE or after & {*a.takes, *a.updates}):
            after.update(a.writes)
            end.append((a, s))
        else:
            begin.append((a, s))
    return begin, end


def gpipe_makespan(
    forward_s: Sequence[float], input_s: Sequence[float], num_microbatches: int, weight_s: Sequence[float] = (), hop_s: Sequence[float] = ()
) -> float:
    """Makespan of GPipe with buffers enough: two flow shops of m equal jobs, forwards up and then backwards down, stages of any speeds.

    A flow shop of equal jobs takes the way of one job through all machines and m - 1 times the slowest machine (Johnson, 1954); hops are machines too.

    >>> gpipe_makespan([1, 1, 1, 1], [2, 2, 2, 2], 8), gpipe_makespan([1, 3], [2, 2], 4, hop_s=[0.5])
    (33.0, 24.0)
    """
    p, m = len(forward_s), num_microbatches
    forward, back, weight, hops, _ = _checked(forward_s, input_s, num_microbatches, weight_s, hop_s, ())
    top = sum(forward) + sum(hops) + (m - 1) * max(*forward, *hops, 0.0)
    way, slowest, end = 0.0, 0.0, 0.0
    for s in range(p - 1, -1, -1):
        slowest = max(slowest, back[s] + weight[s])
        end = max(end, way + (m - 1) * slowest + back[s] + weight[s])
        way += back[s] + (hops[s - 1] if s else 0.0)
        slowest = max(slowest, hops[s - 1]) if s else slowest
    return top + end


def one_forward_one_backward_makespan(forward_s: float, backward_s: float, num_stages: int, num_microbatches: int) -> float:
    """Makespan of 1F1B on uniform stages without hops: `(m + p - 1) (F + B)` (Narayanan et al., 2021, section 2.2).

    >>> one_forward_one_backward_makespan(1, 2, 4, 8)
    33
    """
    return (num_microbatches + num_stages - 1) * (forward_s + backward_s)


def busiest_queue(program: Program, prices: Prices) -> tuple[Queue, float]:
    """The queue that has most to do in a step, and its seconds: k steps never take less than k times that."""
    busy: Mapping[Queue, float] = defaultdict(float)
    for actor, seconds in zip(program.actors, prices.seconds, strict=True):
        busy[actor.rank, actor.queue] += program.firings(actor) * seconds  # type: ignore[index]
    return max(busy.items(), key=lambda item: (item[1], item[0]))


def _checked(
    forward_s: Sequence[float], input_s: Sequence[float], num_microbatches: int, weight_s: Sequence[float], hop_s: Sequence[float], once_s: Sequence[float]
) -> tuple[list[float], list[float], list[float], list[float], list[float]]:
    p = len(forward_s)
    weight, hops, once = list(weight_s) or [0.0] * p, list(hop_s) or [0.0] * (p - 1), list(once_s) or [0.0] * p
    if p < 1 or num_microbatches < 1 or [len(input_s), len(weight), len(once), len(hops)] != [p, p, p, p - 1]:
        raise PlanError(
            f"a pipeline of {p} stages and {num_microbatches} microbatches needs {p} forward, input, weight and once times and {p - 1} hops; given are "
            f"{p}, {len(input_s)}, {len(weight)}, {len(once)} and {len(hops)}"
        )
    times = [*forward_s, *input_s, *weight, *hops, *once]
    if not all(0 <= t < float("inf") for t in times):
        raise PlanError(f"a pipeline's times must be finite and 0 or more; given are {times}")
    return [float(t) for t in forward_s], [float(t) for t in input_s], weight, hops, once

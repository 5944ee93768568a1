"""Why a plan is as fast as it is, in words: what binds it, what the next one does better or worse, and what a slow network asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ir.cluster import Cluster
from ir.plan import Plan
from ir.units import DTYPE_BYTES, GIB, nbytes, seconds

PARTS = {
    "compute_s": "compute", "exposed_comm_s": "communication that nothing hides", "bubble_s": "pipeline bubble", "optimizer_s": "optimizer",
    "other_s": "launches and waits",
}  # fmt: skip
"""The parts of a step, as the command's documents name them, in words."""

SHOWN, LITTLE = 0.25, 0.1
"""Shares of a step that reducing gradients takes: above the first something is said, the second is what it should come to."""


def binds(predicted: Mapping[str, Any]) -> str:
    """The largest part of the step, in words and as a share; `predicted` as of `planner.summary.metrics`."""
    parts = predicted["breakdown"]
    largest = max(parts, key=lambda k: parts[k])
    return f"{PARTS[largest]}: {parts[largest] / predicted['step_s']:.0%} of the step"


def why(plan: Plan, plans: Sequence[Plan]) -> str:
    """One sentence for a ranked list, best first: what binds this plan, and what the next or the best one does better or worse."""
    mine, best = plan.predicted, plans[0].predicted
    told = f"{binds(mine)}; {nbytes(mine['peak_gib'] * GIB)}{_in_chunks(mine)}"
    if plan is not plans[0]:
        return f"{told}; {_beside(mine, best, ' than the first')}"
    if len(plans) > 1:
        return f"{told}; the next is {_beside(plans[1].predicted, mine)}"
    return told


def _beside(this: Mapping[str, Any], other: Mapping[str, Any], than: str = "") -> str:
    """How much slower and in what; one that is told behind a slower one is so for its memory."""
    more = this["step_s"] / other["step_s"] - 1
    if more < 0:
        return f"{-more:.1%} faster{than}, but its memory is tight"
    return f"{more:.1%} slower{than}: {largest_difference(this, other)}"


def _in_chunks(predicted: Mapping[str, Any]) -> str:
    """What the loss over chunks of tokens saves and costs, if it is computed so."""
    trade = predicted.get("loss_chunks")
    if trade is None:
        return ""
    without = "" if trade["fits_without"] else ", without which it does not fit"
    return (
        f"; the loss over {trade['chunks']} chunks of tokens saves {nbytes(trade['saves_gib'] * GIB)} and costs {seconds(trade['costs_s'])} a step "
        f"({100 * trade['costs_mfu']:.1f} points of MFU){without}"
    )


def largest_difference(slower: Mapping[str, Any], faster: Mapping[str, Any]) -> str:
    """The part of the step in which the slower one loses most."""
    more = {k: slower["breakdown"][k] - faster["breakdown"][k] for k in slower["breakdown"]}
    largest = max(more, key=lambda k: more[k])
    return f"{seconds(more[largest])} more {PARTS[largest]}"


def advice(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What to do where the network between nodes is too slow for the plan: one node alone, or more microbatches before gradients are reduced.

    One node is taken to compute as its part of the plan does, in as many times the microbatches, and to hide its own communication. Gradients that accumulate
    cross in float32.
    """
    predicted, rows = plan.predicted, plan.predicted["comm"]
    num_nodes = len({cluster.devices[rank].node for stage in plan.stages for rank in stage.ranks})
    step_s, exposed_s = predicted["step_s"], predicted["breakdown"]["exposed_comm_s"]
    if num_nodes < 2 or not rows:
        return ()
    alone_s = num_nodes * (step_s - exposed_s)
    out = []
    if alone_s < step_s:
        alone = f"one node alone would take about {seconds(alone_s)} if the model fits there"
        out.append(f"prefer one node: {exposed_s / step_s:.0%} of the step is {PARTS['exposed_comm_s']}; {alone}")
    dp = [row for row in rows if row["axis"] == "dp"]
    if sum(row["exposed_s"] for row in dp) > SHOWN * step_s:
        out.append(_less_often(plan, num_nodes, dp))
    return tuple(out)


def _less_often(plan: Plan, num_nodes: int, dp: Sequence[Mapping[str, Any]]) -> str:
    zero, num = plan.layout["zero"], plan.num_microbatches
    if zero == 3 or (zero == 2 and num > 1):
        what = "parameters" if zero == 3 else "gradients"
        return f"shards of {what} cross the network in every microbatch: with ZeRO 1 they do so once a step, if that fits (--fix zero=1)"
    once_s = sum(row["exposed_s"] for row in dp)
    each_s = (plan.predicted["step_s"] - once_s) / num
    if zero == 2:
        once_s += (DTYPE_BYTES["float32"] / DTYPE_BYTES[plan.dtype] - 1) * sum(row["time_s"] for row in dp if row["kind"] == "reduce_scatter")
    even, few = math.ceil(once_s / ((num_nodes - 1) * each_s)), math.ceil(once_s * (1 / LITTLE - 1) / each_s)
    over = f"{num_nodes} nodes overtake one from {even} microbatches a step on (--batch {even * plan.microbatch})"
    little = f"the reduction is {LITTLE:.0%} of the step with {few} (--batch {few * plan.microbatch})"
    return f"accumulate more before gradients are reduced: {over + ', ' if even > num else ''}{little}"

"""Context parallelism: every way through attention is the one-device result under cp x dp x tp, costs what it says, and in zig-zag order is even."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ir.errors import PlanError
from ir.mesh import Mesh
from ir.op import Rule
from ir.plan import Plan, Stage
from ir.program import Program
from planner.candidates import block_layers
from planner.context import context_space, form_of
from planner.frontends import load
from planner.frontends.model import Model
from planner.lower import lower
from planner.optimizers import with_defaults
from planner.placement import search
from planner.pricing import MeshPricing
from planner.search import plan
from planner.single import single_device
from planner.space import layout_space, zero_space
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from tests.families import of_kind
from tests.models import BATCH, SEQ, gpt, llama
from tests.parity import Ended, between, ended, same
from tests.plans import cluster

AXES = ("dp", "cp", "tp")
MODELS = {"gpt": gpt(num_layers=2), "llama": llama(num_layers=2), **{kind: of_kind(kind) for kind in ("gemma2", "mixtral", "deepseek_v3", "gpt_oss")}}


def plan_of(
    model: Model, sizes: tuple[int, int, int], context: str | None, zero: int | None = None, pp: int = 1, recompute: bool = False, batch: int = BATCH
) -> Plan:  # fmt: skip
    """The cheapest placement on a dp x cp x tp mesh; `context` as in a plan, None: gathering or exchanging, whichever is cheaper."""
    devices = cluster()
    graph = model.graph(batch // pp, SEQ, "float64")
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    mesh = Mesh(AXES, sizes, tuple(range(num_ranks)))
    space = layout_space(graph, AXES, zero=zero) & context_space(graph, "cp", sizes[1], context and form_of(context), AXES) & zero_space("cp", zero)
    layers = block_layers(graph) if recompute else ()
    placed = search(graph, AXES, sizes, MeshPricing(CostModel(devices), mesh), num_microbatches=pp, space=space, recompute=layers)
    base = single_device(model, devices, batch=batch, seq=SEQ, dtype="float64", optimizer=with_defaults("adamw"), num_microbatches=pp)
    cuts = ((0, 2), (2, graph.num_layers)) if pp == 2 else ((0, graph.num_layers),)
    stages = tuple(Stage(a, b, tuple(range(i * num_ranks, (i + 1) * num_ranks))) for i, (a, b) in enumerate(cuts))
    return replace(
        base, axes=AXES, mesh_shape=sizes, stages=stages, rules=placed.rules, hubs=placed.hubs, params=placed.params, reboxed=placed.reboxed,
        recompute=layers, context=context or "",
    )  # fmt: skip


@cache
def alone(family: str) -> Ended:
    plan = single_device(MODELS[family], cluster(), batch=BATCH, seq=SEQ, dtype="float64", optimizer=with_defaults("adamw"))
    return ended(lower(MODELS[family], plan))


CASES: tuple[tuple[str, str | None, tuple[int, int, int], dict[str, Any]], ...] = (
    ("llama", "gather", (1, 4, 1), {}), ("llama", "exchange", (1, 4, 1), {}), ("llama", "gather", (2, 2, 2), {}), ("llama", "exchange", (2, 2, 2), {"zero": 1}),
    ("gpt", "gather", (1, 2, 1), {"pp": 2}), ("gpt", "exchange", (2, 2, 1), {"zero": 3}),
    ("llama", "ring", (1, 4, 1), {}), ("llama", "ring zigzag", (2, 2, 2), {"zero": 1}), ("llama", "gather zigzag", (1, 3, 1), {}),
    ("gpt", "ring", (2, 3, 1), {"zero": 3}), ("gpt", "ring zigzag", (1, 2, 2), {"pp": 2}), ("gpt", "gather zigzag", (2, 2, 2), {}),
    ("gpt", "ring zigzag", (1, 3, 1), {"recompute": True}), ("gemma2", "ring zigzag", (1, 3, 1), {}), ("gemma2", "gather zigzag", (1, 2, 2), {}),
    ("llama", "ring:2", (1, 4, 1), {}), ("llama", "ring:3", (1, 6, 1), {}), ("llama", "ring:2 zigzag", (1, 6, 1), {}),
    ("gpt", "ring:2", (2, 4, 1), {"zero": 3}),
    ("gpt", "ring:2 zigzag", (1, 6, 1), {"recompute": True}), ("gemma2", "ring:2 zigzag", (1, 6, 1), {}), ("llama", "ring:2", (1, 4, 2), {"pp": 2}),
    ("mixtral", "ring", (1, 2, 2), {}), ("deepseek_v3", "ring", (1, 2, 1), {}), ("gpt_oss", "gather", (1, 2, 1), {}),
)  # fmt: skip


@pytest.mark.parametrize(("family", "form", "sizes", "more"), CASES, ids=str)
def test_any_way_gives_what_one_device_gives(family: str, form: str | None, sizes: tuple[int, int, int], more: dict[str, Any]) -> None:
    program = lower(MODELS[family], plan_of(MODELS[family], sizes, form, **more))
    found = between(ended(program), alone(family))
    assert same(found), found


def _comm(form: str) -> dict[str, int]:
    """Collectives of one layer's attention on axis cp, by kind, forward and backward."""
    program = lower(MODELS["llama"], plan_of(MODELS["llama"], (1, 2, 1), form))
    kinds: dict[str, int] = {}
    for a in program.actors:
        if a.rank == 0 and a.queue == "comm.cp" and a.layer == 1 and a.phase in ("F", "I"):
            kinds[a.work.op] = kinds.get(a.work.op, 0) + 1
    return kinds


def test_what_each_way_moves() -> None:
    """Gathering: keys and values forward, their gradients scattered; exchanging: three tensors there and one back, in both directions."""
    gathered, exchanged = _comm("gather"), _comm("exchange")
    assert gathered == {"all_gather": 2, "reduce_scatter": 2}
    assert exchanged == {"all_to_all": 8}


def test_the_sequence_is_split_everywhere_and_attention_as_asked() -> None:
    graph = MODELS["llama"].graph(BATCH, SEQ, "float64")
    for form, rule in (("gather", Rule("split", "s")), ("exchange", Rule("split", "g"))):
        plan = plan_of(MODELS["llama"], (1, 2, 2), form)
        assert {plan.rules[n.name][1] for n in graph.nodes if n.op == "attention"} == {rule}
        assert {plan.rules[n.name][1] for n in graph.nodes if n.op in ("linear", "rms_norm", "swiglu", "rope", "add")} == {Rule("split", "s")}


def by_rank(context: str) -> tuple[float, ...]:
    """Floating point operations of attention on each of two ranks, there and back."""
    program = lower(MODELS["llama"], plan_of(MODELS["llama"], (1, 2, 1), context))
    return tuple(sum(a.work.flops for a in program.actors if a.rank == r and a.work.op.startswith("attention")) for r in range(2))


def alone_plan() -> Plan:
    return single_device(MODELS["llama"], cluster(), batch=BATCH, seq=SEQ, dtype="float64", optimizer=with_defaults("adamw"))


def test_zigzag_evens_the_work_of_causal_attention() -> None:
    """Of contiguous parts the second does three times the work of the first; what all ranks do together is the same in any order and form."""
    whole = sum(a.work.flops for a in lower(MODELS["llama"], alone_plan()).actors if a.work.op.startswith("attention"))
    for form in ("ring", "gather"):
        first, last = by_rank(form)
        assert last == pytest.approx(3 * first)
        assert first + last == pytest.approx(whole)
        first, last = by_rank(f"{form} zigzag")
        assert first == pytest.approx(last)
        assert first + last == pytest.approx(whole)


def test_one_rank_that_stands_for_all_has_the_work_of_the_busiest() -> None:
    for context in ("ring", "gather", "ring zigzag", "gather zigzag"):
        plan = plan_of(MODELS["llama"], (1, 2, 1), context)
        alone_it = sum(a.work.flops for a in lower(MODELS["llama"], plan, ranks=(0,)).actors if a.work.op.startswith("attention"))
        assert alone_it == pytest.approx(max(by_rank(context)))


@cache
def of_six() -> Program:
    return lower(MODELS["llama"], plan_of(MODELS["llama"], (1, 6, 1), "ring"))


@pytest.mark.parametrize("way", ["attend", "attend.grad"])
def test_what_has_been_used_makes_room_for_what_comes(way: str) -> None:
    """Five times keys come to a rank in each direction, and no more than three places are taken by them."""
    places = [r.offset for r in of_six().registers if r.rank == 0 and re.fullmatch(rf"h\.0\.attn\.{way}\.k\d", r.tensor) and r.arena]
    assert len(places) == 5
    assert len(set(places)) <= 3


def test_the_next_keys_come_in_while_a_turn_computes_and_not_before() -> None:
    timeline = simulate(of_six(), CostModel(cluster()), steps=1)
    at = {s.actor: s for s in timeline.spans if s.rank == 0}
    for turn in range(2, 5):
        sent, here, before = (at[f"h.0.attn.attend.{name}@0"] for name in (f"k{turn + 1}.shift", f"turn{turn}", f"join{turn - 1}"))
        assert before.end_s <= sent.start_s < here.end_s


def test_turns_that_see_nothing_compute_nothing() -> None:
    """Under a causal mask contiguous part r sees r + 1 parts."""
    turns = {r: [a.work.flops for a in of_six().actors if a.rank == r and a.work.op == "attention_part" and a.layer == 1] for r in range(6)}
    assert {r: sum(f > 0 for f in found) for r, found in turns.items()} == {r: r + 1 for r in range(6)}


def test_a_ring_of_rings_crosses_once_a_round_and_every_rank_for_itself() -> None:
    """Two blocks of three: keys and values go round twice in each block, and once from block to block; the sums of their gradients once more."""
    program = lower(MODELS["llama"], plan_of(MODELS["llama"], (1, 6, 1), "ring:3"))
    shifts = [a for a in program.actors if a.work.op == "shift" and a.layer == 1]
    groups = {queue: {a.work.group for a in shifts if a.queue == queue} for queue in ("comm.cp", "comm.cp.nodes")}
    assert groups == {"comm.cp": {(0, 1, 2), (3, 4, 5)}, "comm.cp.nodes": {(0, 3), (1, 4), (2, 5)}}
    num = {(phase, queue): sum(a.rank == 0 and (a.phase, a.queue) == (phase, queue) for a in shifts) for phase in "FI" for queue in groups}
    assert num == {("F", "comm.cp"): 8, ("F", "comm.cp.nodes"): 2, ("I", "comm.cp"): 8 + 12, ("I", "comm.cp.nodes"): 2 + 4}


def test_over_nodes_the_search_takes_a_ring_of_rings_and_it_is_faster() -> None:
    """One NIC a GPU: a single ring crosses in every turn, by one of them, while all others idle."""
    model, devices = load("llama-2-7b", num_layers=2, max_positions=32768), load_cluster("2x4xH100-SXM@ib400x4")
    found = plan(model, devices, batch=1, seq=32768, fix={"dp": 1, "pp": 1, "tp": 1, "cp": 8, "cp_form": "ring", "recompute": "none"}, top=1).plans[0]
    assert found.context == found.layout["cp_form"] == "ring:4 zigzag"
    nested, single = (
        simulate(lower(model, replace(found, context=context), ranks=(0,)), CostModel(devices)).step_s for context in ("ring:4 zigzag", "ring zigzag")
    )
    assert nested < 0.7 * single
    inside = plan(model, cluster(), batch=1, seq=32768, fix={"dp": 1, "pp": 1, "tp": 1, "cp": 8, "cp_form": "ring", "recompute": "none"}, top=1).plans[0]
    assert inside.context == "ring zigzag"


@pytest.mark.parametrize("context", ["ring:4", "ring:1", "gather:2", "ring:two"])
def test_rings_that_do_not_divide_the_ranks_are_refused(context: str) -> None:
    with pytest.raises(PlanError, match="a ring of rings has a number of ranks in each that divides the 6 of cp"):
        lower(MODELS["llama"], replace(plan_of(MODELS["llama"], (1, 6, 1), "ring"), context=context))


def test_what_does_not_divide_is_refused() -> None:
    graph = MODELS["llama"].graph(BATCH, SEQ, "float64")
    for num_ranks, form, told in ((5, None, "sequence of 12 tokens"), (6, "exchange", "4 key heads"), (2, "spiral", "forms ring, gather, exchange")):
        with pytest.raises(PlanError, match=told):
            context_space(graph, "cp", num_ranks, form)


def _step_s(seq: int, tp: int, cp: int) -> float:
    model = load("llama-3-8b", num_layers=8, max_positions=seq)
    found = plan(
        model, cluster(), batch=1, seq=seq, fix={"dp": 1, "pp": 1, "tp": tp, "cp": cp, "recompute": "none", **({"cp_form": "gather"} if cp > 1 else {})}, top=1
    )
    return float(found.plans[0].predicted["step_s"])


def test_context_parallelism_wins_beyond_a_length() -> None:
    """One sequence a step on eight GPUs of a node: all of them for the heads, or half of that for the sequence (benchmarks/context.py)."""
    assert _step_s(2048, 8, 1) < _step_s(2048, 4, 2)
    assert _step_s(16384, 4, 2) < _step_s(16384, 8, 1)


def test_the_search_finds_it() -> None:
    model = load("llama-3-8b", num_layers=8, max_positions=16384)
    best = plan(model, cluster(), batch=1, seq=16384, fix={"pp": 1}, top=1).plans[0]
    assert best.layout["cp"] > 1

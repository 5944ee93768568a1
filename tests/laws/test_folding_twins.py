"""Folded = unfolded: few layers and few microbatches say of a plan what all of them do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from ir.plan import Plan
from planner.bounds import Bounds
from planner.candidates import Candidate
from planner.evaluate import Evaluator
from planner.folding import Layers
from planner.foretell import foretell
from planner.frontends.model import Model
from planner.lower import lower, representatives
from planner.optimizers import OPTIMIZERS
from planner.pipeline_costs import sizes
from planner.stages import cut_for_ranks
from planner.summary import metrics
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.estimate import estimate
from simulator.figures import figures
from simulator.memory import ledger
from tests.models import gpt, llama

SEQ = 12
COST = CostModel(load_cluster("2x4xH100-SXM@ib400"))
MODELS = {"gpt": gpt(num_layers=18), "llama": llama(num_layers=18, hidden=64, head_dim=8, mlp_hidden=144)}
EVERY = [
    Candidate(8, 1, 1, 1, 8, "1f1b", "none"), Candidate(1, 4, 2, 1, 24, "1f1b", "full"), Candidate(2, 2, 2, 1, 24, "gpipe", "none"),
    Candidate(2, 2, 2, 1, 24, "zb-h1", "none"), Candidate(4, 1, 2, 1, 24, "interleaved", "none", 2), Candidate(2, 1, 4, 1, 48, "zb-h2", "none"),
    Candidate(2, 1, 4, 1, 48, "1f1b", "none"),
]  # fmt: skip
CASES = [(family, c) for k, c in enumerate(EVERY) for family in (("gpt", "llama") if k in (2, 6) else ("gpt" if k % 2 else "llama",))]


def evaluator(model: Model, c: Candidate, optimizer: str = "adamw") -> Evaluator:
    return Evaluator(Bounds(model, SEQ, "bfloat16", COST), COST.cluster, c.dp * c.mbs * c.num_microbatches, OPTIMIZERS[optimizer], {}, 0.95)


@cache
def planned(family: str, c: Candidate) -> Plan:
    return evaluator(MODELS[family], c).plan(c)


@pytest.mark.parametrize(("family", "c"), CASES, ids=str)
def test_few_layers_and_microbatches_say_what_all_of_them_do(family: str, c: Candidate) -> None:
    plan = planned(family, c)
    assert sizes(c.pp, c.num_microbatches).more or c.pp == 1
    told, whole = (foretell(MODELS[family], COST, plan, small=n) for n in (0, 10**9))
    assert told["step_s"] == pytest.approx(whole["step_s"], rel=2e-3)
    assert told["peak_gib"] == pytest.approx(whole["peak_gib"], rel=2e-3)
    for part, seconds in whole["breakdown"].items():
        assert told["breakdown"][part] == pytest.approx(seconds, abs=4e-3 * whole["step_s"]), part
    rows = {(row["axis"], row["kind"]): row for row in told["comm"]}
    for row in whole["comm"]:
        same = rows[row["axis"], row["kind"]]
        assert (same["count"], same["nbytes"]) == pytest.approx((row["count"], row["nbytes"]))
        assert same["time_s"] == pytest.approx(row["time_s"], rel=1e-3, abs=1e-9)


def test_layers_that_are_placed_otherwise_are_no_run() -> None:
    """Of a plan that is mixed by layers, a layer that is left out stands for those that are placed like it."""
    model, c = MODELS["llama"], Candidate(4, 2, 1, 1, 8, "1f1b", "none")
    asked = evaluator(model, c)
    graph = asked.bounds.graph_of(c)
    cheap, small = asked.plan(c), asked.plan(c, 1e6)
    first = {n.name: n.layer <= 6 for n in graph.nodes}
    of_tensor = {t: first[n.name] for n in graph.nodes for t in (*n.inputs, *n.outputs)}
    plan = replace(
        cheap, rules={n: (cheap if first[n] else small).rules[n] for n in cheap.rules},
        hubs={t: (cheap if of_tensor[t] else small).hubs[t] for t in cheap.hubs},
        params={t: (cheap if of_tensor[t] else small).params[t] for t in cheap.params}, reboxed=(),
    )  # fmt: skip
    told, whole, other = (foretell(model, COST, p, small=n) for p, n in ((plan, 0), (plan, 10**9), (small, 10**9)))
    assert whole["peak_gib"] > 1.1 * other["peak_gib"]
    assert told["step_s"] == pytest.approx(whole["step_s"], rel=0.01)
    assert told["peak_gib"] == pytest.approx(whole["peak_gib"], rel=0.01)


@pytest.mark.parametrize(("family", "c"), CASES, ids=str)
def test_a_draft_is_near_its_simulation(family: str, c: Candidate) -> None:
    """What the search ranks by: within 4 % of the step, 1 % of the memory; its bound is one."""
    draft = evaluator(MODELS[family], c).evaluate_at(c, 0.0)
    program = lower(MODELS[family], planned(family, c), representatives(planned(family, c), COST.cluster))
    assert draft.memory.peak_bytes == pytest.approx(ledger(program).peak_bytes, rel=0.01)
    step_s = figures(program, COST).step_s
    assert draft.floor_s <= step_s * (1 + 1e-6)
    assert draft.estimate_s == pytest.approx(step_s, rel=0.04)
    if c.schedule in ("1f1b", "gpipe"):
        assert draft.floor_s == pytest.approx(estimate(program, COST), rel=0.01)


@pytest.mark.parametrize("c", [EVERY[0], EVERY[2]], ids=str)
def test_stacks_that_few_layers_do_not_fill_fold_too(c: Candidate) -> None:
    """Muon's matrices are dealt to owners by as many as there are ranks; few layers count their mean. What is left are launches of stacks not filled."""
    asked = evaluator(MODELS["llama"], c, "muon")
    plan, draft = asked.plan(c), asked.evaluate_at(c, 0.0)
    told, whole = (foretell(MODELS["llama"], COST, plan, small=n) for n in (0, 10**9))
    assert told["step_s"] == pytest.approx(whole["step_s"], rel=0.03)
    assert draft.estimate_s == pytest.approx(whole["step_s"], rel=0.04)
    assert told["peak_gib"] == pytest.approx(whole["peak_gib"], rel=0.01)
    assert draft.floor_s <= whole["step_s"]


@pytest.mark.parametrize(("family", "c"), CASES[::3], ids=str)
def test_figures_are_those_of_the_timeline(family: str, c: Candidate) -> None:
    plan = planned(family, c)
    program = lower(MODELS[family], plan, representatives(plan, COST.cluster))
    timeline, told = simulate(program, COST, steps=2), figures(program, COST)
    says = metrics(MODELS[family], COST.cluster, plan, program, timeline, ledger(program))
    assert told.step_s == timeline.step_s
    assert dict(told.parts) == pytest.approx(says["breakdown"], rel=1e-12, abs=1e-15)
    assert [row.to_json() for row in told.comm] == [pytest.approx(row) for row in says["comm"]]


def test_a_shortened_graph_is_the_graph_of_fewer_layers() -> None:
    for family, model in MODELS.items():
        layers = Layers(model.graph(2, SEQ, "float32"))
        assert layers.classes == (0, *[1] * 18, 2)
        short, fewer = layers.shortened([0, 1, 9, 18, 19]).check(), (gpt if family == "gpt" else llama)
        few = fewer(num_layers=3, **({} if family == "gpt" else {"hidden": 64, "head_dim": 8, "mlp_hidden": 144})).graph(2, SEQ, "float32")
        assert [(n.op, n.layer, few.sizes(n)) for n in few.nodes] == [(n.op, n.layer, short.sizes(n)) for n in short.nodes]
        assert len(short.params) == len(few.params)


@pytest.mark.parametrize("seed", range(12))
def test_no_single_move_makes_ranks_more_even(seed: int) -> None:
    weights = [0.0, *[1.0 + 0.25 * ((seed * k) % 3) for k in range(1, 9 + seed)], 2.0 + seed % 4]
    rank = ((0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 1, 2, 3, 0, 1, 2, 3))[seed % 3]
    cuts = cut_for_ranks(weights, rank)
    heaviest = max(sum(sum(weights[a:b]) for (a, b), r in zip(cuts, rank, strict=True) if r == here) for here in set(rank))
    assert heaviest <= unmoved(weights, rank) + 1e-9
    assert [a for a, _ in cuts] == [0, *(b for _, b in cuts[:-1])]
    assert all(a < b for a, b in cuts)


def unmoved(weights: list[float], rank: tuple[int, ...]) -> float:
    """The heaviest rank under the cut whose heaviest stage is lightest."""
    cuts = cut_for_ranks(weights, tuple(range(len(rank))))
    return max(sum(sum(weights[a:b]) for (a, b), r in zip(cuts, rank, strict=True) if r == here) for here in set(rank))


def test_ranks_of_a_v_are_even_where_layers_allow_it() -> None:
    """GPT-2's 12 blocks on 4 ranks of two stages, the head as heavy as 5: the rank that holds it holds nothing else."""
    weights = [0.0, *[1.0] * 12, 5.4]
    cuts = cut_for_ranks(weights, (0, 1, 2, 3, 3, 2, 1, 0))
    assert (cuts[0], cuts[-1]) == ((0, 1), (13, 14))
    assert sorted(b - a for a, b in cuts[1:-1]) == [2] * 6

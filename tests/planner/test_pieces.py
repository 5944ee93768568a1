"""Sequences cut into pieces: where they are cut, the graph and plan of the pieces, what a program of them keeps, and how they are asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from ir.errors import HeadraceError, PlanError
from ir.graph import Graph
from ir.ops import catalogue
from ir.plan import Plan, Stage
from ir.program import Program
from planner.candidates import block_layers
from planner.check import check_plan
from planner.frontends import load
from planner.lower import lower
from planner.orders import orders_of
from planner.pieces import balanced, unroll, unrolled_plan, whole_layer, whole_name
from planner.schedules import schedule
from planner.schedules.text import write
from planner.search import plan as search
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from simulator.engine import simulate
from simulator.estimate import estimate
from simulator.memory import ledger
from tests.models import SEQ, gpt, llama
from tests.plans import Layout, plan_for
from tests.schedules import longest_path

MODEL = gpt(num_layers=6)
CLUSTER = load_cluster("1x4xH100-SXM")


def in_pieces(pp: int, m: int, pieces: tuple[int, ...], **more: Any) -> Plan:
    return plan_for(MODEL, Layout(pp=pp, num_microbatches=m, schedule="seq1f1b", pieces=pieces, **more), batch=m, seq=SEQ)


# ---- where to cut ----------------------------------------------------------------------------------------------------------------------------------


def work(graph: Graph, start: int, stop: int) -> float:
    """Floating point operations, there and back, of the blocks for the tokens of a piece, counted node by node in the unrolled graph's own operators."""
    found = 0.0
    for n in graph.nodes:
        if n.layer in block_layers(graph):
            op, sizes = graph.op(n), dict(graph.sizes(n))
            for this in (op, *map(catalogue, op.grads)):
                found += this.flops_of({**sizes, "s": stop - start, **({"z": stop} if "z" in sizes else {})}, n.attrs)
    return found


@pytest.mark.parametrize(("name", "seq", "k"), [("gpt2", 1024, 4), ("llama-3-8b", 32768, 4), ("llama-3-8b", 131072, 8), ("llama-3-70b", 8192, 3)])
def test_balanced_pieces_take_equally_long_and_are_whole_tiles(name: str, seq: int, k: int) -> None:
    graph = load(name).graph(1, seq) if name != "llama-3-8b" else load(name, max_positions=seq).graph(1, seq)
    pieces = balanced(graph, k)
    assert (len(pieces), sum(pieces)) == (k, seq)
    assert list(pieces) == sorted(pieces, reverse=True)
    each = [work(graph, stop - n, stop) for n, stop in zip(pieces, accumulate(pieces), strict=True)]
    assert max(each) / min(each) < 1.2
    equal = [work(graph, seq * j // k, seq * (j + 1) // k) for j in range(k)]
    assert max(each) < max(equal)
    assert all(n % (128 if seq > 8192 else 16) == 0 for n in pieces)


def test_short_sequences_are_cut_token_by_token() -> None:
    graph = MODEL.graph(1, SEQ)
    assert balanced(graph, 1) == (SEQ,)
    assert balanced(graph, SEQ) == (1,) * SEQ
    assert sorted(balanced(graph, 5)) == [2, 2, 2, 3, 3]
    with pytest.raises(PlanError, match="12 tokens cannot be cut into 13 pieces; legal are 1 to 12"):
        balanced(graph, 13)


# ---- graph and plan --------------------------------------------------------------------------------------------------------------------------------


def test_every_node_is_there_for_each_piece_and_later_pieces_look_back() -> None:
    made = in_pieces(2, 2, (5, 4, 3))
    graph = MODEL.graph(1, SEQ, "float64")
    cut = unroll(graph, made)
    assert [n.name for n in cut.nodes] == [f"{n.name}~{j}" for j in range(3) for n in graph.nodes]
    attend = [cut.node[f"h.0.attn.attend~{j}"] for j in range(3)]
    assert [n.op for n in attend] == ["attention", "attention.over2", "attention.over3"]
    assert attend[2].inputs[1:4] == tuple(f"h.0.attn.k.add_bias~{i}" for i in range(3))
    assert [t.name for t in cut.params] == [t.name for t in graph.params]
    assert cut.outputs == ("loss~0", "loss~1", "loss~2")
    assert [cut.tensors[f"ids~{j}"].shape for j in range(3)] == [(1, 5), (1, 4), (1, 3)]
    each = unrolled_plan(made, cut)
    assert len(each.stages) == 6
    assert [each.stage_of(n.layer) for n in cut.nodes] == [made.stage_of(graph.node[whole_name(n.name)].layer) * 3 + int(n.name[-1]) for n in cut.nodes]
    assert all(whole_layer(each, n.layer) == graph.node[whole_name(n.name)].layer for n in cut.nodes)


def test_a_program_says_the_layers_of_the_model() -> None:
    layers = {a.origin: a.layer for a in lower(MODEL, in_pieces(2, 2, (5, 4, 3))).actors if a.phase == "F" and a.work.kind == "compute"}
    graph = MODEL.graph(1, SEQ)
    assert {whole_name(origin): layer for origin, layer in layers.items()} == {n.name: n.layer for n in graph.nodes}


def test_what_looks_ahead_is_not_cut() -> None:
    made, graph = in_pieces(2, 2, (5, 4, 3)), MODEL.graph(1, SEQ, "float64")
    seeing = replace(graph, nodes=tuple(replace(n, attrs={**n.attrs, "causal": False}) if n.op == "attention" else n for n in graph.nodes))
    with pytest.raises(PlanError, match=r"cannot be cut: node `h\.0\.attn\.attend` .* looks from one token to another"):
        unroll(seeing, made)
    text = "graph g\ninput x float32 [2 12 4]\nnode a @0: y = transpose(x)\nnode b @0: l = row_sum(y)\nnode c @0: loss = total(l) factor=1.0\noutput loss\n"
    with pytest.raises(PlanError, match="node `a`"):
        unroll(Graph.parse(text), made)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pieces": (6, 5)}, "must be 1 token or more each and 12 together"),
        ({"pieces": (12, 0)}, "must be 1 token or more each and 12 together"),
        ({"pieces": ()}, "cuts sequences, and the plan does not say where"),
        ({"schedule": "1f1b"}, "schedule `1f1b` runs whole sequences, not 2 pieces of them; leave seq_chunks out, or choose seq1f1b"),
        ({"schedule": "zb-h1", "pieces": (4, 4, 4)}, "runs whole sequences, not 3 pieces"),
        ({"schedule": "table", "orders": ("0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0")}, "these wait for each other"),
    ],
)
def test_plans_that_are_wrong_are_refused(change: dict[str, Any], says: str) -> None:
    made = replace(in_pieces(2, 1, (6, 6)), **change)
    with pytest.raises(HeadraceError, match=says):
        check_plan(MODEL.graph(1, SEQ, "float64"), made)


def test_a_piece_that_the_ranks_cannot_split_is_refused() -> None:
    made = plan_for(MODEL, Layout(1, 4, 2, 2, sp=True, schedule="seq1f1b", pieces=(10, 2)), batch=2, seq=SEQ)
    with pytest.raises(PlanError, match=r"~1.*s = 2 cannot be split 4 ways"):
        lower(MODEL, made)


def test_a_plan_in_pieces_reads_back() -> None:
    made = in_pieces(2, 2, (5, 4, 3))
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert lower(MODEL, Plan.from_json(made.to_json())).fingerprint == lower(MODEL, made).fingerprint


# ---- the program -----------------------------------------------------------------------------------------------------------------------------------


def held(program: Program, rank: int, memory: str) -> int:
    return sum(r.nbytes * r.credits for r in program.registers if r.rank == rank and r.memory == memory)


def test_gradients_are_held_once() -> None:
    whole = lower(MODEL, plan_for(MODEL, Layout(pp=2, num_microbatches=4), batch=4, seq=SEQ))
    pieces = lower(MODEL, in_pieces(2, 4, (4, 3, 3, 2)))
    for rank in range(2):
        for memory in ("gradient", "parameter", "optimizer"):
            assert held(pieces, rank, memory) == held(whole, rank, memory)
    adders = [a.name for a in pieces.actors if "d.h.0.attn.q.weight@h.0.attn.q.dw@acc@0" in a.writes]
    assert adders == [f"h.0.attn.q~{j}.dw@0" for j in range(4)]


@pytest.mark.parametrize(("pp", "m"), [(4, 8), (2, 8)])
def test_less_is_kept_than_of_whole_sequences(pp: int, m: int) -> None:
    """The closed form says (p - 1 + k) / k microbatches instead of p; what a transfer fills or empties has slots of its own, some more.

    Beside them lie the gradients of keys that wait for the piece before, less than a tenth of a microbatch here.
    """
    model = llama(num_layers=6, vocab=16)
    whole = lower(model, plan_for(model, Layout(pp=pp, num_microbatches=m), batch=m, seq=48))
    one = ledger(lower(model, plan_for(model, Layout(pp=pp, num_microbatches=1), batch=1, seq=48))).ranks[0]["saved"]
    for k in (2, 4):
        made = lower(model, plan_for(model, Layout(pp=pp, num_microbatches=m, schedule="seq1f1b", pieces=(48 // k,) * k), batch=m, seq=48))
        kept = ledger(made).ranks[0]["saved"] / one
        least = schedule("seq1f1b", k).stash(0, pp, m)
        assert least == (pp - 1 + k) / k
        assert least <= kept <= least + 0.1
        assert kept < ledger(whole).ranks[0]["saved"] / one


@pytest.mark.parametrize(("p", "m", "k"), [(2, 1, 2), (4, 8, 4), (3, 5, 3), (4, 3, 2)])
def test_no_rank_keeps_less_without_losing_time(p: int, m: int, k: int) -> None:
    """The forwards ahead are the fewest: with one less on any rank that waits for others the step takes longer or stands still."""
    orders = schedule("seq1f1b", k).orders(p, m)
    best = longest_path(orders, p, pieces=k)
    assert best is not None
    assert best[0] == pytest.approx(schedule("seq1f1b", k).time_s(p, m))
    for r in range(p):
        at = next(i for i, slot in enumerate(orders[r]) if slot.kind == "B")
        if m * k <= at:
            continue
        row = list(orders[r])
        row[at - 1], row[at] = row[at], row[at - 1]
        late = longest_path((*orders[:r], tuple(row), *orders[r + 1 :]), p, pieces=k)
        assert late is None or late[0] > best[0]


def test_the_estimate_stays_a_bound() -> None:
    program, cost = lower(MODEL, in_pieces(4, 5, (5, 4, 3))), CostModel(CLUSTER)
    assert 0 < estimate(program, cost) <= simulate(program, cost, steps=2).step_s


# ---- what it is for --------------------------------------------------------------------------------------------------------------------------------


def step_s(seq: int, pieces: int, m: int = 8) -> float:
    """Of four stages of two blocks each, on devices whose memory is not looked at."""
    model = load("llama-3-8b", num_layers=8, max_positions=seq, vocab=512)
    cut = balanced(model.graph(1, seq), pieces) if pieces > 1 else ()
    want = Layout(pp=4, num_microbatches=m, schedule="seq1f1b" if cut else "1f1b", pieces=cut)
    made = plan_for(model, want, batch=m, seq=seq, dtype="bfloat16")
    made = replace(made, stages=tuple(Stage(a, b, (r,)) for r, (a, b) in enumerate(((0, 3), (3, 5), (5, 7), (7, 10)))))
    return simulate(lower(model, made), CostModel(CLUSTER), steps=2).step_s


def test_long_contexts_gain_and_short_ones_lose() -> None:
    """Theory: (m + (p - 1) / k) / (m + p - 1) of 1F1B's step, 0.795 for p = 4, m = 8, k = 4; short pieces leave the device idle between kernels."""
    long = step_s(32768, 4) / step_s(32768, 1)
    assert 0.795 < long < 0.9
    assert step_s(512, 4) > step_s(512, 1)


# ---- how it is asked for ---------------------------------------------------------------------------------------------------------------------------


def found(**fix: Any) -> Plan:
    return search(load("gpt2-tiny", num_layers=6), CLUSTER, batch=8, seq=64, fix=fix, top=1).plans[0]


def test_seq_chunks_alone_chooses_the_schedule() -> None:
    made = found(pp=2, dp=2, mbs=1, seq_chunks=4)
    assert (made.schedule, len(made.pieces), sum(made.pieces)) == ("seq1f1b", 4, 64)
    assert made.layout["seq_chunks"] == 4


def test_without_a_number_several_are_tried() -> None:
    assert len(found(pp=2, dp=2, mbs=1, schedule="seq1f1b").pieces) in (2, 4, 8)


def test_a_table_counts_pieces(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    path.write_text(write(schedule("seq1f1b", 2).orders(2, 4)))
    own, listed = found(schedule=str(path), dp=2, seq_chunks=2), found(schedule="seq1f1b", seq_chunks=2, pp=2, dp=2, mbs=1)
    assert (own.schedule, own.num_microbatches, own.pieces) == ("table", 4, listed.pieces)
    assert orders_of(own) == orders_of(listed)
    assert own.predicted["step_s"] == pytest.approx(listed.predicted["step_s"], rel=1e-12)


@pytest.mark.parametrize(
    ("fix", "says"),
    [
        ({"schedule": "1f1b", "seq_chunks": 2}, "schedule `1f1b` runs whole sequences, not 2 pieces of them"),
        ({"schedule": "auto", "seq_chunks": 2}, "auto searches orders of whole sequences; leave seq_chunks out"),
        ({"seq_chunks": 65}, "seq_chunks=65: a sequence of 64 tokens has no more pieces than tokens"),
    ],
)
def test_what_cannot_be_cut_is_named(fix: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        found(pp=2, **fix)


def test_from_the_command_to_a_verified_run(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    work = ["gpt2-tiny", "local", "--batch", "4", "--seq", "32", "--dtype", "fp32"]
    assert main(["plan", *work, "--fix", "pp=2,dp=1,tp=1,mbs=1,seq_chunks=2", "-o", "plan.json"]) == 0
    assert "seq_chunks2" in capsys.readouterr().out
    assert main(["simulate", *work, "--plan", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > 0
    assert main(["run", "plan.json", "--steps", "2", "--verify", "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)["verified"]
    assert max(verified["loss_max_rel"], verified["grad_max_rel"]) < 1e-5

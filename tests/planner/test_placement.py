"""The regimes in which the search finds what people build by hand, on Llama blocks; limits, memory, recompute, errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ir.boxing import bytes_moved, chain
from ir.errors import PlanError
from ir.graph import Graph
from ir.op import Rule, nd_placements
from ir.plan import Hub, ParamPlacement
from ir.sbp import B, NdSbp, P, S
from ir.units import DTYPE_BYTES
from planner.facts import analyse
from planner.placement import Placed, new_tables, price, search
from planner.pricing import Pricing
from planner.solver.elimination import solve
from planner.space import Limit, Space, layout_space
from tests.planner.blocks import AlphaBeta, Llama, boxing_price, model

BLOCK = ("q", "k", "v", "rope_q", "rope_k", "attn", "o", "add1", "norm2", "gate", "up", "swiglu", "down", "add2")
COLUMN_THEN_ROW = {
    "q": "split n", "k": "split n", "v": "split n", "rope_q": "split h", "rope_k": "split h", "attn": "split g", "o": "split k",
    "gate": "split n", "up": "split n", "swiglu": "split t", "down": "split k",
}  # fmt: skip


def rules_of(placed: Placed, layer: int = 0) -> dict[str, str]:
    """Rules of a block by short name; on one axis."""
    return {k.removeprefix(f"h.{layer}."): " | ".join(map(repr, v)) for k, v in placed.rules.items() if k.startswith(f"h.{layer}.")}


def megatron(graph: Graph, sp: bool) -> dict[str, tuple[Rule, ...]]:
    """Column then row, heads split, vocabulary split; the residual stream repeated or split along the sequence. On one axis."""
    stream = Rule("split", "s") if sp else Rule("B")
    named = {"embed": "split v", "head": "split n", "top": "split v", "sum": "split v", "losses": "B", "loss": "B"}
    out = {}
    for n in graph.nodes:
        short = n.name.rpartition(".")[2] if n.name.startswith("h.") else n.name
        text = named.get(short) or COLUMN_THEN_ROW.get(short)
        out[n.name] = (Rule.parse(text) if text else stream,)
    return out


def collectives(graph: Graph, placed: Placed, pricing: Pricing, mesh: tuple[int, ...], layer: int) -> tuple[Counter[str], Counter[str]]:
    """Collectives of a layer's nodes, forward and backward: into and out of every hub, weights left out."""
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()

    def count(into: Counter[str], tensor: str, src: NdSbp, dst: NdSbp) -> None:
        t = graph.tensors[tensor]
        steps = chain(src, dst, t.shape, mesh, boxing_price(pricing, ("tp",), mesh, t.shape, DTYPE_BYTES[t.dtype]))
        into.update(step.kind for step in steps if not step.is_local)

    for n in graph.nodes:
        if n.layer != layer:
            continue
        op, rules = graph.op(n), placed.rules[n.name]
        ins, outs = nd_placements(rules, op)
        cotangents = [op.cotangents(rule) for rule in rules]
        for i, t in enumerate(n.inputs):
            if graph.tensors[t].role == "value":
                count(forward, t, placed.hubs[t].value, ins[i])
                count(backward, t, tuple(c[0][i] for c in cotangents), placed.hubs[t].cotangent)
        for j, t in enumerate(n.outputs):
            if graph.consumers(t):
                count(forward, t, outs[j], placed.hubs[t].value)
                count(backward, t, placed.hubs[t].cotangent, tuple(c[1][j] for c in cotangents))
    return forward, backward


# ---- regimes ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "rounds", "kinds"), [(4098, 2.0, {"all_reduce": 1}), (4096, 1.2, {"all_reduce": 1}), (4096, 1.9, {"reduce_scatter": 1, "all_gather": 1})]
)
def test_neither_sequence_nor_batch_splits_column_then_row_one_reduction_for_each_half_and_direction(hidden: int, rounds: float, kinds: dict[str, int]) -> None:
    """A ring's all-reduce is a reduce-scatter and an all-gather; where the width divides, taken apart they leave a quarter of the sum between to do."""
    graph = model(Llama(batch=1, seq=2047, hidden=hidden, layers=4))
    args = (graph, ("tp",), (4,), AlphaBeta({"tp": 4}, all_reduce_rounds=rounds))
    ends = Space(hubs=tuple(Limit(t, "tp", lambda pair: pair[0] == B) for t in ("embed", "h.3.add2")))
    found = search(*args, num_microbatches=8, space=ends)
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for layer in range(4):
        assert rules_of(found, layer).items() >= COLUMN_THEN_ROW.items()
        both = collectives(graph, found, args[3], (4,), layer + 1)
        forward.update(both[0])
        backward.update(both[1])
    assert forward == backward == {kind: 8 * n for kind, n in kinds.items()}
    assert found.cost_s <= price(*args, rules=megatron(graph, sp=False), num_microbatches=8, space=ends).cost_s


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("num_microbatches", "state_price"), [(1, 0.0), (8, 1e-9)])
def test_one_microbatch_or_dear_states_tensor_and_sequence_parallel_with_a_split_vocabulary(num_microbatches: int, state_price: float, tied: bool) -> None:
    graph = model(Llama(batch=1, layers=2, tied=tied))
    pricing = AlphaBeta({"tp": 4})
    found = search(graph, ("tp",), (4,), pricing, num_microbatches=num_microbatches, state_price=state_price)
    for layer in (0, 1):
        assert rules_of(found, layer).items() >= {**COLUMN_THEN_ROW, "norm1": "split s", "norm2": "split s", "add1": "split s", "add2": "split s"}.items()
        halves = Counter({"reduce_scatter": 2, "all_gather": 2})
        assert collectives(graph, found, pricing, (4,), layer + 1) == (halves, halves)
    assert (found.rules["head"], found.rules["top"], found.rules["sum"]) == ((Rule("split", "n"),), (Rule("split", "v"),), (Rule("split", "v"),))
    assert (found.rules["embed"] == (Rule("split", "v"),)) == tied
    weights = [place for name, place in found.params.items() if not name.endswith(".g")]
    assert all(place.state[0].is_split and place.state == place.held == place.grad for place in weights)
    same = {"num_microbatches": num_microbatches, "state_price": state_price}
    assert found.cost_s <= price(graph, ("tp",), (4,), pricing, rules=megatron(graph, sp=True), **same).cost_s


def test_rising_price_of_memory_zero_1_then_2_then_3() -> None:
    graph = model(Llama(batch=64, layers=2, dtype="float32", vocab=4096))
    args = (graph, ("dp",), (8,), AlphaBeta({"dp": 8}))
    zero = {("S", "B", "P"): 1, ("S", "B", "S"): 2, ("S", "S", "S"): 3}
    levels = []
    for state_price in (0.0, 1e-11, 3e-11, 1e-10, 1e-9):
        same = {"num_microbatches": 4, "state_price": state_price}
        found = search(*args, **same)
        assert all(rule == (Rule("split", "b"),) for name, rule in found.rules.items() if name.startswith("h."))
        levels.append({zero[tuple(nd[0].kind for nd in p)] for name, p in found.params.items() if name.startswith("h.") and not name.endswith(".g")})
        data_parallel = {n.name: (Rule("split", "b"),) for n in graph.nodes}
        assert found.cost_s <= price(*args, **same, rules=data_parallel, params={p.name: ParamPlacement((B,), (B,), (P,)) for p in graph.params}).cost_s
    assert levels == [{1}, {1}, {2}, {3}, {3}]


def test_long_sequence_is_split_and_turned_to_heads_by_all_to_all() -> None:
    graph = model(Llama(batch=1, seq=65536, layers=2))
    pricing = AlphaBeta({"tp": 4})
    found = search(graph, ("tp",), (4,), pricing, num_microbatches=8)
    for layer in (0, 1):
        rules = rules_of(found, layer)
        assert rules.pop("attn") == "split g"
        assert set(rules.values()) == {"split s"}
        assert collectives(graph, found, pricing, (4,), layer + 1) == (Counter(all_to_all=4), Counter(all_to_all=4))
    assert found.cost_s <= price(graph, ("tp",), (4,), pricing, rules=megatron(graph, sp=True), num_microbatches=8).cost_s


# ---- the space -------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero", "kinds"), [(0, "BBP"), (1, "SBP"), (2, "SBS"), (3, "SSS")])
@pytest.mark.parametrize("sp", [True, False])
def test_fixed_layout_is_kept_on_both_axes(zero: int, kinds: str, sp: bool) -> None:
    graph = model(Llama(batch=4, seq=64, hidden=64, heads=8, groups=4, d=8, inner=128, vocab=100))
    pricing = AlphaBeta({"dp": 2, "tp": 4})
    axes = ("dp", "tp")
    found = search(graph, axes, (2, 4), pricing, num_microbatches=2, space=layout_space(graph, axes, zero=zero, sp=sp))
    assert {rules[0] for rules in found.rules.values()} == {Rule("split", "b")}
    for place in found.params.values():
        assert "".join(nd[0].kind for nd in place) == kinds
    stream = [h for t, h in found.hubs.items() if t.endswith(("add1", "add2"))]
    if sp:
        assert {rules[1] for name, rules in found.rules.items() if name.endswith(("add1", "add2", "norm1", "norm2"))} == {Rule("split", "s")}
    else:
        assert not any(h.value[1].is_split for h in stream)


def test_zero_3_and_tensor_parallel_take_different_dims_where_both_divide_and_none_where_nothing_does() -> None:
    graph = model(Llama(batch=4, seq=64, hidden=64, heads=8, groups=4, d=8, inner=128, vocab=101))
    axes = ("dp", "tp")
    found = search(graph, axes, (2, 4), AlphaBeta({"dp": 2, "tp": 4}), num_microbatches=1, state_price=1e-6, space=layout_space(graph, axes, zero=3, sp=True))
    assert {frozenset(s.dim for s in p.held) for name, p in found.params.items() if name.startswith("h.") and not name.endswith(".g")} == {frozenset({0, 1})}
    odd = model(Llama(batch=3, seq=64, hidden=64, heads=8, groups=4, d=8, inner=128, vocab=101))
    third = search(odd, ("dp",), (3,), AlphaBeta({"dp": 3}), num_microbatches=1, space=layout_space(odd, ("dp",), zero=3))
    assert third.params["h.0.q.w"] == ParamPlacement((B,), (B,), (P,))
    assert third.params["head.w"].held == (S(0),), "its rows are the vocabulary, which may split unevenly"


@pytest.mark.parametrize("tied", [False, True])
def test_an_uneven_vocabulary_splits_only_where_it_may(tied: bool) -> None:
    """The head calls it n; that it is the vocabulary follows from the loss, which calls it v."""
    graph = model(Llama(batch=1, seq=63, hidden=64, heads=8, groups=4, d=8, inner=128, vocab=10007, tied=tied))
    args = (graph, ("tp",), (2,), AlphaBeta({"tp": 2}))
    split = {"embed": (Rule("split", "v"),), "head": (Rule("split", "n"),), "sum": (Rule("split", "v"),)}
    assert price(*args, rules=split, num_microbatches=1).params["embed.w"].held == (S(0),)
    for name, rule in split.items():
        with pytest.raises(PlanError, match=f"node `{name}` has no legal placement"):
            price(*args, rules={name: rule}, num_microbatches=1, space=Space(uneven=frozenset()))
    with pytest.raises(PlanError, match=r"node `h\.0\.norm1` has no legal placement"):
        price(*args, rules={"h.0.norm1": (Rule("split", "s"),)}, num_microbatches=1)


def test_limits_hold_one_node_hub_and_parameter() -> None:
    graph = model(Llama(batch=4, layers=1))
    args = (graph, ("tp",), (4,), AlphaBeta({"tp": 4}))
    space = Space(
        rules=(Limit("h.*.up", "tp", lambda rule: rule == Rule("B")),),
        hubs=(Limit(lambda t: t.name == "h.0.attn", "tp", lambda pair: pair == (B, P)),),
        params=(Limit("head.w", "tp", lambda triple: triple == (S(1), B, P)),),
    )
    found = search(*args, num_microbatches=1, space=space)
    assert found.rules["h.0.up"] == (Rule("B"),)
    assert found.hubs["h.0.attn"] == ((B,), (P,))
    assert found.params["head.w"] == ((S(1),), (B,), (P,))
    assert found.cost_s > search(*args, num_microbatches=1).cost_s


def test_an_axis_of_one_rank_is_written_as_b() -> None:
    graph = model(Llama(batch=4, layers=1))
    narrow = search(graph, ("tp",), (4,), AlphaBeta({"tp": 4}), num_microbatches=1)
    wide = search(graph, ("dp", "tp"), (1, 4), AlphaBeta({"dp": 1, "tp": 4}), num_microbatches=1)
    assert wide.cost_s == narrow.cost_s
    assert wide.rules == {name: (Rule("B"), *rules) for name, rules in narrow.rules.items()}
    assert all(nd[0] == B for place in wide.params.values() for nd in place)


def test_what_cannot_be_placed_is_named_with_what_could() -> None:
    graph = model(Llama(batch=3, seq=64, hidden=64, heads=8, groups=4, d=8, inner=128, vocab=100))
    with pytest.raises(PlanError, match=r"node `embed` has no legal placement on mesh .*'dp': 2.*legal by size: dp: B, "):
        search(graph, ("dp",), (2,), AlphaBeta({"dp": 2}), num_microbatches=1, space=layout_space(graph, ("dp",)))
    with pytest.raises(PlanError, match=r"node `head` has no legal placement.*was asked for"):
        price(graph, ("dp",), (2,), AlphaBeta({"dp": 2}), rules={"head": (Rule("split", "b"),)}, num_microbatches=1)
    with pytest.raises(PlanError, match="zero=4 is no level"):
        layout_space(graph, ("dp",), zero=4)
    with pytest.raises(PlanError, match=r"tables of mesh \('dp',\) \(4,\)"):
        search(graph, ("dp",), (2,), AlphaBeta({"dp": 2}), num_microbatches=1, tables=new_tables(("dp",), (4,), AlphaBeta({"dp": 4})))


# ---- memory and recompute --------------------------------------------------------------------------------------------------------------------------


def test_what_the_gradients_read_is_saved_and_a_recomputed_layer_keeps_what_enters_it() -> None:
    graph = model(Llama(layers=2))
    saved = analyse(graph).saved
    assert saved["h.0.q"] == (), "rotary positions are linear"
    assert saved["h.0.norm1"] == (("h.0.q", 0), ("h.0.k", 0), ("h.0.v", 0))
    assert set(saved["h.0.attn"]) == {("h.0.o", 0), ("", 0)}
    assert saved["h.0.add1"] == (("h.0.norm2", 0),)
    assert saved["h.0.down"] == ()
    again = analyse(graph, (1,))
    assert {t for t, uses in again.saved.items() if uses and t.startswith("h.0.")} == {"h.0.add2"}, "read by the next layer"
    assert again.saved["embed"] == (("h.0.norm1", 0), ("h.0.add1", 0))
    assert not again.rerun & {"h.0.down", "h.0.add2", "embed"}
    assert {"h.0.norm1", "h.0.attn", "h.0.add1", "h.0.swiglu"} <= again.rerun


def test_bytes_kept_by_hand_on_one_device() -> None:
    c = Llama(batch=2, seq=16, hidden=32, heads=8, groups=4, d=4, inner=64, vocab=50, dtype="float32")
    graph = model(c)
    found = search(graph, (), (), AlphaBeta({}), num_microbatches=1, in_flight=3)
    tokens, kv = c.batch * c.seq, c.groups * c.d
    floats = (
        2 * (c.hidden + 1) + 2 * c.hidden  # inputs and statistics of two norms, their outputs
        + c.hidden + 2 * kv + c.hidden + c.heads  # q, k, v, attention's output and statistics
        + 3 * c.inner  # gate, up, product
        + c.hidden + 1 + c.hidden  # the last norm
        + c.vocab + 1 + 1  # logits, top, z
    )  # fmt: skip
    integers = 2 + 1  # ids read by the embedding's gradient, labels by the loss's
    assert found.nbytes["activations"] == 3 * tokens * (4 * floats + 8 * (integers - 1))
    assert found.nbytes["params"] == found.nbytes["grads"] == 4 * graph.num_params
    assert found.nbytes["optimizer"] == 8 * graph.num_params
    half = search(model(replace(c, dtype="bfloat16")), (), (), AlphaBeta({}), num_microbatches=1)
    assert (half.nbytes["params"], half.nbytes["grads"], half.nbytes["optimizer"]) == (2 * graph.num_params, 4 * graph.num_params, 12 * graph.num_params)


def test_price_of_memory_is_paid_by_less_memory_and_more_time() -> None:
    graph = model(Llama(batch=8, layers=3))
    args = (graph, ("tp",), (4,), AlphaBeta({"tp": 4}))
    last = search(*args, num_microbatches=4, in_flight=4)
    for memory_price in (1e-13, 1e-12, 1e-11, 1e-10):
        found = search(*args, num_microbatches=4, in_flight=4, memory_price=memory_price)
        total = sum(found.nbytes.values())
        assert found.cost_s == pytest.approx(found.time_s + memory_price * total, rel=1e-9)
        assert total <= sum(last.nbytes.values()) * (1 + 1e-12)
        assert found.time_s >= last.time_s * (1 - 1e-12)
        last = found


def test_a_dear_copy_is_boxed_again_in_the_backward() -> None:
    graph = model(Llama(batch=8, layers=1))
    same = {"rules": megatron(graph, sp=True), "hubs": {"h.0.norm1": ((S(1),), (S(1),)), "h.0.norm2": ((S(1),), (S(1),))}, "num_microbatches": 1}
    args = (graph, ("tp",), (4,), AlphaBeta({"tp": 4}))
    cheap, dear = price(*args, **same), price(*args, **same, memory_price=1e-9, state_price=0.0)
    assert cheap.reboxed == ()
    assert set(dear.reboxed) >= {("h.0.norm1", "h.0.q"), ("h.0.norm1", "h.0.k"), ("h.0.norm2", "h.0.gate")}
    assert dear.nbytes["activations"] < cheap.nbytes["activations"]
    assert dear.time_s > cheap.time_s


def test_equal_readers_share_one_gather_in_each_direction() -> None:
    """As sequence parallelism does it: the shard is kept, gathered once for q, k and v, again in the backward, and their cotangents are scattered once."""
    graph = model(Llama(batch=8, layers=1))
    args = (graph, ("tp",), (4,), AlphaBeta({"tp": 4}))
    rules = megatron(graph, sp=True)
    norms = ("h.0.norm1", "h.0.norm2")
    same = {"num_microbatches": 1, "memory_price": 1e-9, "state_price": 0.0}
    hubs = price(*args, rules=rules, num_microbatches=1).hubs
    assert all(hubs[t] == ((B,), (P,)) for t in norms)
    cheap = price(*args, rules=rules, hubs=hubs, **same)
    shard = price(*args, rules=rules, hubs={**hubs, **dict.fromkeys(norms, Hub((S(1),), (P,)))}, **same)
    assert {t for t, _ in shard.reboxed} >= set(norms)
    tensor = graph.tensors["h.0.norm1"]
    once = sum(map(boxing_price(args[3], ("tp",), (4,), tensor.shape, 2), chain((S(1),), (B,), tensor.shape, (4,), bytes_moved(tensor.shape, (4,), 2))))
    assert shard.time_s == pytest.approx(cheap.time_s + 2 * once, rel=1e-9)
    assert shard.nbytes["activations"] == pytest.approx(cheap.nbytes["activations"] - 2 * 3 / 4 * tensor.nbytes)
    assert search(*args, **same).cost_s <= shard.cost_s < cheap.cost_s


def test_recompute_costs_time_and_frees_memory() -> None:
    graph = model(Llama(batch=8, layers=4))
    args = (graph, ("tp",), (4,), AlphaBeta({"tp": 4}))
    plain, again = search(*args, num_microbatches=4), search(*args, num_microbatches=4, recompute=(1, 2, 3, 4))
    assert plain.time_s < again.time_s < 1.4 * plain.time_s
    assert again.nbytes["activations"] < 0.5 * plain.nbytes["activations"]


def test_layers_may_differ_in_microbatches_in_flight() -> None:
    graph = model(Llama(batch=8, layers=2))
    args = (graph, ("tp",), (4,), AlphaBeta({"tp": 4}))
    one = search(*args, num_microbatches=4, in_flight={1: 4, 2: 1}).nbytes["activations"]
    assert search(*args, num_microbatches=4, in_flight=1).nbytes["activations"] < one < search(*args, num_microbatches=4, in_flight=4).nbytes["activations"]


# ---- size ------------------------------------------------------------------------------------------------------------------------------------------


def test_llama_3_8b_on_8_by_8_folded_is_unfolded() -> None:
    graph = model(Llama(batch=8, layers=32))
    args = (graph, ("dp", "tp"), (8, 8), AlphaBeta({"dp": 8, "tp": 8}, slow=("dp",)))
    tables = new_tables(*args[1:])
    folded = search(*args, num_microbatches=4, tables=tables)
    flat = search(*args, num_microbatches=4, tables=tables, solver=lambda g, _: solve(g))
    assert folded.exact
    assert folded.cost_s == pytest.approx(flat.cost_s, rel=1e-12)
    assert folded.log10_space > 1000


def test_tables_serve_several_graphs_prices_and_limits() -> None:
    pricing = AlphaBeta({"dp": 2, "tp": 4})
    tables = new_tables(("dp", "tp"), (2, 4), pricing)
    for c in (Llama(layers=1), Llama(layers=2), Llama(batch=4, layers=1)):
        graph = model(c)
        for memory_price in (0.0, 1e-11):
            args = (graph, ("dp", "tp"), (2, 4), pricing)
            assert search(*args, num_microbatches=2, memory_price=memory_price, tables=tables) == search(*args, num_microbatches=2, memory_price=memory_price)


def test_links_of_the_axes_choose_the_chains_that_were_priced() -> None:
    """On a slow outer axis a sum is first reduced and scattered over the fast inner one; bytes alone would not know."""
    pricing = AlphaBeta({"dp": 4, "tp": 8}, slow=("dp",))
    found = search(model(Llama(batch=8, layers=1)), ("dp", "tp"), (4, 8), pricing, num_microbatches=2)
    shape, mesh = (4096, 4096), (4, 8)
    true_price = boxing_price(pricing, ("dp", "tp"), mesh, shape, 2)
    first = set()
    for src, dst in (((P, P), (S(0), S(1))), ((P, P), (B, B)), ((S(0), S(1)), (B, B)), ((B, P), (S(1), S(0))), ((S(0), S(0)), (S(1), S(1)))):
        steps = chain(src, dst, shape, mesh, bytes_moved(shape, mesh, 2, found.links))
        best = sum(map(true_price, chain(src, dst, shape, mesh, true_price)))
        assert sum(map(true_price, steps)) == pytest.approx(best, rel=0.01)
        first.add((src, dst, steps[0].axes))
    assert ((P, P), (S(0), S(1)), (1,)) in first
    assert sum(map(true_price, chain((P, P), (S(0), S(1)), shape, mesh, bytes_moved(shape, mesh, 2)))) > 2 * sum(
        map(true_price, chain((P, P), (S(0), S(1)), shape, mesh, bytes_moved(shape, mesh, 2, found.links)))
    )
    one = search(model(Llama(batch=8, layers=1)), ("dp", "tp"), (1, 8), AlphaBeta({"dp": 1, "tp": 8}), num_microbatches=2)
    assert one.links[0] == (0.0, 0.0)


def test_same_bytes_under_any_hash_seed() -> None:
    code = (
        "from tests.planner.blocks import AlphaBeta, Llama, model\n"
        "from planner.placement import search\n"
        "found = search(model(Llama(layers=2)), ('dp', 'tp'), (2, 4), AlphaBeta({'dp': 2, 'tp': 4}), num_microbatches=4, memory_price=1e-11)\n"
        "print(found.rules, found.hubs, found.params, found.reboxed, found.cost_s, found.nbytes)\n"
    )
    root = Path(__file__).parents[2]
    told = {
        subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(told) == 1


def test_what_hides_counts_by_its_exposed_share() -> None:
    """Parameters' boxing counts in proportion, everything else in full."""
    graph = model(Llama(batch=64, layers=2, dtype="float32", vocab=4096))
    args = (graph, ("dp",), (8,), AlphaBeta({"dp": 8}))
    whole = search(*args, num_microbatches=4)
    given = {"rules": whole.rules, "hubs": whole.hubs, "params": whole.params, "num_microbatches": 4}
    full, half, none = (price(*args, **given, exposed=share).cost_s for share in (1.0, 0.5, 0.0))
    assert full == pytest.approx(whole.cost_s)
    assert full > half > none > 0.0
    assert half == pytest.approx((full + none) / 2)
    assert search(*args, num_microbatches=4, exposed=0.0).cost_s <= none


def test_of_equal_costs_the_one_that_moves_and_keeps_least_wins() -> None:
    """Where nothing takes any time, nothing is moved; where only bytes are free, fewer collectives and then fewer bytes kept decide."""
    graph = model(Llama(batch=8, seq=64, hidden=64, heads=8, groups=8, d=8, inner=128, vocab=128, layers=2, dtype="float32"))
    nothing = AlphaBeta({"tp": 4}, latency_s=0.0, bytes_per_s=float("inf"), flops_per_s=float("inf"), memory_bytes_per_s=float("inf"), launch_s=0.0)
    found = search(graph, ("tp",), (4,), nothing, num_microbatches=2)
    assert found.cost_s < 1e-12
    for layer in (1, 2):
        forward, backward = collectives(graph, found, nothing, (4,), layer)
        assert not forward + backward
    whole = sum(found.nbytes.values())
    everywhere = price(graph, ("tp",), (4,), nothing, rules={n.name: (Rule("B"),) for n in graph.nodes}, num_microbatches=2)
    assert whole <= sum(everywhere.nbytes.values())

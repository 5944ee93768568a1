"""The search's tables = the slow, obvious sum: every node, every boxing chain and every parameter of the derived backward, priced one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ir.boxing import chain
from ir.errors import PlanError
from ir.graph import Graph, Node, Tensor
from ir.mesh import Mesh
from ir.op import Op, Rule, nd_placements
from ir.ops import catalogue
from ir.sbp import NdSbp, S, local_shape
from ir.units import DTYPE_BYTES
from planner.autodiff import RECOMPUTED, backward
from planner.frontends import load
from planner.lower import lower
from planner.placement import Placed, new_tables, price, search
from planner.pricing import MeshPricing, Pricing
from planner.solver.elimination import solve
from planner.solver.polytope import integer_program
from planner.space import Space
from simulator.cost import CostModel
from tests.planner.blocks import AlphaBeta, Llama, boxing_price, model
from tests.plans import Layout, cluster, plan_for

SMALL = Llama(batch=4, seq=16, hidden=32, heads=8, groups=4, d=4, inner=64, vocab=50, layers=1, dtype="float32")


def wide(t: Tensor) -> Tensor:
    """A parameter's gradient, master copy and optimizer states: float32 at least."""
    return replace(t, dtype="float32") if DTYPE_BYTES[t.dtype] < DTYPE_BYTES["float32"] else t


class Twin:
    """Seconds of one step of a placement, summed actor by actor; knows nothing of tables."""

    def __init__(self, graph: Graph, axes: tuple[str, ...], mesh: tuple[int, ...], pricing: Pricing, placed: Placed, m: int, recompute: tuple[int | str, ...]):
        self.graph, self.axes, self.mesh, self.pricing, self.placed, self.m = graph, axes, mesh, pricing, placed, m
        self.joint = backward(graph, recompute)
        self.recompute = recompute
        self.params = {p.name for p in graph.params}

    def box(self, t: Tensor, src: NdSbp, dst: NdSbp) -> float:
        cost = boxing_price(self.pricing, self.axes, self.mesh, t.shape, DTYPE_BYTES[t.dtype])
        return sum(map(cost, chain(src, dst, t.shape, self.mesh, cost)))

    def copy(self, t: Tensor, nd: NdSbp, times: float = 2) -> float:
        return times / 2 * self.pricing.local_s(2 * math.prod(local_shape(t.shape, nd, self.mesh)) * DTYPE_BYTES[t.dtype])

    def kernel(self, op: Op, rules: tuple[Rule, ...], total: Mapping[str, int], attrs: Mapping[str, object], dtype: str) -> float:
        if op.copies:
            return 0.0
        sizes = {}
        for label, n in total.items():
            parts = tuple(k if r == Rule("split", label) else 1 for r, k in zip(rules, self.mesh, strict=True))
            sizes[label] = local_shape((n,), (S(0),) * len(parts), parts)[0]
        ins, outs = op.elements_of(sizes)
        num_moved = op.moves(sizes, attrs) if op.moves else sum(ins) + sum(outs)
        return self.pricing.compute_s(op.name, dtype, op.flops_of(sizes, attrs), num_moved * DTYPE_BYTES[dtype], op.gemm_of(sizes, attrs))

    def seconds(self) -> float:
        each = sum(self.forward(n) for n in self.graph.nodes) + sum(self.gradient(n) for n in self.joint.graph.nodes if n.phase in ("I", "W"))
        return self.m * (each - self.shared()) + sum(self.param(t) for t in self.graph.params) + self.adding()

    def readers(self, t: str) -> list[tuple[Node, int, NdSbp]]:
        return [(n, i, nd_placements(self.placed.rules[n.name], self.graph.op(n))[0][i]) for n, i in self.graph.consumers(t)]

    def shared(self) -> float:
        """What equal readers of one tensor save by boxing it once, into the placement where that saves most."""
        saved = 0.0
        for t, hub in self.placed.hubs.items():
            readers = self.readers(t)
            if len({(n.op, i) for n, i, _ in readers}) == len(readers):
                continue
            of_one = {dst: self.box(self.graph.tensors[t], hub.value, dst) for _, _, dst in readers}
            gains = [0.0]
            for dst, once in of_one.items():
                mine = [(n, i) for n, i, nd in readers if nd == dst]
                again = sum(self.again(n, i) for n, i in mine)
                reboxed = sum((t, n.name) in self.placed.reboxed for n, _ in mine)
                gains.append(once * (len(mine) - 1 + max(0, again - 1) + max(0, reboxed - 1)))
            saved += max(gains)
        return saved

    def again(self, n: Node, i: int) -> bool:
        """Whether the backward boxes this operand of a forward node once more: for a re-run, for a gradient in a re-run layer, or because it is a weight."""
        t = n.inputs[i]
        read = any(t in (r, r.removesuffix(RECOMPUTED)) for g in self.joint.graph.nodes if g.origin == n.name and g.phase in ("I", "W") for r in g.inputs)
        if n.layer in self.recompute:
            return read or self.runs_again(n)
        if t in self.params:
            return read or self.runs_again(n)
        return any(t + RECOMPUTED in g.inputs for g in self.joint.graph.nodes if g.origin == n.name and g.phase in ("I", "W", "R"))

    def runs_again(self, n: Node) -> bool:
        return any(g.phase == "R" and g.origin == n.name for g in self.joint.graph.nodes)

    def forward(self, n: Node) -> float:
        op, rules, tensors = self.graph.op(n), self.placed.rules[n.name], self.graph.tensors
        ins, outs = nd_placements(rules, op)
        dtype = tensors[n.outputs[0]].dtype
        total = self.kernel(op, rules, self.graph.sizes(n), n.attrs, dtype) * (2 if self.runs_again(n) else 1)
        for i, (t, nd) in enumerate(zip(n.inputs, ins, strict=True)):
            times = 2 if self.again(n, i) else 1
            if tensors[t].role == "input":
                total += self.copy(tensors[t], nd)
            else:
                times += (t, n.name) in self.placed.reboxed
                total += times * self.box(tensors[t], self.placed.params[t].held if t in self.params else self.placed.hubs[t].value, nd)
        for t, nd in zip(n.outputs, outs, strict=True):
            if self.graph.consumers(t) or t in self.graph.outputs:
                times = 2 if self.runs_again(n) and any(self.again(u, i) for u, i in self.graph.consumers(t)) else 1
                total += times * self.box(tensors[t], nd, self.placed.hubs[t].value)
        return total

    def gradient(self, g: Node) -> float:
        """A gradient operator, the boxing of the cotangent that it reads and of those that it gives."""
        if g.op in ("fill", "add"):
            return 0.0
        n = self.graph.node[g.origin]
        op = self.graph.op(n)
        grad = catalogue(g.op).for_ranks([len(self.joint.graph.tensors[t].shape) for t in g.inputs])
        rules = tuple(op.grad_rule(rule, grad) for rule in self.placed.rules[n.name])
        ins, outs = nd_placements(rules, grad)
        total = self.kernel(grad, rules, self.joint.graph.sizes(g), g.attrs, self.joint.graph.tensors[g.outputs[0]].dtype)
        first = next(k for k in self.joint.graph.nodes if k.origin == g.origin and k.phase in ("I", "W") and k.op != "add")
        names = {"d" + o.name: t for o, t in zip(op.outputs, n.outputs, strict=True)}
        for o, nd in zip(grad.inputs, ins, strict=True):
            if o.name in names and first is g:
                t = names[o.name]
                total += self.box(self.graph.tensors[t], self.placed.hubs[t].cotangent, nd)
        for t, nd in zip(g.outputs, outs, strict=True):
            target = self.graph.tensors[self.joint.stands_for[t]]
            if target.role == "param":
                grad = self.placed.params[target.name].grad
                total += self.box(target, nd, grad) + (self.copy(wide(target), grad) if nd != grad else 0.0)
                total += (self.m - 1) / self.m * self.copy(wide(target), grad, 3)  # every microbatch but the first adds
            elif target.role == "value":
                total += self.box(target, nd, self.placed.hubs[target.name].cotangent)
        return total

    def param(self, t: Tensor) -> float:
        """Gradients are added up, reduced use by use, and updated with in float32; weights go from their state to where they are held as they are read."""
        place, state = self.placed.params[t.name], wide(t)
        n = math.prod(local_shape(t.shape, place.state, self.mesh))
        k = 2  # AdamW's two moments
        update = self.pricing.compute_s("adamw", state.dtype, 15.0 * n, (2 + k + 1 + k) * n * DTYPE_BYTES[state.dtype] + DTYPE_BYTES[state.dtype], ())
        if state.dtype != t.dtype:
            update += self.pricing.compute_s("cast", state.dtype, 0.0, 2 * n * DTYPE_BYTES[state.dtype], ())
        uses = len(self.joint.grads[t.name])
        reduced = uses * self.box(state, place.grad, place.state) + (uses - 1) * self.copy(state, place.state, 3)
        return reduced + update + self.box(t, place.state, place.held)

    def adding(self) -> float:
        """Sums of the cotangents of several uses, at the hub."""
        sums = [n for n in self.joint.graph.nodes if n.op == "add" and n.phase == "I" and n.origin in self.graph.tensors]
        return self.m * sum(self.copy(self.graph.tensors[n.origin], self.placed.hubs[n.origin].cotangent, 3) for n in sums)


PRICINGS = {
    "even": {"latency_s": 5e-6, "bytes_per_s": 1e9, "flops_per_s": 1e12, "memory_bytes_per_s": 1e10, "launch_s": 1e-6},
    "latency": {"latency_s": 1e-4, "bytes_per_s": 1e12, "flops_per_s": 1e10, "memory_bytes_per_s": 1e10, "launch_s": 1e-7},
    "slow links": {"latency_s": 1e-8, "bytes_per_s": 1e7, "flops_per_s": 1e9, "memory_bytes_per_s": 1e9, "launch_s": 1e-8},
}


@pytest.mark.parametrize("pricing", PRICINGS)
@pytest.mark.parametrize("memory_price", [0.0, 1e-9, 1e-6])
@pytest.mark.parametrize(("mesh", "m", "recompute"), [((4,), 1, ()), ((3,), 4, ()), ((2, 2), 3, ()), ((2, 4), 2, (1,)), ((2, 1), 2, (0, 1, 2))])
def test_time_is_the_sum_over_everything_that_is_derived(pricing: str, mesh: tuple[int, ...], m: int, recompute: tuple[int, ...], memory_price: float) -> None:
    graph = model(replace(SMALL, batch=6, heads=6, groups=3) if mesh == (3,) else SMALL)
    axes = ("dp", "tp")[: len(mesh)]
    prices = AlphaBeta(dict(zip(axes, mesh, strict=True)), **PRICINGS[pricing])
    placed = search(graph, axes, mesh, prices, num_microbatches=m, recompute=recompute, memory_price=memory_price)
    assert placed.exact
    twin = Twin(graph, axes, mesh, prices, placed, m, recompute).seconds()
    assert placed.time_s == pytest.approx(twin, rel=1e-9)
    assert placed.cost_s == pytest.approx(placed.time_s + memory_price * sum(placed.nbytes.values()), rel=1e-9)


@pytest.mark.parametrize("memory_price", [0.0, 1e-9])
@pytest.mark.parametrize(("mesh", "m", "recompute"), [((4,), 1, ()), ((2, 2), 3, ()), ((2, 4), 2, (1,))])
def test_time_of_a_narrow_model_on_a_cluster_is_that_sum_too(mesh: tuple[int, ...], m: int, recompute: tuple[int, ...], memory_price: float) -> None:
    """Weights in bfloat16, tied at both ends, gradients and states in float32; kernels by the shapes of their products."""
    graph, axes = load("gpt2", num_layers=2).graph(8, 1024, "bfloat16"), ("dp", "tp")[: len(mesh)]
    prices = MeshPricing(CostModel(cluster()), Mesh(axes, mesh, tuple(range(math.prod(mesh)))))
    placed = search(graph, axes, mesh, prices, num_microbatches=m, recompute=recompute, memory_price=memory_price)
    assert placed.time_s == pytest.approx(Twin(graph, axes, mesh, prices, placed, m, recompute).seconds(), rel=1e-9)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_take_at_the_ends_of_a_step_what_its_program_says(zero: int) -> None:
    """A matrix read at both ends is reduced for each. An addition is one launch, and one and a half in the search, which takes it for that many copies."""
    gpt2, cost = load("gpt2", num_layers=1), CostModel(cluster())
    plan = plan_for(gpt2, Layout(4, zero=zero, num_microbatches=2), batch=16, seq=256, dtype="bfloat16")
    graph = gpt2.graph(8, 256, "bfloat16")
    args = (graph, plan.axes, plan.mesh_shape, MeshPricing(cost, plan.mesh(0)))
    placed = price(*args, rules=plan.rules, hubs=plan.hubs, params=plan.params, num_microbatches=2)
    twin = Twin(*args, placed, 2, ())
    once = [a for a in lower(gpt2, plan, ranks=(0,)).actors if a.clock == "step" and not any(t in a.name for t in ("norm2", *graph.outputs))]
    assert sum(a.work.op == "add" for a in once) == 1
    half_s = twin.pricing.local_s(0.0) / 2
    assert sum(cost.work_s(a.work, 0) for a in once) + half_s == pytest.approx(sum(map(twin.param, graph.params)), rel=1e-9)


def test_the_found_plan_priced_again_costs_the_same_and_no_neighbour_costs_less() -> None:
    graph, mesh = model(SMALL), (2, 2)
    prices = AlphaBeta({"dp": 2, "tp": 2}, **PRICINGS["even"])
    found = search(graph, ("dp", "tp"), mesh, prices, num_microbatches=2, memory_price=1e-9)
    again = price(graph, ("dp", "tp"), mesh, prices, rules=found.rules, hubs=found.hubs, params=found.params, num_microbatches=2, memory_price=1e-9)
    assert again.cost_s == pytest.approx(found.cost_s, rel=1e-12)
    assert again.log10_space < 2, "only where equal readers share a copy is open"
    tried = 0
    tables = new_tables(("dp", "tp"), mesh, prices)
    for n in graph.nodes[3::2]:
        for rule in graph.op(n).rules():
            near = {**found.rules, n.name: (rule, found.rules[n.name][1])}
            try:
                other = price(graph, ("dp", "tp"), mesh, prices, rules=near, num_microbatches=2, memory_price=1e-9, tables=tables)
            except PlanError:
                continue
            tried += 1
            assert other.cost_s >= found.cost_s * (1 - 1e-12)
    assert tried > 30


@pytest.mark.parametrize("seed", range(3))
def test_search_is_the_integer_program_on_the_same_tables(seed: int) -> None:
    """One layer, so few variables that HiGHS can take all rows."""
    graph = model(replace(SMALL, layers=0))
    prices = AlphaBeta({"tp": 2}, latency_s=10.0 ** -(4 + seed), bytes_per_s=1e8 * 10**seed, flops_per_s=1e11, memory_bytes_per_s=1e10, launch_s=1e-6)
    args = (graph, ("tp",), (2,), prices)
    found = search(*args, num_microbatches=2, memory_price=1e-9)
    twin = search(*args, num_microbatches=2, memory_price=1e-9, solver=lambda g, _: integer_program(g))
    assert found.cost_s == pytest.approx(twin.cost_s, rel=1e-7)


def test_folded_layers_cost_what_separate_layers_cost() -> None:
    graph = model(replace(SMALL, layers=5))
    prices = AlphaBeta({"dp": 2, "tp": 2}, **PRICINGS["even"])
    args = (graph, ("dp", "tp"), (2, 2), prices)
    for memory_price in (0.0, 1e-9, 1e-7):
        folded = search(*args, num_microbatches=2, memory_price=memory_price, in_flight=2)
        flat = search(*args, num_microbatches=2, memory_price=memory_price, in_flight=2, solver=lambda g, _: solve(g))
        assert folded.cost_s == pytest.approx(flat.cost_s, rel=1e-12)
        assert folded.exact
        assert flat.exact


def test_empty_space_is_the_whole_space() -> None:
    prices = AlphaBeta({"tp": 2}, **PRICINGS["even"])
    args = (model(SMALL), ("tp",), (2,), prices)
    assert search(*args, num_microbatches=1) == search(*args, num_microbatches=1, space=Space())

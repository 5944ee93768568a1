"""The backward graph: what is differentiated, summed, run again. That its numbers are right, the parity tests show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.errors import GraphError
from ir.graph import Builder, Graph
from planner.autodiff import RECOMPUTED, Joint, backward, cotangent, scale_loss
from tests.models import gpt, llama


def forward(num_layers: int = 2) -> Graph:
    return gpt(num_layers=num_layers).graph(2, 8, "float64")


def before(joint: Joint, first: str, second: str) -> bool:
    names = [n.name for n in joint.graph.nodes]
    return names.index(first) < names.index(second)


@pytest.mark.parametrize("model", [gpt(), llama()], ids=["gpt", "llama"])
@pytest.mark.parametrize("recompute", [(), (1,), (1, 2, 3, 4)], ids=str)
def test_the_whole_is_a_graph_with_a_gradient_for_every_parameter(model, recompute) -> None:
    graph = model.graph(2, 8, "float64")
    joint = backward(graph, recompute)
    joint.graph.check()
    assert set(joint.grads) == {p.name for p in graph.params}
    assert joint.graph.nodes[: len(graph.nodes)] == graph.nodes
    for param, contributions in joint.grads.items():
        assert {joint.graph.tensors[c].shape for c in contributions} == {graph.tensors[param].shape}
        assert {joint.stands_for[c] for c in contributions} == {param}


def test_a_tied_parameter_has_a_contribution_for_each_use() -> None:
    graph = forward()
    (users,) = [len(graph.consumers(p.name)) for p in graph.params if len(graph.consumers(p.name)) > 1]
    assert sorted(map(len, backward(graph).grads.values()))[-1] == users == 2


def test_cotangents_of_a_tensor_with_several_uses_are_summed() -> None:
    build = Builder("twice")
    build.tensor("x", (2, 4), "float64", "param")
    build.node("gelu", ["x"], name="a", outputs=["a"])
    build.node("add", ["a", "a"], name="b", outputs=["b"])
    build.node("mul", ["b", "a"], name="c", outputs=["c"])
    joint = backward_of_sum(build, "c")
    sums = [n for n in joint.graph.nodes if n.op == "add" and n.phase == "I" and n.origin == "a"]
    assert [joint.stands_for[t] for n in sums for t in n.outputs] == ["a", "a"]


def backward_of_sum(build: Builder, tensor: str) -> Joint:
    build.node("total", [tensor], name="sum", outputs=["loss"], attrs={"factor": 1.0})
    return backward(build.graph(["loss"]))


def test_weight_gradients_and_input_gradients_are_operators_of_their_own() -> None:
    joint = backward(forward())
    product = next(n for n in joint.graph.nodes if n.phase == "F" and joint.graph.op(n).is_contraction and n.layer == 1)
    of = {n.phase: n for n in joint.graph.nodes if n.origin == product.name}
    assert set(of) == {"I", "W"}
    assert of["W"].outputs == joint.grads[product.inputs[1]]
    assert joint.stands_for[of["I"].outputs[0]] == product.inputs[0]


def test_nothing_flows_into_integers() -> None:
    graph = forward()
    joint = backward(graph)
    assert not any(cotangent(t.name) in x for t in graph.inputs for n in joint.graph.nodes for x in n.outputs)


def test_a_recomputed_layer_runs_again_before_its_backward_and_no_other_does() -> None:
    graph = forward()
    joint = backward(graph, recompute=(2,))
    again = [n for n in joint.graph.nodes if n.phase == "R"]
    assert {n.layer for n in again} == {2}
    assert all(n.outputs == tuple(t + RECOMPUTED for t in graph.node[n.origin].outputs) for n in again)
    first = next(n for n in joint.graph.nodes if n.phase in ("I", "W") and n.layer == 2)
    assert all(before(joint, n.name, first.name) for n in again)
    inside = {t for n in graph.nodes if n.layer == 2 for t in n.outputs}
    for n in joint.graph.nodes:
        assert not (n.phase in ("I", "W") and n.layer == 2 and inside & set(n.inputs)), f"{n.name} reads what is computed again"


def test_of_a_recomputed_layer_only_what_the_backward_needs_runs_again() -> None:
    graph = forward()
    last = [n for n in graph.nodes if n.layer == 2][-1]  # the sum that leaves the layer
    again = {n.origin for n in backward(graph, recompute=(2,)).graph.nodes if n.phase == "R"}
    assert last.op == "add"
    assert last.name not in again


def test_a_named_operator_runs_again_just_before_its_layer_reads_it() -> None:
    graph = forward()
    norm = next(n for n in graph.nodes if n.op == "layer_norm" and n.layer == 2)
    joint = backward(graph, recompute=(norm.name,))
    joint.graph.check()
    (again,) = [n for n in joint.graph.nodes if n.phase == "R"]
    assert (again.origin, again.attrs, again.inputs) == (norm.name, norm.attrs, norm.inputs)
    readers = [n for n in joint.graph.nodes if n.phase in ("I", "W") and set(n.inputs) & set(again.outputs)]
    assert all(n.layer == norm.layer for n in readers)
    names = [n.name for n in joint.graph.nodes]
    assert names.index(again.name) == min(map(names.index, (n.name for n in readers))) - 1
    assert not any(n.phase in ("I", "W") and n.layer == norm.layer and norm.outputs[0] in n.inputs for n in joint.graph.nodes)


def test_a_named_operator_reads_what_others_make_again_and_serves_its_own_layer_alone() -> None:
    graph = forward()
    chain = [n for n in graph.nodes if n.layer == 1][-3:]  # the last product's bias, dropout, and the sum that leaves the layer
    assert not [n for n in backward(graph, recompute=tuple(n.name for n in chain)).graph.nodes if n.phase == "R"], "no gradient of their layer reads them"
    norm, product = (next(n for n in graph.nodes if n.layer == 1 and n.op == op) for op in ("layer_norm", "linear"))
    joint = backward(graph, recompute=(norm.name, product.name, "no such operator"))
    bias = next(n for n in graph.nodes if n.inputs[0] == product.outputs[0])
    assert {n.origin for n in joint.graph.nodes if n.phase == "R"} == {norm.name}, f"{bias.name} keeps what attention reads"


def test_the_losses_of_all_microbatches_add_up_to_the_mean() -> None:
    graph = forward()
    factor = {n.name: n.attrs["factor"] for n in graph.nodes if n.op == "total"}
    assert {n.name: n.attrs["factor"] for n in scale_loss(graph, 4).nodes if n.op == "total"} == {k: v / 4 for k, v in factor.items()}


def test_a_graph_that_ends_in_no_scalar_is_refused() -> None:
    graph = forward()
    (logits,) = graph.nodes[-2].inputs[:1]
    with pytest.raises(GraphError, match=f"the backward starts at one scalar output, or their sum, not at `{logits}`"):
        backward(replace(graph, outputs=(logits,)))

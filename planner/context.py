"""Context parallelism: a mesh axis along which the sequence is split everywhere, and two ways through attention, which needs all keys.

`gather`: queries stay split along the sequence, keys and values are gathered (Llama 3, arXiv:2407.21783, section 3.3.2); with few key heads that is little.
`exchange`: queries, keys and values go from a split of the sequence to one of the heads and the output back, by all-to-all (Ulysses, arXiv:2309.14509); with
n ranks it moves an n-th of what a gathering does, and n divides the key heads. Both are placements that attention's sentence allows, so boxing, backward and
price follow; which one is cheaper the search finds where neither is asked for.
"""

from __future__ import annotations

from ir.errors import PlanError
from ir.graph import Graph, Node, Tensor
from ir.op import Rule
from planner.space import Limit, Space

FORMS = ("gather", "exchange")

SPLIT_S, SPLIT_HEADS = Rule("split", "s"), Rule("split", "g")


def context_space(graph: Graph, axis: str, num_ranks: int, form: str | None = None) -> Space:
    """What context parallelism over `num_ranks` leaves to choose on its axis; `form` None: either way through attention.

    Raises PlanError where the sequence or, for `exchange`, the key heads of an attention do not divide.
    """
    if form not in (None, *FORMS):
        raise PlanError(f"context parallelism has the forms {', '.join(FORMS)}, not `{form}`")
    attends = {n.name for n in graph.nodes if n.op == "attention"}
    for name in attends:
        sizes = graph.sizes(graph.node[name])
        if sizes["s"] % num_ranks:
            longer = -(-sizes["s"] // num_ranks) * num_ranks
            raise PlanError(
                f"context parallelism over {num_ranks}: the sequence of {sizes['s']} tokens does not divide; take a divisor of it, or pad it to {longer}"
            )
        if form == "exchange" and sizes["g"] % num_ranks:
            raise PlanError(f"context parallelism over {num_ranks} by exchange: {sizes['g']} key heads do not divide; take a divisor of them, or `gather`")
    through = {None: (SPLIT_S, SPLIT_HEADS), "gather": (SPLIT_S,), "exchange": (SPLIT_HEADS,)}[form]
    has_s = {n.name for n in graph.nodes if "s" in graph.op(n).labels} - attends
    long = {t for n in graph.nodes for o, t in zip(graph.op(n).outputs, n.outputs, strict=True) if len(o.dims) > 1 and o.dims[1] == ("s",)}

    def splits_sequence(node: Node) -> bool:
        return node.name in has_s

    def is_attention(node: Node) -> bool:
        return node.name in attends

    def is_long(tensor: Tensor) -> bool:
        return tensor.name in long

    return Space(
        rules=(Limit(splits_sequence, axis, lambda rule: rule == SPLIT_S), Limit(is_attention, axis, lambda rule: rule in through)),
        hubs=(Limit(is_long, axis, lambda pair: pair[0].is_split and pair[0].dim == 1),),
    )


__all__ = ["FORMS", "context_space"]

"""Context parallelism: a mesh axis along which the sequence is split everywhere, and three ways through attention, which needs all keys.

`gather`: queries stay split along the sequence, keys and values are gathered (Llama 3, arXiv:2407.21783, section 3.3.2); with few key heads that is little.
`exchange`: queries, keys and values go from a split of the sequence to one of the heads and the output back, by all-to-all (Ulysses, arXiv:2309.14509); with
n ranks it moves an n-th of what a gathering does, and n divides the key heads. Both are placements that attention's sentence allows, so boxing, backward and
price follow; which one is cheaper the search finds where neither is asked for. `ring`: placed as by gathering, but keys and values go round from neighbour to
neighbour while each rank attends to what it has (Ring attention, arXiv:2310.01889); `planner.ring` writes it out, and no rank ever holds all keys. Over nodes
it is a ring of rings: keys go round in a node, and after each round every rank sends its own on to the next node, over all NICs at once.

Under a causal mask the last of contiguous parts has twice the mean work. In zig-zag order (`ir.zigzag`) all have the same; an exchange is even by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ir.errors import PlanError
from ir.graph import Graph, Node, Tensor
from ir.op import Rule
from ir.ops import catalogue
from planner.dims import dims_of
from planner.space import Limit, Space

AXIS = "cp"
"""What the mesh axis is called."""

FORMS = ("ring", "gather", "exchange")

ORDERS = ("zigzag", "contiguous")

SPLIT_S, SPLIT_HEADS = Rule("split", "s"), Rule("split", "g")


def form_of(context: str) -> str:
    """The form of a plan's `context`.

    >>> form_of("ring:8 zigzag"), form_of("gather")
    ('ring', 'gather')
    """
    return context.partition(" ")[0].partition(":")[0]


def inner_of(context: str, num_parts: int) -> int:
    """Parts that go round in an inner ring: all, where a plan's `context` names no number."""
    told = context.partition(" ")[0].partition(":")[2]
    return int(told) if told else num_parts


def over_nodes(context: str, nodes: Sequence[Sequence[int]]) -> str:
    """A ring in rings of the ranks of one node each, where the groups of the axis lie on several nodes; `nodes`: by group the node of every member.

    >>> over_nodes("ring zigzag", [(0, 0, 1, 1), (0, 0, 1, 1)]), over_nodes("ring", [(0, 0, 0, 0)]), over_nodes("ring", [(0, 1, 2, 3)])
    ('ring:2 zigzag', 'ring', 'ring')
    """
    runs = {tuple(len(tuple(run)) for _, run in groupby(group)) for group in nodes}
    lengths = {n for found in runs for n in found}
    if form_of(context) != "ring" or len(lengths) != 1 or not 1 < min(lengths) < len(nodes[0]):
        return context
    return context.replace("ring", f"ring:{lengths.pop()}", 1)


def is_positional(node: Node) -> bool:
    """Whether an operator asks where in the text a token stands: attention, rotary and learned positions, random numbers."""
    op = node.op.partition(".")[0]
    return op in ("attention", "rope", "positions") or catalogue(node.op).random


def refusal(graph: Graph, num_ranks: int, form: str, zigzag: bool, tp: int = 1) -> str:
    """Why this form or order is not for the model, whose heads are split `tp` ways besides; empty where it is."""
    attention = [n for n in graph.nodes if n.op.partition("_")[0] == "attention"]
    other = next((n for n in attention if n.op != "attention"), None)
    if form in ("ring", "exchange") and other is not None:
        return f"`{other.op}` of `{other.name}` has more than queries, keys and values, which `{form}` knows nothing of; take cp_form=gather"
    for n in attention:
        sizes = graph.sizes(n)
        if sizes["s"] % num_ranks:
            return f"the sequence of {sizes['s']} tokens does not divide by {num_ranks}; take a divisor of it"
        if form == "exchange" and sizes["g"] % (num_ranks * tp):
            return f"{sizes['g']} key heads do not divide by cp x tp = {num_ranks * tp}; take a divisor of them, or cp_form=ring"
        if form == "ring" and sizes["s"] != sizes["z"]:
            return f"`{n.name}` looks at another sequence than its own; take cp_form=gather"
        if zigzag and (not n.attrs.get("causal", True) or n.op != "attention"):
            return f"`{n.name}` is not plain causal attention, of which the zig-zag order evens the work; take cp_order=contiguous"
        if zigzag and sizes["s"] % (2 * num_ranks):
            return f"the sequence of {sizes['s']} tokens does not divide by {2 * num_ranks}, as the zig-zag order needs; take cp_order=contiguous"
    dims = dims_of(graph)
    for n in graph.nodes if zigzag else ():
        label = dims.label(n, "sequence")
        if label and n not in attention and Rule("split", label) not in graph.op(n).rules():
            return f"`{n.name}` ({n.op}) looks along the sequence in its order; take cp_order=contiguous"
    return ""


def context_space(graph: Graph, axis: str, num_ranks: int, form: str | None = None, axes: Sequence[str] = ()) -> Space:
    """What context parallelism over `num_ranks` leaves to choose on its axis, one of `axes`; `form` None: gathering or exchanging.

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
    through = {None: (SPLIT_S, SPLIT_HEADS), "gather": (SPLIT_S,), "ring": (SPLIT_S,), "exchange": (SPLIT_HEADS,)}[form]
    dims = dims_of(graph)
    has_s = {n.name for n in graph.nodes if dims.label(n, "sequence") == "s" and SPLIT_S in graph.op(n).rules()} - attends
    long = {t for n in graph.nodes if n.name in has_s or n.name in attends for t in n.outputs if dims.dim(t, "sequence") == 1}

    def splits_sequence(node: Node) -> bool:
        return node.name in has_s

    def is_attention(node: Node) -> bool:
        return node.name in attends

    def is_long(tensor: Tensor) -> bool:
        return tensor.name in long

    # a turn of a ring takes the whole part of its rank
    others = tuple(Limit(is_attention, other, lambda rule: rule != SPLIT_S) for other in axes if other != axis) if form == "ring" else ()
    return Space(
        rules=(Limit(splits_sequence, axis, lambda rule: rule == SPLIT_S), Limit(is_attention, axis, lambda rule: rule in through), *others),
        hubs=(Limit(is_long, axis, lambda pair: pair[0].is_split and pair[0].dim == 1),),
    )


__all__ = ["AXIS", "FORMS", "ORDERS", "context_space", "form_of", "inner_of", "is_positional", "over_nodes", "refusal"]

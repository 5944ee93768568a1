"""Placements that people have written for other systems, as limits of the search: a Mesh-TensorFlow layout, a tensor-parallel plan of `transformers`.

A layout (Shazeer et al., 2018, arXiv:1811.02084) names dims of the model and the mesh axis that each is split over: `batch:dp;mlp_hidden:tp;heads:tp;vocab:tp`;
what is not named is repeated. A tensor-parallel plan says of modules, by pattern, how their weight is cut: `{"layers.*.mlp.up_proj": "colwise"}`.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from networkx.utils import UnionFind

from ir.errors import InputError, PlanError
from ir.graph import Graph, Node, Tensor
from ir.op import Rule
from ir.sbp import S, Sbp
from planner.frontends.model import Model
from planner.frontends.weights import origins
from planner.space import RESIDUAL_OPS, Limit, Space

# ---- a layout of dims --------------------------------------------------------------------------------------------------------------------------------

SYNONYMS = {
    "d_model": "hidden", "model": "hidden", "io": "hidden", "d_ff": "mlp_hidden", "ff": "mlp_hidden", "filter": "mlp_hidden", "length": "seq",
    "sequence": "seq", "num_heads": "heads",
}  # fmt: skip
"""What Mesh-TensorFlow's own models call dims that the config calls otherwise."""


@dataclass(frozen=True)
class NamedDims:
    """The dims of a model by name: of each tensor {dim: name}, of each node {label: name}."""

    tensors: Mapping[str, Mapping[int, str]]
    nodes: Mapping[str, Mapping[str, str]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for dims in self.tensors.values() for name in dims.values()))


def named_dims(graph: Graph) -> NamedDims:
    """Dims that an operator calls alike are one dim of the model; it has a name where some operator's sentence says what it is."""
    classes: UnionFind[tuple[Any, ...]] = UnionFind()
    marks: dict[tuple[Any, ...], str] = {}
    for n in graph.nodes:
        op = graph.op(n)
        for operand, t in zip((*op.inputs, *op.outputs), (*n.inputs, *n.outputs), strict=True):
            for d, dim in enumerate(operand.dims):
                classes.union((n.name, dim), (t, d))
                name = _name(n, dim)
                if name:
                    marks[t, d] = name
    # "hidden" is the weakest: the width of an attention's output is first of all its heads
    named = {classes[item]: name for item, name in sorted(marks.items(), key=lambda m: m[1] != "hidden")}
    tensors: dict[str, dict[int, str]] = {}
    nodes: dict[str, dict[str, str]] = {}
    for item in classes:
        found = named.get(classes[item])
        if found and isinstance(item[1], int):
            tensors.setdefault(item[0], {})[item[1]] = found
        elif found:
            nodes.setdefault(item[0], {})[item[1][0]] = found
    return NamedDims(tensors, nodes)


def _name(node: Node, dim: tuple[str, ...]) -> str:
    """What an operator's sentence says of a dim, in the words of a config."""
    if dim == ("b",):
        return "batch"
    if dim == ("s",):
        return "seq"
    if dim == ("v",):
        return "vocab"
    if len(dim) > 1 and dim[0] in ("g", "h"):
        return "heads"
    if node.op in ("swiglu", "gelu", "relu", "silu", "geglu") and dim == ("t",):
        return "mlp_hidden"
    return "hidden" if node.op == "embedding" and dim == ("h",) else ""


def parse_layout(text: str) -> dict[str, str]:
    """
    >>> parse_layout("batch:dp;d_ff:tp")
    {'batch': 'dp', 'mlp_hidden': 'tp'}
    """
    out: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        dim, colon, axis = (p.strip() for p in part.partition(":"))
        if not colon or not dim or not axis:
            raise InputError(f"`{part}` in layout `{text}` is no `dim:axis`; write for example batch:dp;mlp_hidden:tp")
        name = SYNONYMS.get(dim, dim)
        if name in out:
            raise InputError(f"layout `{text}` gives `{name}` twice")
        out[name] = axis
    if not out:
        raise InputError(f"layout `{text}` names no dim; write for example batch:dp;mlp_hidden:tp")
    return out


def layout_limits(graph: Graph, axes: Sequence[str], mesh_shape: Sequence[int], layout: Mapping[str, str]) -> Space:
    """What a layout leaves to choose: on each axis, values and compute copies of parameters are split where they have the dim, and nowhere else.

    Raises InputError for a dim or an axis that there is not, PlanError where a size does not divide or one tensor has two dims on one axis.
    """
    dims = named_dims(graph)
    size = dict(zip(axes, mesh_shape, strict=True))
    for name, axis in layout.items():
        if axis not in size:
            raise InputError(f"layout {name}:{axis}: the mesh has no axis `{axis}`; its axes are {', '.join(axes)}")
        if name not in dims.names:
            raise InputError(f"layout {name}:{axis}: `{graph.name}` has no dim `{name}`; it has {', '.join(dims.names)}")
    rules: list[Limit] = []
    hubs: list[Limit] = []
    params: list[Limit] = []
    for axis in dict.fromkeys(layout.values()):
        mine = frozenset(name for name, a in layout.items() if a == axis)
        where = {t: _only(graph.tensors[t], found, mine, axis, size[axis]) for t, found in dims.tensors.items()}
        said = f"layout {';'.join(f'{name}:{axis}' for name in sorted(mine))}"
        cuts: dict[frozenset[Rule], set[str]] = {}
        for n in graph.nodes:
            labels = (label for label, of in dims.nodes.get(n.name, {}).items() if of in mine)
            cuts.setdefault(frozenset(Rule("split", label) for label in labels) & frozenset(graph.op(n).rules()), set()).add(n.name)
        rules += [Limit(_among(names), axis, _one_of(cut), said=said) for cut, names in cuts.items()]
        for dim in dict.fromkeys(where.values()):
            alike = {t for t, d in where.items() if d == dim}
            params.append(Limit(_among(alike), axis, _lies(1, dim), said=said))
            if dim is not None:
                hubs.append(Limit(_among(alike), axis, _lies(0, dim), said=said))
    return Space(rules=tuple(rules), hubs=tuple(hubs), params=tuple(params))


def _among(names: Collection[str]) -> Callable[[Any], bool]:
    return lambda thing: thing.name in names


def _one_of(rules: Collection[Rule]) -> Callable[[Rule], bool]:
    return lambda rule: rule in rules if rules else rule.kind != "split"


def _lies(place: int, dim: int | None) -> Callable[[Sequence[Sbp]], bool]:
    """Whether this part of a state is split along a dim; with none, whether it is not split."""
    return lambda state: state[place] == S(dim) if dim is not None else not state[place].is_split


def _only(tensor: Tensor, found: Mapping[int, str], mine: frozenset[str], axis: str, parts: int) -> int | None:
    """The dim of a tensor that an axis splits."""
    split = [d for d, name in found.items() if name in mine]
    told = "; ".join(f"{found[d]}:{axis}" for d in split)
    if len(split) > 1:
        raise PlanError(f"layout {told}: `{tensor.name}` of shape {tensor.shape} has both dims, and one axis splits one dim; leave one out")
    if split and tensor.role != "input" and found[split[0]] != "vocab" and tensor.shape[split[0]] % parts:
        raise PlanError(f"layout {told}: dim {split[0]} of `{tensor.name}` is {tensor.shape[split[0]]}, which {axis} = {parts} does not divide")
    return split[0] if split else None


# ---- a plan of modules -------------------------------------------------------------------------------------------------------------------------------

COLUMNS = frozenset({"colwise", "colwise_rep", "colwise_gather_output", "local_colwise", "packed_colwise"})
ROWS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise", "packed_rowwise"})
GATHERED = frozenset({"colwise_rep", "colwise_gather_output"})
VOCABULARY_ROWS = frozenset({"embedding_rowwise"})
REPEATED = frozenset({"replicate", "replicated_with_grad_allreduce", "sequence_parallel", "gather"})


def read_tp_plan(path: str) -> dict[str, str]:
    """A plan of modules from a JSON file: the mapping itself, or a config that holds it as `base_model_tp_plan`. Raises InputError."""
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"the tensor-parallel plan `{path}` cannot be read: {error}") from error
    found = data.get("base_model_tp_plan", data) if isinstance(data, dict) else data
    if not isinstance(found, dict) or not found or not all(isinstance(k, str) and isinstance(v, str) for k, v in found.items()):
        raise InputError(f'`{path}` holds no tensor-parallel plan; write {{"layers.*.mlp.up_proj": "colwise", ...}}')
    return found


def tp_plan_limits(model: Model, graph: Graph, plan: Mapping[str, str], axis: str = "tp") -> Space:
    """A tensor-parallel plan of `transformers` (`base_model_tp_plan` of a config class, `_tp_plan` of a model class) as limits on one axis.

    Column and row splits of the modules that it names; activations between the blocks are repeated; what follows a column split (attention by heads, the gated
    product) is left open. Raises InputError for a style that is not known or a module that the model has not.
    """
    unknown = sorted(set(plan.values()) - COLUMNS - ROWS - VOCABULARY_ROWS - REPEATED)
    if unknown:
        known = ", ".join(sorted(COLUMNS | ROWS | VOCABULARY_ROWS | REPEATED))
        raise InputError(f"style `{unknown[0]}` of the tensor-parallel plan is not known; known are {known}")
    styles = _styles(model, graph, plan)
    kinds = dict.fromkeys((style, on) for style, on in styles.values() if on)
    rules = [
        Limit(_among({name for name, found in styles.items() if found == kind}), axis, Rule("split", kind[1]).__eq__, said=f"{kind[0]} of the plan of modules")
        for kind in kinds
    ]
    # what only some of the planned modules read is cut as they are; the residual stream between them is whole on every rank
    stream = {t for n in graph.nodes if n.op in RESIDUAL_OPS for t in (n.outputs[0], n.inputs[0])}
    rules.append(Limit(lambda n: n.op in RESIDUAL_OPS and n.name not in styles, axis, lambda rule: rule.kind != "split"))
    rules.append(Limit("*", axis, lambda rule: rule not in (Rule("split", "b"), Rule("split", "s"))))
    gathered = {t for name, (style, on) in styles.items() if on and (style in GATHERED or style in ROWS) for t in graph.node[name].outputs}
    hubs = [Limit(lambda t: t.name in stream or t.name in gathered, axis, lambda pair: not pair[0].is_split)]
    return Space(rules=tuple(rules), hubs=tuple(hubs))


def _styles(model: Model, graph: Graph, plan: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """For every operator that the plan names: (style, label that it splits; "" where it splits none)."""
    modules = {name: _module(origin.key) for name, origin in origins(model).items()}
    out: dict[str, tuple[str, str]] = {}
    used: set[str] = set()
    for n in graph.nodes:
        read = [modules[t] for t in n.inputs if t in modules]
        for wanted, style in plan.items():
            if any(fnmatch.fnmatchcase(module, wanted) for module in read):
                used.add(wanted)
                out[n.name] = (style, _label(graph, n, style))
    missing = [wanted for wanted in plan if wanted not in used and not any(_is_part(wanted, other) for other in plan)]
    if missing:
        raise InputError(f"the tensor-parallel plan names `{missing[0]}`, which `{model.name}` has not; its modules are {', '.join(_few(modules.values()))}")
    return out


def _is_part(wanted: str, other: str) -> bool:
    return other != wanted and other.startswith(wanted + ".")


def _module(key: str) -> str:
    """The module of a state dict's key, as plans write it: without the model's name in front and the parameter's behind."""
    inside = key.rpartition(".")[0]
    return inside.partition(".")[2] if inside.partition(".")[0] in ("model", "transformer", "gpt_neox") else inside


def _label(graph: Graph, node: Node, style: str) -> str:
    if style in REPEATED or not (graph.op(node).is_contraction or node.op in ("embedding", "grouped_linear")):
        return ""  # a bias, or a norm of each head, follows the product that it belongs to
    if style in VOCABULARY_ROWS or node.op == "embedding":
        return "v"
    return "n" if style in COLUMNS else "k"


def _few(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names))

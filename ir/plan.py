"""A Plan: decisions only, small, diffable, JSON.

Mesh axes and stages, schedule and microbatches, recompute, and on every mesh axis a rule for each forward node, a hub for each tensor and three placements
for each parameter. What follows from these (backward operators, boxing, order, memory) is not in it: `planner.lower` derives it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ir.boxing import Link, axis_sets
from ir.errors import PlanError
from ir.mesh import Mesh
from ir.op import Rule
from ir.sbp import NdSbp, format_nd, parse_nd

SCHEMA_VERSION = 1


class Hub(NamedTuple):
    """Where a tensor's forward value exists once (`value`), and where its cotangent is summed (`cotangent`)."""

    value: NdSbp
    cotangent: NdSbp


class ParamPlacement(NamedTuple):
    """Where a parameter's optimizer state and master copy lie, where its compute copy is held between microbatches, where its gradient accumulates.

    On a data-parallel axis (B, B, P) is plain data parallelism, (S, B, P) ZeRO-1, (S, B, S) ZeRO-2, (S, S, S) ZeRO-3.
    """

    state: NdSbp
    held: NdSbp
    grad: NdSbp


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [first, last) of the chain and the ranks that run them, in row-major order of the plan's mesh axes.

    A plan that keeps parameters twice goes through the layers twice: the stages of the second copy follow those of the first.
    """

    first: int
    last: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """All decisions for one model on one cluster. `batch` is the global batch in samples of `seq` tokens.

    `optimizer`: {"name": "adamw", "lr": ..., ...}. `recompute`: the layers, by number, and the nodes, by name, whose forward is run again in the
    backward: of such a layer what enters it is kept, of such a node its own layer's backward reads what it gives then. `reboxed`: ("tensor", "node") uses whose
    saved value is kept at its hub and boxed again in the backward, instead of kept as the node read it. `layout` is the summary people ask for
    (dp, tp, pp, ...), `predicted` what the simulator said; both inform, nothing reads them to act.
    `orders`: where the schedule is none of the catalogue, what each pipeline rank runs, as in `0F0 0F1 0B0 0B1`; else empty.
    `pieces`: tokens of each piece into which the schedule cuts a sequence; empty where sequences run whole.
    `context`: how attention goes over the mesh axis `cp`, a form of `planner.context` and, where sequences lie in zig-zag order, `zigzag`; else empty.
    `loss_chunks`: over so many chunks of a rank's tokens head and loss are computed, 1 where all logits are made at once.
    `links`: for each mesh axis, then for every two, what a collective costs there (`ir.boxing.axis_sets`); every re-shard takes the cheapest chain under them
    (absent: the fewest bytes).
    """

    model: str
    model_fingerprint: str
    cluster: str
    cluster_fingerprint: str
    batch: int
    seq: int
    dtype: str
    optimizer: Mapping[str, Any]
    axes: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    stages: tuple[Stage, ...]
    schedule: str
    num_microbatches: int
    recompute: tuple[int | str, ...]
    rules: Mapping[str, tuple[Rule, ...]]
    hubs: Mapping[str, Hub]
    params: Mapping[str, ParamPlacement]
    reboxed: tuple[tuple[str, str], ...] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    orders: tuple[str, ...] = ()
    pieces: tuple[int, ...] = ()
    context: str = ""
    loss_chunks: int = 1

    def mesh(self, stage: int) -> Mesh:
        return Mesh(self.axes, self.mesh_shape, self.stages[stage].ranks)

    @property
    def copies(self) -> int:
        """How often the stages go through the layers, each time with other microbatches: so often every parameter is there."""
        return max(1, sum(s.first == 0 for s in self.stages))

    def copy_of(self, stage: int) -> int:
        """Which time through the layers a stage belongs to; copy c runs the c-th of `copies` equal parts of the batch."""
        return stage * self.copies // len(self.stages)

    def stage_of(self, layer: int, copy: int = 0) -> int:
        for i, stage in enumerate(self.stages):
            if stage.first <= layer < stage.last and self.copy_of(i) == copy:
                return i
        raise PlanError(f"layer {layer} is in no stage of copy {copy}; stages are {[(s.first, s.last) for s in self.stages]}")

    @property
    def sites(self) -> tuple[tuple[int, ...], ...]:
        """The distinct sets of ranks that hold stages, in order of their first stage: the pipeline's ranks. Where stages are virtual, one holds several."""
        return tuple(dict.fromkeys(s.ranks for s in self.stages))

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.sites))

    @property
    def microbatch(self) -> int:
        """Samples of one (global) microbatch."""
        return self.batch // self.num_microbatches

    def squeezed(self) -> Plan:
        """The same plan on a mesh without the axes of size 1, on which every placement is the same."""
        keep = [i for i, n in enumerate(self.mesh_shape) if n > 1]
        links = zip(self.links, axis_sets(len(self.axes)), strict=True) if self.links else ()

        def some(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[i] for i in keep)

        return replace(
            self, axes=some(self.axes), mesh_shape=some(self.mesh_shape), rules={k: some(v) for k, v in self.rules.items()},
            links=tuple(link for link, axes in links if set(axes) <= set(keep)), hubs={k: Hub(*map(some, v)) for k, v in self.hubs.items()},
            params={k: ParamPlacement(*map(some, v)) for k, v in self.params.items()},
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        def nd(value: NdSbp) -> str:
            return format_nd(value, self.axes)

        return {
            "schema_version": SCHEMA_VERSION, "kind": "plan",
            "model": {"name": self.model, "fingerprint": self.model_fingerprint},
            "cluster": {"name": self.cluster, "fingerprint": self.cluster_fingerprint},
            "batch": self.batch, "seq": self.seq, "dtype": self.dtype, "optimizer": dict(self.optimizer),
            "layout": dict(self.layout), "predicted": dict(self.predicted),
            "mesh": dict(zip(self.axes, self.mesh_shape, strict=True)),
            "stages": [{"layers": [s.first, s.last], "ranks": list(s.ranks)} for s in self.stages],
            "schedule": self.schedule, "num_microbatches": self.num_microbatches, "recompute": list(self.recompute),
            "params": _group((k, [nd(v.state), nd(v.held), nd(v.grad)]) for k, v in self.params.items()),
            "rules": _group((k, [repr(r) for r in v]) for k, v in self.rules.items()),
            "hubs": _group((k, [nd(v.value), nd(v.cotangent)]) for k, v in self.hubs.items()),
            "reboxed": [list(pair) for pair in self.reboxed], "links": [list(link) for link in self.links], "orders": list(self.orders),
            "pieces": list(self.pieces), "context": self.context, "loss_chunks": self.loss_chunks,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Reads `to_json`; raises PlanError when the document is of another kind or version, or misses a key."""
        if not isinstance(data, Mapping) or data.get("kind") != "plan":
            raise PlanError("this document is no plan; `headrace plan MODEL CLUSTER -o plan.json` writes one")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise PlanError(f"plan of schema version {data.get('schema_version')}; this headrace reads version {SCHEMA_VERSION}: plan again")
        _check_fields(data)
        try:
            axes = tuple(data["mesh"])

            def nd(text: str) -> NdSbp:
                found, value = parse_nd(text)
                if found != axes:
                    raise PlanError(f"placement {text} names axes {found}, the plan's mesh has {axes}")
                return value

            return cls(
                data["model"]["name"], data["model"]["fingerprint"], data["cluster"]["name"], data["cluster"]["fingerprint"],
                data["batch"], data["seq"], data["dtype"], dict(data["optimizer"]), axes, tuple(data["mesh"].values()),
                tuple(Stage(s["layers"][0], s["layers"][1], tuple(s["ranks"])) for s in data["stages"]),
                data["schedule"], data["num_microbatches"], tuple(map(_layer_or_node, data["recompute"])),
                {k: tuple(map(Rule.parse, v)) for k, v in _ungroup(data["rules"])},
                {k: Hub(*map(nd, v)) for k, v in _ungroup(data["hubs"])},
                {k: ParamPlacement(*map(nd, v)) for k, v in _ungroup(data["params"])},
                tuple((t, n) for t, n in data["reboxed"]), dict(data["layout"]), dict(data["predicted"]),
                tuple((float(latency_s), float(per_byte)) for latency_s, per_byte in data.get("links", ())), tuple(map(str, data.get("orders", ()))),
                tuple(map(int, data.get("pieces", ()))), str(data.get("context", "")), int(data.get("loss_chunks", 1)),
            )  # fmt: skip
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise PlanError(f"the plan document is incomplete or damaged ({error!r}); plan again") from error


_FIELDS: Mapping[str, type] = {
    "model": dict, "cluster": dict, "batch": int, "seq": int, "dtype": str, "optimizer": dict, "layout": dict, "predicted": dict, "mesh": dict, "stages": list,
    "schedule": str, "num_microbatches": int, "recompute": list, "params": dict, "rules": dict, "hubs": dict, "reboxed": list,
}  # fmt: skip


def _layer_or_node(value: Any) -> int | str:
    if type(value) not in (int, str):
        raise ValueError(f"recompute names {value!r}, neither the number of a layer nor the name of an operator")
    found: int | str = value
    return found


def _check_fields(data: Mapping[str, Any]) -> None:
    """Raises PlanError at the first field that is missing or of another type than `to_json` writes."""
    for name, kind in _FIELDS.items():
        if name not in data:
            raise PlanError(f"the plan document is incomplete: `{name}` is missing; plan again")
        if type(data[name]) is not kind or (kind is int and data[name] < 1):
            wanted = {int: "a whole number, 1 or more", str: "a name", list: "a list", dict: "an object"}[kind]
            raise PlanError(f"the plan document is damaged: `{name}` is {data[name]!r}, not {wanted}; plan again")
    if not isinstance(data["optimizer"].get("name"), str):
        raise PlanError(f"the plan document is damaged: `optimizer` is {data['optimizer']!r} and has no name; plan again")


_NUMBERED = re.compile(r"(.*?\.)(\d+)(\..*)")


def _group(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Entries of runs of equal layers written once: `h.0-11.attn.q`.

    >>> _group([("h.0.q", 1), ("h.0.k", 2), ("h.1.q", 1), ("h.1.k", 2), ("ln_f", 1)])
    {'h.0-1.q': 1, 'h.0-1.k': 2, 'ln_f': 1}
    """
    runs: dict[tuple[str, str], list[tuple[int, int, Any]]] = {}
    order: list[tuple[str, str] | str] = []
    plain: dict[str, Any] = {}
    for name, value in items:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain[name] = value
            order.append(name)
            continue
        key, i = (match[1], match[3]), int(match[2])
        if key not in runs:
            order.append(key)
        here = runs.setdefault(key, [])
        if here and here[-1][1] == i - 1 and here[-1][2] == value:
            here[-1] = (here[-1][0], i, value)
        else:
            here.append((i, i, value))
    out: dict[str, Any] = {}
    for entry in order:
        if isinstance(entry, str):
            out[entry] = plain[entry]
        else:
            for first, last, value in runs[entry]:
                out[f"{entry[0]}{first if first == last else f'{first}-{last}'}{entry[1]}"] = value
    return out


_RANGE = re.compile(r"(.*?\.)(\d+)-(\d+)(\..*)")


def _ungroup(data: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """
    >>> list(_ungroup({'h.0-1.q': 1, 'ln_f': 1}))
    [('h.0.q', 1), ('h.1.q', 1), ('ln_f', 1)]
    """
    for name, value in data.items():
        match = _RANGE.fullmatch(name)
        if match is None:
            yield name, value
        else:
            for i in range(int(match[2]), int(match[3]) + 1):
                yield f"{match[1]}{i}{match[4]}", value

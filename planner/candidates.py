"""The outer space: how many ways data, tensor and pipeline parallel, how many microbatches, which schedule, recompute or not.

`fix` holds what the user decided; contradictions are named with the numbers and the legal values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from ir.errors import InputError, PlanError
from ir.graph import Graph, Node
from planner.chunks import in_chunks
from planner.context import FORMS, ORDERS, refusal
from planner.dims import EXPERT_PRODUCTS
from planner.hints import Hint, check_hint, is_hint, parse_hint
from planner.imports import parse_layout, read_tp_plan
from planner.orders import OWN, table_fix
from planner.pieces import sequence_length
from planner.schedules import SCHEDULES, schedule
from planner.stages import parse_stages

KEYS = (
    "dp", "tp", "pp", "cp", "cp_form", "cp_order", "ep", "vpp", "mbs", "schedule", "seq_chunks", "loss_chunks", "recompute", "zero", "sp", "layout", "tp_plan",
)  # fmt: skip
"""What `--fix` may hold besides tensor placements."""

PIECES = (2, 4, 8)
"""Into how many pieces a schedule that cuts sequences is tried to cut them."""

LEAST_PIECE = 2048
"""Tokens of the shortest piece of a sequence that is tried where nobody asks for pieces (benchmarks/seq_chunks.py)."""

MESH_AXES = ("dp", "ep", "cp", "tp")
"""The axes of a stage's mesh, outer first; `ep` only where experts, `cp` only where sequences are split over it."""

FARTHEST = 4
"""Times as many microbatches as are asked for, or as there are ranks, among which legal numbers are looked for."""

NEAREST = 4
"""Legal numbers that are named."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One point of the outer space; `mbs` is the samples of a microbatch on one data-parallel rank, `pieces` how many a sequence is cut into (0: whole).

    The experts of a model are split over `ep` ranks, which for all else are data-parallel: `ep` divides `dp`. Where they are to be in more parts, the tensor-
    parallel ranks split them too. Over `cp` ranks sequences are split, `context` says how attention goes (`Plan.context`). `loss_chunks` as of `Plan`.
    """

    dp: int
    tp: int
    pp: int
    mbs: int
    num_microbatches: int
    schedule: str
    recompute: str
    vpp: int = 1
    ep: int = 1
    pieces: int = 0
    cp: int = 1
    context: str = ""
    loss_chunks: int = 1

    @property
    def stage_ranks(self) -> int:
        """Devices of a stage."""
        return self.dp * self.cp * self.tp

    @property
    def mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Axes and shape of a stage's mesh."""
        size = {"dp": self.dp // self.ep, "ep": self.ep, "cp": self.cp, "tp": self.tp}
        axes = tuple(axis for axis in MESH_AXES if axis in ("dp", "tp") or size[axis] > 1)
        return axes, tuple(size[axis] for axis in axes)

    def __str__(self) -> str:
        virtual = (f" vpp{self.vpp}" if self.vpp > 1 else "") + (f" seq_chunks{self.pieces}" if self.pieces else "")
        virtual += f" loss_chunks{self.loss_chunks}" if self.loss_chunks > 1 else ""
        experts = f" ep{self.ep}" if self.ep > 1 else ""
        experts += f" cp{self.cp} {self.context}" if self.cp > 1 else ""
        return f"dp{self.dp} tp{self.tp} pp{self.pp}{experts}{virtual} mbs{self.mbs} x {self.num_microbatches} {self.schedule} recompute={self.recompute}"


def parse_fix(fix: Mapping[str, Any], num_devices: int, batch: int, graph: Graph) -> dict[str, Any]:
    """The fixed keys, typed and checked against each other. Raises InputError or PlanError naming the contradiction."""
    out: dict[str, Any] = {}
    table: dict[str, Any] = {}
    if str(fix.get("schedule", "")).endswith(".csv"):
        table = table_fix(str(fix["schedule"]), _typed("seq_chunks", fix.get("seq_chunks", 1)))
        fix = {"pp": table["pp"], "vpp": table["vpp"], **{k: v for k, v in fix.items() if k != "schedule"}}
        if (int(fix["pp"]), int(fix["vpp"])) != (table["pp"], table["vpp"]):
            raise PlanError(f"the table has pp={table['pp']}, vpp={table['vpp']}; --fix says pp={fix['pp']}, vpp={fix['vpp']}")
    missing = {"ep": not any(n.op in EXPERT_PRODUCTS for n in graph.nodes), "cp": str(fix.get("cp", 1)) == "1"}
    axes = tuple(axis for axis in MESH_AXES if not missing.get(axis))
    for key, value in fix.items():
        if is_hint(value):
            out[key] = value if isinstance(value, Hint) else parse_hint(key, value)
            check_hint(out[key], graph, axes)
            continue
        if key not in KEYS:
            raise InputError(f"--fix {key}={value}: `{key}` is not known; known are {', '.join(KEYS)}, and a tensor's placement, NAME=[tp: S(0)]")
        out[key] = _typed(key, value)
    if "schedule" in out and out["schedule"] not in (*SCHEDULES, "auto"):
        raise PlanError(f"--fix schedule={out['schedule']}: known schedules are {', '.join(SCHEDULES)}, auto, or the path of a table (.csv)")
    out |= table
    if out.get("schedule") == "auto" and out.get("vpp", 1) > 1:
        raise PlanError(f"--fix schedule=auto,vpp={out['vpp']}: auto searches orders of one stage a rank; leave vpp out")
    if out.get("vpp", 1) > 1 and not table:
        schedule(out.setdefault("schedule", "interleaved")).num_chunks(out["vpp"])
    _check_pieces(out, graph, table)
    in_chunks(graph, out.get("loss_chunks", 1))
    if out.get("recompute", "none") not in RECOMPUTES:
        raise PlanError(f"--fix recompute={out['recompute']}: legal are none, selective (the search decides of each operator) and full (whole layers)")
    if out.get("zero", 0) not in (0, 1, 2, 3):
        raise PlanError(f"--fix zero={out['zero']}: legal are 0, 1, 2 and 3")
    _check_product(out, num_devices)
    _check_context(out, graph)
    _check_ep(out, graph, num_devices)
    _check_tp(out, graph, num_devices)
    blocks = graph.num_layers - 2
    if out.get("pp", 1) * out.get("vpp", 1) > blocks:
        raise PlanError(f"--fix pp={out.get('pp', 1)},vpp={out.get('vpp', 1)}: `{graph.name}` has {blocks} blocks, so pp x vpp can be 1 to {blocks}")
    _check_batch(out, batch)
    return out


def fix_stages(fix: Mapping[str, Any], text: str, graph: Graph) -> dict[str, Any]:
    """`fix` with the stages of a layout as `planner.stages.parse_stages` reads it, and with pp and vpp as they follow. Raises InputError or PlanError."""
    stages = parse_stages(text, graph.num_layers)
    out = {**fix, "stages": stages}
    pp, vpp = fix.get("pp"), fix.get("vpp")
    if pp is None:
        pp = len(stages) // vpp if vpp else len(stages)
    vpp = vpp or max(1, len(stages) // pp)
    if pp * vpp != len(stages):
        raise PlanError(f"--stages {text} has {len(stages)} stages; --fix says pp={pp}, vpp={vpp}: pp x vpp must be {len(stages)}")
    if vpp > 1:
        schedule(out.setdefault("schedule", "interleaved")).num_chunks(vpp)
    return out | {"pp": pp, "vpp": vpp}


def _typed(key: str, value: Any) -> Any:
    if key == "layout":
        return value if isinstance(value, Mapping) else parse_layout(str(value))
    if key == "tp_plan":
        return value if isinstance(value, Mapping) else read_tp_plan(str(value))
    if key in ("schedule", "recompute"):
        return str(value)
    if key in ("cp_form", "cp_order"):
        known = FORMS if key == "cp_form" else ORDERS
        if value not in known:
            raise InputError(f"--fix {key}={value}: give one of {', '.join(known)}")
        return str(value)
    if key == "sp":
        text = str(value).lower()
        if text not in ("true", "false", "1", "0", "on", "off"):
            raise InputError(f"--fix sp={value}: give true or false")
        return text in ("true", "1", "on")
    try:
        number = int(str(value))
    except ValueError:
        raise InputError(f"--fix {key}={value}: give a whole number") from None
    if number < (0 if key == "zero" else 1):
        raise InputError(f"--fix {key}={value}: give a whole number of {0 if key == 'zero' else 1} or more")
    return number


def _check_pieces(fix: dict[str, Any], graph: Graph, table: Mapping[str, Any]) -> None:
    """`seq_chunks` cuts the sequence of a schedule that takes pieces: seq1f1b where none is named, or the user's table."""
    if "seq_chunks" not in fix:
        return
    if fix["seq_chunks"] > sequence_length(graph):
        raise PlanError(f"--fix seq_chunks={fix['seq_chunks']}: a sequence of {sequence_length(graph)} tokens has no more pieces than tokens")
    if fix.setdefault("schedule", "seq1f1b") == "auto":
        raise PlanError(f"--fix schedule=auto,seq_chunks={fix['seq_chunks']}: auto searches orders of whole sequences; leave seq_chunks out")
    if not table:
        schedule(fix["schedule"], fix["seq_chunks"])


def _check_product(fix: Mapping[str, Any], num_devices: int) -> None:
    degrees = ("dp", "tp", "pp", "cp") if fix.get("cp", 1) > 1 else ("dp", "tp", "pp")
    known = {k: fix[k] for k in degrees if k in fix}
    product = math.prod(known.values())
    told, must = " x ".join(f"{k}={v}" for k, v in known.items()), f"{' x '.join(degrees)} must be {num_devices}"
    if len(known) == len(degrees) and product != num_devices:
        raise PlanError(f"--fix {told} asks for {product} devices, the cluster has {num_devices}; {must}")
    if num_devices % product:
        raise PlanError(f"--fix {told}: {product} does not divide the {num_devices} devices of the cluster; {must}")


LONG = 16384
"""Tokens of a sequence from which on context parallelism is tried where nobody asks for it: below, the split over heads is as good (benchmarks/context.py)."""

MOST_CP = 16
"""Ranks over which a sequence is split at most where nobody asks for it."""


def contexts(fix: Mapping[str, Any], graph: Graph, cp: int, tp: int) -> tuple[str, ...]:
    """The ways in which attention may go over `cp` ranks, each split over heads `tp` ways, as `Plan.context` says it; ("",) where there is one rank.

    Where neither form nor order are fixed, each form in zig-zag order if that is for the model; an exchange is even in any.
    """
    if cp == 1:
        return ("",)
    forms = (fix["cp_form"],) if "cp_form" in fix else FORMS if "cp" in fix else ("ring", "exchange")
    found = []
    for form in forms:
        orders = (fix["cp_order"],) if "cp_order" in fix else ("contiguous",) if form == "exchange" else ORDERS
        legal = [order for order in orders if not refusal(graph, cp, form, order == "zigzag", tp)]
        found += [f"{form} zigzag" if order == "zigzag" else form for order in legal[:1]]
    return tuple(found)


def _check_context(fix: Mapping[str, Any], graph: Graph) -> None:
    cp, named = fix.get("cp", 1), [f"{k}={fix[k]}" for k in ("cp_form", "cp_order") if k in fix]
    if cp == 1 and named:
        raise PlanError(f"--fix {','.join(named)}: sequences are not split; give cp=N, the number of ranks over which they are")
    if cp == 1:
        return
    if "seq_chunks" in fix:
        raise PlanError(f"--fix cp={cp},seq_chunks={fix['seq_chunks']}: both cut the sequence; leave one of them out")
    if not contexts(fix, graph, cp, fix.get("tp", 1)):
        form, order = fix.get("cp_form", "gather"), fix.get("cp_order", "contiguous")
        raise PlanError(f"--fix {','.join([f'cp={cp}', *named])}: {refusal(graph, cp, form, order == 'zigzag', fix.get('tp', 1))}")


def _cps(fix: Mapping[str, Any], graph: Graph, num_devices: int) -> Sequence[int]:
    """Over how many ranks sequences are tried to be split."""
    if "cp" in fix:
        return (fix["cp"],)
    if "seq_chunks" in fix or sequence_length(graph) < LONG:
        return (1,)
    return [n for n in _divisors(num_devices) if n <= MOST_CP]


def legal_tp(graph: Graph, num_devices: int) -> tuple[int, ...]:
    """Numbers of ways that the key and value heads of every attention divide into, up to the number of devices."""
    heads = [graph.sizes(n)["g"] for n in graph.nodes if is_attention(n)]
    common = reduce(math.gcd, heads, 0)
    return tuple(n for n in range(1, num_devices + 1) if common % n == 0) if common else tuple(range(1, num_devices + 1))


def is_attention(node: Node) -> bool:
    """Whether the node is attention of some kind."""
    return node.op.partition("_")[0] == "attention"


def legal_ep(graph: Graph, dp: int) -> tuple[int, ...]:
    """Numbers of ways that the experts of every layer divide into, of those that divide `dp`; (1,) without experts."""
    experts = [graph.sizes(n)["e"] for n in graph.nodes if n.op in EXPERT_PRODUCTS]
    return tuple(_divisors(math.gcd(dp, *experts))) if experts else (1,)


def splits_experts(ep: int, axis: int, tp: int) -> bool | None:
    """Whether experts in `ep` parts, `axis` of them on their own axis, are split over the `tp` tensor-parallel ranks as well; None: no way gives `ep`."""
    return False if ep == axis else True if ep == axis * tp else None


def _check_ep(fix: Mapping[str, Any], graph: Graph, num_devices: int) -> None:
    ep = fix.get("ep", 1)
    experts = reduce(math.gcd, (graph.sizes(n)["e"] for n in graph.nodes if n.op in EXPERT_PRODUCTS), 0)
    if ep == 1:
        return
    if not experts:
        raise PlanError(f"--fix ep={ep}: `{graph.name}` has no experts to split; leave ep out")
    if experts % ep:
        raise PlanError(f"--fix ep={ep}: {ep} does not divide the {experts} experts of a layer; legal are {', '.join(map(str, _divisors(experts)))}")
    stage = num_devices // (fix.get("pp", 1) * fix.get("cp", 1))
    tps = [n for n in legal_tp(graph, stage) if fix.get("tp", n) == n and stage % n == 0]
    regions = [(fix.get("dp", stage // tp), tp) for tp in tps]
    legal = sorted({n for dp, tp in regions for axis in legal_ep(graph, dp) for n in (axis, axis * tp) if experts % n == 0})
    if ep not in legal and regions:
        dp, tp = regions[0]
        raise PlanError(
            f"--fix ep={ep}: experts are split over data-parallel ranks, or over all tensor-parallel ranks too; with dp={dp}, tp={tp} ep can be "
            f"{', '.join(map(str, legal))}"
        )


def _check_tp(fix: Mapping[str, Any], graph: Graph, num_devices: int) -> None:
    if "tp" not in fix:
        return
    if fix["tp"] not in legal_tp(graph, fix["tp"]):
        legal = [n for n in legal_tp(graph, num_devices) if num_devices % n == 0]
        alone = f"; split the {num_devices} devices by dp or pp" if legal == [1] else ""
        sizes = next(graph.sizes(n) for n in graph.nodes if is_attention(n))
        raise PlanError(
            f"--fix tp={fix['tp']}: `{graph.name}` has {sizes['g'] * sizes['r']} heads and {sizes['g']} KV heads, which {fix['tp']} does not divide; "
            f"legal tp are {', '.join(map(str, legal))}{alone}"
        )


def _check_batch(fix: Mapping[str, Any], batch: int) -> None:
    unit = fix.get("dp", 1) * fix.get("mbs", 1)
    if batch % unit:
        told = " x ".join(f"{k}={fix[k]}" for k in ("dp", "mbs") if k in fix)
        near = [n for n in (batch // unit * unit, (batch // unit + 1) * unit) if n]
        raise PlanError(f"batch {batch} is not divisible by {unit} ({told}); batches near it that are: {', '.join(map(str, near))}")


RECOMPUTES = ("none", "selective", "full")
"""What runs again in the backward: nothing, the operators that the search chooses at its price of memory, or all layers but the embedding and the head."""

WIDTHS = (2, 3, 4, 5, 6, 8)
"""Stages a rank that are tried under schedules that leave their number free."""


def candidates(fix: Mapping[str, Any], num_devices: int, batch: int, graph: Graph) -> Iterator[Candidate]:
    """Every legal point, in a fixed order. `graph` tells heads and layers; its batch does not matter."""
    for base in bases(fix, num_devices, batch, graph):
        yield from variants(base, fix, graph)


def bases(fix: Mapping[str, Any], num_devices: int, batch: int, graph: Graph) -> Iterator[Candidate]:
    """Every legal point but for its schedule, under which it is given as 1F1B or as `fix` says."""
    tps = [n for n in legal_tp(graph, num_devices) if num_devices % n == 0]
    blocks = graph.num_layers - 2
    cps = _cps(fix, graph, num_devices)
    for tp, pp, cp in itertools.product(tps, range(1, min(blocks, num_devices) + 1), cps):
        if num_devices % (tp * pp * cp):
            continue
        dp = num_devices // (tp * pp * cp)
        if batch % dp or any(fix.get(k, v) != v for k, v in (("dp", dp), ("tp", tp), ("pp", pp))):
            continue
        for mbs in _divisors(batch // dp):
            if fix.get("mbs", mbs) != mbs:
                continue
            num_microbatches = batch // (dp * mbs)
            name = fix.get("schedule", "1f1b")
            vpp = fix.get("vpp", 1) if name in OWN else schedule(name).num_chunks(fix.get("vpp", 1))
            if not (pp * vpp <= blocks or ("stages" in fix and pp * vpp <= blocks + 2)) or not _is_legal(name, pp, num_microbatches, vpp, fix):
                continue
            recomputes = [fix["recompute"]] if "recompute" in fix else RECOMPUTES
            ways = itertools.product(recomputes, legal_ep(graph, dp), _pieces(name, fix, graph), contexts(fix, graph, cp, tp))
            for recompute, ep, pieces, context in ways:
                if splits_experts(fix.get("ep", ep), ep, tp) is not None and not (pieces and cp > 1):
                    yield Candidate(dp, tp, pp, mbs, num_microbatches, name, recompute, vpp, ep, pieces, cp, context, fix.get("loss_chunks", 1))


def why_none(fix: Mapping[str, Any], num_devices: int, batch: int, graph: Graph) -> str:
    """Behind the sentence that no point is legal: what the schedule that was fixed says of the first point that there would be without it."""
    name = fix.get("schedule", "")
    first = next(candidates({k: v for k, v in fix.items() if k not in ("schedule", "seq_chunks")}, num_devices, batch, graph), None)
    if first is None or name in ("", *OWN):
        return ""
    known = schedule(name)
    num_chunks = known.num_chunks(fix.get("vpp", 1))
    refused = known.refuse(first.pp, first.num_microbatches, num_chunks)
    if not refused:
        return ""
    legal = [n for n in range(1, FARTHEST * max(first.pp, first.num_microbatches) + 1) if not known.refuse(first.pp, n, num_chunks)]
    near = sorted(sorted(legal, key=lambda n: (abs(n - first.num_microbatches), n))[:NEAREST])
    batches = ", ".join(str(n * first.dp * first.mbs) for n in near)
    told = (
        f"; legal near it are {', '.join(map(str, near))} microbatches, with mbs={first.mbs} and dp={first.dp} a batch of {batches}"
        if near and "legal" not in refused
        else ""
    )
    return f"; {name} cannot run {first.num_microbatches} microbatches on pp = {first.pp} ranks: {refused}{told}"


def _pieces(name: str, fix: Mapping[str, Any], graph: Graph) -> Sequence[int]:
    """How many pieces are tried; 0 for whole sequences."""
    if "seq_chunks" in fix:
        return (fix["seq_chunks"],)
    cuts = name not in OWN and schedule(name).pieces > 1
    return [k for k in PIECES if k <= sequence_length(graph)] if cuts else (0,)


def variants(base: Candidate, fix: Mapping[str, Any], graph: Graph) -> Iterator[Candidate]:
    """The point itself, and where the schedule is open, the point under every other that keeps one copy of the parameters and sequences whole."""
    yield base
    if "schedule" in fix or base.pp == 1 or base.pieces:
        return
    for name, known in SCHEDULES.items():
        if name == base.schedule or known.copies > 1 or known.pieces > 1 or (known.chunks is None and name == "interleaved-megatron"):
            continue  # Megatron's interleaving takes the same orders at fewer sizes
        for vpp in WIDTHS if known.chunks is None else (known.chunks,):
            if "stages" in fix and len(fix["stages"]) != base.pp * vpp:
                continue
            if base.pp * vpp <= graph.num_layers - 2 and not known.refuse(base.pp, base.num_microbatches, vpp):
                yield replace(base, schedule=name, vpp=vpp)
    if "stages" not in fix or len(fix["stages"]) == base.pp:
        yield replace(base, schedule="auto")


def whole_variants(base: Candidate, fix: Mapping[str, Any], graph: Graph) -> Iterator[Candidate]:
    """The point under schedules of which there are no drafts, where they may pay: sequences in pieces that are long enough to fill a device, and two copies of
    the parameters, one for either direction."""
    if {"schedule", "stages", "vpp"} & set(fix) or base.pp == 1 or base.pieces or base.cp > 1:
        return
    for name, known in SCHEDULES.items():
        if known.copies > 1 and not known.refuse(base.pp, base.num_microbatches, 1):
            yield replace(base, schedule=name, vpp=1)
    for k in PIECES:
        if sequence_length(graph) >= k * LEAST_PIECE and not schedule("seq1f1b", k).refuse(base.pp, base.num_microbatches, 1):
            yield replace(base, schedule="seq1f1b", vpp=1, pieces=k)


def _is_legal(name: str, pp: int, num_microbatches: int, vpp: int, fix: Mapping[str, Any]) -> bool:
    if "stages" in fix and len(fix["stages"]) != pp * vpp:
        return False
    if name in OWN:
        return bool(fix.get("num_microbatches", num_microbatches) == num_microbatches)
    return not schedule(name).refuse(pp, num_microbatches, vpp)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def block_layers(graph: Graph) -> tuple[int, ...]:
    """The layers that `recompute=full` runs again: all but the embedding and the head."""
    return tuple(range(1, graph.num_layers - 1))

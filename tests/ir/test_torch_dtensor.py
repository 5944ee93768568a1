"""Placements and boxing beside those of PyTorch's DTensor, on a process group that only counts (no data moves)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ir.boxing import bytes_moved, chain, kind_1d, step_nbytes
from ir.op import Op
from ir.ops import catalogue
from ir.sbp import P_MAX, B, NdSbp, P, S, Sbp, local_shape

torch = pytest.importorskip("torch", reason="needs PyTorch")
tensor = pytest.importorskip("torch.distributed.tensor", reason="needs PyTorch with DTensor")
debug = pytest.importorskip("torch.distributed.tensor.debug")
aten, functional = torch.ops.aten, torch.nn.functional

SIZES = {"b": 4, "s": 6, "h": 8, "n": 8, "m": 6, "k": 4, "v": 10, "d": 2}

OPERATORS: dict[str, tuple[int, Callable[..., Any]]] = {
    "linear": (2, torch.matmul), "linear_t": (2, functional.linear), "matmul": (0, torch.mm), "batched_matmul": (1, torch.bmm),
    "add": (2, torch.add), "bias": (2, torch.add), "add_positions": (0, torch.add), "scale": (2, lambda x: x * 1.7), "mul": (2, torch.mul),
    "gelu": (2, functional.gelu), "gelu.dx": (2, lambda d, x: aten.gelu_backward(d, x)), "silu": (2, functional.silu),
    "silu.dx": (2, lambda d, x: aten.silu_backward(d, x)), "softmax": (2, lambda x: functional.softmax(x, -1)),
    "softmax.dx": (2, lambda d, out: aten._softmax_backward_data(d, out, 2, torch.float32)),
    "layer_norm": (2, lambda x, g, c: functional.layer_norm(x, (8,), g, c)), "transpose": (1, lambda x: x.transpose(-1, -2)),
    "embedding": (2, functional.embedding), "embedding.dtable": (2, lambda ids, d: aten.embedding_dense_backward(d, ids, 10, -1, False)),
    "row_sum": (2, lambda x: x.sum(-1)), "row_max": (2, lambda x: x.amax(-1)), "total": (0, lambda x: x.sum()), "cast": (2, lambda x: x.double()),
    "split_heads": (0, lambda x: x.view(4, 6, 8, 2).transpose(1, 2)),
}  # fmt: skip
"""Our operator, how many dims `...` stands for, and the same in PyTorch."""

OURS_ALONE = {
    "gelu.dx": "linear dout", "silu.dx": "linear dout", "softmax.dx": "linear dout", "layer_norm": "linear g+c", "embedding": "linear table",
}  # fmt: skip
"""Rules that DTensor reduces for: it knows a partial sum through few operators, while these are linear in the operands that are partial."""


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """Four ranks of which this process is the first; collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield torch.distributed.device_mesh.init_device_mesh
    torch.distributed.destroy_process_group()


def theirs(sbp: Sbp) -> Any:
    """Our placement in their words."""
    if sbp.is_split:
        return tensor.Shard(sbp.dim)
    return tensor.Replicate() if sbp.is_broadcast else tensor.Partial(sbp.reduce)


def ours(placement: Any) -> Sbp:
    if placement.is_shard():
        return S(placement.dim)
    return B if placement.is_replicate() else {"sum": P, "max": P_MAX}[placement.reduce_op]


def held(shape: tuple[int, ...], nd: NdSbp, mesh: Any, dtype: Any = None) -> Any:
    """A DTensor of this shape and placement."""
    return tensor.DTensor.from_local(torch.zeros(local_shape(shape, nd, tuple(mesh.shape)), dtype=dtype), mesh, list(map(theirs, nd)), run_check=False)


# ---- operators -----------------------------------------------------------------------------------------------------------------------------------------

Signatures = dict[tuple[Sbp, ...], set[Sbp]]


def expanded(name: str) -> Op:
    op, leading = catalogue(name), OPERATORS[name][0]
    return op.for_ranks([len(o.dims) - 1 + leading if ("...",) in o.dims else len(o.dims) for o in op.inputs])


def without_communication(name: str, mesh: Any) -> dict[tuple[Sbp, ...], Sbp]:
    """Placement of the first output for every placement of the inputs on which DTensor computes without a collective."""
    op, compute = expanded(name), OPERATORS[name][1]
    shapes = [o.shape(SIZES) for o in op.inputs]
    found = {}
    for ins in itertools.product(*[(B, P, *map(S, range(len(shape)))) for shape in shapes]):
        dtypes = [torch.int64 if o.name == "ids" else torch.float32 for o in op.inputs]
        args = [held(shape, (s,), mesh, dtype) for shape, s, dtype in zip(shapes, ins, dtypes, strict=True)]
        with debug.CommDebugMode() as count:
            out = compute(*args)
        if not count.get_total_counts():
            found[ins] = ours((out[0] if isinstance(out, tuple) else out).placements[0])
    return found


def derived(name: str) -> dict[tuple[Sbp, ...], dict[Sbp, str]]:
    """The same from our rules: for each placement of the inputs the outputs, and the rule that gives each."""
    op, found = expanded(name), {}
    for rule in op.rules():
        if rule.kind != "B~P":
            ins, outs = op.placements(rule)
            found.setdefault(ins, {})[outs[0]] = repr(rule)
    return found


def local_steps(name: str, ins: tuple[Sbp, ...]) -> set[Sbp]:
    """Outputs of our rules whose inputs these become by slicing or zeroing whole operands, which costs no communication."""
    return {out for wanted, outs in derived(name).items() if all(b in (a, a if a != B else b) for a, b in zip(ins, wanted, strict=True)) for out in outs}


@pytest.mark.parametrize("name", OPERATORS)
def test_outputs_lie_where_dtensors_do(name: str, group: Any) -> None:
    """What DTensor computes without communication, we do too, with the same output; what we alone do is one rule with its reason."""
    found, mine = without_communication(name, _pair(group)), derived(name)
    for ins, out in found.items():
        assert out in mine.get(ins, {}) or out in local_steps(name, ins), f"{name}{ins} -> {out}"
    alone = {rule for ins, outs in mine.items() for out, rule in outs.items() if ins not in found}
    assert alone == ({OURS_ALONE[name]} if name in OURS_ALONE else set())


def _pair(group: Any) -> Any:
    """A mesh whose inner axis alone matters: two ranks."""
    return group("cpu", (2, 2), mesh_dim_names=("out", "in"))["in"]


def test_there_are_twenty_operators() -> None:
    assert len(OPERATORS) >= 20
    assert set(OURS_ALONE) <= set(OPERATORS)


# ---- boxing --------------------------------------------------------------------------------------------------------------------------------------------

SHAPE = (16, 24)
KINDS = {
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce", "shard_dim_alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
}  # fmt: skip


@dataclass
class Seen:
    """Collectives of a redistribution: kind, and bytes that cross a link for each rank, as a ring moves them."""

    steps: list[tuple[str, float]] = field(default_factory=list)

    @property
    def nbytes(self) -> float:
        return sum(n for _, n in self.steps)

    def add(self, kind: str, read: float, num_ranks: int) -> None:
        share = (num_ranks - 1) / num_ranks
        self.steps.append((kind, {"all_gather": read * num_ranks * share, "all_reduce": 2 * read * share}.get(kind, read * share)))


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Writes down every functional collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(func.__name__.partition(".")[0])
        if kind is not None:
            name = next(a for a in reversed(args) if isinstance(a, str))
            size = torch.distributed.distributed_c10d._resolve_process_group(name).size()
            self.seen.add(kind, args[0].numel() * args[0].element_size(), size)
        return func(*args, **(kwargs or {}))


def by_dtensor(src: NdSbp, dst: NdSbp, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> Seen | None:
    """What DTensor does; None where it refuses (it makes nothing partial). On a CPU it gathers where on a GPU it exchanges: here it exchanges too."""
    recorder = Recorder()

    def exchanged(value: Any, gather_dim: int, shard_dim: int, on: Any, axis: int) -> Any:
        n = on.size(axis)
        recorder.seen.add("all_to_all", value.numel() * value.element_size(), n)
        shape = list(value.shape)
        shape[gather_dim], shape[shard_dim] = shape[gather_dim] * n, shape[shard_dim] // n
        return value.new_zeros(shape)

    monkeypatch.setattr("torch.distributed.tensor.placement_types.shard_dim_alltoall", exchanged)
    start = held(SHAPE, src, mesh)
    try:
        with recorder:
            start.redistribute(mesh, list(map(theirs, dst)))
    except RuntimeError as error:
        if "to P" not in str(error):
            raise
        return None
    return recorder.seen


def by_us(src: NdSbp, dst: NdSbp, mesh: tuple[int, ...]) -> Seen:
    seen = Seen()
    for step in chain(src, dst, SHAPE, mesh, bytes_moved(SHAPE, mesh, 4)):
        if not step.is_local:
            seen.add(step.kind, step_nbytes(step, SHAPE, mesh, 4)[0], step.num_ranks(mesh))
    return seen


PLACES = (S(0), S(1), B, P)
PAIRS = tuple(itertools.product(PLACES, repeat=2))


@pytest.mark.parametrize(("src", "dst"), list(itertools.product(PLACES, PLACES)), ids=str)
def test_boxing_on_one_axis_is_dtensors(src: Sbp, dst: Sbp, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, true = by_us((src,), (dst,), (4,)), by_dtensor((src,), (dst,), group("cpu", (4,)), monkeypatch)
    if true is None:
        assert dst == P
        assert not found.steps, "nothing moves: the others hold zeros"
        assert kind_1d(src, dst) in ("zero", "pad")
    else:
        assert found == true


def test_boxing_on_two_axes_moves_no_more_than_dtensors(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs of the sixteen placements on a 2 x 2 mesh: the same collectives, one over both axes in place of two, or fewer bytes."""
    mesh, fewer, equal, refused = group("cpu", (2, 2)), 0, 0, 0
    for src, dst in itertools.product(PAIRS, repeat=2):
        found, true = by_us(src, dst, (2, 2)), by_dtensor(src, dst, mesh, monkeypatch)
        if true is None:
            refused += 1
            continue
        assert found.nbytes <= true.nbytes + 1e-9, f"{src} -> {dst}: {found.steps} against {true.steps}"
        fewer += found.nbytes < true.nbytes - 1e-9
        equal += found.nbytes == pytest.approx(true.nbytes) and len(found.steps) <= len(true.steps)
    assert refused == sum(P in (d for s, d in zip(src, dst, strict=True) if s != P) for src in PAIRS for dst in PAIRS)
    assert equal >= 100
    assert fewer >= 20
    assert equal + fewer + refused >= 250

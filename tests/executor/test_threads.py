"""Collectives and p2p between threads against numpy, for all kinds, uneven regions, two to four members, several dtypes."""

from __future__ import annotations

from itertools import pairwise
from time import sleep

import numpy as np
import pytest

from executor.backend import Backend
from executor.buffers import Buffers, as_slices
from executor.driver import Driver
from executor.numpy_backend import NumpyBackend
from executor.slots import Access
from executor.threads import ThreadTransport
from executor.transport import BLOCK, SMALL
from ir.errors import ProgramError
from ir.machine import Machine
from ir.program import Program
from ir.sbp import split_sizes
from tests.executor.programs import Writer, cut

SHAPES = ((7, 5), (13,), (4, 9, 6))
DTYPES = ("float64", "float32", "float16", "int64")


def shards(shape, parts, dim):
    return [tuple(s if d == dim else (0, n) for d, n in enumerate(shape)) for s in cut(shape[dim], parts)]


def whole(shape, parts):
    return [tuple((0, n) for n in shape)] * parts


def size_of(region):
    return tuple(b - a for a, b in region)


def collective(kind, src, dst, dtype="float64", reduce=None, backend: Backend | None = None, fill=None):
    """What each member's destination holds after one firing, and what each contributed."""
    n = len(src)
    w = Writer()
    reads = [w.register(f"src{i}", i, size_of(r), dtype, initial=1, clock="step") for i, r in enumerate(src)]
    writes = [w.register(f"dst{i}", i, size_of(r), dtype, clock="step") for i, r in enumerate(dst)]
    more = {} if reduce is None else {"reduce": reduce}
    w.collective("c", kind, range(n), reads, writes, src, dst, clock="step", **more)
    return perform(w.program(), reads, writes, fill)


def perform(program: Program, reads, writes, fill):
    device = NumpyBackend()
    machine = Machine(program, 1)
    buffers = Buffers(program, device)
    access = Access(machine, device, buffers)
    for i, name in enumerate(reads):
        buffers.slots[name][0][...] = fill(i)
    driver = Driver(machine, device, 10.0)
    transport = ThreadTransport(program, device, buffers, access)
    driver.performs = [transport.bind(a) for a in program.actors]
    list(driver.values())
    return [buffers.slots[name][0] for name in writes]


def contributions(shape, dtype, n):
    draw = np.random.default_rng(3)
    return [(draw.standard_normal(shape) * 100).astype(dtype) for _ in range(n)]


def in_order(parts, fold, first=0):
    """From the member that reduces on, then the others in the order of the group."""
    total = parts[first].copy()
    for part in (*parts[:first], *parts[first + 1 :]):
        fold(total, part, out=total)
    return total


def by_chunks(parts, fold):
    """Each member reduces its own chunk."""
    cuts = np.cumsum([0, *split_sizes(parts[0].size, len(parts))])
    flat = [in_order(parts, fold, i).reshape(-1)[a:b] for i, (a, b) in enumerate(pairwise(cuts))]
    return np.concatenate(flat).reshape(parts[0].shape)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_all_reduce_adds_in_an_order_that_is_always_the_same(n, shape, dtype, reduce):
    parts = contributions(shape, dtype, n)
    found = collective("all_reduce", whole(shape, n), whole(shape, n), dtype, reduce, fill=lambda i: parts[i])
    expected = by_chunks(parts, np.maximum if reduce == "max" else np.add)
    assert all(np.array_equal(f, expected) for f in found)


@pytest.mark.parametrize("size", [1, SMALL, SMALL + 3, 7 * BLOCK + 1])
def test_all_reduce_of_any_length(size):
    """One element, done by one member, by all, in several blocks."""
    parts = contributions((size,), "float32", 3)
    found = collective("all_reduce", whole((size,), 3), whole((size,), 3), "float32", fill=lambda i: parts[i])
    assert all(np.array_equal(f, by_chunks(parts, np.add)) for f in found)


def test_all_reduce_of_a_scalar():
    found = collective("all_reduce", [()] * 3, [()] * 3, fill=lambda i: 1.5 + i)
    assert [float(f) for f in found] == [7.5] * 3


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter_gives_each_its_slice(n, shape, dtype):
    parts = contributions(shape, dtype, n)
    for dim in (d for d in range(len(shape)) if shape[d] >= n):
        dst = shards(shape, n, dim)
        found = collective("reduce_scatter", whole(shape, n), dst, dtype, fill=lambda i: parts[i])
        assert all(np.array_equal(f, in_order(parts, np.add, i)[as_slices(r)]) for i, (f, r) in enumerate(zip(found, dst, strict=True)))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather_joins_uneven_slices(n, shape, dtype):
    (value,) = contributions(shape, dtype, 1)
    for dim in (d for d in range(len(shape)) if shape[d] >= n):
        src = shards(shape, n, dim)
        found = collective("all_gather", src, whole(shape, n), dtype, fill=lambda i, src=src: value[as_slices(src[i])])
        assert all(np.array_equal(f, value) for f in found)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("shape", [(7, 5), (4, 9, 6)])
def test_all_to_all_moves_the_split(n, shape):
    (value,) = contributions(shape, "float64", 1)
    src, dst = shards(shape, n, 0), shards(shape, n, 1)
    found = collective("all_to_all", src, dst, fill=lambda i: value[as_slices(src[i])])
    assert all(np.array_equal(f, value[as_slices(r)]) for f, r in zip(found, dst, strict=True))


def test_a_region_inside_the_tensor_is_gathered_where_it_lies():
    """A group of a second mesh axis holds the lower half only."""
    value = np.arange(40.0).reshape(8, 5)
    src, dst = [((4, 6), (0, 5)), ((6, 8), (0, 5))], [((4, 8), (0, 5))] * 2
    found = collective("all_gather", src, dst, fill=lambda i: value[as_slices(src[i])])
    assert all(np.array_equal(f, value[4:8]) for f in found)


def test_a_gap_is_refused_by_name():
    with pytest.raises(ProgramError, match=r"all_gather `c@0` writes .* but the members hold"):
        collective("all_gather", [((0, 2),), ((3, 4),)], [((0, 4),)] * 2, fill=lambda i: 0)


def test_a_reduction_over_less_than_its_target_is_refused():
    with pytest.raises(ProgramError, match="member `c@1` contributes"):
        collective("reduce_scatter", [((0, 4),), ((0, 3),)], [((0, 2),), ((2, 4),)], fill=lambda i: 0)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("length", [5, 3 * SMALL + 1])
def test_a_collective_of_every_microbatch_adds_up(kind, length):
    """Three microbatches into a step register: the first writes, in whatever order they come, the others add."""
    n, shape = 3, (length, 2)
    cuts, all_of_it = shards(shape, n, 0), whole(shape, n)
    src, dst = (cuts, all_of_it) if kind == "all_gather" else (all_of_it, cuts if kind == "reduce_scatter" else all_of_it)
    parts = contributions(shape, "float64", n)
    w = Writer(3)
    for i in range(n):
        w.register(f"src{i}", i, size_of(src[i]), initial=1, clock="step")
        w.register(f"dst{i}", i, size_of(dst[i]), clock="step")
    w.collective("c", kind, range(n), [f"src{i}" for i in range(n)], [f"dst{i}" for i in range(n)], src, dst)
    program = w.program({(i, "comm"): [(f"c@{i}", m) for m in (2, 0, 1)] for i in range(n)})
    found = perform(program, [f"src{i}" for i in range(n)], [f"dst{i}" for i in range(n)], lambda i: parts[i][as_slices(src[i])])
    once = {
        "all_gather": lambda i: np.concatenate([part[as_slices(r)] for part, r in zip(parts, src, strict=True)]),
        "all_reduce": lambda i: by_chunks(parts, np.add), "reduce_scatter": lambda i: in_order(parts, np.add, i),
    }[kind]  # fmt: skip
    for i, (f, r) in enumerate(zip(found, dst, strict=True)):
        assert np.array_equal(f, once(i)[as_slices(r)] + once(i)[as_slices(r)] + once(i)[as_slices(r)])


def test_p2p_crosses_in_both_directions_at_once():
    w = Writer(3)
    for rank in (0, 1):
        w.register(f"out{rank}", rank, (2, 3), clock="step", initial=1)
        w.register(f"in{rank}", rank, (2, 3))
    w.p2p("there", 0, 1, "out0", "in1")
    w.p2p("back", 1, 0, "out1", "in0")
    found = perform(w.program().check(), ["out0", "out1"], ["in0", "in1"], lambda i: i + 1.0)
    assert (found[0] == 2.0).all()
    assert (found[1] == 1.0).all()


@pytest.mark.parametrize("kind", ["p2p", "all_gather"])
def test_no_slot_is_freed_while_a_neighbour_still_reads_it(kind):
    """The writer of rank 0's one slot is ready for the next microbatch at once; rank 1 copies late."""
    w = Writer(4)
    w.register("src0", 0, (2,))
    w.register("dst1", 1, (2,) if kind == "p2p" else (4,))
    w.compute("make", 0, "fill", (), ["src0"])
    if kind == "p2p":
        w.p2p("c", 0, 1, "src0", "dst1")
    else:
        w.register("src1", 1, (2,), clock="step", initial=1)
        w.register("dst0", 0, (4,))
        halves, both = shards((4,), 2, 0), whole((4,), 2)
        w.collective("c", kind, (0, 1), ["src0", "src1"], ["dst0", "dst1"], halves, both)
    w.compute("look", 1, "scale", ["dst1"], queue="look")
    program = w.program().check()
    device = NumpyBackend()
    machine = Machine(program, 1)
    buffers = Buffers(program, device)
    transport = ThreadTransport(program, device, buffers, Access(machine, device, buffers))
    seen = []
    does = {a.name: transport.bind(a) for a in program.actors if a.channel}
    late = "c.recv" if kind == "p2p" else "c@0"
    copy = does[late]

    def slowly(step, microbatch):
        sleep(0.01)
        copy(step, microbatch)

    does[late] = slowly
    does["make"] = lambda step, microbatch: buffers.slots["src0"][0].fill(microbatch + 1)
    does["look"] = lambda step, microbatch: seen.append(float(buffers.slots["dst1"][0][0]))
    driver = Driver(machine, device, 10.0)
    driver.performs = [does[a.name] for a in program.actors]
    list(driver.values())
    assert seen == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("length", [6, SMALL + 6])
def test_a_reduction_may_write_where_its_operand_lies(kind, length):
    """What it gives lies inside what it reads, of every member; the numbers are those of buffers apart."""
    n, shape = 3, (length, 2)
    src, dst = whole(shape, n), shards(shape, n, 0) if kind == "reduce_scatter" else whole(shape, n)
    parts = contributions(shape, "float64", n)

    def result(in_place):
        w = Writer(1)
        for i in range(n):
            w.register(f"src{i}", i, size_of(src[i]), initial=1, clock="step")
            inside = {"inside": f"src{i}", "offset": 16 * dst[i][0][0]} if in_place else {}
            w.register(f"dst{i}", i, size_of(dst[i]), clock="step", **inside)
        w.collective("c", kind, range(n), [f"src{i}" for i in range(n)], [f"dst{i}" for i in range(n)], src, dst, clock="step")
        return perform(w.program(), [f"src{i}" for i in range(n)], [f"dst{i}" for i in range(n)], lambda i: parts[i])

    assert all(np.array_equal(a, b) for a, b in zip(result(True), result(False), strict=True))

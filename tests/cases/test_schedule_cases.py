"""Public reports about schedules and deadlocks as small cases: what was done, what is true, and that we say so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

import headrace as hr
from ir.errors import Deadlock, PlanError
from ir.machine import Machine
from ir.program import Firing, Program, Queue
from ir.work import Work
from planner.lower import lower
from planner.schedules import Times, schedule
from planner.schedules.pipe import Pipe, StageTimes
from planner.schedules.retime import retime
from planner.stages import cut
from tests.models import SEQ
from tests.parity import DEEP, apart, model, same
from tests.plans import Layout, plan_for
from tests.programs import Builder
from tests.schedules import longest_path

# ---- schedule --------------------------------------------------------------------------------------------------------------------------------------------


def test_microbatches_of_unequal_size() -> None:
    """B042, github.com/pytorch/pytorch/issues/126600, github.com/pytorch/torchtitan/issues/784: batch 8 in 3 microbatches; later stages took 3, 3, 3."""
    plan = replace(plan_for(model(DEEP), Layout(pp=3, num_microbatches=4), batch=8, seq=SEQ), num_microbatches=3)
    with pytest.raises(PlanError, match="batch 8 cannot be cut into 3 equal microbatches; try 1, 2, 4, 8"):
        lower(model(DEEP), plan)


@pytest.mark.parametrize(
    ("pp", "m", "flexible"), [(6, 3, ""), (4, 10, ""), (4, 3, ""), (4, 9, "m // pp = 2 groups do not divide m; nearest legal are 7, 8, 10")]
)
def test_interleaving_says_what_it_needs(pp: int, m: int, flexible: str) -> None:
    """B043, github.com/NVIDIA-NeMo/Speech/issues/14288, github.com/pytorch/pytorch/issues/129597: "micro-batches should range in [PP=6, M=3]".

    Megatron's rule needs a multiple of pp; PyTorch's needs m // pp groups to divide m.
    """
    with pytest.raises(PlanError, match=rf"cannot run {m} microbatches on pp = {pp} ranks: m must be a multiple of pp = {pp}; nearest legal are {pp}"):
        schedule("interleaved-megatron").orders(pp, m, 2)
    if flexible:
        with pytest.raises(PlanError, match=f"cannot run {m} microbatches on pp = {pp} ranks: {flexible}"):
            schedule("interleaved").orders(pp, m, 2)
    else:
        assert longest_path(schedule("interleaved").orders(pp, m, 2), 2 * pp, 2) is not None


MEASURED = {"1f1b": (1, 55.0), "zb-v": (2, 64.0), "interleaved": (4, 66.0), "zb-h2": (1, 67.0)}
"""Stages a rank and samples a second that were measured."""


def test_the_measured_order_of_four_schedules() -> None:
    """B110, github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/21: 6.2B on 8 H800; memory 48, 53, 57 and 79 GB in this order.

    With F = I = W. ZB-H2 counts from each rank's first start to its last end: the next step begins while this one drains.
    """

    def seconds(name: str, m: int) -> float:
        makespan, busiest = longest_path(schedule(name).orders(8, m, MEASURED[name][0]), 8 * MEASURED[name][0], MEASURED[name][0]) or (math.nan, math.nan)
        return busiest if name == "zb-h2" else makespan

    m = next(m for m in range(15, 64) if seconds("zb-h2", m) / seconds("1f1b", m) >= 0.82)
    assert 24 <= m <= 40
    m = -(-m // 8) * 8
    rate = {name: 1.0 / seconds(name, m) for name in MEASURED}
    assert rate["1f1b"] < 0.9 * rate["zb-v"]
    assert rate["zb-v"] <= 1.03 * rate["interleaved"]
    assert rate["interleaved"] <= 1.03 * rate["zb-h2"]
    assert max(seconds(name, 512) for name in MEASURED) <= 1.03 * min(seconds(name, 512) for name in MEASURED)


def test_the_measured_order_of_four_schedules_on_a_whole_model() -> None:
    """B110 once more, planned and simulated: 6.7B, 32 layers, 8 GPUs, 24 microbatches of 3 x 1024 tokens; throughput within ties of 3 %, memory strictly."""
    model, rate, memory = hr.load("gpt3-6.7b"), {}, {}
    for name, (v, _) in MEASURED.items():
        fix = {"pp": 8, "mbs": 3, "schedule": name, "recompute": "none", **({"vpp": v} if name == "interleaved" else {})}
        told = hr.plan(model, "1x8xH100-SXM", batch=72, seq=1024, fix=fix, top=1).plans[0].predicted
        rate[name], memory[name] = 72 / told["step_s"], told["peak_gib"]
    assert rate["1f1b"] < 0.9 * rate["zb-v"]
    assert rate["zb-v"] <= 1.03 * rate["interleaved"]
    assert rate["interleaved"] <= 1.03 * rate["zb-h2"]
    assert memory["1f1b"] < memory["zb-v"] < memory["interleaved"] < memory["zb-h2"]
    # 79 GB against 48: more than half again
    assert 1.4 < memory["zb-h2"] / memory["1f1b"] < 1.8


def test_interleaving_against_two_directions() -> None:
    """B113, github.com/deepseek-ai/DualPipe/issues/15, 8, 17, 23: bubble over useful time with B = 2F and W = F: (p-1)/M, (p-1)/(v M), (p-2)/(3 M)."""

    def ratio(name: str, v: int = 1) -> float:
        return schedule(name).time_s(8, 20, v, Times()) / (20 * Times().total) - 1.0

    found = {"1f1b": ratio("1f1b"), "vpp2": ratio("interleaved", 2), "vpp4": ratio("interleaved", 4), "dualpipe": ratio("dualpipe")}
    assert found == pytest.approx({"1f1b": 0.35, "vpp2": 0.175, "vpp4": 0.0875, "dualpipe": 0.1}, abs=1e-9)
    assert [schedule(name).copies for name in ("1f1b", "interleaved", "dualpipe")] == [1, 1, 2]
    kept = [max(schedule(name).stash(rank, 8, 24, v) for rank in range(8)) / 8 for name, v in (("1f1b", 1), ("interleaved", 2), ("dualpipe", 1))]
    assert kept == pytest.approx([1.0, 1 + 7 / (8 * 2), 1 + 1 / 8])
    assert ratio("interleaved", 3) > ratio("dualpipe") > ratio("interleaved", 4)  # above v = 3 interleaving has the smaller bubble


def test_both_spellings_of_the_zero_bubble_formula() -> None:
    """B114, github.com/deepseek-ai/DeepSeek-V3/issues/724: (p-1)(F + B - 2W) with the whole backward is (p-1)(F + B - W) with that of the input."""
    times = Times(f=1.0, i=1.1, w=0.9)
    bubble = schedule("zb-h1").time_s(8, 16, 1, times) - 16 * times.total
    assert bubble == pytest.approx(8.4, abs=1e-9)
    assert bubble == pytest.approx(7 * (times.f + (times.i + times.w) - 2 * times.w), abs=1e-9)
    made = longest_path(schedule("zb-h1").orders(8, 16), 8, times=times)
    assert made is not None
    assert made[0] - 16 * times.total == pytest.approx(8.4, abs=1e-9)


def test_a_bigger_microbatch_raises_the_bubble() -> None:
    """B117, github.com/ISEEKYAN/verl_megatron_practice/issues/9: batch 64 on p = 8; bigger matrices are faster, so the best size lies inside."""
    sizes, efficiency = (1, 2, 4, 8), (0.5, 0.65, 0.72, 0.75)
    chosen = schedule("1f1b")
    bubbles, seconds = [], []
    for mbs, share in zip(sizes, efficiency, strict=True):
        each = mbs / share / 3
        seconds.append(chosen.time_s(8, 64 // mbs, 1, Times(each, each, each)))
        bubbles.append(seconds[-1] / (64 // mbs * 3 * each) - 1.0)
    assert bubbles == pytest.approx([0.109375, 0.21875, 0.4375, 0.875])
    assert seconds == pytest.approx([142.0, 120.0, 127.8, 160.0], abs=0.05)
    assert sizes[seconds.index(min(seconds))] == 2


UNIFORM = [2] * 40


@pytest.mark.parametrize(("head", "m"), [(1.0, 16), (1.0, 64), (1.5, 16), (1.5, 64)])
def test_chunks_that_make_room_for_the_head(head: float, m: int) -> None:
    """B120, github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5391: 80 layers on pp 8, vpp 5, a head as heavy as a layer: the last chunk gets fewer layers.

    With a head of one whole layer the work of 81 layers lies on 8 ranks, so that one has 11 whatever is done; what the layout gains there is that the last
    chunk, which every microbatch waits for, is no longer the heaviest. Above that, the busiest rank has less to do as well.
    """
    chunks = cut([0.0, *[1.0] * 80, head], 40)
    layers = [sum(1 <= layer <= 80 for layer in range(a, b)) for a, b in chunks]
    assert (len(chunks), sum(layers)) == (40, 80)
    assert layers[-1] <= 2 - 0.5
    busiest = [max(sum(n + head * (i == 39) for i, n in enumerate(of) if i % 8 == rank) for rank in range(8)) for of in (layers, UNIFORM)]
    assert busiest[0] == math.ceil(81 / 8) == busiest[1] if head == 1.0 else busiest[0] < busiest[1]
    assert step_of(layers, head, m) < step_of(UNIFORM, head, m)


def step_of(layers: Sequence[int], head: float, m: int) -> float:
    """Units that a step of interleaved chunks takes, of so many layers each, a layer one unit of F, I and W each."""
    units = tuple(n + head * (i == len(layers) - 1) for i, n in enumerate(layers))
    pipe = Pipe(StageTimes(units, units, units, (0.0,) * (len(units) - 1), tuple(i % 8 for i in range(len(units)))), m)
    return float(retime(pipe, pipe.word(schedule("interleaved-megatron").orders(8, m, len(units) // 8))[None])[0][0])


def test_pipeline_against_tensor_parallel_in_one_box() -> None:
    """B123, github.com/NVIDIA/Megatron-LM/issues/258: on 8 A100 pure pipeline was over 30 % faster at many microbatches; at 8 half of its time is bubble."""
    gpt = hr.load("gpt3-6.7b")
    found = {
        (axis, m): hr.plan(gpt, "1x8xA100-SXM", batch=4 * m, seq=1024, fix={axis: 8, "mbs": 4, "schedule": "1f1b"}, top=1).plans[0].predicted
        for axis in ("pp", "tp")
        for m in (8, 64)
    }
    assert found["tp", 64]["step_s"] > 1.3 * found["pp", 64]["step_s"]
    assert found["tp", 8]["step_s"] < 1.1 * found["pp", 8]["step_s"]
    assert found["pp", 8]["bubble"] == pytest.approx(7 / 15, abs=0.03)


# ---- deadlock --------------------------------------------------------------------------------------------------------------------------------------------


def neighbours(sends_wait: bool, line: bool) -> Program:
    """Two ranks that send each other F0 and F1 and then compute with what they got. `line`: a rank's receive stands behind its send."""
    b = Builder(1)
    for rank in range(2):
        for name in ("mine", "theirs", "copy") if not sends_wait else ("mine", "theirs"):
            b.register(f"{name}{rank}", rank)
        b.actor(f"make{rank}", rank, "make", writes=(f"mine{rank}",))
    for rank in range(2):
        other, queue = 1 - rank, "line"
        if not sends_wait:
            b.actor(f"buffer{rank}", rank, queue, reads=(f"mine{rank}",), writes=(f"copy{rank}",))
        work = Work("send", "send", "float32", nbytes=16.0, group=(rank, other))
        b.actor(f"send{rank}", rank, queue if sends_wait else "wire", reads=(f"mine{rank}" if sends_wait else f"copy{rank}",), channel=f"from{rank}", work=work)
        work = Work("recv", "recv", "float32", nbytes=16.0, group=(other, rank))
        b.actor(f"recv{rank}", rank, queue if line else "wire in", writes=(f"theirs{rank}",), channel=f"from{other}", work=work)
        b.actor(f"F{rank}", rank, queue, reads=(f"theirs{rank}",))
    return b.build("neighbours")


def test_both_neighbours_send_first() -> None:
    """B050, github.com/NVIDIA/nccl/issues/479, github.com/pytorch/pytorch/issues/172668: it hangs where a send waits; not with a buffer, nor both at once."""
    with pytest.raises(Deadlock, match=r"number 0 rank 0 \(line\) comes to `send0` .*, rank 1 \(line\) comes to `send1`"):
        neighbours(sends_wait=True, line=True).check()
    neighbours(sends_wait=False, line=True).check()
    neighbours(sends_wait=True, line=False).check()


def entering(order: Mapping[int, Sequence[tuple[int, int]]]) -> Program:
    """Ranks that make a communicator for each of their pairs, in this order; both of a pair must come to it."""
    b = Builder(1)
    for rank, pairs in order.items():
        for pair in pairs:
            b.actor(f"{pair}@{rank}", rank, "host", channel=str(pair), clock="step", work=Work("collective", "init", "float32", group=pair))
    return b.build("communicators")


def test_communicators_made_when_they_are_first_used() -> None:
    """B052, github.com/NVIDIA/Megatron-LM/issues/5240, github.com/NVIDIA/nccl/issues/783: pp 4 with vpp 2 is a ring of pairs, entered by each rank as it came.

    Our programs name every group before the run, in one order that all ranks share, and it can always be entered; each as it comes may not be.
    """
    program = lower(model(DEEP), plan_for(model(DEEP), Layout(pp=4, num_microbatches=4, schedule="interleaved", vpp=2), batch=4, seq=SEQ))
    pairs = list(dict.fromkeys(tuple(sorted(a.work.group)) for members in program.channels.values() for a in members if a.work.kind in ("send", "recv")))
    assert sorted(pairs) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    for ranks in ((0,), (1, 2), (3,)):
        assert list(Machine(program, steps=1, ranks=ranks).program.channels) == list(program.channels)
    entering({rank: [pair for pair in pairs if rank in pair] for rank in range(4)}).check()
    with pytest.raises(Deadlock, match=r"would stand still"):
        entering({0: [(0, 1), (0, 3)], 1: [(1, 2), (0, 1)], 2: [(2, 3), (1, 2)], 3: [(0, 3), (2, 3)]}).check()


def rounds(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which each rank has one partner at most (the circle method)."""
    found = []
    for turn in range(num_ranks - 1):
        ring = [0, *((i + turn) % (num_ranks - 1) + 1 for i in range(num_ranks - 1))]
        found.append([(min(a, b), max(a, b)) for a, b in zip(ring[: num_ranks // 2], ring[: num_ranks // 2 - 1 : -1], strict=True)])
    return found


def exchanged(lists: Mapping[int, Sequence[tuple[int, int, int]]]) -> Program:
    """Ranks that work off their lists of (source, destination, number) messages one after another."""
    b = Builder(1)
    for rank, messages in lists.items():
        for src, dst, i in messages:
            name, kind = f"{src}>{dst}.{i}", "send" if rank == src else "recv"
            b.registers.append(replace(ITEM, name=f"{name}@{rank}", rank=rank, initial=int(kind == "send")))
            used = {"reads": (f"{name}@{rank}",)} if kind == "send" else {"writes": (f"{name}@{rank}",)}
            b.actor(f"{kind} {name}", rank, "p2p", channel=name, clock="step", fire=False, work=Work(kind, kind, "float32", group=(src, dst)), **used)
            b.orders.setdefault((rank, "p2p"), []).append((f"{kind} {name}", 0))
    return b.build("exchange")


ITEM = Builder(1)
ITEM.register("item", 0, "step")
ITEM = ITEM.registers[0]


def test_batches_of_messages_that_ranks_split_each_for_itself() -> None:
    """B053, github.com/pytorch/pytorch/issues/174942, 174288: batches of 700 messages a rank, cut at 256 by each for itself, hung.

    Here every message is a rendezvous in a proved order: in rounds of pairs it runs, and where each rank goes through its partners by number it is refused.
    """
    paired = rounds(8)
    assert len(paired) == 7
    assert sorted(pair for one in paired for pair in one) == [(a, b) for a in range(8) for b in range(a + 1, 8)]
    assert all(sorted(rank for pair in one for rank in pair) == list(range(8)) for one in paired)
    in_rounds = {r: [(*way, i) for one in paired for a, b in one if r in (a, b) for i in range(50) for way in ((a, b), (b, a))] for r in range(8)}
    assert {len(messages) for messages in in_rounds.values()} == {700}
    exchanged(in_rounds).check()
    by_number = {r: [(*way, i) for s in range(8) if s != r for way in ((r, s), (s, r)) for i in range(50)] for r in range(8)}
    with pytest.raises(Deadlock, match="messages are not in the same order on both sides"):
        exchanged(by_number).check()


def one_line_each(program: Program) -> Program:
    """The program with all that a rank communicates in one line, in the order in which the whole could run."""
    machine = Machine(program, steps=1)
    orders: dict[Queue, list[Firing]] = {}
    ready = list(machine.startable)
    while ready:
        action = machine.start(ready.pop(0))
        actor = machine.actors[action.actor]
        orders.setdefault((actor.rank, "wire" if actor.channel else actor.queue), []).append((actor.name, action.microbatch))
        ready += machine.finish(action)
    actors = tuple(replace(a, queue="wire") if a.channel else a for a in program.actors)
    return replace(program, actors=actors, orders={queue: tuple(order) for queue, order in orders.items()})


def test_two_kinds_of_communication_at_once() -> None:
    """B054, github.com/NVIDIA/nccl/issues/522, 1192, github.com/sgl-project/sglang/issues/31117: streams of one device need not go forward by themselves.

    A communicator stands on one queue of a rank, never on two; and all of a device's communication can be put in one line that fits all others'.
    """
    program = lower(model(DEEP), plan_for(model(DEEP), Layout(2, 1, 2, 4, zero=1), batch=8, seq=SEQ))
    queues: dict[tuple[int, tuple[int, ...], str], set[str]] = {}
    for a in program.actors:
        if a.channel:
            queues.setdefault((a.rank, a.work.group, a.phase if a.work.kind in ("send", "recv") else ""), set()).add(a.queue)
    assert all(len(found) == 1 for found in queues.values())
    assert {a.work.kind for a in program.actors if a.channel} == {"send", "recv", "collective"}
    line = one_line_each(program).check()
    lists = {queue: order for queue, order in line.orders.items() if queue[1] == "wire"}
    assert len(lists) == 4
    swapped = {queue: (*order[1:], order[0]) if queue[0] == 0 else order for queue, order in lists.items()}
    with pytest.raises(Deadlock):
        replace(line, orders=line.orders | swapped).check()


def test_two_ranks_that_are_each_others_next_and_last() -> None:
    """B055, github.com/NVIDIA/Megatron-LM/issues/750: pp 2 with virtual stages, where messages down and up go between the same two ranks."""
    found = apart(DEEP, Layout(pp=2, num_microbatches=4, schedule="interleaved", vpp=2))
    assert same(found), found

"""Orders of sends and receives that hung in public reports: refused before anything runs, with the sentence that says who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ir.errors import Deadlock, PlanError, ProgramError
from ir.program import Program
from ir.work import Work
from planner.schedules import SCHEDULES, schedule
from planner.schedules.proof import check_orders, program_of, with_messages
from planner.schedules.slot import Slot
from planner.schedules.text import Message, Table, read
from tests.programs import Builder, pipeline, with_order

RENDEZVOUS = ("stream", "blocking")
"""How a send can wait for its receive: beside the passes, or in one line with them."""

CROSSED = r"messages are not in the same order on both sides: as number \d+ rank 0 .* comes to `\dSEND_[FB]\d` .* rank \d .* comes to `\dSEND_[FB]\d`"
"""Two ranks come to a send, each to the other."""


def receives(slot: Slot, num_stages: int, held: Sequence[int]) -> list[Message]:
    """What a pass receives from another rank."""
    if slot.kind == "F":
        return [Message(slot.stage, "RECV_F", slot.microbatch)] if slot.stage and slot.stage - 1 not in held else []
    return [Message(slot.stage, "RECV_B", slot.microbatch)] if slot.kind in "BI" and slot.stage + 1 < num_stages and slot.stage + 1 not in held else []


def sends(slot: Slot, num_stages: int, held: Sequence[int]) -> list[Message]:
    """What a pass sends to another rank."""
    if slot.kind == "F":
        return [Message(slot.stage, "SEND_F", slot.microbatch)] if slot.stage + 1 < num_stages and slot.stage + 1 not in held else []
    return [Message(slot.stage, "SEND_B", slot.microbatch)] if slot.kind in "BI" and slot.stage and slot.stage - 1 not in held else []


def written_locally(name: str, p: int, m: int) -> Table:
    """Every rank receives right before a pass and sends right after it, looking at nobody else: how a loop on each rank writes it."""
    orders = schedule(name).orders(p, m)
    num_stages = 1 + max(s.stage for order in orders for s in order)
    rows = []
    for order in orders:
        held = [s.stage for s in order]
        rows.append(tuple(a for s in order for a in (*receives(s, num_stages, held), s, *sends(s, num_stages, held))))
    return tuple(rows)


def test_1f1b_whose_forward_send_and_backward_send_meet() -> None:
    """github.com/pytorch/pytorch/issues/126419: a forward is sent down while a gradient is sent up; it ran where messages were buffered, and hung in CI."""
    rows = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
    )
    table = read("\n".join(rows))
    for how in RENDEZVOUS:
        with pytest.raises(Deadlock, match=CROSSED):
            check_orders(table, None, 2, how)
    check_orders(table, None, 2, "buffered")


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "interleaved-zb", "zb-v", "looped-bfs", "dualpipe-v"])
@pytest.mark.parametrize("p", [2, 4])
def test_loops_on_each_rank_that_criss_cross(name: str, p: int) -> None:
    """github.com/pytorch/pytorch/issues/172668, 127332, github.com/NVIDIA/Megatron-LM/issues/750: every rank right for itself, and no two fit together.

    So does a receive that is moved to right before the pass that needs it: `0SEND_F` before `2RECV_B` on one rank, `3SEND_B` before `1RECV_F` on the other.
    """
    m = 2 * p
    table = written_locally(name, p, m)
    for how in RENDEZVOUS:
        with pytest.raises(Deadlock, match=f"{CROSSED}|would stand still: these wait for each other"):
            check_orders(table, None, m, how)
    check_orders(table, None, m, "buffered")
    for how in RENDEZVOUS:
        check_orders(with_messages(schedule(name).orders(p, m)), None, m, how)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_every_schedule_lives_where_nothing_is_buffered(name: str, p: int) -> None:
    """github.com/hpcaitech/ColossalAI/issues/2156, github.com/pytorch/torchtitan/issues/775, 1188: hangs at m = p, at m < p, in a schedule never run whole."""
    s = SCHEDULES[name]
    for m in range(1, 3 * p + 1):
        if s.refuse(p, m, s.num_chunks()):
            continue
        table = with_messages(s.orders(p, m), s.copies, s.pieces)
        for how in RENDEZVOUS:
            check_orders(table, None, m * s.pieces, how, s.copies, s.pieces)


def test_a_warm_up_longer_than_the_step() -> None:
    """github.com/AMD-AGI/Primus/issues/1003: with fewer microbatches than ranks the table had backwards of microbatches that never went forward."""
    text = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1\n3F0,3B0,3F1,3B1"
    with pytest.raises(PlanError, match="rank 0 runs 0F2; there are 2 microbatches, 0 to 1"):
        check_orders(read(text), None, 2)


def metadata_first(fixed_order: bool) -> Program:
    """Four ranks in the steady part of 1F1B that tell each other the shapes of what they send: down the forward's, up the gradient's.

    In a fixed order every rank sends first; else the even ranks send first and the odd ones receive first.
    """
    b = Builder(1)
    for low in range(3):
        for src, dst, what in ((low, low + 1, "act"), (low + 1, low, "grad")):
            b.register(f"{what}.out{src}", src)
            b.register(f"{what}.in{dst}", dst)
            b.actor(f"make.{what}{src}", src, f"make.{what}", writes=(f"{what}.out{src}",))
    for rank in range(4):
        first, second = ("send", "recv") if fixed_order or rank % 2 == 0 else ("recv", "send")
        for kind in (first, second):
            for what, peer in (("act", rank + 1 if kind == "send" else rank - 1), ("grad", rank - 1 if kind == "send" else rank + 1)):
                if 0 <= peer < 4:
                    pair = (rank, peer) if kind == "send" else (peer, rank)
                    used = {"reads": (f"{what}.out{rank}",)} if kind == "send" else {"writes": (f"{what}.in{rank}",)}
                    work = Work(kind, kind, "int64", nbytes=24.0, group=pair)
                    b.actor(f"{kind}.{what}{pair[0]}>{pair[1]}@{rank}", rank, "p2p", channel=f"{what}{pair[0]}>{pair[1]}", work=work, **used)
    return b.build("shapes")


def test_shapes_exchanged_in_a_fixed_order() -> None:
    """github.com/NVIDIA/Megatron-LM/issues/5100: data went in even and odd order, the shapes before it in a fixed one."""
    metadata_first(fixed_order=False).check()
    with pytest.raises(Deadlock, match=r"send.act0>1@0 microbatch 0 .* does not start|not in the same order"):
        metadata_first(fixed_order=True).check()


def reduction(ranks: Sequence[int]) -> Program:
    """The norm of the gradients summed over ranks 0 to 2, entered by `ranks` alone."""
    b = Builder(1)
    for rank in range(3):
        b.register(f"part{rank}", rank, "step")
        b.register(f"norm{rank}", rank, "step")
        b.actor(f"square{rank}", rank, "compute", writes=(f"part{rank}",), clock="step")
        if rank in ranks:
            work = Work("collective", "all_reduce", "float32", nbytes=4.0, group=(0, 1, 2), attrs={"reduce": "sum"})
            b.actor(f"sum{rank}", rank, "comm", (f"part{rank}",), (f"norm{rank}",), clock="step", work=work, channel="norm")
        else:
            b.actor(f"sum{rank}", rank, "compute", (f"part{rank}",), (f"norm{rank}",), clock="step")
    return b.build("norm")


def test_a_rank_without_parameters_that_leaves_the_norm_out() -> None:
    """github.com/deepspeedai/DeepSpeed/issues/1522: the stage that held only an embedding had nothing to sum, and did not join."""
    reduction((0, 1, 2)).check()
    with pytest.raises(ProgramError, match=r"channel `norm` is a collective of group \(0, 1, 2\), its members are on ranks \(0, 2\)"):
        reduction((0, 2)).check()


def test_ranks_with_different_numbers_of_batches() -> None:
    """github.com/deepspeedai/DeepSpeed/issues/2223: one rank's loader had one batch less, and the others waited for it."""
    whole = pipeline(2, 4)
    short = with_order(whole, (1, "p2p.recv.F"), whole.orders[1, "p2p.recv.F"][:-1])
    with pytest.raises(ProgramError, match=r"`recv\.act0` microbatch 3 is missing in the order of queue"):
        short.check()


def test_waiting_for_data_is_told() -> None:
    """github.com/deepspeedai/DeepSpeed/issues/5568: stuck in the loader. Here it is an actor, and a circle through it is told like any other."""
    b = Builder(2)
    b.register("x", 0)
    b.register("seen", 0)
    b.actor("load", 0, "load", reads=("seen",), writes=("x",), work=Work("load", "tokens", "float32", nbytes=16.0))
    b.actor("F", 0, "compute", reads=("x",), writes=("seen",))
    with pytest.raises(Deadlock, match=r"load microbatch 0 .* waits: seen has no item"):
        b.build("loader").check()


def test_one_line_of_messages_for_each_communicator() -> None:
    """github.com/NVIDIA/Megatron-LM/issues/1028: a second thread sent on the same communicator. Here it would be a second queue, whose order is proved too."""
    crossed = lines_of_two({0: ("a", "b"), 1: ("b", "a")})
    with pytest.raises(Deadlock, match=r"messages are not in the same order on both sides: as number 0 rank 0 .* `send.a` .* rank 1 .* `recv.b`"):
        crossed.check()
    lines_of_two({0: ("a", "b"), 1: ("a", "b")}).check()


def lines_of_two(order: Mapping[int, Sequence[str]]) -> Program:
    """Two messages from rank 0 to rank 1 in the order of each."""
    b = Builder(1)
    for name in ("a", "b"):
        b.register(f"{name}.out", 0)
        b.register(f"{name}.in", 1)
        b.actor(f"make.{name}", 0, "compute", writes=(f"{name}.out",))
    for kind, rank in (("send", 0), ("recv", 1)):
        for name in order[rank]:
            used = {"reads": (f"{name}.out",)} if kind == "send" else {"writes": (f"{name}.in",)}
            b.actor(f"{kind}.{name}", rank, "p2p", channel=name, work=Work(kind, kind, "float32", nbytes=16.0, group=(0, 1)), **used)
    return b.build("lines")


def test_no_program_is_needed_to_say_so() -> None:
    """The sentence names passes and messages as the table does."""
    table = read("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0")
    assert program_of(table, "blocking").check().orders[1, "compute"] == (("1RECV_F0", 0), ("1F0", 0), ("1B0", 0), ("1SEND_B0", 0))

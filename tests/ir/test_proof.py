"""Programs that are refused, each with the sentence that names what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.errors import Deadlock, ProgramError
from ir.program import Actor, Program, Register
from ir.proof import sufficient_credits
from ir.work import Work
from tests.programs import Builder, pipeline, with_credits, with_order


def changed(program: Program, name: str, **fields: object) -> Program:
    """The program with fields of one actor or register replaced."""
    actors = tuple(replace(a, **fields) if a.name == name else a for a in program.actors)
    registers = tuple(replace(r, **fields) if r.name == name else r for r in program.registers)
    return replace(program, actors=actors, registers=registers)


def worked(program: Program, name: str, **fields: object) -> Program:
    return changed(program, name, work=replace(program.actor[name].work, **fields))


PIPE = pipeline(2, 4)
F0 = PIPE.actor["F0"]

ILL_FORMED = {
    "two actors are called `F0`": replace(PIPE, actors=(*PIPE.actors, F0)),
    "two registers are called `x`": replace(PIPE, registers=(*PIPE.registers, PIPE.register["x"])),
    "has 0 microbatches; give 1 or more": replace(PIPE, num_microbatches=0),
    "has True microbatches": replace(PIPE, num_microbatches=True),
    "register `x` has credits 0; give a whole number, 1 or more": changed(PIPE, "x", credits=0),
    "register `x` has credits 1.5": changed(PIPE, "x", credits=1.5),
    "register `x` has nbytes -4": changed(PIPE, "x", nbytes=-4),
    "register `x` has nbytes nan": changed(PIPE, "x", nbytes=float("nan")),
    r"register `x` has shape \(-1,\)": changed(PIPE, "x", shape=(-1,)),
    "register `x` has clock `epoch`; legal are microbatch, step": changed(PIPE, "x", clock="epoch"),
    "register `x` has memory class `heap`; legal are parameter": changed(PIPE, "x", memory="heap"),
    "register `x` has 1 initial items on the microbatch clock": changed(PIPE, "x", initial=1),
    "register `w0` has 2 initial items in 1 credits": changed(PIPE, "w0", initial=2),
    "actor `F0` has clock `epoch`": changed(PIPE, "F0", clock="epoch"),
    "actor `F0` has work of kind `dance`": worked(PIPE, "F0", kind="dance"),
    "actor `F0` has work of nan flops": worked(PIPE, "F0", flops=float("nan")),
    "actor `F0` has work of inf nbytes": worked(PIPE, "F0", nbytes=float("inf")),
    "actor `send.act0` is a send without channel": changed(PIPE, "send.act0", channel=""),
    "actor `F0` changes register `x` and uses it once more": changed(PIPE, "F0", writes=("x", "out0")),
    "actor `F0` uses register `nothing`, which does not exist": changed(PIPE, "F0", reads=("nothing",)),
    "actor `F0` on rank 0 uses register `in1` of rank 1": changed(PIPE, "F0", reads=("in1",)),
    "actor `opt0` fires once a step, its register `x` holds an item each microbatch": changed(PIPE, "opt0", reads=("x",)),
    r"actor `B0` \(clock microbatch\) updates register `w0`": changed(PIPE, "B0", updates=("w0",), reads=("gin0",)),
    "register `stash0` has two writers, `load` and `F0`": changed(PIPE, "load", writes=("x", "stash0")),
    "register `g0` has two writers, `load` and `B0`; .*only what is added up": changed(PIPE, "load", writes=("x", "g0")),
    "register `spare` has no writer and no initial item": replace(PIPE, registers=(*PIPE.registers, Register("spare", 0, (4,), "float32", 16))),
    "parameter `w0` has 2 credits: its readers would see stale weights": changed(PIPE, "w0", credits=2, initial=2),
    "register `w0` is updated in place and has 2 credits, 1 initial items": changed(PIPE, "w0", credits=2),
    "channel `solo` has one member, `F0`": changed(PIPE, "F0", channel="solo"),
    "channel `act0` goes from rank 0 to rank 1, its works say": worked(PIPE, "recv.act0", group=(1, 0)),
    "channel `act0`: `send.act0` moves 16 bytes, `recv.act0` 8": worked(PIPE, "recv.act0", nbytes=8.0),
    "channel `act0` joins send, send": worked(PIPE, "recv.act0", kind="send"),
    "channel `act0` joins actors of different clocks": changed(changed(PIPE, "recv.act0", clock="step"), "in1", clock="step"),
    r"the order of queue \(0, 'compute'\) names actor `G0`, which does not exist": with_order(PIPE, (0, "compute"), [("G0", 0)]),
    r"actor `F0` belongs to queue \(0, 'compute'\) and stands in the order of \(0, 'load'\)": with_order(PIPE, (0, "load"), [("F0", 0)]),
    "`load` fires 4 times a step, its order has microbatch 4": with_order(PIPE, (0, "load"), [("load", 4)]),
    "`load` microbatch 0 stands twice in the order": with_order(PIPE, (0, "load"), [("load", 0), ("load", 0)]),
    r"`load` microbatch 3 is missing in the order of queue \(0, 'load'\)": with_order(PIPE, (0, "load"), [("load", i) for i in range(3)]),
}


@pytest.mark.parametrize("sentence", ILL_FORMED)
def test_ill_formed_programs_are_refused_by_name(sentence):
    with pytest.raises(ProgramError, match=sentence) as caught:
        ILL_FORMED[sentence].check()
    assert not isinstance(caught.value, Deadlock)


def test_stale_weights_are_legal_when_asked_for():
    two = changed(changed(PIPE, "w0", credits=2, initial=2), "w1", credits=2, initial=2)
    replace(two, meta={"stale_weights": True}).check()


def collectives(second: tuple[str, ...] = ("norm", "grad")) -> Program:
    """Two ranks that reduce `norm`, then `grad`, on one queue each; `second` is the order on rank 1."""
    b = Builder(1)
    for rank, sequence in ((0, ("norm", "grad")), (1, second)):
        for name in sequence:
            b.register(f"{name}.in{rank}", rank, "step")
            b.register(f"{name}.out{rank}", rank, "step")
        for name in ("norm", "grad"):
            b.actor(f"make.{name}{rank}", rank, "compute", writes=(f"{name}.in{rank}",), clock="step")
        for name in sequence:
            work = Work("collective", "all_reduce", "float32", nbytes=16.0, group=(0, 1), attrs={"reduce": "sum"})
            b.actor(f"sum.{name}{rank}", rank, "comm.dp", (f"{name}.in{rank}",), (f"{name}.out{rank}",), clock="step", channel=name, work=work)
    return b.build("collectives")


def test_a_reordered_collective_is_named():
    collectives().check()
    sentence = (
        r"collectives are not in the same order on both sides: as number 0 rank 0 \(comm.dp\) comes to `sum.norm0` microbatch 0 on channel `norm`, "
        r"rank 1 \(comm.dp\) comes to `sum.grad1` microbatch 0 on channel `grad`"
    )
    with pytest.raises(Deadlock, match=sentence):
        collectives(("grad", "norm")).check()


def test_members_that_do_different_things_are_named():
    program = collectives()
    with pytest.raises(ProgramError, match=r"channel `norm` do not do the same: `sum.norm0`: collective all_reduce"):
        worked(program, "sum.norm1", op="all_gather").check()
    with pytest.raises(ProgramError, match=r"channel `norm` is a collective of group \(0, 2\), its members are on ranks \(0, 1\)"):
        worked(worked(program, "sum.norm1", group=(0, 2)), "sum.norm0", group=(0, 2)).check()


def test_two_members_on_one_rank_are_refused():
    b = Builder(1)
    for name in ("a", "b"):
        b.actor(name, 0, name, channel="c", work=Work("collective", "all_reduce", "float32", group=(0,)))
    with pytest.raises(ProgramError, match="channel `c` has two members on one rank"):
        b.build("twins").check()


def test_a_swapped_receive_is_named():
    order = list(PIPE.orders[1, "p2p.recv.F"])
    order[1], order[2] = order[2], order[1]
    sentence = (
        r"messages are not in the same order on both sides: as number 1 rank 0 \(p2p.send.F\) comes to `send.act0` microbatch 1 on channel `act0`, "
        r"rank 1 \(p2p.recv.F\) comes to `recv.act0` microbatch 2"
    )
    with pytest.raises(Deadlock, match=sentence):
        with_order(PIPE, (1, "p2p.recv.F"), order).check()


def test_a_missing_credit_is_named_with_the_cycle_and_the_raise():
    with pytest.raises(Deadlock) as caught:
        with_credits(pipeline(4, 8), {"stash1": 2}).check()
    told = str(caught.value).splitlines()
    assert told[0] == "program `1f1b-p4-m8` would stand still: these wait for each other"
    assert "  F1 microbatch 2 (rank 1, compute) waits: stash1 has no free credit (of 2)   <- freed by B1 microbatch 0" in told
    assert told[-1] == "  3 credits on stash1 would let this order run for ever"


def test_standing_behind_many_is_told_in_one_line():
    with pytest.raises(Deadlock) as caught:
        with_credits(pipeline(6, 24, "gpipe"), {"stash0": 3}).check()
    assert str(caught.value).splitlines()[1:-1] == [
        "  F0 microbatch 3 (rank 0, compute) waits: stash0 has no free credit (of 3)   <- freed by B0 microbatch 0",
        "  B0 microbatch 0 (rank 0, compute) waits: it stands behind F0 microbatch 3",
    ]


def test_orders_that_contradict_each_other_cannot_be_helped_by_credits():
    b = Builder(1)
    for name in ("x", "y"):
        b.register(name, 0)
    b.actor("use_x", 0, "a", ("x",))
    b.actor("make_y", 0, "a", writes=("y",))
    b.actor("use_y", 0, "b", ("y",))
    b.actor("make_x", 0, "b", writes=("x",))
    program = b.build("knot")
    with pytest.raises(Deadlock, match="no number of credits helps"):
        program.check()
    with pytest.raises(Deadlock, match="with any number of credits"):
        sufficient_credits(program)


def test_an_update_that_precedes_its_readers_is_named():
    order = PIPE.orders[0, "compute"]
    with pytest.raises(Deadlock, match=r"opt0 .* waits: w0 is still to be read"):
        with_order(changed(PIPE, "opt0", reads=()), (0, "compute"), [*order[-1:], *order[:-1]]).check()


def test_credits_of_two_registers_at_once_are_offered_as_a_set():
    program = with_credits(pipeline(4, 8), {"stash0": 3, "stash1": 2})
    with pytest.raises(Deadlock, match=r"others remain[\s\S]*these suffice for this order: stash0 4, stash1 3"):
        program.check()


def test_an_empty_program_and_an_empty_queue_are_legal():
    Program("empty", 1, (), (), {}).check()
    Program("idle", 1, (Actor("a", 0, "q", "step", Work("compute", "scale", "float32")),), (), {(0, "q"): (("a", 0),), (0, "r"): ()}).check()

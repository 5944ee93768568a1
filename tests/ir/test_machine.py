"""The Machine on small programs made by hand: modes of access, channels, steps, errors and the story it tells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.errors import ProgramError
from ir.machine import Action, Arrival, Machine
from ir.work import Work
from tests.programs import Builder, pipeline, with_credits
from tests.token_game import TokenGame


def names(machine: Machine, actions: list[Action]) -> list[str]:
    return [f"{machine.actors[a.actor].name}.{a.microbatch}@{a.step}" for a in actions]


def run_all(machine: Machine) -> list[str]:
    """Plays first in, first out until nothing can start."""
    ready, fired = list(machine.startable), []
    while ready:
        fired.append(machine.start(ready.pop(0)))
        ready += machine.finish(fired[-1])
    return names(machine, fired)


def two_readers(credits: int = 1) -> Builder:
    b = Builder(3)
    b.register("x", 0, credits=credits)
    b.actor("make", 0, "load", writes=("x",))
    b.actor("left", 0, "a", ("x",))
    b.actor("right", 0, "b", ("x", "x"))
    return b


def test_a_slot_is_free_when_every_reader_has_released_it():
    machine = Machine(two_readers().build("two").check(), steps=1)
    load, a, b = (machine.queue_index[0, q] for q in ("load", "a", "b"))
    assert machine.startable == (load,)
    assert sorted(machine.finish(machine.start(load))) == sorted([a, b])
    assert machine.finish(machine.start(a)) == []
    assert not machine.can_start(load)
    assert machine.head(load) == Action(0, 0, 1)
    assert machine.finish(machine.start(b)) == [load]


def test_two_credits_let_the_writer_run_one_item_ahead():
    machine = Machine(two_readers(credits=2).build("two").check(), steps=1)
    load = machine.queue_index[0, "load"]
    machine.finish(machine.start(load))
    second = machine.start(load)
    assert machine.slot(second, "x") == 1
    machine.finish(second)
    assert not machine.can_start(load)
    assert "x has no free credit (of 2)" in machine.story()


def training(m: int = 2) -> Builder:
    """One rank: weights read every microbatch, a gradient that adds up, an update in place."""
    b = Builder(m)
    b.register("w", 0, "step", initial=1, memory="parameter")
    b.register("v", 0, "step", initial=1, memory="optimizer")
    b.register("dw", 0, "step", memory="gradient")
    b.register("loss", 0)
    b.actor("FB", 0, "compute", ("w",), ("dw", "loss"))
    b.actor("tell", 0, "store", ("loss",), work=Work("store", "loss", "float32"))
    b.actor("opt", 0, "update", ("dw",), (), ("w", "v"), clock="step", phase="U")
    return b


def test_a_parameter_with_one_credit_does_not_block_itself():
    machine = Machine(training().build("train").check(), steps=2)
    fired = run_all(machine)
    assert machine.done
    assert [f for f in fired if not f.startswith("tell")] == ["FB.0@0", "FB.1@0", "opt.0@0", "FB.0@1", "FB.1@1", "opt.0@1"]


def test_an_accumulator_is_published_by_the_last_firing_and_taken_by_the_first():
    machine = Machine(training(3).build("train").check(), steps=2)
    compute, update = machine.queue_index[0, "compute"], machine.queue_index[0, "update"]
    tell = machine.queue_index[0, "store"]
    for _ in range(3):
        assert not machine.can_start(update)
        machine.finish(machine.start(compute))
        machine.finish(machine.start(tell))
    assert machine.can_start(update)
    assert not machine.can_start(compute), "step 1 reads the weights that the update writes"
    machine.start(update)
    assert not machine.can_start(compute), "an update publishes when it finishes"


def test_stale_weights_let_the_next_step_begin_before_the_update():
    program = training(1).build("stale", stale_weights=True)
    program = replace(program, registers=tuple(replace(r, credits=2, initial=2) if r.initial else r for r in program.registers)).check()
    machine = Machine(program, steps=3)
    compute = machine.queue_index[0, "compute"]
    assert machine.slot(Action(0, 1, 0), "w") == 1
    machine.finish(machine.start(compute))
    machine.finish(machine.start(machine.queue_index[0, "store"]))
    update = machine.queue_index[0, "update"]
    action = machine.start(update)
    assert machine.slot(action, "w") == 0, "the update of step 0 makes version 2, in the slot of version 0"
    assert not machine.can_start(compute), "the only gradient slot is still being read"
    machine.finish(action)
    assert TokenGame(program, 3).play()


def test_what_is_written_meets_readers_as_many_steps_later_as_there_are_initial_items():
    b = Builder(1)
    b.register("scale", 0, "step", credits=2, initial=1)
    b.actor("use", 0, "compute", ("scale",), clock="step")
    b.actor("set", 0, "host", (), ("scale",), clock="step")
    machine = Machine(b.build("late").check(), steps=3)
    use, host = machine.queue_index[0, "compute"], machine.queue_index[0, "host"]
    assert machine.slot(machine.start(use), "scale") == 0
    assert machine.slot(machine.start(host), "scale") == 1, "into the second slot while the first is read"
    assert machine.finish(Action(1, 0, 0)) == []
    assert sorted(machine.finish(Action(0, 0, 0))) == sorted([use, host])
    assert machine.slot(machine.start(use), "scale") == 1


def test_a_constant_is_there_in_every_step():
    b = Builder(2)
    b.register("table", 0, "step", initial=1, memory="buffer")
    b.actor("use", 0, "compute", ("table",))
    machine = Machine(b.build("constant").check(), steps=4)
    assert len(run_all(machine)) == 8
    assert machine.slot(Action(0, 3, 1), "table") == 0


def test_a_register_nobody_reads_is_free_at_once():
    b = Builder(4)
    b.register("waste", 0)
    b.actor("make", 0, "compute", writes=("waste",))
    assert len(run_all(Machine(b.build("waste").check(), steps=2))) == 8


def test_slots_follow_the_order_in_which_the_writer_opens():
    b = Builder(4)
    b.register("x", 0, credits=2)
    b.actor("make", 0, "a", writes=("x",), fire=False)
    b.actor("use", 0, "b", ("x",), fire=False)
    for m in (0, 2, 1, 3):
        b.fire("make", m)
        b.fire("use", m)
    machine = Machine(b.build("permuted").check(), steps=2)
    assert [machine.slot(Action(0, 0, m), "x") for m in (0, 2, 1, 3)] == [0, 1, 0, 1]
    assert len(run_all(machine)) == 16


def test_members_become_startable_together_and_finish_by_themselves():
    b = Builder(1)
    for rank in (0, 1):
        b.register(f"x{rank}", rank)
        b.register(f"y{rank}", rank)
        b.actor(f"F{rank}", rank, "compute", writes=(f"x{rank}",))
        b.actor(f"sum{rank}", rank, "comm", (f"x{rank}",), (f"y{rank}",), channel="c", work=Work("collective", "all_reduce", "float32", group=(0, 1)))
        b.actor(f"G{rank}", rank, "after", (f"y{rank}",))
    machine = Machine(b.build("sum").check(), steps=1)
    q = machine.queue_index
    assert machine.finish(machine.start(q[0, "compute"])) == []
    assert sorted(machine.finish(machine.start(q[1, "compute"]))) == sorted([q[0, "comm"], q[1, "comm"]])
    first = machine.start(q[0, "comm"])
    assert machine.finish(first) == [q[0, "after"]], "rank 0 goes on although rank 1 has not even begun its part"
    assert machine.can_start(q[1, "comm"])


def test_a_part_sends_its_arrivals_and_waits_for_those_of_others():
    program = pipeline(2, 2).check()
    machine = Machine(program, steps=1, ranks={1})
    recv = machine.queue_index[1, "p2p.recv.F"]
    assert list(machine.outbox) == [Arrival("act0", 0, 0, 1)]
    assert not machine.can_start(recv)
    assert "no arrival from rank 0 on channel act0" in machine.story()
    assert machine.arrive("act0", 0, 0, 0) == [recv]
    with pytest.raises(ProgramError, match="arrival at `act0` microbatch 0 of step 0 from rank 1"):
        machine.arrive("act0", 0, 0, 1)


def test_run_ahead_is_bounded_by_steps_alone_when_nothing_holds_it_back():
    b = Builder(1)
    b.actor("tick", 0, "a")
    machine = Machine(b.build("tick").check())
    for step in range(5):
        assert machine.start(0) == Action(0, step, 0)
        assert machine.finish(Action(0, step, 0)) == [0]
    assert not machine.done
    assert Machine(b.build("tick"), steps=0).done


def test_misuse_is_refused_by_name():
    machine = Machine(two_readers().build("two").check(), steps=1)
    load, a = machine.queue_index[0, "load"], machine.queue_index[0, "a"]
    with pytest.raises(ProgramError, match=r"queue \(0, 'a'\) cannot start anything now; left microbatch 0 of step 0 \(rank 0, a\) is next"):
        machine.start(a)
    action = machine.start(load)
    with pytest.raises(ProgramError, match="cannot start anything now"):
        machine.start(load)
    with pytest.raises(ProgramError, match=r"left microbatch 0 of step 0 .* cannot finish: it does not run"):
        machine.finish(Action(1, 0, 0))
    machine.finish(action)
    with pytest.raises(ProgramError, match="cannot finish"):
        machine.finish(action)
    with pytest.raises(ProgramError, match="actor `make` does not use register `y`; it uses x"):
        machine.slot(action, "y")
    with pytest.raises(ProgramError, match="-1 steps"):
        Machine(machine.program, steps=-1)


def test_the_story_of_a_deadlock_is_its_cycle():
    program = with_credits(pipeline(4, 8), {"stash1": 2})
    machine = Machine(program, steps=1)
    run_all(machine)
    told = machine.story()
    assert "these wait for each other:" in told
    assert "F1 microbatch 2 (rank 1, compute) of step 0 waits: stash1 has no free credit (of 2)   <- freed by B1 microbatch 0" in told


def test_the_story_of_a_healthy_machine_says_who_runs():
    machine = Machine(pipeline(2, 2).check(), steps=1)
    machine.start(machine.queue_index[0, "load"])
    told = machine.story()
    assert "load microbatch 0 (rank 0, load) of step 0 runs" in told
    assert "F0 microbatch 0 (rank 0, compute) of step 0 waits: x has no item of microbatch 0   <- written by load microbatch 0" in told
    assert "wait for each other" not in told

"""The Machine and its proof against the token game, and the least credits of the classical orders."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from ir.errors import Deadlock
from ir.machine import Action, Arrival, Machine
from ir.program import Program
from ir.proof import sufficient_credits
from tests.programs import LEAST_STASH, ORDERS, Builder, pipeline, random_program, with_credits
from tests.token_game import TokenGame

SEEDS = range(800)
PIPELINES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 8)]


def is_live(program: Program) -> bool:
    try:
        program.check()
    except Deadlock:
        return False
    return True


def perform(machine: Machine, game: TokenGame | None = None, seed: int = 0) -> list[Action]:
    """Plays a machine in a random order until nothing runs and nothing can start; the game, if given, performs and judges every start and finish."""
    rng = random.Random(seed)
    ready, running, fired = list(machine.startable), list[Action](), list[Action]()
    while ready or running:
        if ready and (not running or rng.random() < 0.5):
            queue = ready.pop(rng.randrange(len(ready)))
            running.append(machine.start(queue))
            if game:
                game.start(machine.queues[queue])
        else:
            action = running.pop(rng.randrange(len(running)))
            if game:
                actor = machine.actors[action.actor]
                game.finish((actor.rank, actor.queue))
            fired.append(action)
            ready += machine.finish(action)
    return fired


def test_check_agrees_with_the_token_game():
    counts = {(crossed, live): 0 for crossed in (False, True) for live in (False, True)}
    for seed in SEEDS:
        program = random_program(seed)
        live = is_live(program)
        assert live == TokenGame(program, steps=3).play(), f"seed {seed}"
        counts[bool(program.channels), live] += 1
    assert all(n > 80 for n in counts.values()), f"the sample says little: (channels, live) {counts}"


@pytest.mark.parametrize("live", [True, False])
def test_machine_fires_what_the_game_allows_and_no_less(live):
    """Every start and finish is legal in the game; a live machine finishes, another stops where the game stops."""
    for seed in SEEDS[:: 2 if live else 3]:
        program = random_program(seed)
        if is_live(program) != live:
            continue
        machine, judge, alone = Machine(program, steps=3), TokenGame(program, steps=3), TokenGame(program, steps=3)
        fired = perform(machine, judge, seed)
        assert machine.done == live == alone.play()
        assert {(program.actors[a].name, k, m) for a, k, m in fired} == set(alone.fired)
        assert ("wait for each other" in machine.story()) == (not live), machine.story()


def test_slots_are_those_of_the_game():
    for seed in SEEDS[::5]:
        program = random_program(seed)
        machine, game = Machine(program, steps=3), TokenGame(program, steps=3)
        for action in perform(machine):
            actor = machine.actors[action.actor]
            for name in (*actor.reads, *actor.writes, *actor.updates):
                number = game.number(name, actor, action.step, action.microbatch) if name in game.writer else 0
                assert machine.slot(action, name) == number % program.register[name].credits


def join(program: Program, steps: int, seed: int, has_latency: bool = False) -> list[tuple[str, int, int]]:
    """Plays one machine for each rank, in random order; the game judges the joint sequence. Arrivals reach the other ranks of the channel at once or, with
    latency, some time later and in any order."""
    rng = random.Random(seed)
    machines = {rank: Machine(program, steps, ranks={rank}) for rank in program.ranks}
    game = TokenGame(program, steps)
    ready = [(rank, q) for rank, machine in machines.items() for q in machine.startable]
    running: list[tuple[int, Action]] = []

    bus: list[tuple[int, Arrival]] = []

    def deliver() -> None:
        for sender in machines.values():
            while sender.outbox:
                arrival = sender.outbox.popleft()
                bus.extend((member.rank, arrival) for member in program.channels[arrival.channel] if member.rank != arrival.rank)
        while bus and (not has_latency or rng.random() < 0.4 or not (ready or running)):
            to, arrival = bus.pop(rng.randrange(len(bus)))
            ready.extend((to, q) for q in machines[to].arrive(*arrival))

    deliver()
    while ready or running:
        if ready and (not running or rng.random() < 0.5):
            rank, queue = ready.pop(rng.randrange(len(ready)))
            game.start(machines[rank].queues[queue])
            running.append((rank, machines[rank].start(queue)))
        else:
            rank, action = running.pop(rng.randrange(len(running)))
            actor = program.actors[action.actor]
            game.finish((actor.rank, actor.queue))
            ready.extend((rank, q) for q in machines[rank].finish(action))
        deliver()
    return game.fired


@pytest.mark.parametrize("has_latency", [False, True])
def test_split_by_rank_equals_the_global_machine(has_latency):
    """The same actions, in the same order on every queue, each of them legal for the whole: live programs and others."""
    for seed in SEEDS[1::2]:
        program = random_program(seed)
        whole = perform(Machine(program, steps=3), seed=seed)
        parts = join(program, 3, seed, has_latency)
        assert sorted(parts) == sorted((program.actors[a].name, k, m) for a, k, m in whole)
        for queue in program.orders:
            here = [(program.actors[a].name, k, m) for a, k, m in whole if (program.actors[a].rank, program.actors[a].queue) == queue]
            assert here == [f for f in parts if (program.actor[f[0]].rank, program.actor[f[0]].queue) == queue]


@pytest.mark.parametrize("schedule", ORDERS)
def test_frozen_orders_need_exactly_these_stash_credits(schedule):
    for p, m in PIPELINES:
        least = {f"stash{s}": LEAST_STASH[schedule](s, p, m) for s in range(p)}
        program = pipeline(p, m, schedule).check()
        found = sufficient_credits(program)
        assert {name: found[name] for name in least} == least
        for name, n in least.items():
            if n == 1:
                continue
            short = with_credits(program, {name: n - 1})
            with pytest.raises(Deadlock, match=rf"{name} has no free credit \(of {n - 1}\)[\s\S]*{n} credits on {name} would let this order run for ever"):
                short.check()
            assert not TokenGame(short, steps=2).play()


def test_sufficient_credits_suffice():
    helped = 0
    for seed in SEEDS:
        program = random_program(seed)
        try:
            enough = sufficient_credits(program)
        except Deadlock:
            plenty = {r.name: 50 for r in program.registers if not r.initial}
            assert not is_live(with_credits(program, plenty))
            continue
        helped += not is_live(program)
        generous = with_credits(program, enough).check()
        assert TokenGame(generous, steps=3).play()
    assert helped > 50


def test_the_advice_of_a_deadlock_helps():
    """Whoever follows the sentence gets a program that lives; where it says that no credits help, none do."""
    said = {"single": 0, "set": 0, "none": 0}
    for seed in SEEDS:
        program = random_program(seed)
        try:
            program.check()
        except Deadlock as error:
            told = str(error)
            single = re.search(r"(\d+) credits on (\w+) would let this order run for ever", told)
            several = re.search(r"these suffice for this order: (.*)", told)
            if single:
                said["single"] += 1
                with_credits(program, {single[2]: int(single[1])}).check()
                assert not is_live(with_credits(program, {single[2]: int(single[1]) - 1})), "one less would do"
            elif several:
                said["set"] += 1
                with_credits(program, {name: int(n) for name, n in (pair.split() for pair in several[1].split(", "))}).check()
            elif "no number of credits helps" in told:
                said["none"] += 1
                with pytest.raises(Deadlock):
                    with_credits(program, {r.name: 50 for r in program.registers if not r.initial}).check()
    assert min(said.values()) > 10, said


def test_each_wait_of_a_cycle_leads_to_the_next():
    """Whoever a line says would end the wait is who waits in the next line; the last leads to the first."""
    partners = 0
    for seed in SEEDS:
        try:
            random_program(seed).check()
        except Deadlock as error:
            lines = [line.strip() for line in str(error).splitlines() if " waits: " in line]
            for line, after in zip(lines, [*lines[1:], *lines[:1]], strict=True):
                reason = line.split(" waits: ")[1]
                held_by = re.search(r"(?:(?:written|freed|read) by|stands behind|its partner) (a\d+(?: microbatch \d+)?)", reason)
                assert held_by, line
                assert re.match(rf"{held_by[1]} \(", after), (line, after)
                partners += "its partner" in reason
    assert partners > 20


def test_order_of_declaration_does_not_matter():
    """A program whose actors, registers and queues are listed in another order is proved and performed alike."""
    for seed in SEEDS[:100]:
        program = random_program(seed)
        other = replace(program, actors=program.actors[::-1], registers=program.registers[::-1], orders=dict(reversed(program.orders.items())))
        assert is_live(program) == is_live(other)
        ours, theirs = perform(Machine(program, 2)), perform(Machine(other, 2), seed=1)
        assert sorted((program.actors[a].name, k, m) for a, k, m in ours) == sorted((other.actors[a].name, k, m) for a, k, m in theirs)


def test_waits_for_names_all_that_another_queue_must_finish_first():
    """Played with each action finished at its very start, an order of real completions that respects queues and `waits_for` is legal in the game.

    The completions are drawn at random afterwards, as streams of a device would deliver them.
    """
    for seed in SEEDS[::4]:
        program = random_program(seed)
        if not is_live(program) or program.channels:
            continue
        machine, game, rng = Machine(program, steps=3), TokenGame(program, steps=3), random.Random(seed)
        issued: dict[int, list[Action]] = {q: [] for q in range(len(machine.queues))}
        ready = list(machine.startable)
        while ready:
            queue = ready.pop()
            action = machine.start(queue)
            issued[queue].append(action)
            ready += machine.finish(action)
        finished: set[Action] = set()
        while any(issued.values()):
            free = [q for q, actions in issued.items() if actions and finished.issuperset(machine.waits_for(actions[0]))]
            queue = rng.choice(free)
            game.start(machine.queues[queue])
            game.finish(machine.queues[queue])
            finished.add(issued[queue].pop(0))
        assert machine.done


def two_writers(seed: int) -> Program:
    """Two actors of one queue add to one gradient, each its own share of the microbatches in any order; the optimizer may lack a credit."""
    rng, m = random.Random(seed), 3
    b = Builder(m)
    b.register("w", 0, "step", initial=1)
    b.register("g", 0, "step")
    b.register("x", 0, credits=rng.randint(1, 3))
    b.actor("make", 0, "other" if seed % 2 else "compute", ("w",), ("x",), fire=False)
    b.actor("one", 0, "compute", ("x",), ("g",), fire=False)
    b.actor("two", 0, "compute", ("x",), ("g",), fire=False)
    b.actor("opt", 0, "compute" if seed % 3 else "late", ("g",), (), ("w",), clock="step", fire=False)
    firings = [(name, i) for name in ("make", "one", "two") for i in range(m)]
    rng.shuffle(firings)
    for name, i in [*sorted(firings, key=lambda f: f[1] + rng.random()), ("opt", 0)]:
        b.fire(name, i)
    return b.build("two-writers")


def test_several_writers_of_a_gradient_are_what_the_token_game_says() -> None:
    live = 0
    for seed in range(120):
        program = two_writers(seed)
        assert is_live(program) == TokenGame(program, steps=3).play(), f"seed {seed}"
        if is_live(program):
            live += 1
            assert len(perform(Machine(program, steps=3), TokenGame(program, steps=3), seed)) == 3 * 10
    assert 20 < live < 100

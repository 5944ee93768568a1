"""Runs of hand-written Programs against the same sums done by numpy at once; repeat, resume, failure, interrupt, deadlock."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import replace

import numpy as np
import pytest

from executor import checkpoint
from executor.data import ArrayData
from executor.train import learning_rate, run
from executor.verify import compare, relative, seen
from ir.errors import Deadlock, ExecutionError, InputError, ProgramError
from ir.program import Program
from ir.random import initial
from tests.executor.programs import FACTOR, LR, MLP, pipeline

STEPS = 5
X = np.random.default_rng(0).standard_normal((STEPS, MLP["batch"], MLP["k"]))
DATA = ArrayData({"x": X})


def by_numpy(optimizer: str, steps: int = STEPS, rates: tuple[float, ...] = (LR,) * STEPS):
    """(losses, state by tensor name) of the perceptron of `programs.pipeline`, the whole batch at once on one device."""
    shapes = {"w0": (MLP["k"], MLP["n"]), "w1": (MLP["n"], MLP["m"])}
    state = {n: initial({"init": "normal", "std": 0.3}, s, tuple((0, x) for x in s), "float64", 1, n) for n, s in shapes.items()}
    for n, s in shapes.items():
        state[f"{n}@m"], state[f"{n}@v"] = np.zeros(s), np.zeros(s)
    losses = []
    for step in range(steps):
        x, h = X[step], X[step] @ state["w0"]
        t = np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))
        a = h * (1 + t) / 2
        losses.append(FACTOR * np.sum(a @ state["w1"]))
        dy = np.full((MLP["batch"], MLP["m"]), FACTOR)
        slope = (1 + t) / 2 + h * (1 - t * t) / 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * h * h)
        state["d.w1"], state["d.w0"] = a.T @ dy, x.T @ (dy @ state["w1"].T * slope)
        for n in shapes:
            _update(state, n, step, optimizer, rates[step])
    return losses, state


def _update(state, n, step, optimizer, lr):
    g, w, m, v = (state[k] for k in (f"d.{n}", n, f"{n}@m", f"{n}@v"))
    if optimizer == "sgd":
        state[f"{n}@m"] = 0.9 * m + g + 0.1 * w
        state[n] = w - lr * state[f"{n}@m"]
        return
    state[f"{n}@m"], state[f"{n}@v"] = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    hat_m, hat_v = state[f"{n}@m"] / (1 - 0.9 ** (step + 1)), state[f"{n}@v"] / (1 - 0.99 ** (step + 1))
    state[n] = w * (1 - lr * 0.1) - lr * hat_m / (np.sqrt(hat_v) + 1e-8)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("num_microbatches", "dp"), [(1, 2), (4, 2), (2, 4), (8, 2)])
def test_any_split_equals_one_device(num_microbatches, dp, optimizer):
    done = run(pipeline(num_microbatches, dp, optimizer), data=DATA, steps=STEPS, seed=1)
    losses, state = by_numpy(optimizer)
    assert relative(np.array(done.loss), np.array(losses)) < 1e-12
    for name in done.tensors:
        assert relative(done.tensor(name), state[name]) < 1e-12, name


def test_a_run_repeats_bit_by_bit():
    one, two = (run(pipeline(), data=DATA, steps=STEPS, seed=1) for _ in range(2))
    assert one.loss == two.loss
    for name in one.tensors:
        assert np.array_equal(one.tensor(name), two.tensor(name))
    assert compare(seen(one), seen(two))["grad_max_rel"] == 0.0


def test_steps_run_ahead_of_each_other():
    """A microbatch of step 1 is loaded before the last update of step 0 is done: credits bound the run-ahead, not the step."""
    done = run(pipeline(), data=DATA, steps=2, seed=1)
    order = {(s.actor, s.step, s.microbatch): s for s in done.timeline.spans}
    assert order["load0", 1, 0].start_s < order["step.w0.0", 0, 0].end_s


def test_the_timeline_holds_every_firing_in_the_frozen_order():
    program = pipeline()
    done = run(program, data=DATA, steps=3, seed=1)
    for (rank, queue), order in program.orders.items():
        spans = [s for s in done.timeline.spans if (s.rank, s.queue) == (rank, queue)]
        assert [(s.actor, s.step, s.microbatch) for s in spans] == [(a, step, m) for step in range(3) for a, m in order]
        assert all(s.issued_s <= s.start_s <= s.end_s for s in spans)
        assert all(a.end_s <= b.issued_s for a, b in itertools.pairwise(spans))
    for members in program.channels.values():
        ends = [{(s.step, s.microbatch): s.end_s for s in done.timeline.spans if s.actor == a.name} for a in members]
        assert all(e == ends[0] for e in ends)


def test_the_null_backend_performs_the_same_order():
    program = pipeline()
    done = run(program, steps=2, backend="null")
    for (rank, queue), order in program.orders.items():
        spans = [(s.actor, s.microbatch) for s in done.timeline.spans if (s.rank, s.queue) == (rank, queue)]
        assert spans == list(order) * 2
    assert done.loss == []


def test_messages_are_counted():
    done = run(pipeline(4, 2), data=DATA, steps=2, seed=1)
    assert (done.messages["collectives"], done.messages["p2p"]) == (2 * 3, 2 * 4 * 4)
    assert 0.0 <= done.overlap <= 1.0
    assert done.step_s > 0


def test_registers_of_an_arena_share_memory():
    done = run(pipeline(), data=DATA, steps=1, seed=1)
    (y,), (dy,) = done.buffers.slots["y0"], done.buffers.slots["dy0"]
    assert np.shares_memory(y, dy)
    assert not any(np.shares_memory(y, done.buffers.slots[other][0]) for other in ("y1", "in0", "da0"))


def test_given_weights_replace_the_drawn_ones():
    w1 = np.ones((MLP["n"], MLP["m"]))
    drawn = run(pipeline(), data=DATA, steps=1, seed=1)
    given = run(pipeline(), data=DATA, steps=1, seed=1, initial={"w1": w1})
    assert np.array_equal(drawn.tensor("d.w1"), given.tensor("d.w1"))
    assert not np.array_equal(drawn.tensor("d.w0"), given.tensor("d.w0"))
    with pytest.raises(ProgramError, match=r"`w1` was given with shape \(3, 3\)"):
        run(pipeline(), data=DATA, steps=1, initial={"w1": np.ones((3, 3))})


def test_stale_weights_are_renewed_from_the_newest():
    """Two credits for w1: step k computes with the weights that step k - 2 left, its update goes on from those of step k - 1."""
    program = pipeline(optimizer="sgd")
    registers = tuple(replace(r, credits=2, initial=2) if r.tensor == "w1" else r for r in program.registers)
    done = run(replace(program, registers=registers, meta={**program.meta, "stale_weights": True}), data=DATA, steps=3, seed=1)
    w1 = [run(program, data=DATA, steps=1, seed=1, lr=1e-300).tensor("w1")] * 2
    gradients, moment = [], np.zeros_like(w1[0])
    for step in range(3):
        replay = run(program, data=ArrayData({"x": X[step:]}), steps=1, seed=1, initial={"w0": done_w0(program, registers, step), "w1": w1[step]})
        gradients.append(replay.tensor("d.w1"))
        moment = 0.9 * moment + gradients[step] + 0.1 * w1[-1]
        w1.append(w1[-1] - LR * moment)
    assert relative(done.tensor("w1"), w1[-1]) < 1e-12


def done_w0(program: Program, registers, steps: int) -> np.ndarray:
    """w0 after so many steps with a stale w1."""
    if not steps:
        return run(program, data=DATA, steps=1, seed=1, lr=1e-300).tensor("w0")
    stale = replace(program, registers=registers, meta={**program.meta, "stale_weights": True})
    return run(stale, data=DATA, steps=steps, seed=1).tensor("w0")


def test_warmup_grows_the_rate():
    rates = (0.05, 0.1, 0.1, 0.1, 0.1)
    done = run(pipeline(), data=DATA, steps=STEPS, seed=1, lr=0.1, warmup=2)
    losses, _ = by_numpy("adamw", rates=rates)
    assert relative(np.array(done.loss), np.array(losses)) < 1e-12
    rate = learning_rate(pipeline(), None, 4)
    assert rate is not None
    assert [rate(k) for k in (0, 3, 9)] == [LR / 4, LR, LR]
    with pytest.raises(InputError, match="learning rate above 0"):
        learning_rate(pipeline(), 0.0, 0)


# ---- failures ----------------------------------------------------------------------------------------------------------------------------------------


def quiet() -> bool:
    """Whether every thread of a run has ended."""
    return not any(t.name.startswith("rank ") for t in threading.enumerate())


def test_a_failing_rank_stops_the_others_and_is_named():
    with pytest.raises(ExecutionError, match=r"rank 3, actor `da.1` .* step 0, microbatch 0 failed: .*; the other ranks were stopped") as caught:
        run(pipeline(fail="dy1"), data=DATA, steps=STEPS, seed=1)
    assert caught.value.__cause__ is not None
    assert quiet()


def test_missing_data_names_the_input():
    with pytest.raises(ExecutionError, match=r"actor `load0`.*the program loads an input `x`; there are ids"):
        run(pipeline(), data=ArrayData({"ids": X}), steps=1)
    assert quiet()


def crossed(program: Program) -> Program:
    """Stage 0 starts with a backward before it has done any forward."""
    order = program.orders[0, "compute"]
    back = next(i for i, (name, _) in enumerate(order) if name == "gelu.dx.0")
    return replace(program, orders={**program.orders, (0, "compute"): (order[back], *order[:back], *order[back + 1 :])})


def test_a_cycle_is_told_before_the_run_and_during_it():
    with pytest.raises(Deadlock, match=r"gelu\.dx\.0"):
        run(crossed(pipeline()), data=DATA, steps=1)
    with pytest.raises(Deadlock, match=r"gelu\.dx\.0"):
        run(crossed(pipeline()), data=DATA, steps=1, check=False, watchdog_s=5)
    assert quiet()


def test_an_interrupt_gives_what_was_done():
    seen = []

    def progress(step: int, steps: int, loss: float) -> None:
        seen.append(loss)
        if step == 3:
            raise KeyboardInterrupt

    data = ArrayData({"x": np.tile(X, (200, 1, 1))})
    done = run(pipeline(), data=data, steps=500, seed=1, progress=progress)
    assert done.interrupted
    assert done.loss[:3] == seen == run(pipeline(), data=data, steps=3, seed=1).loss
    assert len(done.loss) < 500
    assert {s.step for s in done.timeline.spans} >= {0, 1, 2}
    assert quiet()


# ---- checkpoints -------------------------------------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_under_another_plan_as_if_it_had_never_stopped(tmp_path):
    whole = run(pipeline(4, 2), data=DATA, steps=STEPS, seed=1)
    first = run(pipeline(2, 4), data=DATA, steps=2, seed=1)
    checkpoint.save(first, tmp_path, program="hand")
    state = checkpoint.load(tmp_path)
    assert (state.step, set(state.tensors), state.meta) == (2, {"w0", "w0@m", "w0@v", "w1", "w1@m", "w1@v"}, {"program": "hand"})
    second = run(pipeline(4, 2), data=DATA, steps=STEPS - 2, seed=99, initial=state.tensors, first_step=state.step)
    assert relative(np.array(first.loss + second.loss), np.array(whole.loss)) < 1e-12
    assert relative(second.tensor("w0"), whole.tensor("w0")) < 1e-12


def test_a_newer_checkpoint_replaces_the_older_and_a_damaged_one_is_named(tmp_path):
    for steps in (1, 2, 2):
        where = checkpoint.save(run(pipeline(), data=DATA, steps=steps, seed=1), tmp_path)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["manifest.json", where.name]
    assert checkpoint.load(tmp_path).step == 2
    (where / "w1.npy").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="incomplete or damaged"):
        checkpoint.load(tmp_path)
    with pytest.raises(InputError, match="holds no checkpoint"):
        checkpoint.load(tmp_path / "nowhere")


def test_a_writer_that_dies_leaves_the_state_before(tmp_path, monkeypatch):
    done = run(pipeline(), data=DATA, steps=1, seed=1)
    checkpoint.save(done, tmp_path)

    def broken(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.np, "save", broken)
        with pytest.raises(InputError, match=r"cannot write a checkpoint .* No space left"):
            checkpoint.save(run(pipeline(), data=DATA, steps=2, seed=1), tmp_path)
    state = checkpoint.load(tmp_path)
    assert state.step == 1
    assert np.array_equal(state.tensors["w0"], done.tensor("w0"))

"""Timelines: what a step takes, where its time goes, what lives, how two are compared, and how they are written."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ir.errors import InputError
from ir.intervals import common, covers, length, minus, union
from ir.program import Actor
from ir.timeline import Span, Timeline, diff, trace
from ir.work import Work
from tests.programs import Builder, pipeline
from tests.virtual import perform_timed

F_S, B_S = 1.0, 2.0


def durations(actor: Actor, microbatch: int) -> float:
    """Forward 1 s, backward 2 s, everything else free."""
    return {"F": F_S, "B": B_S}.get(actor.phase, 0.0) if actor.work.kind == "compute" else 0.0


def with_costs(hop_s: float = 0.0, update_s: float = 0.0, load_s: float = 0.0):
    def seconds(actor: Actor, microbatch: int) -> float:
        extra = {"send": hop_s, "recv": hop_s, "load": load_s}.get(actor.work.kind, update_s if actor.phase == "U" else 0.0)
        return extra or durations(actor, microbatch)

    return seconds


# ---- steps ---------------------------------------------------------------------------------------------------------------------------------------------


def spans_of(steps: dict[int, tuple[float, float]]) -> tuple[Span, ...]:
    return tuple(Span("F", k, 0, 0, "compute", a, a, b) for k, (a, b) in steps.items())


def test_a_step_takes_the_time_between_completions():
    slow_first = Timeline("measured", spans_of({0: (0, 5), 1: (5, 7), 2: (7, 9), 3: (9, 10.5), 4: (10.5, 12)}))
    assert slow_first.steady_steps == (3, 4)
    assert slow_first.window_s == (9, 12)
    assert slow_first.step_s == 1.5
    assert Timeline("measured", spans_of({0: (1, 5)})).step_s == 4
    assert Timeline("measured", spans_of({0: (1, 5), 1: (4, 6)})).step_s == 1


def test_a_step_that_was_cut_short_does_not_count():
    whole = [Span("F", k, m, 0, "compute", 0, 4.0 * k + 2 * m, 4.0 * k + 2 * m + 2) for k in range(3) for m in range(2)]
    timeline = Timeline("measured", (*whole, Span("F", 3, 0, 0, "compute", 12, 12, 99)))
    assert timeline.steps == (0, 1, 2)
    assert timeline.step_s == 4


def test_an_empty_timeline_is_refused():
    with pytest.raises(InputError, match="the measured timeline is empty"):
        _ = Timeline("measured", ()).step_s


# ---- where the time goes -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 4), (4, 8)])
def test_bubbles_are_those_of_the_closed_forms(schedule, p, m):
    """(p - 1)(F + B) of a step of (m + p - 1)(F + B); of it, warm-up and drain are what ranks wait before their first and after their last kernel."""
    program = pipeline(p, m, schedule, hop_credits=m)
    timeline = perform_timed(program, durations)
    assert timeline.step_s == pytest.approx((m + p - 1) * (F_S + B_S))
    parts = timeline.breakdown(program)
    assert parts == pytest.approx({"compute_s": m * 3.0, "bubble_s": (p - 1) * 3.0, "exposed_comm_s": 0.0, "optimizer_s": 0.0, "other_s": 0.0})
    assert timeline.bubble(program) == pytest.approx((p - 1) / (m + p - 1))
    half = (p - 1) / 2
    assert timeline.bubbles(program) == pytest.approx({"warm_up_s": half * F_S, "imbalance_s": half * (F_S + B_S), "drain_s": half * B_S})


def test_waiting_for_the_first_data_is_warm_up():
    """In the first step nobody has begun before: rank 0 loads for 5 s, the others wait, and none of it is drain."""
    program = pipeline(2, 2, hop_credits=2)
    timeline = perform_timed(program, with_costs(load_s=5.0))
    late = timeline.bubbles(program)
    assert late["drain_s"] == pytest.approx(B_S / 2)
    assert late["warm_up_s"] >= (5.0 + F_S) / 2


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_parts_sum_to_the_step(steps):
    program = pipeline(3, 4)
    timeline = perform_timed(program, with_costs(0.3, 0.7, 0.2), steps)
    parts = timeline.breakdown(program)
    assert sum(parts.values()) == pytest.approx(timeline.step_s)
    assert min(parts.values()) > 0 or steps > 1
    assert parts["compute_s"] == pytest.approx(12.0)
    assert parts["optimizer_s"] == pytest.approx(0.7)
    assert sum(timeline.bubbles(program).values()) == pytest.approx(parts["bubble_s"])


def reduced(slow: float) -> tuple[object, Timeline]:
    """Two ranks: a kernel (rank 1's takes `slow`), a collective of 1 s while rank 0 computes 0.25 s more, an update of 0.5 s."""
    b = Builder(1)
    for rank in (0, 1):
        for name in ("g", "sum"):
            b.register(f"{name}{rank}", rank, "step")
        b.register(f"w{rank}", rank, "step", initial=1, memory="parameter")
        b.actor(f"B{rank}", rank, "compute", (f"w{rank}",), (f"g{rank}",), clock="step", phase="B")
        work = Work("collective", "all_reduce", "float32", nbytes=16.0, group=(0, 1))
        b.actor(f"reduce{rank}", rank, "comm.dp", (f"g{rank}",), (f"sum{rank}",), clock="step", channel="c", work=work, phase="B")
        b.actor(f"more{rank}", rank, "compute", clock="step", phase="B")
        b.actor(f"opt{rank}", rank, "compute", (f"sum{rank}",), (), (f"w{rank}",), clock="step", phase="U")
    program = b.build("reduced").check()
    seconds = {"B0": 1.0, "B1": slow, "reduce0": 1.0, "reduce1": 1.0, "more0": 0.25, "more1": 0.25, "opt0": 0.5, "opt1": 0.5}
    return program, perform_timed(program, lambda actor, _: seconds[actor.name])


def test_communication_is_exposed_where_nothing_computes_and_waiting_is_not_communication():
    program, timeline = reduced(slow=3.0)
    assert timeline.step_s == pytest.approx(4.5)
    parts = timeline.breakdown(program)
    assert parts["exposed_comm_s"] == pytest.approx((1.0 + 0.75) / 2)  # rank 0 computed its 0.25 s while it waited for rank 1
    assert parts["bubble_s"] == pytest.approx((2.0 - 0.25) / 2)
    assert parts["optimizer_s"] == pytest.approx(0.5)
    classes = {c.name: c for c in timeline.by_class(program)}
    assert classes["all_reduce B"].busy_s == pytest.approx(2.0)
    assert classes["all_reduce B"].waiting_s == pytest.approx(2.0)
    assert classes["scale B"].busy_s == pytest.approx(4.5)
    assert classes["scale B"].num_firings == 4


def test_a_collective_that_waits_inside_its_kernel_is_split_alike():
    """A device that starts its part at once and spins until the others come: the transfer begins with the last start."""
    program, timeline = reduced(slow=3.0)
    spinning = replace(timeline, spans=tuple(s._replace(start_s=1.0) if s.actor == "reduce0" else s for s in timeline.spans))
    assert spinning.breakdown(program) == pytest.approx(timeline.breakdown(program))
    assert spinning.by_class(program) == timeline.by_class(program)


def test_a_kernel_that_could_run_and_is_not_started_is_other():
    program = pipeline(1, 2)
    timeline = perform_timed(program, durations)
    late = replace(timeline, spans=tuple(s._replace(start_s=s.start_s + 0.25) if s.actor in ("F0", "B0") else s for s in timeline.spans))
    parts = late.breakdown(program)
    assert parts == pytest.approx({"compute_s": 5.0, "other_s": 1.0, "bubble_s": 0.0, "exposed_comm_s": 0.0, "optimizer_s": 0.0})


def test_intervals_agree_with_a_grid():
    rng = np.random.default_rng(0)
    grid = np.arange(0, 40) + 0.5
    for _ in range(50):
        a, b = (union([tuple(sorted(map(float, rng.integers(0, 40, 2)))) for _ in range(rng.integers(0, 8))]) for _ in range(2))
        for made, wanted in ((minus(a, b), covers(a, grid) & ~covers(b, grid)), (common(a, b), covers(a, grid) & covers(b, grid))):
            assert (covers(made, grid) == wanted).all()
            assert length(made) == wanted.sum()
            assert (made[1:, 0] > made[:-1, 1]).all(), "disjoint, and joined where they touch"


# ---- memory --------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "serial"])
def test_live_memory_peaks_with_the_stash(schedule):
    p, m = 4, 6
    program = pipeline(p, m, schedule, hop_credits=m)
    least = {"1f1b": lambda s: p - s, "gpipe": lambda s: m, "serial": lambda s: 1}[schedule]
    for memory in perform_timed(program, durations, steps=2).live_memory(program):
        assert memory.by_class["saved"].max() == 16 * least(memory.rank)
        assert set(memory.by_class["parameter"][:-1]) == {16.0}
        assert memory.total[-1] == 0
        assert memory.peak_bytes == memory.total.max() == sum(memory.at_peak.values())
        at = np.searchsorted(memory.times_s, memory.peak_s)
        assert memory.total[at] == memory.peak_bytes


def test_live_memory_never_exceeds_what_is_allocated():
    program = pipeline(3, 5)
    timeline = perform_timed(program, with_costs(0.3, 0.7, 0.2), steps=3)
    for memory in timeline.live_memory(program):
        assert memory.peak_bytes <= sum(r.nbytes * r.credits for r in program.registers if r.rank == memory.rank)


def test_an_item_lives_until_its_last_reader_has_finished():
    b = Builder(1)
    b.register("x", 0)
    b.actor("make", 0, "load", writes=("x",))
    b.actor("quick", 0, "a", ("x",))
    b.actor("slow", 0, "b", ("x",))
    seconds = {"make": 1.0, "quick": 1.0, "slow": 4.0}
    program = b.build("two").check()
    (memory,) = perform_timed(program, lambda actor, _: seconds[actor.name]).live_memory(program)
    assert memory.times_s.tolist() == [0.0, 5.0]
    assert memory.total.tolist() == [16.0, 0.0]


def test_classes_are_of_one_step():
    program = pipeline(2, 3)
    one, five = (perform_timed(program, with_costs(0.1, 0.2), steps).by_class(program) for steps in (1, 5))
    assert {c.name: c.num_firings for c in five} == {c.name: c.num_firings for c in one}
    assert {c.name: c.busy_s for c in five} == pytest.approx({c.name: c.busy_s for c in one})
    assert five[0].name == "scale B"


# ---- predicted against measured -------------------------------------------------------------------------------------------------------------------------


def test_diff_joins_firings_and_finds_the_culprit():
    program = pipeline(2, 3)
    predicted = perform_timed(program, with_costs(0.1, 0.2), steps=2)

    def slower(actor: Actor, microbatch: int) -> float:
        return with_costs(0.1, 0.2)(actor, microbatch) * (1.5 if actor.name == "B1" else 1.0)

    measured = perform_timed(program, slower, steps=6, kind="measured")
    found = diff(predicted, measured, program)
    assert found.worst[0].name == "B1"
    assert found.worst[0].predicted_s == pytest.approx(6.0)
    assert found.worst[0].measured_s == pytest.approx(9.0)
    assert found.worst[0].ratio == pytest.approx(1.5)
    assert found.ranks[0].name == "rank 1"
    ratios = {r.name: r.ratio for r in found.classes}
    assert math.isnan(ratios.pop("tokens F")), "nothing was predicted for the load"
    assert ratios.pop("scale B") == pytest.approx(1.25)
    assert ratios == pytest.approx(dict.fromkeys(("scale F", "scale U", "send F", "recv F", "send B", "recv B"), 1.0))
    assert found.step.measured_s == pytest.approx(measured.step_s)
    assert found.breakdown["compute_s"] == pytest.approx((9.0, 10.5))
    assert (found.only_predicted, found.only_measured) == (0, 0)
    json.dumps(found.to_json(), allow_nan=False)


def test_diff_of_a_timeline_with_itself_is_flat():
    program = pipeline(3, 4)
    timeline = perform_timed(program, with_costs(0.1, 0.2, 0.1), steps=3)
    found = diff(timeline, replace(timeline, kind="measured"), program)
    assert all(r.ratio == pytest.approx(1.0) and r.error_s == pytest.approx(0.0) for r in (found.step, *found.classes, *found.ranks, *found.worst))


def test_timelines_of_other_programs_are_refused():
    program = pipeline(2, 3)
    timeline = perform_timed(program, durations)
    other = pipeline(3, 4)
    with pytest.raises(InputError, match=r"the predicted timeline has `send.act1` microbatch 0 on rank 1 .* which program `1f1b-p2-m3` has not"):
        perform_timed(other, durations).breakdown(program)
    with pytest.raises(InputError, match="the timelines are of different programs"):
        diff(timeline, replace(timeline, meta={"program": "another"}), program)
    with pytest.raises(InputError, match="no firing of program `1f1b-p2-m3` in common"):
        diff(timeline, Timeline("measured", tuple(s for s in timeline.spans if s.rank > 9)), program)


# ---- documents -----------------------------------------------------------------------------------------------------------------------------------------


def test_json_reads_back_equal():
    program = pipeline(2, 3)
    timeline = perform_timed(program, with_costs(0.1, 0.2), steps=2)
    again = Timeline.from_json(json.loads(timeline.dumps()))
    assert again == timeline
    assert again.dumps() == timeline.dumps()


def broken(**changes: object) -> dict[str, object]:
    return json.loads(perform_timed(pipeline(1, 1), durations).dumps()) | changes


def with_row(*row: object) -> dict[str, object]:
    return broken(spans=[list(row)])


BROKEN = [
    ([], "no timeline"),
    (broken(kind="plan"), "no timeline"),
    (broken(schema_version=9), "schema version 9"),
    (broken(timeline="dreamt"), "the timeline is `dreamt`; legal are predicted, measured"),
    ({k: v for k, v in broken().items() if k != "actors"}, "incomplete or damaged"),
    (broken(spans=3), "incomplete or damaged"),
    (with_row(0, 0, 0), "incomplete or damaged"),
    (with_row(99, 0, 0, 0, 0, 0.0, 0.0, 1.0), "incomplete or damaged"),
    (with_row(0, 0, 0, 0, 0, 0.0, "x", 1.0), "incomplete or damaged"),
    (with_row(0, -1, 0, 0, 0, 0.0, 0.0, 1.0), "span 0 of the timeline cannot be"),
    (with_row(0, 0, 0, 0, 0, 0.0, 2.0, 1.0), "the start not after the end"),
    (with_row(0, 0, 0, 0, 0, 0.0, float("nan"), 1.0), "times finite"),
    (broken(actors=[1, 2, 3, 4]), "incomplete or damaged"),
]


@pytest.mark.parametrize(("data", "sentence"), BROKEN)
def test_broken_documents_are_refused(data, sentence):
    with pytest.raises(InputError, match=sentence):
        Timeline.from_json(data)


def test_a_trace_has_a_process_a_rank_a_thread_a_queue_an_arrow_a_message():
    program = pipeline(2, 3)
    timeline = perform_timed(program, with_costs(0.1, 0.2), steps=2)
    events = json.loads(json.dumps(timeline.to_perfetto(program), allow_nan=False))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(timeline.spans)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(threads) == len(program.orders)
    assert all(threads[e["pid"], e["tid"]] == program.actor[e["name"]].queue for e in slices)
    assert sum(e["dur"] for e in slices) == pytest.approx(1e6 * sum(s.end_s - s.start_s for s in timeline.spans))
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 3 * 2
    for i, arrow in starts.items():
        assert {arrow["pid"], ends[i]["pid"]} == {0, 1}
        for end in (arrow, ends[i]):
            assert any(e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in slices if (e["pid"], e["tid"]) == (end["pid"], end["tid"]))
    assert {e["name"] for e in events if e["ph"] == "C"} == {"live bytes"}


def test_two_timelines_share_a_trace():
    program = pipeline(2, 3)
    predicted, measured = perform_timed(program, durations), perform_timed(program, with_costs(0.1), kind="measured")
    later = replace(measured, spans=tuple(s._replace(issued_s=s.issued_s + 50, start_s=s.start_s + 50, end_s=s.end_s + 50) for s in measured.spans))
    events = trace((predicted, later), program)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "predicted rank 0", 1: "predicted rank 1", 2: "measured rank 0", 3: "measured rank 1"}
    assert {min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in (0, 2)} == {0.0}
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2 * 2 * 3
    bare = trace((predicted,))["traceEvents"]
    assert {e["ph"] for e in bare} == {"M", "X"}

"""The figures, from small values made by hand: what is drawn where, how high, and in which words."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headrace.layouts import describe
from ir.program import Actor, Program
from ir.timeline import Span
from ir.units import GIB
from ir.work import Work
from ui import charts
from ui.bars import KINDS


def span(actor: str, start_s: float, end_s: float, rank: int = 0, queue: str = "compute", microbatch: int = 0, step: int = 0) -> Span:
    return Span(actor, step, microbatch, rank, queue, start_s, start_s, end_s)


KIND_OF = {"f": "F", "i": "I", "w": "W", "u": "U", "ar": "collective"}
STEP = (
    span("f", 10.0, 10.2),
    span("i", 10.2, 10.6),
    span("u", 10.6, 10.7),
    span("ar", 10.4, 10.5, queue="comm.dp"),
    span("f", 10.1, 10.4, rank=1),
    span("f", 11.0, 11.3, step=1),
)


def named(figure, name):
    (found,) = [trace for trace in figure.data if trace.name == name]
    return found


def test_timeline_has_a_row_a_queue_compute_first_and_starts_at_zero():
    figure = charts.timeline({"predicted": STEP}, KIND_OF, step=0)
    assert list(figure.layout.yaxis.categoryarray) == ["rank 0 · compute", "rank 0 · comm.dp", "rank 1 · compute"]
    forward = named(figure, "forward")
    assert list(forward.y) == ["rank 0 · compute", "rank 1 · compute"]
    assert list(forward.base) == pytest.approx([0.0, 100.0])
    assert list(forward.x) == pytest.approx([200.0, 300.0])
    assert figure.layout.xaxis.title.text == "time [ms]"
    assert list(figure.layout.xaxis.range) == pytest.approx([0.0, 700.0])
    assert list(named(figure, "collective").y) == ["rank 0 · comm.dp"]
    assert [trace.name for trace in figure.data] == ["forward", "input gradient", "update", "collective"]


def test_timeline_draws_the_chosen_step_ranks_and_window():
    assert list(named(charts.timeline({"": STEP}, KIND_OF, step=1), "forward").x) == pytest.approx([300.0])
    assert list(charts.timeline({"": STEP}, KIND_OF, ranks=[1]).layout.yaxis.categoryarray) == ["rank 1 · compute"]
    window = charts.timeline({"": STEP}, KIND_OF, step=0, window=(0.9, 1.0))
    assert [trace.name for trace in window.data] == ["update"]
    assert list(window.layout.xaxis.range) == pytest.approx([630.0, 700.0])


def test_input_that_is_loaded_ahead_does_not_begin_the_step():
    early = [span("load", 1.0, 1.1), span("load", 10.3, 10.4, queue="load"), *STEP]
    figure = charts.timeline({"": early}, KIND_OF | {"load": "io"}, step=0)
    assert list(named(figure, "forward").base) == pytest.approx([0.0, 100.0])
    assert list(named(figure, "input and output").base) == pytest.approx([300.0])


def test_two_lanes_lie_under_each_other_and_both_start_at_zero():
    later = tuple(s._replace(start_s=s.start_s + 5, end_s=s.end_s + 5) for s in STEP)
    figure = charts.timeline({"predicted": STEP, "measured": later}, KIND_OF, step=0, ranks=[0])
    assert list(figure.layout.yaxis.categoryarray)[:2] == ["rank 0 · compute · predicted", "rank 0 · compute · measured"]
    assert list(named(figure, "forward").base) == pytest.approx([0.0, 0.0])


def test_a_bar_of_two_kinds_is_split_in_height_by_busy_share_and_idle_time_is_empty():
    narrow = [span("iw"[n % 2], n * 1e-4, n * 1e-4 + (2e-5 if n % 2 else 4e-5)) for n in range(100)]
    figure = charts.timeline({"": [*narrow, span("u", 0.01, 1.0)]}, KIND_OF)
    inputs, weights = named(figure, "input gradient"), named(figure, "weight gradient")
    assert len(inputs.y) == len(weights.y) == 1
    assert inputs.width[0] / weights.width[0] == pytest.approx(2.0)
    assert inputs.width[0] + weights.width[0] < 0.4 * charts.ROW
    assert inputs.offset[0] + inputs.width[0] == pytest.approx(weights.offset[0])
    assert weights.offset[0] + weights.width[0] == pytest.approx(charts.ROW / 2), "bars stand on the floor of their row"


def test_a_row_on_which_nothing_can_be_seen_is_left_out():
    figure = charts.timeline({"": [*STEP, span("ar", 10.3, 10.3, queue="comm.tp")]}, KIND_OF, step=0)
    assert list(figure.layout.yaxis.categoryarray) == ["rank 0 · compute", "rank 0 · comm.dp", "rank 1 · compute"]
    assert list(named(figure, "collective").y) == ["rank 0 · comm.dp"]
    short = [span("ar", 10.1 + n / 10, 10.1002 + n / 10, queue="comm.tp") for n in range(3)]
    assert "rank 0 · comm.tp" in charts.timeline({"": [*STEP, *short]}, KIND_OF, step=0).layout.yaxis.categoryarray


def test_microbatch_numbers_stand_on_wide_bars_only():
    spans = [span("f", 0.0, 0.001, microbatch=3), span("f", 0.5, 1.0, microbatch=7)]
    assert list(named(charts.timeline({"": spans}, KIND_OF), "forward").text) == ["", "7"]


def test_an_actor_of_no_known_kind_is_an_error():
    with pytest.raises(KeyError, match="nobody"):
        charts.timeline({"": [span("nobody", 0.0, 1.0)]}, KIND_OF)


def test_an_empty_timeline_is_a_figure():
    assert len(charts.timeline({"predicted": ()}, {}).data) == 0


def test_kinds_of_a_program():
    works = {"c": "collective", "s": "send", "r": "recv", "l": "load", "o": "store"}
    actors = [Actor(name, 0, "q", "step", Work(kind, "x", "float32"), phase="I") for name, kind in works.items()]
    actors += [Actor(phase, 0, "q", "step", Work("compute", "x", "float32"), phase=phase) for phase in "FIWU"]
    found = charts.kinds(Program("p", 1, tuple(actors), (), {}))
    assert found == {"c": "collective", "s": "p2p", "r": "p2p", "l": "io", "o": "io", "F": "F", "I": "I", "W": "W", "U": "U"}


def test_memory_stacks_classes_merges_equal_ranks_and_draws_the_capacity():
    held = {"parameter": 10 * GIB, "saved": 20 * GIB}
    figure = charts.memory({0: held, 1: held, 2: {**held, "logits": 5 * GIB}, 3: held}, 40 * GIB)
    assert [trace.name for trace in figure.data[:-1]] == ["parameter", "saved", "logits"]
    assert list(figure.data[0].x) == ["0-1", "2", "3"]
    assert list(named(figure, "logits").y) == pytest.approx([0, 5, 0])
    assert list(figure.data[-1].y) == pytest.approx([30, 35, 30])
    assert list(figure.data[-1].text) == ["<b>30 GiB</b>", "<b>35 GiB</b>", "<b>30 GiB</b>"]
    assert figure.layout.shapes[0].y0 == pytest.approx(40)
    assert figure.layout.annotations[0].text == "usable: 40 GiB"
    assert figure.layout.yaxis.range[1] > 40
    assert figure.layout.yaxis.title.text == "memory [GiB]"


def test_a_capacity_far_above_is_named_and_not_drawn():
    figure = charts.memory({0: {"saved": 2.0**20}}, {0: 80 * GIB, 1: 40 * GIB})
    assert not figure.layout.shapes
    assert figure.layout.annotations[0].text == "usable: 40 GiB, far above these bars"
    assert figure.layout.yaxis.title.text == "memory [MiB]"


def test_breakdown_bars_sum_to_their_steps():
    steps = {"1. dp4": {"compute_s": 0.06, "exposed_comm_s": 0.04}, "2. pp4": {"compute_s": 0.06, "bubble_s": 0.14}}
    figure = charts.breakdown(steps)
    assert [trace.name for trace in figure.data] == ["compute", "exposed communication", "bubble"]
    assert np.sum([trace.x for trace in figure.data], axis=0) == pytest.approx([100, 200])
    assert list(figure.data[0].text) == ["60%", "30%"]
    assert figure.layout.xaxis.title.text == "time of one step [ms]"


PLAN = {"rank": 1, "step_s": 0.1, "peak_gib": 30.0, "fits": "yes", "mfu": 0.41, "bubble": 0.0, "layout": {"dp": 4, "tp": 2, "mbs": 1, "num_microbatches": 8}}


def test_ranked_plans_keep_their_order_and_say_what_does_not_fit():
    figure = charts.ranked_plans([PLAN, PLAN | {"rank": 2, "step_s": 0.2, "fits": "no"}, PLAN | {"rank": 3, "step_s": 0.4}])
    assert list(figure.layout.yaxis.categoryarray) == [f"{i}. {describe(PLAN['layout'])}" for i in (1, 2, 3)]
    assert list(named(figure, "fits").x) == pytest.approx([100, 400])
    assert list(named(figure, "does not fit").x) == pytest.approx([200])
    assert "MFU 41.0%" in named(figure, "fits").hovertext[0]


def test_busy_seconds_are_summed_by_kind_and_lane():
    assert charts.busy({"predicted": STEP, "measured": STEP[:3]}, KIND_OF, step=0) == {
        "F": pytest.approx((0.5, 0.2)),
        "I": pytest.approx((0.4, 0.4)),
        "U": pytest.approx((0.1, 0.1)),
        "collective": pytest.approx((0.1, 0.0)),
    }
    assert charts.busy({"predicted": STEP}, KIND_OF)["F"] == pytest.approx((0.8,))


def test_predicted_and_measured_stand_side_by_side_with_their_ratio():
    figure = charts.predicted_measured({"F": (0.3, 0.2), "U": (0.1, 0.0)})
    assert list(named(figure, "predicted").y) == pytest.approx([300, 100])
    assert list(named(figure, "measured").y) == pytest.approx([200, 0])
    assert list(figure.data[-1].text) == ["x1.50", "not measured"]
    assert list(figure.data[0].x) == ["forward", "update"]


@pytest.mark.parametrize(
    "figure",
    [
        charts.timeline({"predicted": STEP}, KIND_OF),
        charts.memory({0: {"saved": GIB}}, 40 * GIB),
        charts.breakdown({"a": {"compute_s": 1.0}}),
        charts.ranked_plans([PLAN]),
        charts.predicted_measured({"F": (1.0, 1.0)}),
    ],
)
def test_every_figure_has_a_title_units_and_survives_json(figure):
    assert figure.layout.title.text
    assert "[" in (figure.layout.xaxis.title.text or "") + (figure.layout.yaxis.title.text or "")
    assert figure.layout.height >= 200
    assert len(figure.to_json()) > 100


def lab(rgb: np.ndarray) -> np.ndarray:
    """Linear sRGB to CIE L*a*b* (D65)."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", ["KIND_COLOURS", "MEMORY_COLOURS", "BREAKDOWN_COLOURS", "FITS_COLOURS"])
def test_colours_can_be_told_apart(palette, vision):
    seen = {}
    for name, colour in getattr(charts, palette).items():
        encoded = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
        seen[name] = lab(np.clip(VISION[vision] @ linear, 0, 1))
    distances = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in itertools.combinations(seen, 2)}
    assert min(distances.values()) > 12, min(distances, key=distances.__getitem__)


def test_every_kind_has_a_colour_and_a_name():
    assert list(charts.KIND_COLOURS) == list(KINDS)

"""The figures: functions from headrace's values to Plotly figures, for the page and for notebooks alike.

Colours are those of Okabe and Ito ("Color Universal Design", 2008, https://jfly.uni-koeln.de/color/), which people with every kind of colour vision tell
apart, with two darker and two lighter tones beside them; a test measures the distances under simulated colour blindness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from headrace.layouts import describe
from ir.program import Actor, Program
from ir.timeline import Span
from ir.units import GIB, nbytes, seconds
from ui.bars import KINDS, PIXELS, Bar, merge

KIND_COLOURS = {
    "F": "#0072B2", "R": "#56B4E9", "I": "#E69F00", "W": "#009E73", "U": "#CC79A7", "collective": "#D55E00", "p2p": "#3B1F6B", "io": "#C4C4C4",
}  # fmt: skip
MEMORY_COLOURS = {
    "parameter": "#0072B2", "gradient": "#E69F00", "optimizer": "#009E73", "saved": "#56B4E9", "activation": "#CC79A7",
    "logits": "#D55E00", "buffer": "#3B1F6B", "input": "#C4C4C4", "framework": "#5B5B5B",
}  # fmt: skip
BREAKDOWN_COLOURS = {
    "compute_s": "#0072B2", "exposed_comm_s": "#D55E00", "bubble_s": "#D9D9D9", "optimizer_s": "#CC79A7", "other_s": "#7A7A7A",
}  # fmt: skip
BREAKDOWN_NAMES = {
    "compute_s": "compute", "exposed_comm_s": "exposed communication", "bubble_s": "bubble", "optimizer_s": "optimizer", "other_s": "other",
}  # fmt: skip
FITS_COLOURS = {"yes": "#0072B2", "tight": "#E69F00", "no": "#D55E00"}
FITS_NAMES = {"yes": "fits", "tight": "fits within the risk band", "no": "does not fit"}

INK = "#222222"
GRID = "#E6E6E6"
FONT = "Inter, 'Source Sans Pro', 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
ROW = 0.88
"""Height of a row's bars, of a row."""

OFF_SCALE = 0.15
"""Below this share of the capacity the fullest rank would be too flat to read, and the capacity line is named in words instead."""


def kinds(program: Program) -> dict[str, str]:
    """The kind (`ui.bars.KINDS`) of every actor of a program."""
    return {a.name: _kind(a) for a in program.actors}


def busy(lanes: Mapping[str, Iterable[Span]], kind_of: Mapping[str, str], *, step: int | None = None) -> dict[str, tuple[float, ...]]:
    """Seconds that all queues were busy, by kind, one figure a lane of `lanes`: what `predicted_measured` takes. `step`: of that step only."""
    found = {kind: [0.0] * len(lanes) for kind in KINDS}
    for i, spans in enumerate(lanes.values()):
        for span in spans:
            if step is None or span.step == step:
                found[kind_of[span.actor]][i] += span.end_s - span.start_s
    return {kind: tuple(times) for kind, times in found.items() if any(times)}


def timeline(
    lanes: Mapping[str, Iterable[Span]], kind_of: Mapping[str, str], *, title: str = "Timeline",
    step: int | None = None, ranks: Sequence[int] | None = None, window: tuple[float, float] = (0.0, 1.0),
) -> go.Figure:  # fmt: skip
    """When every queue of every rank is busy with what: one row a queue, time from left to right, the height of a bar the share of its time it was busy.

    `lanes` maps a name to spans, for instance {"predicted": ..., "measured": ...}: with two of them the rows of one queue lie under each other and the first
    work of both starts at zero. `step`, `ranks` and `window` (from and to, as shares of their time) choose what is drawn; a narrow window shows spans that
    the whole step merges. Rows whose bars together are too short to be seen are left out. Raises KeyError where `kind_of` lacks an actor.
    """
    chosen = {lane: [s for s in spans if (step is None or s.step == step) and (ranks is None or s.rank in ranks)] for lane, spans in lanes.items()}
    origin = {lane: _first_start_s(spans, kind_of) for lane, spans in chosen.items()}
    whole_s = max((s.end_s - origin[lane] for lane, spans in chosen.items() for s in spans), default=0.0)
    begin, end = window[0] * whole_s, window[1] * whole_s
    seen = {lane: [s for s in spans if s.end_s - origin[lane] >= begin and s.start_s - origin[lane] <= end] for lane, spans in chosen.items()}
    bars = [(lane, bar) for lane, spans in seen.items() for bar in merge(spans, kind_of.__getitem__, max_bars=6000 // len(lanes))]
    bars = _of_visible_rows(bars, (end - begin) / PIXELS)
    unit, scale = _time_unit(end)
    figure = go.Figure()
    for kind in KINDS:
        if any(kind == k for _, bar in bars for k, _ in bar.busy_s):
            figure.add_trace(_bars_of_kind(kind, bars, origin, scale, (end - begin) / 60, named=len(lanes) > 1))
    order = {lane: i for i, lane in enumerate(lanes)}
    rows = sorted({(bar.rank, bar.queue != "compute", bar.queue, order[lane], lane) for lane, bar in bars})
    labels = [_row_label(rank, queue, lane if len(lanes) > 1 else "") for rank, _, queue, _, lane in rows]
    figure.update_yaxes(categoryorder="array", categoryarray=labels, autorange="reversed", showgrid=False, ticklabelstandoff=6, tickmode="linear")
    figure.update_xaxes(range=[begin * scale, end * scale] if end > begin else [0, 1])
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 8, "mode": "hide"})
    return _dress(figure, title, f"time [{unit}]", "", height=150 + 26 * max(len(labels), 3), top=94)


def memory(by_rank: Mapping[int, Mapping[str, float]], usable_bytes: Mapping[int, float] | float | None = None, *, title: str = "Memory by rank") -> go.Figure:
    """Bytes by class of every rank, stacked, with the usable capacity as a line; neighbouring ranks that hold the same share one bar."""
    groups = _equal_ranks(by_rank)
    totals = [sum(held.values()) for _, held in groups]
    unit, scale = _byte_unit(max(totals, default=0.0))
    figure = go.Figure()
    for name in _ordered({name for _, held in groups for name in held}, MEMORY_COLOURS):
        values = [held.get(name, 0.0) for _, held in groups]
        hover = [f"{label}<br>{name}: {nbytes(v)} of {nbytes(t)}" for (label, _), v, t in zip(groups, values, totals, strict=True)]
        figure.add_bar(
            x=[label for label, _ in groups], y=[v * scale for v in values], name=name, marker={"color": MEMORY_COLOURS.get(name, INK), "line": _EDGE},
            hovertext=hover, hoverinfo="text",
        )  # fmt: skip
    _write_above(figure, [label for label, _ in groups], [t * scale for t in totals], [f"<b>{nbytes(t)}</b>" for t in totals])
    figure.update_layout(barmode="stack", bargap=_gap(len(groups)))
    figure.update_xaxes(type="category")
    _dress(figure, title, "rank", f"memory [{unit}]", height=420, top=94)
    if usable_bytes:
        _capacity_line(figure, _smallest(usable_bytes), max(totals, default=0.0), scale)
    return figure


def breakdown(steps: Mapping[str, Mapping[str, float]], *, title: str = "Where the step goes") -> go.Figure:
    """The seconds of a step by what they are spent on, one bar a name of `steps`; keys are those of `simulate`'s "breakdown", each bar sums to its step."""
    longest = max((sum(parts.values()) for parts in steps.values()), default=0.0)
    unit, scale = _time_unit(longest)
    figure = go.Figure()
    for key in _ordered({key for parts in steps.values() for key in parts}, BREAKDOWN_COLOURS):
        values = [parts.get(key, 0.0) for parts in steps.values()]
        shares = [v / sum(parts.values()) if sum(parts.values()) else 0.0 for v, parts in zip(values, steps.values(), strict=True)]
        name = BREAKDOWN_NAMES.get(key, key)
        figure.add_bar(
            y=list(steps), x=[v * scale for v in values], name=name, orientation="h", marker={"color": BREAKDOWN_COLOURS.get(key, INK), "line": _EDGE},
            text=[f"{share:.0%}" if share >= 0.04 else "" for share in shares], textposition="inside", insidetextanchor="middle", textangle=0,
            hovertext=[f"{label}<br>{name}: {seconds(v)}, {share:.1%}" for label, v, share in zip(steps, values, shares, strict=True)], hoverinfo="text",
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False, ticklabelstandoff=6)
    return _dress(figure, title, f"time of one step [{unit}]", "", height=160 + 44 * max(len(steps), 1))


def ranked_plans(plans: Sequence[Mapping[str, Any]], *, title: str = "Plans, fastest first") -> go.Figure:
    """Step time of ranked plans, coloured by whether they fit; entries have the keys of `plan`'s "plans" (rank, step_s, peak_gib, fits, layout, ...)."""
    unit, scale = _time_unit(max((p["step_s"] for p in plans), default=0.0))
    labels = [f"{p['rank']}. {describe(p['layout'])}" for p in plans]
    figure = go.Figure()
    for fits, colour in FITS_COLOURS.items():
        chosen = [(label, p) for label, p in zip(labels, plans, strict=True) if p["fits"] == fits]
        if not chosen:
            continue
        figure.add_bar(
            y=[label for label, _ in chosen], x=[p["step_s"] * scale for _, p in chosen], name=FITS_NAMES[fits], orientation="h",
            marker={"color": colour, "line": _EDGE}, text=[f"{seconds(p['step_s'])} · {p['peak_gib']:.3g} GiB" for _, p in chosen], textposition="auto",
            hovertext=[_plan_hover(label, p) for label, p in chosen], hoverinfo="text",
        )  # fmt: skip
    figure.update_layout(barmode="overlay", bargap=0.3, showlegend=True)
    figure.update_yaxes(categoryorder="array", categoryarray=labels, autorange="reversed", showgrid=False, ticklabelstandoff=6)
    return _dress(figure, title, f"predicted step time [{unit}]", "", height=162 + 38 * max(len(plans), 1))


def predicted_measured(rows: Mapping[str, tuple[float, ...]], *, title: str = "Predicted against measured") -> go.Figure:
    """Seconds of a step by class of work, predicted beside measured; `rows` maps a class to (predicted_s, measured_s). The ratio stands at each pair."""
    unit, scale = _time_unit(max((max(pair) for pair in rows.values()), default=0.0))
    names = [KINDS.get(name, name) for name in rows]
    figure = go.Figure()
    for i, (name, colour) in enumerate((("predicted", "#0072B2"), ("measured", "#E69F00"))):
        values = [pair[i] for pair in rows.values()]
        figure.add_bar(
            x=names, y=[v * scale for v in values], name=name, marker={"color": colour, "line": _EDGE},
            hovertext=[f"{label}: {name} {seconds(v)}" for label, v in zip(names, values, strict=True)], hoverinfo="text",
        )  # fmt: skip
    ratios = [f"x{predicted / measured:.2f}" if measured > 0 else "not measured" for predicted, measured in rows.values()]
    _write_above(figure, names, [max(pair) * scale for pair in rows.values()], ratios)
    figure.update_layout(barmode="group", bargap=_gap(len(rows)), bargroupgap=0.05)
    return _dress(figure, title, "class of work (x is predicted over measured)", f"busy time of one step [{unit}]", height=420)


_EDGE = {"color": "white", "width": 0.6}


def _kind(actor: Actor) -> str:
    if actor.work.kind == "collective":
        return "collective"
    if actor.work.kind in ("send", "recv"):
        return "p2p"
    if actor.work.kind in ("load", "store"):
        return "io"
    return actor.phase if actor.phase in KINDS else "F"


def _of_visible_rows(bars: Sequence[tuple[str, Bar]], shortest_s: float) -> list[tuple[str, Bar]]:
    taken_s: dict[tuple[str, int, str], float] = {}
    for lane, bar in bars:
        row = lane, bar.rank, bar.queue
        taken_s[row] = taken_s.get(row, 0.0) + bar.end_s - bar.start_s
    return [(lane, bar) for lane, bar in bars if taken_s[lane, bar.rank, bar.queue] >= shortest_s]


def _bars_of_kind(kind: str, bars: Sequence[tuple[str, Bar]], origin: Mapping[str, float], scale: float, wide_s: float, named: bool) -> go.Bar:
    """All bars of one colour; a bar of several kinds is split in height by their busy shares, the first kind on top."""
    y, base, x, width, offset, text, hover = [], [], [], [], [], [], []
    for lane, bar in bars:
        before, share = _shares(bar, kind)
        if not share:
            continue
        y.append(_row_label(bar.rank, bar.queue, lane if named else ""))
        base.append((bar.start_s - origin[lane]) * scale)
        x.append((bar.end_s - bar.start_s) * scale)
        width.append(ROW * share)
        offset.append(ROW * (before - 0.5))
        labelled = bar.microbatch >= 0 and bar.end_s - bar.start_s >= wide_s and kind in "FRIW" and share > 0.3
        text.append(str(bar.microbatch) if labelled else "")
        hover.append(_bar_hover(bar, origin[lane]))
    return go.Bar(
        y=y, base=base, x=x, width=width, offset=offset, orientation="h", name=KINDS[kind], marker={"color": KIND_COLOURS[kind], "line": {"width": 0}},
        text=text, textposition="inside", insidetextanchor="middle", textangle=0, constraintext="inside", hovertext=hover, hoverinfo="text",
    )  # fmt: skip


def _first_start_s(spans: Sequence[Span], kind_of: Mapping[str, str]) -> float:
    """Where a lane's time begins: input is loaded ahead, while the step before still runs, and does not count."""
    return min((s.start_s for s in spans if kind_of[s.actor] != "io"), default=min((s.start_s for s in spans), default=0.0))


def _shares(bar: Bar, kind: str) -> tuple[float, float]:
    """How much of the row's height lies above this kind, and how much it takes; idle time lies on top."""
    busy = sum(s for _, s in bar.busy_s)
    whole = max(busy, bar.end_s - bar.start_s)
    if whole <= 0:
        return 0.0, 1.0 if kind == bar.busy_s[0][0] else 0.0
    before = whole - busy
    for k, s in bar.busy_s:
        if k == kind:
            return before / whole, s / whole
        before += s
    return 0.0, 0.0


def _bar_hover(bar: Bar, origin_s: float) -> str:
    busy = ", ".join(f"{KINDS[kind]} {seconds(s)}" for kind, s in bar.busy_s)
    who = bar.first if bar.num == 1 else f"{bar.num} actors: {bar.first} … {bar.last}"
    batch = f"microbatch {bar.microbatch}, " if bar.microbatch >= 0 else ""
    return f"<b>{busy}</b><br>{batch}step {bar.step}, from {seconds(bar.start_s - origin_s)} to {seconds(bar.end_s - origin_s)}<br>{who}"


def _row_label(rank: int, queue: str, lane: str) -> str:
    return f"rank {rank} · {queue}" + (f" · {lane}" if lane else "")


def _plan_hover(label: str, plan: Mapping[str, Any]) -> str:
    facts = [f"step {seconds(plan['step_s'])}", f"peak {plan['peak_gib']:.3g} GiB, {FITS_NAMES[plan['fits']]}"]
    facts += [f"{plan['tokens_per_s_per_gpu']:,.0f} tokens/s per device"] if plan.get("tokens_per_s_per_gpu") else []
    facts += [f"MFU {plan['mfu']:.1%}"] if plan.get("mfu") else []
    facts += [f"bubble {plan['bubble']:.1%}"] if plan.get("bubble") is not None else []
    return f"<b>{label}</b><br>" + "<br>".join(facts)


def _equal_ranks(by_rank: Mapping[int, Mapping[str, float]]) -> list[tuple[str, Mapping[str, float]]]:
    """Runs of ranks that hold the same, by label: `0-3`."""
    runs: list[tuple[int, int, Mapping[str, float]]] = []
    for rank in sorted(by_rank):
        if runs and runs[-1][1] == rank - 1 and dict(runs[-1][2]) == dict(by_rank[rank]):
            runs[-1] = (runs[-1][0], rank, runs[-1][2])
        else:
            runs.append((rank, rank, by_rank[rank]))
    return [(str(first) if first == last else f"{first}-{last}", held) for first, last, held in runs]


def _smallest(usable_bytes: Mapping[int, float] | float) -> float:
    return min(usable_bytes.values()) if isinstance(usable_bytes, Mapping) else float(usable_bytes)


def _capacity_line(figure: go.Figure, usable: float, peak: float, scale: float) -> None:
    text = f"usable: {nbytes(usable)}"
    if peak < OFF_SCALE * usable:
        corner = {"xref": "paper", "yref": "paper", "x": 1, "y": 1, "xanchor": "right", "yanchor": "bottom"}
        figure.add_annotation(text=f"{text}, far above these bars", showarrow=False, yshift=28, font={"size": 12}, **corner)
        return
    figure.add_hline(y=usable * scale, line={"color": INK, "width": 1.5, "dash": "dash"}, annotation_text=text, annotation_position="top right")
    figure.update_yaxes(range=[0, max(usable, peak) * scale * 1.15])


def _write_above(figure: go.Figure, x: Sequence[str], y: Sequence[float], text: Sequence[str]) -> None:
    figure.add_scatter(x=list(x), y=list(y), text=list(text), mode="text", textposition="top center", showlegend=False, hoverinfo="skip", cliponaxis=False)


def _gap(num_bars: int) -> float:
    """Space between bars, so that one or two bars alone do not fill the figure."""
    return max(0.3, 1 - 0.13 * num_bars)


def _ordered(found: Iterable[str], order: Mapping[str, str]) -> list[str]:
    known = [name for name in order if name in set(found)]
    return known + sorted(set(found) - set(order))


def _time_unit(longest_s: float) -> tuple[str, float]:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if longest_s >= size:
            return unit, 1 / size
    return "µs", 1e6


def _byte_unit(most: float) -> tuple[str, float]:
    for unit, size in (("GiB", GIB), ("MiB", 2.0**20)):
        if most >= size:
            return unit, 1 / size
    return "KiB", 1 / 2.0**10


def _dress(figure: go.Figure, title: str, x: str, y: str, height: int, top: int = 78) -> go.Figure:
    figure.update_layout(
        title={"text": title, "x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 14}, "font": {"size": 17}},
        template="plotly_white", height=height,
        font={"family": FONT, "size": 13, "color": INK}, margin={"l": 10, "r": 20, "t": top, "b": 50},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "traceorder": "normal"}, hoverlabel={"align": "left"},
    )  # fmt: skip
    figure.update_xaxes(title=x, automargin=True, gridcolor=GRID, zeroline=False)
    figure.update_yaxes(title=y, automargin=True, gridcolor=GRID, zeroline=False)
    return figure

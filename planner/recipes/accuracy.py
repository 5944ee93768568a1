"""`docs/accuracy.md`: how well the bundled runs are foretold, what each term is worth, and every fitted number with what it was fitted on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.recipes.accuracy_classes import classes_part, three
from planner.recipes.accuracy_memory import memory_part
from planner.recipes.bill import Bill
from planner.recipes.estimate import Estimate, Priced, told
from planner.recipes.learn import errors, parts_of
from planner.recipes.release import releases
from planner.recipes.run import Run
from planner.recipes.shares import Shares
from planner.recipes.step import step
from planner.recipes.study import ENOUGH, fits, fitted, studies
from planner.recipes.validate import spearman

Change = Callable[[Bill, Shares], tuple[Bill, Shares]]


def _without(**zero: float) -> Change:
    return lambda bill, shares: (bill, shares.with_(zero))


def _headless(bill: Bill, shares: Shares) -> tuple[Bill, Shares]:
    return replace(bill, parts=bill.parts * np.array([1.0, 0.0, 0.0])), shares


TERMS: Mapping[str, Change] = {
    "bubble": _without(bubble=0.0), "hops": _without(hop=0.0), "links": _without(link=0.0, nic=0.0, ep=0.0), "memory-bound": _without(memory=0.0),
    "attention": _without(attention=0.0, misaligned=0.0), "host": _without(host_s=0.0), "embedding and head": _headless, "reduction": _without(reduce=0.0),
    "sharded gathers": _without(fsdp=0.0), "optimizer": _without(update=0.0),
}  # fmt: skip
"""The terms of a step, and how each is left out."""

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")


def write(folder: Path, priced: Priced) -> None:
    """`accuracy.md` and `accuracy.svg` in a folder."""
    page, plot = render(priced)
    (folder / "accuracy.md").write_text(page, "utf-8")
    (folder / "accuracy.svg").write_text(plot, "utf-8")


def render(priced: Priced) -> tuple[str, str]:
    """The page and its plot; the same runs and fits give the same text."""
    found = [told(fitted(run), priced.bill.take(np.array([i]))) for i, run in enumerate(priced.runs)]
    told_of_steps = (
        _HEAD,
        _in_short(priced, found),
        _WORDS,
        _table(priced, found),
        _bands(priced, found),
        _ablation(priced),
        _shares(),
        classes_part(),
    )
    parts = (*told_of_steps, memory_part(priced.runs))
    return "\n\n".join(parts) + "\n", _plot(priced.runs, found)


_HEAD = """# How far the predictions hold

Written by `python -m benchmarks.accuracy`; a test checks that it is current. `headrace validate` says the same run by run, also of a table of yours."""

_WORDS = """A step is predicted in closed form (`planner/recipes`): the works of a layer under the run's layout, priced by the cost model, times a few *shares*
that say how the products, the memory-bound kernels, the links of one GPU, release and machine differ from it, at most six for each. They were fitted to the
runs below, so the errors *inside* flatter; *thirds* are errors of runs that were left out (random thirds, five draws of them), *sizes* those of a model left
out whole. A *family* is what one paper or project published. Errors are percent of the step's seconds, mean / median / worst, below zero where the prediction
is too fast. The form of the model was chosen on these same runs: expect fresh ones to be worse.

![predicted over measured](accuracy.svg)"""


def _in_short(priced: Priced, found: Sequence[Estimate]) -> str:
    """The page in five sentences."""
    left = {family: of["parts"]["all"]["thirds"]["mape"] for family, of in fits()["families"].items() if "all" in of["parts"]}
    worst = max(left, key=lambda family: left[family])
    width = {own: [0.5 * (e.high_s - e.low_s) / e.step_s for e in found if e.basis.startswith("cross-validated") == own] for own in (True, False)}
    by_class = ", ".join(f"{name} {100 * math.sinh(of['band']):.0f}" for name, of in fits()["classes"].items() if name != "all")
    order = _ordered(priced.runs, found)
    says = (
        f"{len(priced.runs)} published runs of {len(left)} families on {len({run.gpu for run in priced.runs})} kinds of GPU. Runs that the fits had not seen "
        f"are off by {np.median(list(left.values())):.1f} % in half of the families or less, by {left[worst]:.1f} % in the worst ({worst}).",
        f"Of {order['pairs']} pairs of schedules on the same model and machine that were published at least 2 % apart, {order['right']} are ordered right "
        f"({order['share']:.0f} %).",
        "Every prediction has a band for four of five runs. Where the GPU, release and machine are among those measured, its half-width is "
        f"{100 * np.median(width[True]):.0f} % in the median; elsewhere it goes by the class of the GPU: {by_class} %.",
        "One measured step of yours tells of all others, as far as runs of one family do (`headrace calibrate`): *Where nobody measured*.",
        "Whether a run fits is told as *yes*, *tight* or *no*, with the peak: *Memory*.",
    )
    return "## In short\n\n" + "\n".join(f"- {say}" for say in says)


def _table(priced: Priced, found: Sequence[Estimate]) -> str:
    rows = ["| family | part | runs | inside | thirds | sizes | Spearman |", "|---|---|---|---|---|---|---|"]
    for family, parts in parts_of(priced.runs).items():
        for part, which in parts.items():
            mine = [i for i in which if priced.runs[i].measured_s]
            off = np.array([math.log(found[i].step_s / float(priced.runs[i].measured_s or 1.0)) for i in mine])
            left = fits()["families"].get(family, {}).get("parts", {}).get(part, {})
            rank = spearman([found[i].step_s for i in mine], [float(priced.runs[i].measured_s or 0.0) for i in mine])
            cells = [three(errors(off)), three(left.get("thirds")), three(left.get("sizes")), "-" if rank is None else f"{rank:.3f}"]
            rows.append(f"| {family} | {part} | {len(mine)} | " + " | ".join(cells) + " |")
    return "## Families\n\n" + "\n".join(rows)


def ordered(runs: Sequence[Run], seconds: Sequence[float], apart: float = 0.02) -> tuple[int, int]:
    """(pairs, right): runs that differ in their schedule alone and were measured at least `apart` from each other, and how many are predicted in that order."""
    pairs = right = 0
    for i, a in enumerate(runs):
        for j in range(i):
            b = runs[j]
            same = (a.family, a.model, a.num_gpus, a.pp, a.mbs, a.gbs) == (b.family, b.model, b.num_gpus, b.pp, b.mbs, b.gbs)
            if not same or a.schedule == b.schedule or not a.measured_s or not b.measured_s:
                continue
            if abs(math.log(a.measured_s / b.measured_s)) >= math.log1p(apart):
                pairs += 1
                right += (seconds[i] < seconds[j]) == (a.measured_s < b.measured_s)
    return pairs, right


def _ordered(runs: Sequence[Run], found: Sequence[Estimate]) -> dict[str, float]:
    pairs, right = ordered(runs, [e.step_s for e in found])
    return {"pairs": pairs, "right": right, "share": 100 * right / max(1, pairs)}


def _bands(priced: Priced, found: Sequence[Estimate]) -> str:
    rows = ["| family | GPU | runs | half-width % | measured inside % | basis |", "|---|---|---|---|---|---|"]
    for family, parts in parts_of(priced.runs).items():
        for gpu in dict.fromkeys(priced.runs[i].gpu for i in parts["all"]):
            mine = [i for i in parts["all"] if priced.runs[i].gpu == gpu and priced.runs[i].measured_s]
            inside = [found[i].low_s <= float(priced.runs[i].measured_s or 0.0) <= found[i].high_s for i in mine]
            width = float(np.median([50 * (found[i].high_s - found[i].low_s) / found[i].step_s for i in mine]))
            own = sum(found[i].basis.startswith("cross-validated") for i in mine)
            basis = "own runs" if 2 * own > len(mine) else "class"
            rows.append(f"| {family} | {gpu} | {len(mine)} | {width:.0f} | {100 * float(np.mean(inside)):.0f} | {basis} |")
    return (
        "## Bands\n\nFour of five runs are meant to lie in their band; its half-width is half of what lies between its ends, over the prediction. *Own runs*: "
        f"the GPU, release and machine have at least {ENOUGH} measured runs, and the band is that of their cross-validated errors; few runs with wild ones "
        "among them give a wide one. *Class*: the band of families that were left out among GPUs of the class (*Where nobody measured*).\n\n" + "\n".join(rows)
    )


def _ablation(priced: Priced) -> str:
    rows = ["| family | full | " + " | ".join(TERMS) + " |", "|---" * (len(TERMS) + 2) + "|"]
    by_family = parts_of(priced.runs)
    for family, parts in by_family.items():
        mine = [i for i in parts["all"] if priced.runs[i].measured_s]
        full = _mape(priced, mine, lambda bill, shares: (bill, shares))
        cells = []
        for change in TERMS.values():
            value = _mape(priced, mine, change)
            cells.append(f"**{value:.1f}**" if value > full + 2 else f"{value:.1f}")
        rows.append(f"| {family} | {full:.1f} | " + " | ".join(cells) + " |")
    return "## What each term is worth\n\nMean error with one term left out, the others kept; bold where it costs more than two points.\n\n" + "\n".join(rows)


def _mape(priced: Priced, which: Sequence[int], change: Change) -> float:
    groups: dict[Shares, list[int]] = {}
    for i in which:
        groups.setdefault(fitted(priced.runs[i]).shares, []).append(i)
    off: list[float] = []
    for shares, mine in groups.items():
        bill, changed = change(priced.bill.take(np.array(mine)), shares)
        measured = np.array([priced.runs[i].measured_s for i in mine])
        off += list(np.abs(step(bill, changed).total / measured - 1))
    return 100 * float(np.mean(off))


def _shares() -> str:
    rows = ["| study | GPU, release, machine | runs | shares (expected 1 unless said) |", "|---|---|---|---|"]
    for study in studies():
        for member in study.members:
            found = fits()["members"].get(str(member), {"runs": 0, "shares": {}, "expected": {}})
            told_shares = ", ".join(_share(name, value, found["expected"].get(name)) for name, value in found["shares"].items())
            rows.append(f"| {study.name} | {member} | {found['runs']} | {told_shares} |")
    return (
        "## Every fitted number\n\nA study's `common` shares are one number for all its members. What a share multiplies is said in "
        "`planner/recipes/shares.py`; each is drawn to what is expected of it.\n\n" + "\n".join(rows) + "\n\n" + _set_by_hand()
    )


def _set_by_hand() -> str:
    """The figures of releases that were chosen with these tables at hand."""
    costs = ("flash_cost", "grouped_cost", "grouped_low_cost")
    told = [f"{r.name} {name} {getattr(r, name):g}" for r in releases() for name in costs if getattr(r, name) != 1.0]
    told += [f"{r.name} {name} {on[name]:g} on {gpu}..." for r in releases() for gpu, on in r.on.items() for name in costs if name in on]
    return (
        "Chosen by hand with these tables in view, and so to be counted with what was fitted: what a release's kernels take over the best ones of a device ("
        + ", ".join(told) + "), the host's time of a layer with experts (" + _values("experts_host") + " times one without) and what shows of messages "
        f"between stages ({_values('shown_hops')}), what its unfused kernels move and what it hides (`simulator/profiles/runtimes`)."
    )  # fmt: skip


def _values(name: str) -> str:
    """The figures of all releases, once each."""
    return " or ".join(f"{value:g}" for value in sorted({getattr(r, name) for r in releases()}))


def _share(name: str, value: float, expected: float | None) -> str:
    number = f"{1e3 * value:.2f} ms" if name.endswith("_s") else f"{value:.2f}"
    origin = "set" if expected is None else "" if expected == 1.0 else f"{1e3 * expected:.2f} ms" if name.endswith("_s") else f"{expected:g}"
    return f"{name} {number}" + (f" ({origin})" if origin else "")


# ---- the plot ------------------------------------------------------------------------------------------------------------------------------------------


def _plot(runs: Sequence[Run], found: Sequence[Estimate], width: int = 760, height: int = 420) -> str:
    """Predicted over measured against measured seconds, both logarithmic, a colour a family."""
    left, top, right, bottom = 50, 14, 230, 40
    spans = (math.log10(0.05), math.log10(400.0)), (math.log(0.5), math.log(2.0))

    def at(seconds: float, ratio: float) -> tuple[float, float]:
        x = (math.log10(seconds) - spans[0][0]) / (spans[0][1] - spans[0][0])
        y = (math.log(min(max(ratio, 0.5), 2.0)) - spans[1][0]) / (spans[1][1] - spans[1][0])
        return left + x * (width - left - right), top + (1 - y) * (height - top - bottom)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">']
    out.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for ratio in (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0):
        (x0, y), (x1, _) = at(0.05, ratio), at(400.0, ratio)
        out.append(f'<path d="M{x0:.0f} {y:.1f}H{x1:.0f}" stroke="{"#444" if ratio == 1.0 else "#ddd"}"/><text x="8" y="{y + 4:.0f}">{ratio:g}</text>')
    for seconds in (0.1, 1.0, 10.0, 100.0):
        x, y = at(seconds, 0.5)
        out.append(f'<text x="{x - 8:.0f}" y="{y + 16:.0f}">{seconds:g} s</text>')
    out.append(f'<text x="{left}" y="{height - 6}">predicted over measured, by the measured seconds of a step</text>')
    for k, (family, parts) in enumerate(parts_of(runs).items()):
        dots = []
        for i in parts["all"]:
            measured = runs[i].measured_s
            if measured:
                x, y = at(measured, found[i].step_s / measured)
                dots.append(f"M{x:.0f} {y:.0f}h2v2h-2z")
        colour = COLOURS[k % len(COLOURS)]
        out.append(f'<path d="{"".join(dots)}" fill="{colour}" fill-opacity="0.7"/>')
        out.append(f'<text x="{width - right + 12}" y="{top + 14 + 18 * k}" fill="{colour}">{family} ({len(dots)})</text>')
    return "\n".join([*out, "</svg>"]) + "\n"

"""The part of `docs/accuracy.md` about classes of GPUs: bands, levels and shares where nobody measured."""

from __future__ import annotations

import math
from collections.abc import Mapping

from planner.recipes.study import class_shares, fits


def three(found: Mapping[str, float] | None) -> str:
    """Mean, median and worst of `learn.errors`."""
    return "-" if not found else f"{found['mape']:.1f} / {found['median']:.1f} / {found['worst']:+.0f}"


def classes_part() -> str:
    classes, names = fits()["classes"], class_shares()
    bands = [_line("class", "runs", "families", "band %", "held % (least)", "shared %", "band % after one run"), "|---" * 7 + "|"]
    left = [_line("class", "family left out", "runs", "error", "after one of its runs (the median one)"), "|---" * 5 + "|"]
    shares = [_line("", *names), "|---" * (len(names) + 1) + "|"]
    for name, found in classes.items():
        band, levelled = (f"{100 * math.sinh(found[key]):.0f}" for key in ("band", "band_after_one"))
        held = f"{100 * found['covered']:.0f} ({100 * found['covered_least']:.0f})"
        families = {family.split(", ")[0] for family in found["families"]}
        bands.append(_line(name, found["runs"], len(families), band, held, f"{100 * found['shared']:.0f}", levelled))
        shares.append(_line(name, *(f"{found['shares'][share]:.2f}" for share in names)))
        for family, e in found["families"].items():
            left.append(_line(name, family, e["runs"], three(e), f"{e['after_one']:.1f} ({e['after_median_one']:.1f})" if "after_one" in e else "-"))
    for name, found in fits()["frameworks"].items():
        shares.append(_line(f"{name}, times", *(f"{found[share]:.2f}" if share in found else "" for share in names)))
    return "\n\n".join((_CLASSES, "\n".join(bands), _LEFT, "\n".join(left), _FACTORS, "\n".join(shares)))


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


_CLASSES = """## Where nobody measured

For a GPU, release and machine without enough runs of their own: shares of the class of the GPU times factors of the framework, fitted to all runs at once,
every family of a class weighing the same (`planner/recipes/transfer.py`). The band of a class is that of its families, each predicted without any of its runs
while runs of its framework on *other* classes stay (for a framework nobody measured it is wider): it holds four of five runs, every family weighing the same,
and half of those of each. *Held*: how many of a family's runs lie in it, the mean of families and the least. The band of *all* is for GPUs of no class: each
class left out whole.

Ranking carries over from family to family, levels do not always. *Shared*: how much of what one run takes beyond its prediction the others of its family
take too (their mean product over their mean square); `headrace calibrate` moves all plans by that part of what one measured step shows, further with every
plan that is measured, and by all of it where it is more than three bands, which hardly a family shows. *After one run*: the band then, the part being that of
the other families; where one run would tell less than it blurs, the band stays what it was."""

_LEFT = """Errors of the runs of families left out, mean / median / worst in percent, and their mean once one run was measured: of every other run, over all
runs that could have been the one, and where it was the median one of them. A wild run is a bad one to measure by. Fully sharded runs (ZeRO-3) apart."""

_FACTORS = """What was found. What carries over from one class to another is what a framework fuses, hides and quantizes; big products and attention are the
device's. On which shares frameworks differ, and how far, was chosen with these tables in view (`docs/log.md` has the tries): expect fresh families to be
wider."""

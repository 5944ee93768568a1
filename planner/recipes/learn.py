"""Fits every study to measured runs and says how well each carries over: the document `simulator/profiles/fits.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.recipes.bill import Bill
from planner.recipes.estimate import Priced
from planner.recipes.fit import Problem, cross_validate, fit, predict
from planner.recipes.level import Level, shared
from planner.recipes.run import Run
from planner.recipes.shares import Shares
from planner.recipes.step import step
from planner.recipes.study import ENOUGH, Study, class_of, class_shares, framework_of, framework_shares, studies, study_of
from planner.recipes.transfer import Transfer, transfer
from planner.recipes.works import LOW

THIRDS = 3
DRAWS = 5
COVERED = 0.8
"""Share of runs that a band is meant to hold."""

ELSEWHERE = 0.1
"""Weight of a family of another class where it is asked how much of a run's error its family shares: few classes have enough families to tell."""


def learn(priced: Priced, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Shares and bands of members and classes, and the cross-validated errors of families, fitted to the runs that were measured."""
    measured = np.array([i for i, run in enumerate(priced.runs) if run.measured_s])
    runs, bill = [priced.runs[i] for i in measured], priced.bill.take(measured)
    seconds = np.array([run.measured_s for run in runs], float)
    of_run = [study_of(run) for run in runs]
    crossed, left = np.full((DRAWS, len(runs)), np.nan), np.full((1, len(runs)), np.nan)
    members: dict[str, Any] = {}
    for study in studies():
        which = np.array([i for i, found in enumerate(of_run) if found is not None and found[0] is study])
        progress(f"{study.name}: {len(which)} runs")
        if not len(which):
            continue
        problem = problem_of(study, bill.take(which), seconds[which], np.array([of_run[i][1] for i in which]))
        shares = fit(problem)
        crossed[:, which] = _thirds(problem)
        left[:, which] = _sizes(problem, [runs[i] for i in which])
        members |= _members(study, problem, shares, crossed[:, which], left[:, which], [runs[i] for i in which])
    return {"schema_version": 1, "members": members, **_classes(runs, bill, seconds, progress), "families": _families(runs, crossed, left)}


def problem_of(study: Study, bill: Bill, seconds: np.ndarray, member: np.ndarray) -> Problem:
    """What is to be fitted of a study: its members weigh the same, however many runs each has, if they have enough."""
    counts = np.maximum(np.bincount(member, minlength=len(study.members)), ENOUGH)
    weight = len(seconds) / (len(np.unique(member)) * counts[member])
    return Problem(bill, seconds, member, study.common, study.own, (study.start,) * len(study.members), weight)


def spread_of(residuals: np.ndarray) -> float:
    """The half-width that holds `COVERED` of the absolute residuals [draw, n], and of one more run: with n runs the share (n + 1) / n of it.

    >>> round(spread_of(np.array([[-0.1, 0.2, 0.05, -0.3, 0.0, 0.1, 0.1, 0.1, 0.1]])), 2)
    0.21
    """
    n = residuals.shape[1]
    return float(np.quantile(np.abs(residuals), min(1.0, COVERED * (n + 1) / n))) if n else 0.0


def errors(residuals: np.ndarray) -> dict[str, float]:
    """Percent of |predicted / measured - 1| from logarithms: mean, median and the worst with its sign."""
    off = 100 * np.expm1(residuals.ravel())
    worst = float(off[np.abs(off).argmax()])
    return {"mape": round(float(np.abs(off).mean()), 2), "median": round(float(np.median(np.abs(off))), 2), "worst": round(worst, 1)}


# ---- what carries over ---------------------------------------------------------------------------------------------------------------------------------


def _thirds(problem: Problem) -> np.ndarray:
    """Logarithms [draw, n] of predicted over measured for random thirds, each fitted without it."""
    rng, n, found = np.random.default_rng(0), len(problem.measured_s), []
    for _ in range(DRAWS):
        fold = np.arange(n) % THIRDS
        rng.shuffle(fold)
        found.append(np.log(cross_validate(problem, fold) / problem.measured_s))
    return np.array(found)


def _sizes(problem: Problem, runs: Sequence[Run]) -> np.ndarray:
    """The same, leaving one model out; NaN where there is but one."""
    models = sorted({run.model for run in runs})
    if len(models) < 2:
        return np.full(len(runs), np.nan)
    off: np.ndarray = np.log(cross_validate(problem, np.array([models.index(run.model) for run in runs])) / problem.measured_s)
    return off


def _members(study: Study, problem: Problem, shares: Sequence[Shares], crossed: np.ndarray, left: np.ndarray, runs: Sequence[Run]) -> dict[str, Any]:
    out = {}
    inside = np.log(predict(problem, shares) / problem.measured_s)
    for k, member in enumerate(study.members):
        mine = np.flatnonzero(problem.machine == k)
        start = study.start
        values = {name: round(getattr(shares[k], name), 6) for name in (*study.common, *study.own)}
        out[str(member)] = {
            "study": study.name, "runs": len(mine), "families": sorted({runs[int(i)].family for i in mine}),
            "shares": {**{k: v for k, v in study.expected.items() if k not in values}, **values}, "expected": {n: getattr(start, n) for n in values},
            "band": round(spread_of(crossed[:, mine]), 4),
            **({"inside": errors(inside[mine]), "thirds": errors(crossed[:, mine])} if len(mine) else {}),
        }  # fmt: skip
        if len(mine) and not np.isnan(left[:, mine]).any():
            out[str(member)]["sizes"] = errors(left[:, mine])
    return out


def _families(runs: Sequence[Run], crossed: np.ndarray, left: np.ndarray) -> dict[str, Any]:
    """Errors of runs that were left out, by family and by its parts."""
    out: dict[str, Any] = {}
    for family, parts in parts_of(runs).items():
        out[family] = {"parts": {}}
        for part, mine in parts.items():
            known = np.array([i for i in mine if not np.isnan(crossed[0, i])], int)
            if len(known):
                found = {"runs": len(mine), "thirds": errors(crossed[:, known])}
                if not np.isnan(left[:, known]).any():
                    found["sizes"] = errors(left[:, known])
                out[family]["parts"][part] = found
    return out


PARTS: Mapping[str, Callable[[Run], str]] = {
    "experts": lambda run: "with experts" if run.shape.experts else "dense",
    "precision": lambda run: "fp8 and less" if run.precision in LOW else "16 bits",
    "sharding": lambda run: "ZeRO-3" if run.zero == 3 else "not ZeRO-3",
    "tensor parallelism": lambda run: "tp over nodes" if run.tp > run.gpus_per_node else "tp in a node",
    "oddity": lambda run: "flagged" if run.flag else "not flagged",
}
"""By what the runs of a family are told apart where they differ in it."""


def parts_of(runs: Sequence[Run]) -> dict[str, dict[str, list[int]]]:
    """Numbers of the runs by family and part; the part "all" has all of a family."""
    out: dict[str, dict[str, list[int]]] = {}
    for i, run in enumerate(runs):
        of = out.setdefault(run.family, {"all": []})
        for part in ("all", *(tell(run) for tell in PARTS.values())):
            of.setdefault(part, []).append(i)
    return {f: {"all": of["all"], **{p: which for p, which in of.items() if len(which) < len(of["all"])}} for f, of in out.items()}


# ---- classes -------------------------------------------------------------------------------------------------------------------------------------------


def _classes(runs: Sequence[Run], bill: Bill, seconds: np.ndarray, progress: Callable[[str], None]) -> dict[str, Any]:
    """For every class of GPUs, and for all: shares, and the band of its families, each left out while its framework's runs on other classes stay."""
    kinds, families = np.array([class_of(run.gpu) for run in runs]), np.array([source_of(run) for run in runs])
    frameworks = np.array([framework_of(run.release) for run in runs])

    def fitted_to(which: np.ndarray) -> Transfer:
        return transfer(class_shares(), framework_shares(), bill.take(which), seconds[which], kinds[which], frameworks[which], families[which])

    def left_out(groups: np.ndarray) -> np.ndarray:
        """Logarithms [n] of predicted over measured of the runs of each group, fitted without it."""
        off = np.zeros(len(runs))
        for group in sorted(set(groups)):
            without = fitted_to(np.flatnonzero(groups != group))
            for kind, framework in sorted(set(zip(kinds[groups == group], frameworks[groups == group], strict=True))):
                mine = np.flatnonzero((groups == group) & (kinds == kind) & (frameworks == framework))
                off[mine] = np.log(step(bill.take(mine), without.shares(kind, framework)).total / seconds[mine])
        return off

    found = fitted_to(np.arange(len(runs)))
    progress(f"classes: {', '.join(found.classes)}")
    off = left_out(np.array([f"{kind}, {family}" for kind, family in zip(kinds, families, strict=True)]))
    progress("classes: every family left out")
    sharded = np.array([run.zero == 3 for run in runs])
    out = {kind: _class(_Left(off, kinds, families, sharded), kind, found.shares(kind)) for kind in found.classes}
    out["all"] = _class(_Left(left_out(kinds), np.full(len(runs), "all"), families, sharded), "all", found.shares())
    progress("classes: every class left out")
    times = {f: {name: round(float(np.exp(x)), 6) for name, x in zip(found.names, logs, strict=True) if x} for f, logs in found.frameworks.items()}
    return {"classes": out, "frameworks": times}


@dataclass(frozen=True, slots=True)
class _Left:
    """Logarithms `off` of predicted over measured of runs that were left out, their class, family and whether they are fully sharded."""

    off: np.ndarray
    kinds: np.ndarray
    families: np.ndarray
    sharded: np.ndarray

    def parts(self, mine: np.ndarray) -> dict[str, np.ndarray]:
        """`off` by family, fully sharded runs apart."""
        units = np.array([f"{family}, ZeRO-3" if sharded else family for family, sharded in zip(self.families, self.sharded, strict=True)])
        return {str(unit): self.off[mine & (units == unit)] for unit in sorted(set(units[mine]))}


def _class(left: _Left, kind: str, shares: Shares) -> dict[str, Any]:
    """What is told of a class."""
    mine = left.kinds == kind
    by_family = [left.off[mine & (left.families == name)] for name in sorted(set(left.families[mine]))]
    band = max(_equal_spread(by_family), *(float(np.median(np.abs(part))) for part in by_family))  # no family lies outside with more than half of its runs
    parts, elsewhere = left.parts(mine), [part for other in sorted(set(left.kinds[~mine])) for part in left.parts(left.kinds == other).values()]

    def level(without: str = "") -> Level:
        known = [part for unit, part in parts.items() if unit != without]
        return Level(shared((*known, *elsewhere), (*(1.0 for _ in known), *(ELSEWHERE for _ in elsewhere)), band), band)

    levelled = {unit: level(unit).fixed(part) for unit, part in parts.items()}  # by what other families share
    inside = [float(np.mean(np.abs(part) <= band)) for part in by_family]
    return {
        "runs": int(mine.sum()), "shares": _rounded(shares), "band": round(band, 4), "shared": round(level().shared, 3),
        "band_after_one": round(min(band, _equal_spread([fixed.ravel() for fixed in levelled.values()])), 4),
        "covered": round(float(np.mean(inside)), 3), "covered_least": round(min(inside), 3),
        "families": {unit: {"runs": len(part), **errors(part), **_after_one(levelled[unit])} for unit, part in parts.items()},
    }  # fmt: skip


def _after_one(fixed: np.ndarray) -> dict[str, float]:
    """Percent, of `Level.fixed`: the mean over all runs that could have been the one, and the mean of the others where the median one was; none for one run."""
    if not len(fixed):
        return {}
    off = 100 * np.abs(np.expm1(fixed))
    return {"after_one": round(float(off.mean()), 2), "after_median_one": round(float(np.median(off.mean(axis=1))), 2)}


def source_of(run: Run) -> str:
    """What counts as one family when families are left out: all tables of one paper or project."""
    return run.family.split(" Table")[0]


def _equal_spread(by_family: Sequence[np.ndarray]) -> float:
    """`spread_of`, each family weighing the same."""
    off = np.concatenate([np.abs(f) for f in by_family if len(f)])
    weight = np.concatenate([np.full(len(f), 1.0 / len(f)) for f in by_family if len(f)])
    order = np.argsort(off)
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(off[order][np.searchsorted(reached, COVERED)])


def _rounded(shares: Shares) -> Mapping[str, float]:
    return {name: round(getattr(shares, name), 6) for name in class_shares()}

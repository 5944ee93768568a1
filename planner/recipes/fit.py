"""Fits shares to measured runs: least squares of the logarithm of the error, drawn towards what is expected, outliers counted less; and what carries over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from planner.recipes.bill import Bill
from planner.recipes.shares import Shares
from planner.recipes.step import step

SPREAD = 0.5
"""One deviation of a share about what is expected of it, in its logarithm."""

NOISE = 0.03
"""One deviation of a run about its prediction, in its logarithm."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Runs of one GPU and release. `machine` [n] numbers their machines; shares named in `common` are the same for all, those in `own` each machine has its
    own. `weight` [n]: how often a run counts."""

    bill: Bill
    measured_s: np.ndarray
    machine: np.ndarray
    common: tuple[str, ...]
    own: tuple[str, ...]
    start: tuple[Shares, ...]
    weight: np.ndarray

    def take(self, which: np.ndarray) -> Problem:
        return replace(
            self, bill=self.bill.take(which), measured_s=self.measured_s[which], machine=self.machine[which], weight=self.weight[which]
        )  # fmt: skip


def fit(problem: Problem, spread: Mapping[str, float] | None = None) -> tuple[Shares, ...]:
    """The shares of every machine; what is expected of them where nothing was measured."""
    if not len(problem.measured_s):
        return problem.start
    num, common, own = len(problem.start), problem.common, problem.own
    names = (*common, *(name for _ in range(num) for name in own))
    expected = np.log([getattr(problem.start[0], name) for name in common] + [getattr(s, name) for s in problem.start for name in own])
    wide = np.array([(spread or {}).get(name, SPREAD) for name in names])
    groups = [np.flatnonzero(problem.machine == k) for k in range(num)]
    bills, weight = [problem.bill.take(g) for g in groups], np.sqrt(problem.weight[np.concatenate(groups)])

    def misses(x: np.ndarray) -> np.ndarray:
        shares = _shares(problem, x)
        off = np.concatenate([np.log(step(b, s).total / problem.measured_s[g]) / NOISE for b, s, g in zip(bills, shares, groups, strict=True) if len(g)])
        # a robust error of each run, a plain one of each share
        return np.concatenate([weight * np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)), (x - expected) / wide])

    found = least_squares(misses, expected, method="trf", x_scale=wide, max_nfev=60)
    return _shares(problem, found.x)


def _shares(problem: Problem, x: np.ndarray) -> tuple[Shares, ...]:
    values, c, o = np.exp(x), len(problem.common), len(problem.own)
    common = dict(zip(problem.common, map(float, values[:c]), strict=True))
    return tuple(
        s.with_(common | dict(zip(problem.own, map(float, values[c + k * o : c + (k + 1) * o]), strict=True))) for k, s in enumerate(problem.start)
    )  # fmt: skip


def predict(problem: Problem, shares: Sequence[Shares]) -> np.ndarray:
    """Seconds [n] of a problem's runs."""
    out = np.zeros(len(problem.measured_s))
    for k, s in enumerate(shares):
        which = np.flatnonzero(problem.machine == k)
        if len(which):
            out[which] = step(problem.bill.take(which), s).total
    return out


def cross_validate(problem: Problem, fold: np.ndarray, spread: Mapping[str, float] | None = None) -> np.ndarray:
    """Seconds [n] of each run by the shares that were fitted without its `fold`."""
    out = np.zeros(len(fold))
    for k in np.unique(fold):
        left = np.flatnonzero(fold == k)
        out[left] = predict(problem.take(left), fit(problem.take(np.flatnonzero(fold != k)), spread))
    return out

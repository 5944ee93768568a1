"""What carries over to what nobody measured: shares of a class of GPUs times factors of a framework, fitted to all runs, every family weighing the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from planner.recipes.bill import Bill
from planner.recipes.shares import Shares
from planner.recipes.step import step

WIDE = {"all": 0.5, "class": 0.25, "framework": 0.4}
"""One deviation of a logarithm: of a share about what is expected of it, of a class about all, of a framework about its class."""

NOISE = 0.06
"""One deviation of a run about its prediction, in its logarithm: between families it is twice what it is within one."""

NUDGE = 1e-4


@dataclass(frozen=True, slots=True)
class Cell:
    """Runs of one class and framework: their bill, the logarithms of their seconds, the roots of their weights, and `design` [share, unknown]: what adds up
    to the logarithm of each share."""

    bill: Bill
    log_s: np.ndarray
    weight: np.ndarray
    design: np.ndarray


@dataclass(frozen=True, slots=True)
class Transfer:
    """Factors [share] in logarithms on what is expected of `names`: of all runs, of each class, of each framework."""

    names: tuple[str, ...]
    whole: np.ndarray
    classes: Mapping[str, np.ndarray]
    frameworks: Mapping[str, np.ndarray]

    def shares(self, kind: str = "", framework: str = "") -> Shares:
        """Of runs of a class and a framework; one that was not measured adds nothing."""
        nothing = np.zeros(len(self.names))
        return _shares(self.names, self.whole + self.classes.get(kind, nothing) + self.frameworks.get(framework, nothing))


def transfer(
    names: Sequence[str], of_framework: Sequence[str], bill: Bill, seconds: np.ndarray, kinds: np.ndarray, frameworks: np.ndarray, families: np.ndarray
) -> Transfer:  # fmt: skip
    """The factors that fit runs [n] best; frameworks differ in `of_framework` alone. Within a class every family weighs the same, however many its runs."""
    names = tuple(names)
    groups = {"all": ("",), "class": tuple(sorted({str(k) for k in kinds if k})), "framework": tuple(sorted({str(f) for f in frameworks if f}))}
    unknowns = [(group, of, name) for group in groups for of in groups[group] for name in (of_framework if group == "framework" else names)]
    wide, weight = np.array([WIDE[group] for group, _, _ in unknowns]), np.sqrt(equal_weights(kinds, families))
    cells = []
    for kind, framework in sorted({(str(k), str(f)) for k, f in zip(kinds, frameworks, strict=True)}):
        mine, counts = np.flatnonzero((kinds == kind) & (frameworks == framework)), {("all", ""), ("class", kind), ("framework", framework)}
        design = np.array([[float(name == share and (group, of) in counts) for group, of, share in unknowns] for name in names])
        cells.append(Cell(bill.take(mine), np.log(seconds[mine]), weight[mine], design))

    def misses(x: np.ndarray) -> np.ndarray:
        return np.concatenate([*(_misses(names, x, cell) for cell in cells), x / wide])

    def slopes(x: np.ndarray) -> np.ndarray:
        return np.vstack([*(_slopes(names, x, cell) for cell in cells), np.diag(1 / wide)])

    found = least_squares(misses, np.zeros(len(wide)), jac=slopes, method="trf", x_scale=wide, max_nfev=30).x
    at = dict(zip(unknowns, found, strict=True))
    told = {group: {of: np.array([at.get((group, of, name), 0.0) for name in names]) for of in groups[group]} for group in groups}
    return Transfer(names, told["all"][""], told["class"], told["framework"])


def equal_weights(kinds: np.ndarray, families: np.ndarray) -> np.ndarray:
    """Ten for every family of a class, shared among its runs [n]."""
    pairs = np.array([f"{kind}, {family}" for kind, family in zip(kinds, families, strict=True)])
    _, which, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    weights: np.ndarray = 10.0 / counts[which]
    return weights


def _shares(names: Sequence[str], logs: np.ndarray) -> Shares:
    expected = Shares()
    return expected.with_({name: getattr(expected, name) * float(np.exp(x)) for name, x in zip(names, logs, strict=True)})


def _off(names: Sequence[str], logs: np.ndarray, cell: Cell) -> np.ndarray:
    off: np.ndarray = (np.log(step(cell.bill, _shares(names, logs)).total) - cell.log_s) / NOISE
    return off


def _misses(names: Sequence[str], x: np.ndarray, cell: Cell) -> np.ndarray:
    off = _off(names, cell.design @ x, cell)
    misses: np.ndarray = cell.weight * np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
    return misses


def _slopes(names: Sequence[str], x: np.ndarray, cell: Cell) -> np.ndarray:
    """The derivatives [run, unknown] of `_misses`."""
    logs = cell.design @ x
    off = _off(names, logs, cell)
    root = np.sqrt(1 + off**2)
    outer = cell.weight / root * np.sqrt((root + 1) / 2)  # of the robust error, in a form that is finite at zero
    slope = np.stack([(_off(names, logs + NUDGE * row, cell) - off) / NUDGE for row in np.eye(len(names))], axis=1)
    slopes: np.ndarray = outer[:, None] * slope @ cell.design
    return slopes

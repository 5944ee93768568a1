"""The level of a family: what all its runs take beyond their prediction, as far as one or a few measured runs tell.

Between families levels differ, within one every run differs besides; how much of a run's difference is its family's is found among bundled families.

>>> level = Level(shared=0.8, band=0.2)
>>> [round(level.of([x]), 2) for x in (0.1, 0.4, 0.5, 0.6, 1.2)], round(level.of([0.1] * 8), 3)
([0.08, 0.32, 0.45, 0.6, 1.2], 0.097)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

USUAL, ODD = 2.0, 3.0
"""Bands: a difference up to `USUAL` is shared as those of bundled families are, from `ODD` on it is the machine's own and whole."""


@dataclass(frozen=True, slots=True)
class Level:
    """`shared`: the part of a run's difference that the others of its family have too; `band`: the half-width of a class's band, a logarithm."""

    shared: float
    band: float

    def of(self, off: Sequence[float]) -> float:
        """The level by the logarithms of a few runs, measured over predicted or the other way round.

        Their mean, drawn to nothing: k runs tell k s / (1 + (k - 1) s) of it where one tells s, since what is not shared averages out.
        """
        mean, k = float(np.mean(off)), len(off)
        told = k * self.shared / (1 + (k - 1) * self.shared)
        return mean * float(_grown(abs(mean), told, self.band))

    def fixed(self, off: np.ndarray) -> np.ndarray:
        """Logarithms of a family's errors once one of its runs told the level: for each run that could have been the one, of every other.

        >>> Level(1.0, 0.2).fixed(np.array([0.3, 0.3, 0.4])).round(1).tolist()
        [[0.0, 0.1], [0.0, 0.1], [-0.1, -0.1]]
        """
        rest = off[None, :] - (off * _grown(np.abs(off), self.shared, self.band))[:, None]
        left: np.ndarray = rest[~np.eye(len(off), dtype=bool)].reshape(len(off), -1)
        return left if left.size else left[:0]


def shared(families: Sequence[np.ndarray], weights: Sequence[float], band: float) -> float:
    """The part of a run's error that the others of its family share: the mean product of two of a family over the mean square, between 0 and 1.

    `families`: logarithms of their errors; `weights` of whole families, however many their runs. What lies beyond `ODD` bands counts as that far.
    """
    among = own = 0.0
    for off, weight in zip(families, weights, strict=True):
        if (n := len(off)) > 1:
            near = np.clip(off, -ODD * band, ODD * band)
            among += weight * float(near.sum() ** 2 - (near**2).sum()) / (n * (n - 1))
            own += weight * float((near**2).mean())
    return min(1.0, max(0.0, among / own)) if own else 0.0


def _grown(off: np.ndarray | float, told: float, band: float) -> np.ndarray:
    """The part of differences `off` that counts as level: `told`, and up to all of them from `USUAL` to `ODD` bands."""
    grown: np.ndarray = told + (1 - told) * np.clip((np.asarray(off) / band - USUAL) / (ODD - USUAL), 0.0, 1.0)
    return grown

"""How fast a device multiplies matrices, by shape: a measured table where there is one, else a tile-and-wave model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ir.cluster import Device

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
"""Output tiles that a vendor library chooses among, (rows, columns)."""

NEIGHBOURS = 6
"""Measured shapes that count for a shape in between."""

FAR = 2.0
"""Doublings of m, n or k at which a measured shape says as much of another as the law does by itself."""


class Gemm(Protocol):
    def seconds(self, shape: tuple[int, ...], nbytes: float, bytes_per_s: float) -> float:
        """Seconds of `batch` products (m, k) x (k, n), shape = (batch, m, n, k), that move `nbytes`."""


@dataclass(frozen=True, slots=True)
class Tiled:
    """Tiles of the output are dealt to `num_sms` units in waves; every tile does `k + extra_k` multiply-adds an element, the extra for filling and emptying.

    `time = launch + max(waves x tile x 2 (k + extra_k) / (rate / num_sms), bytes / bandwidth)`, the best of eight tiles. It does not decrease in any of batch,
    m, n, k. `rate` is peak times the share that large products reach.

    >>> h100 = Tiled(rate=0.846 * 989e12, num_sms=132, extra_k=222, launch_s=4e-6)
    >>> for m in (128, 1024, 8192):
    ...     print(m, f"{2 * m * 4096 * 4096 / h100.seconds((1, m, 4096, 4096), 0, 1e12) / 1e12:.0f} Tflop/s")
    128 448 Tflop/s
    1024 706 Tflop/s
    8192 773 Tflop/s
    """

    rate: float
    num_sms: int
    extra_k: float
    launch_s: float

    def seconds(self, shape: tuple[int, ...], nbytes: float, bytes_per_s: float) -> float:
        batch, m, n, k = shape
        work = min(-(-batch * -(-m // rows) * -(-n // columns) // self.num_sms) * rows * columns for rows, columns in TILES)
        busy = work * 2.0 * (k + self.extra_k) * self.num_sms / self.rate
        return self.launch_s + max(busy, nbytes / bytes_per_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """A table of measured products: rows of (batch, m, n, k, seconds), a law fitted to them, and what the law misses near each of them.

    The law is `seconds = launch + batch c0 + flops c1 + elements read c2 + elements written c3`, none of the c below 0, by least squares of the relative error.
    A measured shape has its measured time. Any other has the law's, times the mean factor of its nearest shapes, weighted by their distance in the logarithms
    of m, n, k and (less) batch; far from all of them the law stands alone.
    """

    launch_s: float
    law: np.ndarray
    places: np.ndarray
    log_factors: np.ndarray

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[float]], launch_s: float) -> Measured:
        """A table; its fastest row bounds the launch time that is told apart."""
        table = np.asarray(rows, float)
        launch_s = min(launch_s, float(table[:, 4].min()) / 2)
        law = _fit(_terms(table[:, :4]), table[:, 4] - launch_s, table[:, 4])
        told = launch_s + _terms(table[:, :4]) @ law
        return cls(launch_s, law, _places(table[:, :4]), np.log(table[:, 4] / told))

    def seconds(self, shape: tuple[int, ...], nbytes: float, bytes_per_s: float) -> float:
        here = np.asarray([shape], float)
        far = np.square(self.places - _places(here)).sum(axis=1)
        near = np.argsort(far, kind="stable")[:NEIGHBOURS]
        weights = 1 / (far[near] + 1e-9) ** 1.5
        factor = math.exp(float((weights * self.log_factors[near]).sum() / (weights.sum() + FAR**-3)))
        return float(factor * (self.launch_s + (_terms(here) @ self.law)[0]))


def _terms(shapes: np.ndarray) -> np.ndarray:
    """What the law is linear in, one row a shape: batch, flops, elements read, elements written."""
    batch, m, n, k = shapes.T
    return np.stack([batch, 2 * batch * m * n * k, batch * (m * k + k * n), batch * m * n], axis=1)


def _fit(terms: np.ndarray, seconds: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Coefficients of 0 or more: the most negative is left out until there is none."""
    used = list(range(terms.shape[1]))
    while True:
        rows = terms[:, used] / scale[:, None]
        size = rows.max(axis=0)
        found = np.linalg.lstsq(rows / size, seconds / scale, rcond=None)[0] / size
        if found.min() >= 0 or len(used) == 1:
            out = np.zeros(terms.shape[1])
            out[used] = np.maximum(found, 0.0)
            return out
        used.pop(int((found * size).argmin()))


def _places(shapes: np.ndarray) -> np.ndarray:
    """Where shapes lie: the logarithms of m, n, k, and of batch at a quarter of their weight."""
    return np.asarray(np.log2(shapes) * np.array([0.25, 1.0, 1.0, 1.0]), float)


def of_device(device: Device, dtype: str, peak: float) -> Gemm:
    """The device's GEMM at this dtype. Without a table and without a tile model, its peak counts for every shape."""
    table: Mapping[str, Any] | None = device.profile.get("gemm", {}).get(dtype)
    if table is not None and table["rows"]:
        return Measured.of_rows(table["rows"], device.launch_s)
    tile = device.profile.get("gemm_tile")
    if tile is None:
        return Tiled(peak, 1, 0.0, device.launch_s)
    return Tiled(peak * tile["share"], device.profile["num_sms"], tile["extra_k"], device.launch_s)

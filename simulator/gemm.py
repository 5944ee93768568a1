"""How fast a device multiplies matrices, by shape: a measured table where there is one, else a tile-and-wave model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Protocol

import numpy as np

from ir.cluster import Device
from simulator.profile import bundled

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
"""Output tiles that a vendor library chooses among, (rows, columns)."""

GRID_DTYPE = {"float16": "bfloat16", "float16_sum16": "bfloat16"}
"""Dtypes that run as another one does."""

SPLITS = (1, 2, 4, 8, 16)
"""Parts into which it may cut k where the output alone does not fill the device."""

NEIGHBOURS = 6
"""Measured shapes that count for a shape in between."""

FAR = 2.0
"""Doublings of m, n or k at which a measured shape says as much of another as the law does by itself."""

STEP = 0.0125
"""What one step of a bundled grid means: the logarithm of measured over modelled seconds, in 8 bits."""


class Gemm(Protocol):
    def seconds(self, shape: tuple[int, ...], nbytes: float, bytes_per_s: float) -> float:
        """Seconds of `batch` products (m, k) x (k, n), shape = (batch, m, n, k), that move `nbytes`."""

    @property
    def best_rate(self) -> float:
        """Flops a second that no product exceeds."""


@dataclass(frozen=True, slots=True)
class Tiled:
    """Tiles of the output are dealt to `num_sms` units in waves; every tile does `k + extra_k` multiply-adds an element, the extra for filling and emptying.

    `time = launch + max(waves x tile x 2 (k + extra_k) / (rate / num_sms), bytes / bandwidth)`, the best of eight tiles. It does not decrease in any of batch,
    m, n, k. `rate` is peak times the share that large products reach. A tile with the sides r and c takes `1 + small_tile (1/r + 1/c - 1/256 - 1/128)` times as
    long as its flops say, since it reads more for each of them. With a finite `split_s`, k may be cut into pieces whose float32 sums are added in `split_s` and
    the time of their traffic. `cast_bytes`: bytes moved for each element of the left operand to bring it to the product's dtype (fp8 tables hold that too).
    `misaligned`: how much longer the flops take where n or k is no multiple of 8, so that rows do not start at 16 bytes.

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
    small_tile: float = 0.0
    split_s: float = math.inf
    cast_bytes: float = 0.0
    misaligned: float = 1.0

    def seconds(self, shape: tuple[int, ...], nbytes: float, bytes_per_s: float) -> float:
        batch, m, n, k = (np.float64(x) for x in shape)
        return float(self.of_arrays(batch, m, n, k, np.float64(nbytes), bytes_per_s))

    def of_arrays(self, batch: Any, m: Any, n: Any, k: Any, nbytes: Any, bytes_per_s: float) -> Any:
        """`seconds` of many shapes at once: arrays of one shape, or scalars of numpy."""
        splits = SPLITS if math.isfinite(self.split_s) else (1,)
        rows, columns, parts = _choices(splits)
        wide = [np.asarray(x)[..., None] for x in (batch, m, n, k)]
        tiles = wide[0] * np.ceil(wide[1] / rows) * np.ceil(wide[2] / columns) * parts
        slow = (1 + self.small_tile * (1 / rows + 1 / columns - 1 / 256 - 1 / 128)) * rows * columns
        busy = np.ceil(tiles / self.num_sms) * slow * (wide[3] / parts + self.extra_k) * (2.0 * self.num_sms / self.rate)
        if len(splits) > 1:
            busy = busy + (parts > 1) * (self.split_s + 8.0 * parts * wide[0] * wide[1] * wide[2] / bytes_per_s)
        best = busy.min(axis=-1) * np.where((np.asarray(n) % 8 > 0) | (np.asarray(k) % 8 > 0), self.misaligned, 1.0)
        return self.launch_s + np.maximum(best, nbytes / bytes_per_s) + self.cast_bytes * batch * m * k / bytes_per_s

    @property
    def best_rate(self) -> float:
        return self.rate


@lru_cache(maxsize=2)
def _choices(splits: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and parts of k of everything that may be chosen."""
    every = np.array([(r, c, s) for s in splits for r, c in TILES], float)
    return every[:, 0], every[:, 1], every[:, 2]


@dataclass(frozen=True, slots=True)
class Gridded:
    """A tile-and-wave law fitted to a measured grid of m, n and k, and what the grid says beyond it.

    The law knows tiles and waves; `log_factors[m, n, k]`, measured over modelled, is smooth enough to be read off between the points of the grid, straight in
    the logarithms of m, n and k, and outside of it as at its edge. A batch of products lies where one product of as many rows does. The bandwidth is the
    law's own: that of `seconds` is not asked.
    """

    law: Tiled
    bytes_per_s: float
    axes: tuple[tuple[float, ...], ...]
    log_factors: np.ndarray
    best_rate: float

    def seconds(self, shape: tuple[int, ...], nbytes: float, bytes_per_s: float) -> float:
        batch, m, n, k = shape
        return self.law.seconds(shape, nbytes, self.bytes_per_s) * math.exp(self.log_factor(batch * m, n, k))

    def log_factor(self, m: float, n: float, k: float) -> float:
        """The logarithm of measured over modelled seconds."""
        corners = [(0, 1.0)]
        for axis, size, stride in zip(self.axes, (m, n, k), _strides(self.log_factors.shape), strict=True):
            low, share = _between(axis, math.log(size))
            corners = [(at + i * stride, weight * w) for at, weight in corners for i, w in ((low, 1 - share), (low + 1, share)) if w]
        flat = self.log_factors.ravel()
        return STEP * sum(weight * float(flat[at]) for at, weight in corners)


def _strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return shape[1] * shape[2], shape[2], 1


def _between(axis: Sequence[float], x: float) -> tuple[int, float]:
    """The point of `axis` below x, and how far x is on the way to the next; inside the axis, whatever x."""
    if x <= axis[0]:
        return 0, 0.0
    if x >= axis[-1]:
        return len(axis) - 1, 0.0
    low = int(np.searchsorted(axis, x, side="right")) - 1
    return low, (x - axis[low]) / (axis[low + 1] - axis[low])


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
    best_rate: float

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[float]], launch_s: float) -> Measured:
        """A table; its fastest row bounds the launch time that is told apart."""
        table = np.asarray(rows, float)
        launch_s = min(launch_s, float(table[:, 4].min()) / 2)
        law = _fit(_terms(table[:, :4]), table[:, 4] - launch_s, table[:, 4])
        told = launch_s + _terms(table[:, :4]) @ law
        measured = float((2 * table[:, :4].prod(axis=1) / (table[:, 4] - launch_s)).max())
        return cls(launch_s, law, _places(table[:, :4]), np.log(table[:, 4] / told), max(measured, 1 / law[1] if law[1] else 0.0))

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
    """The device's GEMM at this dtype: its own measured rows; a bundled grid (`profile["gemm_grid"]`, `instead` where its own is of kernels made for another
    card); a tile model; or its peak for every shape.
    """
    table: Mapping[str, Any] | None = device.profile.get("gemm", {}).get(dtype)
    if table is not None and table["rows"]:
        return Measured.of_rows(table["rows"], device.launch_s)
    grid = device.profile.get("gemm_grid")
    if grid is not None:
        name = str(grid.get("instead", {}).get(dtype, grid["name"]))
        found = of_grid(device, name, dtype, peak * float(grid.get("share", 1.0)))
        if found is not None:
            return found
    tile = device.profile.get("gemm_tile")
    if tile is None:
        return Tiled(peak, 1, 0.0, device.launch_s)
    odd = float(bundled("gemm")["misaligned"]["factor"]) if dtype in ("float16", "bfloat16", "float16_sum16") else 1.0
    return Tiled(peak * tile["share"], device.profile["num_sms"], tile["extra_k"], device.launch_s, misaligned=odd)


def of_grid(device: Device, name: str, dtype: str, peak: float) -> Gridded | None:
    """The bundled grid `name` at this dtype on a device with this many units, this peak and this bandwidth; None where there is none."""
    key = f"{name}|{GRID_DTYPE.get(dtype, dtype)}"
    table = bundled("gemm")["tables"].get(key)
    if table is None:
        return None
    law = Tiled(
        peak * table["share"], int(device.profile["num_sms"]), table["extra_k"], table["launch_s"], table["small_tile"], table["split_s"], table["cast_bytes"],
        float(bundled("gemm")["misaligned"]["factor"]),
    )  # fmt: skip
    axes, factors = _grid(key)
    return Gridded(law, device.bytes_per_s * table["hbm_share"], axes, factors, peak * table["best_share"])


@lru_cache(maxsize=64)
def _grid(key: str) -> tuple[tuple[tuple[float, ...], ...], np.ndarray]:
    """Logarithms of the grid's m, n and k, and its factors in steps."""
    with (files("simulator") / "profiles" / "gemm.npz").open("rb") as stream, np.load(stream) as tables:
        axes = bundled("gemm")["tables"][key]["axes"]
        return tuple(tuple(np.log(tables[f"{axes}|{x}"].astype(float)).tolist()) for x in "mnk"), tables[key]

"""Fits the tile-and-wave law of `simulator.gemm` to measured grids and writes `simulator/profiles/gemm.json` and `gemm.npz`.

    python benchmarks/fit_gemm.py gemm_fine.npz gemm_measured.csv

The first file holds arrays `GPU|dtype` (3 x N: m, n, k) and `GPU|dtype|us`; the second rows of gpu, dtype, m, n, k, time_us, of which those GPUs are taken
that the first lacks. Held-out errors are of m >= 128: `law`, fitted on a random half of the points, on the other half; `half`, the same with what the first
half of the grid says beyond the law, absent points from their neighbours on the three axes; `columns`, every other value of n left out.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from simulator.gemm import STEP, Tiled
from simulator.profile import gpu_profile

PROFILES = Path(__file__).parents[1] / "simulator" / "profiles"
SOURCE = "GEMM times published with ai-dynamo/aiconfigurator (Apache-2.0), {}; {} points; the law fitted by benchmarks/fit_gemm.py"
OWNERS = {
    "a100_sxm": "A100-SXM-80GB", "h100_sxm": "H100-SXM", "h200_sxm": "H200", "b200_sxm": "B200", "b300_sxm": "B300",
    "gb200": "GB200", "gb300": "GB300", "l40s": "L40S",
}  # fmt: skip
ELEMENT_BYTES = {"bfloat16": (2.0, 2.0), "fp8": (1.0, 2.0), "fp8_block": (1.0, 2.0), "nvfp4": (0.5625, 2.0)}
PEAK_DTYPE = {"fp8_block": "fp8"}
MISALIGNED = {
    "factor": 1.8,
    "source": "(from memory) GPT-2 with its vocabulary padded from 50257 to 50304 trains 25 % faster on A100, karpathy/nanoGPT: the head has 31 % of the flops",
}
ABOUT = (
    "share of peak, extra k a tile, seconds before a product, share of bandwidth, slowness of small tiles, seconds to add a split sum, bytes a cast element; "
    "held_out: [mean, 90 %] of absolute log errors"
)
NAMES = ("share", "extra_k", "launch_s", "hbm_share", "small_tile", "split_s", "cast_bytes")
LEAST = dict.fromkeys(NAMES, 0.0) | {"cast_bytes": 1e-3}
LOW = np.array([0.3, 0, 0.3e-6, 0.3, 0, 0, 0])
HIGH = np.array([1.0, 500, 30e-6, 1.0, 60, 60e-6, 60])
STARTS = ([0.8, 150, 4e-6, 0.75, 5, 5e-6, 1], [0.6, 60, 6e-6, 0.6, 15, 8e-6, 6], [0.7, 200, 3e-6, 0.85, 2, 4e-6, 0.5])


def modelled(p: np.ndarray, shapes: np.ndarray, owner: dict[str, Any], dtype: str) -> np.ndarray:
    """Seconds by the law of the seven parameters `p`."""
    share, extra_k, launch_s, hbm_share, small_tile, split_s, cast_bytes = (float(x) for x in p)
    m, n, k = shapes.astype(float)
    read, written = ELEMENT_BYTES[dtype]
    law = Tiled(owner["flops_per_s"][PEAK_DTYPE.get(dtype, dtype)] * share, owner["num_sms"], extra_k, launch_s, small_tile, split_s, cast_bytes)
    return law.of_arrays(np.ones_like(m), m, n, k, read * (m * k + k * n) + written * m * n, owner["bytes_per_s"] * hbm_share)


def fit(shapes: np.ndarray, seconds: np.ndarray, owner: dict[str, Any], dtype: str, chosen: np.ndarray) -> np.ndarray:
    """The law's parameters by robust least squares of log errors over 3,000 of the `chosen` points; few rows count less, they are no training."""
    chosen = np.random.default_rng(0).choice(chosen, min(3000, len(chosen)), replace=False)
    weight, high = np.where(shapes[0] >= 128, 1.0, 0.3)[chosen], HIGH.copy()
    if dtype == "bfloat16":
        high[-1] = LEAST["cast_bytes"]  # nothing is cast

    def error(p: np.ndarray) -> np.ndarray:
        return weight * np.log(modelled(p, shapes[:, chosen], owner, dtype) / seconds[chosen])

    tries = []
    for start in STARTS:
        inside = np.clip(start, LOW + 1e-3 * (high - LOW), high - 1e-3 * (high - LOW))
        tries.append(least_squares(error, inside, bounds=(LOW, high), loss="soft_l1", f_scale=0.1, diff_step=3e-2, x_scale=[0.1, 50, 2e-6, 0.1, 5, 5e-6, 2]))
    return min(tries, key=lambda r: r.cost).x


def cube(axes: list[np.ndarray], shapes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values on the product of the axes, NaN where there is none."""
    out = np.full([len(x) for x in axes], np.nan)
    out[tuple(np.searchsorted(x, s) for x, s in zip(axes, shapes, strict=True))] = values
    return out


def filled(grid: np.ndarray, axes: list[np.ndarray], only: int | None = None) -> np.ndarray:
    """The grid without gaps: each is the mean of what its neighbours on the axes say, straight in the logarithm of the size."""
    found = np.nanmean([_along(grid, axes[i], i) for i in (range(3) if only is None else (only,))], axis=0)
    return np.where(np.isnan(grid), found, grid)


def _along(grid: np.ndarray, axis: np.ndarray, i: int) -> np.ndarray:
    lines = np.moveaxis(grid, i, 0).copy()
    shape, places = lines.shape, np.log(axis)
    lines = lines.reshape(shape[0], -1)
    for column in lines.T:
        there = ~np.isnan(column)
        if there.any() and not there.all():
            column[~there] = np.interp(places[~there], places[there], column[there])
    return np.moveaxis(lines.reshape(shape), 0, i)


def held_out(shapes: np.ndarray, seconds: np.ndarray, owner: dict[str, Any], dtype: str) -> dict[str, list[float]]:
    """[mean, 90 % quantile] of absolute log errors, three ways."""
    axes = [np.unique(s) for s in shapes]
    half = np.random.default_rng(1).random(len(seconds)) < 0.5
    real = shapes[0] >= 128
    p = fit(shapes, seconds, owner, dtype, np.flatnonzero(half))
    factors = np.log(seconds / modelled(p, shapes, owner, dtype))
    places = tuple(np.searchsorted(x, s) for x, s in zip(axes, shapes, strict=True))
    told = filled(cube(axes, shapes, np.where(half, factors, np.nan)), axes)
    left_out = np.isin(shapes[1], axes[1][1:-1:2])
    columns = filled(cube(axes, shapes, np.where(left_out, np.nan, factors)), axes, only=1)
    errors = {"law": factors[real & ~half], "half": (factors - told[places])[real & ~half], "columns": (factors - columns[places])[real & left_out]}
    return {name: [round(float(np.abs(e).mean()), 4), round(float(np.quantile(np.abs(e), 0.9)), 4)] for name, e in errors.items()}


def read(fine: Path, coarse: Path) -> dict[str, tuple[np.ndarray, np.ndarray, str]]:
    """(shapes, seconds, origin) by `GPU|dtype`."""
    with np.load(fine) as tables:
        out = {key: (tables[key], tables[f"{key}|us"].astype(float) * 1e-6, "sglang 0.5.10") for key in tables.files if not key.endswith("us")}
    rows: dict[str, list[list[float]]] = {}
    for row in csv.DictReader(coarse.open()):
        if row["gpu"] in OWNERS and row["dtype"] in ELEMENT_BYTES and not any(key.startswith(row["gpu"]) for key in out):
            rows.setdefault(f"{row['gpu']}|{row['dtype']}", []).append([float(row[c]) for c in ("m", "n", "k", "time_us")])
    for key, values in rows.items():
        table = np.asarray(values).T
        out[key] = (table[:3].astype(int), table[3] * 1e-6, "trtllm 1.3.0rc20")
    return out


def _fits(arrays: dict[str, np.ndarray], kind: str, axes: list[np.ndarray]) -> bool:
    """Whether axes of this name are these, or not there yet."""
    return all(np.array_equal(arrays.get(f"{kind}|{x}", axis), axis) for x, axis in zip("mnk", axes, strict=True))


def main(fine: str, coarse: str) -> None:
    arrays: dict[str, np.ndarray] = {}
    tables: dict[str, dict[str, Any]] = {}
    for key, (shapes, seconds, origin) in read(Path(fine), Path(coarse)).items():
        name, dtype = key.split("|")
        owner = dict(gpu_profile(OWNERS[name])[1])
        axes = [np.unique(s) for s in shapes]
        kind = next(f"grid{i}" for i in itertools.count() if _fits(arrays, f"grid{i}", axes))
        p = fit(shapes, seconds, owner, dtype, np.arange(len(seconds)))
        factors = np.log(seconds / modelled(p, shapes, owner, dtype))
        arrays |= {f"{kind}|{x}": axis.astype(np.int32) for x, axis in zip("mnk", axes, strict=True)}
        arrays[key] = np.round(np.clip(filled(cube(axes, shapes, factors), axes) / STEP, -127, 127)).astype(np.int8)
        best = float((2 * shapes.astype(float).prod(axis=0) / seconds).max() / owner["flops_per_s"][PEAK_DTYPE.get(dtype, dtype)])
        tables[key] = {n: float(f"{x:.4g}") if x > LEAST[n] else 0.0 for n, x in zip(NAMES, p, strict=True)} | {
            "best_share": round(best, 4), "axes": kind, "held_out": held_out(shapes, seconds, owner, dtype), "source": SOURCE.format(origin, len(seconds)),
        }  # fmt: skip
        print(key, tables[key], flush=True)
    np.savez_compressed(PROFILES / "gemm.npz", **arrays)
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(tables.items()))
    head = f'{{"schema_version": 1,\n "about": "{ABOUT}",\n "misaligned": {json.dumps(MISALIGNED)},\n "tables": {{\n'
    (PROFILES / "gemm.json").write_text(f"{head}{lines}\n }}}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

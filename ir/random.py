"""Random numbers that are a function of where they are used: (seed, step, salt, logical index), so every plan draws the same.

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) entered at any position: element number `n` of the stream `key` is `mix(key + n * GOLDEN)`.
Elements are addressed by row and column of the whole tensor; two neighbours in a row share one 64-bit word, so a shard that starts anywhere sees its own part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ir.errors import GraphError

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 18


def mix(word: int) -> int:
    """SplitMix64's finaliser on one Python integer: a bijection of 64-bit words.

    >>> hex(mix(GOLDEN))
    '0xe220a8397b1dcdaf'
    """
    word = ((word ^ (word >> 30)) * _FIRST) & MASK
    word = ((word ^ (word >> 27)) * _SECOND) & MASK
    return word ^ (word >> 31)


def stream(*parts: int | str) -> int:
    """The key of the stream that belongs to these numbers and names; order matters.

    >>> stream(0, 1) != stream(1, 0), stream(3, "wte") == stream(3, "wte")
    (True, True)
    """
    key = 0
    for part in parts:
        number = part if isinstance(part, int) else int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
        key = mix((key + GOLDEN + (number & MASK)) & MASK)
    return key


def words(xp: Any, key: int, counters: Any) -> Any:
    """The 64-bit words at positions `counters` (uint64, overwritten) of the stream `key`."""
    word = counters
    word *= xp.uint64(GOLDEN)
    word += xp.uint64(key)
    shifted = word >> xp.uint64(30)
    word ^= shifted
    word *= xp.uint64(_FIRST)
    xp.right_shift(word, xp.uint64(27), out=shifted)
    word ^= shifted
    word *= xp.uint64(_SECOND)
    xp.right_shift(word, xp.uint64(31), out=shifted)
    word ^= shifted
    return word


def _counters(xp: Any, rows: Any, width: int, first: int, stop: int) -> Any:
    """One position for each pair of columns that touches [first, stop), for each row: uint64 [rows, pairs]."""
    pairs = xp.arange(first // 2, (stop + 1) // 2, dtype=xp.uint64)
    return rows.astype(xp.uint64)[:, None] * xp.uint64((width + 1) // 2) + pairs


def kept(xp: Any, key: int, p: float, rows: Any, width: int, first: int, stop: int) -> Any:
    """bool [len(rows), stop - first]: False with probability `p`, for the columns [first, stop) of rows of `width` of a whole tensor.

    >>> whole = kept(np, 7, 0.5, np.arange(4), 5, 0, 5)
    >>> bool((kept(np, 7, 0.5, np.arange(2, 4), 5, 1, 4) == whole[2:, 1:4]).all())
    True
    """
    halves = words(xp, key, _counters(xp, rows, width, first, stop)).view(xp.uint32)
    return halves[:, first % 2 : first % 2 + stop - first] >= xp.uint32(min(round(p * 2.0**32), (1 << 32) - 1))


def growth(p: float) -> float:
    """What survives dropout is multiplied by 1 / (1 - p), so that the expectation stays; GraphError unless 0 <= p < 1."""
    if not 0.0 <= p < 1.0:
        raise GraphError(f"dropout with p = {p}: give a probability from 0 up to, but not including, 1")
    return 1.0 / (1.0 - p)


def normal(key: int, rows: Any, width: int, first: int, stop: int) -> Any:
    """float64 [len(rows), stop - first] of standard normal numbers by Box and Muller (1958), for the columns [first, stop) of rows of `width`."""
    counters = _counters(np, rows, width, first, stop)
    counters <<= np.uint64(1)
    radius = words(np, key, counters.copy())
    angle = words(np, key, counters + np.uint64(1))
    # 53 bits; the radius's uniform lies in (0, 1] so that its logarithm is finite
    r = np.sqrt(-2.0 * np.log(((radius >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53))
    phi = (angle >> np.uint64(11)).astype(np.float64) * (2.0 * math.pi * 2.0**-53)
    both = np.stack((r * np.cos(phi), r * np.sin(phi)), axis=-1).reshape(len(rows), -1)
    return both[:, first % 2 : first % 2 + stop - first]


def uniform(key: int, rows: Any, width: int, first: int, stop: int) -> Any:
    """float64 [len(rows), stop - first] of numbers between -1 and 1, for the columns [first, stop) of rows of `width`."""
    counters = _counters(np, rows, width, first, stop)
    counters <<= np.uint64(1)
    both = np.stack((words(np, key, counters.copy()), words(np, key, counters + np.uint64(1))), axis=-1).reshape(len(rows), -1)
    return ((both[:, first % 2 : first % 2 + stop - first] >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-52 - 1.0


def initial(init: Mapping[str, Any], shape: Sequence[int], region: Sequence[Sequence[int]], dtype: str, seed: int, name: str) -> Any:
    """The first value of the part `region` ((start, stop) for each dim) of a parameter of whole `shape`: the same numbers however it is cut.

    `init`: {"init": "normal", "std": 0.02, "mean": 0.0}, {"init": "uniform", "bound": 0.1}, "zeros" or "ones". Raises GraphError for another kind.

    >>> whole = initial({"init": "normal", "std": 0.02}, (4, 6), ((0, 4), (0, 6)), "float32", 1, "w")
    >>> part = initial({"init": "normal", "std": 0.02}, (4, 6), ((1, 3), (3, 6)), "float32", 1, "w")
    >>> bool((whole[1:3, 3:6] == part).all())
    True
    """
    local = tuple(stop - start for start, stop in region)
    kind = init.get("init", "zeros")
    if kind == "zeros":
        return np.zeros(local, dtype)
    if kind == "ones":
        return np.ones(local, dtype)
    if kind not in ("normal", "uniform"):
        raise GraphError(f"parameter `{name}`: init `{kind}` is not known; known are normal, uniform, zeros, ones")
    out = np.empty(local, dtype)
    start, stop = region[-1] if region else (0, 1)
    rows: Any = np.zeros(1, np.uint64)
    for (first, last), size in zip(region[:-1], shape[:-1], strict=True):
        rows = (rows[:, None] * np.uint64(size) + np.arange(first, last, dtype=np.uint64)).reshape(-1)
    width = shape[-1] if len(shape) else 1
    flat = out.reshape(len(rows), stop - start)
    key = stream(seed, name)
    height = max(1, _CHUNK // (stop - start))
    for at in range(0, len(rows), height):
        drawn = (normal if kind == "normal" else uniform)(key, rows[at : at + height], width, start, stop)
        flat[at : at + height] = drawn * init.get("std", 1.0) + init.get("mean", 0.0) if kind == "normal" else drawn * init["bound"]
    return out

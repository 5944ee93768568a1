"""Pretty numbers for people; inside, everything is seconds, bytes, flops."""

from __future__ import annotations

import math

from ir.errors import InputError

GIB = float(1 << 30)

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int64": 8, "int32": 4, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element; numpy's names, and the field's for what numpy lacks."""

DTYPE_ALIASES: dict[str, str] = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64", "double": "float64",
}  # fmt: skip


def dtype_name(text: str) -> str:
    """The canonical name of a dtype.

    >>> dtype_name("bf16")
    'bfloat16'
    """
    name = DTYPE_ALIASES.get(text, text)
    if name not in DTYPE_BYTES:
        raise InputError(f"dtype `{text}` is not known; known are {', '.join(sorted(DTYPE_BYTES))} and {', '.join(sorted(DTYPE_ALIASES))}")
    return name


def is_floating(dtype: str) -> bool:
    """Whether weights and activations may have it.

    >>> [is_floating(d) for d in ("bfloat16", "fp8", "int64", "uint8")]
    [True, True, False, False]
    """
    return dtype.startswith(("float", "bfloat", "fp"))


def seconds(value: float) -> str:
    """A duration of three significant digits; below a picosecond, which only rounding leaves, it is none.

    >>> seconds(0.01234), seconds(3.2e-6), seconds(75.0), seconds(6e-13)
    ('12.3 ms', '3.2 us', '75 s', '0 ns')
    """
    return _scaled(value if abs(value) >= 1e-12 else 0.0, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)))


def nbytes(value: float) -> str:
    """A size in binary units.

    >>> nbytes(3 * 2**30), nbytes(1536)
    ('3 GiB', '1.5 KiB')
    """
    return _scaled(value, (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)))


def count(value: float) -> str:
    """A count in the field's decimal units.

    >>> count(124_439_808), count(999_885_952)
    ('124 M', '1 B')
    """
    return _scaled(value, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))).strip()


def _scaled(value: float, steps: tuple[tuple[str, float], ...]) -> str:
    if not math.isfinite(value):
        return str(value)
    for unit, size in steps:
        if abs(value) >= 0.9995 * size:  # 999.9 M is 1 B in three digits
            return f"{value / size:.3g} {unit}" if abs(value) < 999.5 * size else f"{value / size:.0f} {unit}"
    unit, size = steps[-1]
    return f"{value / size:.3g} {unit}"

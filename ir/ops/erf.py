"""The error function, element by element, for numpy and cupy alike."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

_EDGE = 6.0
"""Beyond it 1 - erf(x) is less than 3e-17."""
_DEGREE = {"float64": 19, "float32": 8}
"""More terms would add more rounding than they take away."""


@lru_cache(maxsize=4)
def _coefficients(dtype: str) -> tuple[float, ...]:
    """erfc(z) exp(z^2) as a polynomial in u = (2t - 1 - t0) / (1 - t0), t = 1 / (1 + z/2), t0 its value at the edge; constant last.

    A Chebyshev interpolant of the standard library's `erfc`, in powers of u.
    """
    low = 1.0 / (1.0 + _EDGE / 2.0)

    def scaled(u: Any) -> Any:
        t = (u * (1.0 - low) + 1.0 + low) / 2.0
        return np.array([math.erfc(z) * math.exp(z * z) for z in 2.0 / t - 2.0])

    series = np.polynomial.chebyshev.chebinterpolate(scaled, _DEGREE.get(dtype, 8))
    return tuple(float(a) for a in np.polynomial.chebyshev.cheb2poly(series)[::-1])


def erf(xp: Any, x: Any) -> Any:
    """erf(x) as a new array; absolute error below 2e-15 in float64, 5e-7 in float32.

    >>> float(erf(np, np.array([-0.5]))[0]) - math.erf(-0.5) < 2e-15
    True
    """
    low = 1.0 / (1.0 + _EDGE / 2.0)
    z = xp.abs(x)
    xp.minimum(z, _EDGE, out=z)
    u = z * 0.5
    u += 1.0
    xp.divide(2.0 / (1.0 - low), u, out=u)
    u -= (1.0 + low) / (1.0 - low)
    first, *rest = _coefficients(x.dtype.name)
    y = u * first
    y += rest[0]
    for a in rest[1:]:
        y *= u
        y += a
    xp.multiply(z, z, out=z)
    xp.negative(z, out=z)
    y *= xp.exp(z, out=z)
    xp.subtract(1.0, y, out=y)
    return xp.copysign(y, x, out=y)

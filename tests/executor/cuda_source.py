"""What the catalogue's kernels ask of an array module, and CUDA source for the elementwise part of it as cupy writes it."""

from __future__ import annotations

from typing import Any

import numpy as np

from executor.gpu_check import variants
from ir.ops import CATALOGUE

C_TYPES = {"?": "bool", "b": "signed char", "B": "unsigned char", "i": "int", "I": "unsigned int", "l": "long", "L": "unsigned long", "q": "long long",
           "Q": "unsigned long long", "f": "float", "d": "double"}  # fmt: skip


class Traced(np.ndarray):
    """An array that writes down every ufunc and array function that meets it, operators too."""

    seen: tuple[set[tuple[str, str, tuple[str, ...]]], set[tuple[str, tuple[str, ...]]]] = (set(), set())

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **more):
        plain = [x.view(np.ndarray) if isinstance(x, Traced) else x for x in inputs]
        if out is not None:
            more["out"] = tuple(x.view(np.ndarray) if isinstance(x, Traced) else x for x in out)
        result = getattr(ufunc, method)(*plain, **more)
        of = tuple(np.asarray(x).dtype.char if hasattr(x, "dtype") else type(x).__name__ for x in plain)
        self.seen[0].add((ufunc.__name__, method, of))
        return traced(out[0] if out is not None and isinstance(out[0], Traced) else result)

    def __array_function__(self, func, types, args, kwargs):
        self.seen[1].add((func.__name__, tuple(sorted(kwargs))))
        return traced(super().__array_function__(func, types, args, kwargs))


def traced(value: Any) -> Any:
    return value.view(Traced) if isinstance(value, np.ndarray) and not isinstance(value, Traced) else value


class Module:
    """numpy, but everything that it makes is traced; `used` are the names that were asked for."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.used.add(name)
        found = getattr(np, name)
        return (lambda *args, **more: traced(found(*args, **more))) if callable(found) and not isinstance(found, type | np.ufunc) else found


def trace() -> tuple[set[str], set[tuple[str, str, tuple[str, ...]]]]:
    """(names of the array module that the kernels use, (ufunc, method, dtypes) of every call, by operator or by name)."""
    module = Module()
    Traced.seen[0].clear()
    for name in CATALOGUE:
        for dtype in ("float32", "float64"):
            for one in variants(name, dtype):
                one.work(module)()
    return module.used, set(Traced.seen[0])


def kernel_source(index: int, ufunc: Any, dtypes: tuple[str, ...]) -> str:
    """One CUDA kernel that applies cupy's routine for these dtypes; dtypes are numpy's characters, or `int` and `float` for Python's own numbers."""
    chars = [d for d in dtypes if len(d) == 1]
    concrete = [np.dtype(d) if len(d) == 1 else np.result_type(*chars) for d in dtypes]
    op = next(o for o in ufunc._ops.ops if all(np.can_cast(have, want) for have, want in zip(concrete, o.in_types, strict=True)))
    names = [f"in{i}" for i in range(ufunc.nin)] + [f"out{i}" for i in range(ufunc.nout)]
    types = [C_TYPES[np.dtype(t).char] for t in (*op.in_types, *op.out_types)]
    aliases = "".join(f"typedef {t} {n}_type; " for t, n in zip(types, names, strict=True))
    arguments = ", ".join(f"{t}* p_{n}" for t, n in zip(types, names, strict=True))
    reads = "".join(f"{t} {n} = p_{n}[i]; " for t, n in zip(types, names, strict=True))
    writes = "".join(f"p_{n}[i] = {n}; " for n in names[ufunc.nin :])
    return f'extern "C" __global__ void k{index}({arguments}) {{ {aliases} int i = threadIdx.x; {reads} {{ {op.routine}; }} {writes} }}\n'

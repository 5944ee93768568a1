"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from executor.backend import Backend
from executor.cupy_backend import CupyBackend
from executor.null_backend import NullBackend
from executor.numpy_backend import NumpyBackend
from ir.errors import InputError

BACKENDS: Mapping[str, Callable[[], Backend]] = {"numpy": NumpyBackend, "cupy": CupyBackend, "null": NullBackend}


def open_backend(name: str) -> Backend:
    """The backend of this name; InputError for another, ExecutionError where it cannot run here."""
    if name not in BACKENDS:
        raise InputError(f"no backend `{name}`; there are {', '.join(BACKENDS)}")
    return BACKENDS[name]()

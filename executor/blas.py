"""One BLAS thread for each device: queues are the only parallelism, so that a device's work does not spill onto its neighbour's core."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def one_thread() -> Iterator[str]:
    """Holds the BLAS to one thread for as long as the context lasts; yields how: "threadpoolctl", "openblas" or "environment".

    With threadpoolctl every loaded BLAS is held; without it the OpenBLAS that numpy's wheel bundles is told through its C interface; where neither is there,
    OPENBLAS_NUM_THREADS=1, MKL_NUM_THREADS=1 or OMP_NUM_THREADS=1 must have been in the environment when numpy was imported.
    """
    try:
        import threadpoolctl
    except ModuleNotFoundError:
        threadpoolctl = None
    if threadpoolctl is not None:
        with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
            yield "threadpoolctl"
        return
    controls = _openblas()
    before = [get() for get, _ in controls]
    for _, put in controls:
        put(1)
    try:
        yield "openblas" if controls else "environment"
    finally:
        for (_, put), count in zip(controls, before, strict=True):
            put(count)


def _openblas() -> list[tuple[Callable[[], int], Callable[[int], object]]]:
    """(get, set) of the number of threads for every OpenBLAS that this process has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = dict.fromkeys(line.split()[-1] for line in maps.read_text().splitlines() if "openblas" in line)
    found = []
    for path in paths:
        library = ctypes.CDLL(path)
        for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
            get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
            put = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if get is not None and put is not None:
                found.append((get, put))
                break
    return found

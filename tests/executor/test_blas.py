"""The BLAS is held to one thread while a run lasts, with threadpoolctl and without."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from executor.blas import _openblas, one_thread


def num_threads() -> list[int]:
    np.ones((2, 2)) @ np.ones((2, 2))
    return [get() for get, _ in _openblas()]


@pytest.mark.parametrize("has_threadpoolctl", [True, False])
def test_one_thread_inside_and_as_before_outside(monkeypatch, has_threadpoolctl):
    controls = _openblas()
    if not controls:
        pytest.skip("this numpy bundles no OpenBLAS whose threads could be counted")
    if has_threadpoolctl:
        pytest.importorskip("threadpoolctl")
    else:
        monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    before = num_threads()
    for _, put in controls:
        put(2)
    try:
        with one_thread() as how:
            assert how == ("threadpoolctl" if has_threadpoolctl else "openblas")
            assert num_threads() == [1] * len(controls)
        assert num_threads() == [2] * len(controls)
    finally:
        for (_, put), count in zip(controls, before, strict=True):
            put(count)

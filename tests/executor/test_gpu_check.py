"""The GPU check: its comparisons on numpy's own arrays, its refusal without a GPU, the kernels' functions in cupy, its elementwise code through NVRTC."""

from __future__ import annotations

import numpy as np
import pytest

from executor.backends import open_backend
from executor.gpu_check import Row, kernel_difference, main, operators, table, variants
from executor.samples import SMALL, sample
from ir.errors import ExecutionError
from ir.ops import CATALOGUE
from tests.executor.cuda_source import kernel_source, trace


def has_gpu() -> bool:
    try:
        open_backend("cupy")
    except ExecutionError:
        return False
    return True


def test_without_a_gpu_it_says_so_and_fails(capsys):
    if has_gpu():
        pytest.skip("this machine has a GPU")
    assert main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nothing ran on a GPU: the backend cupy ")


def test_numpy_equals_itself_in_every_operator():
    (row,) = operators(np)
    assert row.good
    assert row.found == "largest difference float64 0.0e+00, float32 0.0e+00"


def test_a_kernel_that_differs_is_named():
    class Halved:
        """numpy with another tanh."""

        def __getattr__(self, name):
            return getattr(np, name)

        @staticmethod
        def tanh(x, out=None):
            return np.multiply(x, 0.5, out=out)

    rows = operators(Halved(), ["gelu", "add"])
    assert not rows[0].good
    assert [row.what for row in rows[1:]] == ["gelu float64", "gelu float32"]
    assert kernel_difference(sample(CATALOGUE["add"], SMALL, "float64", 0), Halved()) == 0.0


def test_attention_is_looked_at_with_dropout_too():
    assert [one.attrs.get("p", 0.0) for one in variants("attention", "float64")] == [0.0, 0.1]


def test_a_table_marks_what_fails():
    assert table([Row("a", "b", True), Row("long", "c", False)]).splitlines() == ["ok    a     b", "FAIL  long  c"]


def nvrtc():
    """The compiler of CUDA source; skips the test, naming what is missing, where it cannot be loaded."""
    pytest.importorskip("cupy", reason="cupy is not installed")
    from cupy.cuda import nvrtc as found

    try:
        found.getVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC cannot be loaded ({error}); install nvidia-cuda-nvrtc")
    return found


def test_the_kernels_elementwise_code_compiles_without_a_gpu():
    """Every elementwise function that a kernel uses, at the dtypes it uses it with, exists in cupy and its CUDA source compiles for an H100."""
    compiler = nvrtc()
    import cupy

    names, calls = trace()
    assert [name for name in sorted(names) if not hasattr(cupy, name)] == []
    elementwise = [(name, dtypes) for name, method, dtypes in sorted(calls) if method == "__call__" and name != "matmul"]
    assert len(elementwise) > 30
    preambles = dict.fromkeys(getattr(cupy, name)._preamble for name, _ in elementwise)
    source = "".join(preambles) + "\n" + "".join(kernel_source(i, getattr(cupy, name), dtypes) for i, (name, dtypes) in enumerate(elementwise))
    program = compiler.createProgram(source, "kernels.cu", (), ())
    try:
        compiler.compileProgram(program, ("--gpu-architecture=compute_90",))
        assert compiler.getPTX(program).count(b".entry") == len(elementwise)
    finally:
        compiler.destroyProgram(program)


def test_every_method_of_a_ufunc_that_kernels_use_is_cupys_too():
    cupy = pytest.importorskip("cupy")
    _, calls = trace()
    for name, method, _ in calls:
        if name != "matmul":
            assert hasattr(getattr(cupy, name), method), (name, method)

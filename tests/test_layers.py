"""Imports go one way: ir <- simulator <- planner <- headrace <- ui, and ir <- executor <- headrace."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BELOW = {
    "ir": {"ir"},
    "simulator": {"ir", "simulator"},
    "planner": {"ir", "simulator", "planner"},
    "executor": {"ir", "executor"},
    "headrace": {"ir", "simulator", "planner", "executor", "headrace"},
    "ui": {"ir", "simulator", "planner", "executor", "headrace", "ui"},
}
LEAN = {"ir": {"numpy", "networkx"}, "executor": {"numpy", "networkx", "cupy", "mpi4py", "threadpoolctl", "psutil"}}
"""The third parties of the packages that must run where little is installed."""
OPTIONAL = {"cupy", "mpi4py", "onnx", "plotly", "rich", "streamlit", "threadpoolctl", "torch", "transformers"}
"""Third parties that may be imported inside a function."""
LATE = {
    ("ir/program.py", "ir.net"), ("ir/program.py", "ir.proof"), ("ir/program.py", "ir.program_text"), ("executor/backend.py", "executor.numpy_backend"),
    ("executor/backend.py", "executor.null_backend"), ("executor/backend.py", "executor.cupy_backend"),
}  # fmt: skip
"""Our own modules that may be: methods of a value that are written elsewhere, backends when they are opened, two modules that call each other."""
COMMANDS = {"headrace/cli.py", "executor/cli.py"}
"""These import late, to start quickly and to tell the BLAS its threads before numpy is there."""
FILES = [path for package in BELOW for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether the import stands inside a function) of every import of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield str(node.module), id(node) in inside


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    where = path.relative_to(ROOT)
    package = where.parts[0]
    for module, inside in imports(path):
        root = module.split(".")[0]
        ours = root in BELOW
        assert not ours or root in BELOW[package], f"{where} imports {module}, which lies above it"
        assert ours or package not in LEAN or root in LEAN[package] | sys.stdlib_module_names, f"{where} imports {module}; {package} must run without it"
        late = root in OPTIONAL or (str(where), module) in LATE or str(where) in COMMANDS
        assert late or not inside, f"{where} imports {module} inside a function; it belongs at the top"

"""The surface of the command, frozen: verbs and options may be added here, none may change or vanish."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

import headrace
from headrace.cli import INTERRUPTED
from headrace.options import parser, verb_parsers
from ir import errors

WORKLOAD = {"--batch", "--global-batch", "--seq", "--dtype", "--optimizer", "--lora", "--freeze", "--fix", "--stages", "--memory-fraction", "--budget",
            "--moe-imbalance"}  # fmt: skip
SURFACE: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "plan": (("model", "cluster"), {*WORKLOAD, "--top", "--strict", "-o", "--output"}),
    "simulate": (("model", "cluster"), {*WORKLOAD, "--plan", "--trace", "--timeline"}),
    "check": (("plan",), {"--cluster", "--strict"}),
    "explain": (("plan",), {"--why-not", "--about", "--against"}),
    "lower": (("plan",), {"-o", "--output"}),
    "run": (("plan",), {"--steps", "--data", "--lr", "--warmup", "--seed", "--backend", "--verify", "--checkpoint", "--resume", "--timeline"}),
    "diff": (("predicted", "measured"), {"--trace"}),
    "measure": ((), {"-o", "--output"}),
    "calibrate": (("cluster",), {"--plan", "--step-s", "--measured", "-o", "--output"}),
    "validate": (("runs",), set()),
    "profile": (("action", "files"), {"--gpu", "--nodes", "--nic", "-o", "--output"}),
    "models": ((), set()),
    "clusters": ((), set()),
    "ui": ((), {"--port", "--headless"}),
}
VERBS = {"load", "load_cluster", "plan", "lower", "simulate", "explain", "run", "diff", "measure", "calibrate", "validate"}
EXIT_CODES = {
    "HeadraceError": 2, "InputError": 2, "SbpError": 2, "GraphError": 2, "ClusterError": 2, "PlanError": 2, "DoesNotFit": 4, "ProgramError": 2, "Deadlock": 2,
    "ExecutionError": 1,
}  # fmt: skip


def test_commands_are_those() -> None:
    assert list(verb_parsers(parser())) == list(SURFACE)


@pytest.mark.parametrize("verb", SURFACE)
def test_options_are_those(verb: str) -> None:
    positional, options = SURFACE[verb]
    actions = verb_parsers(parser())[verb]._actions
    assert tuple(a.dest for a in actions if not a.option_strings) == positional
    assert {o for a in actions for o in a.option_strings} == options | {"-h", "--help", "--json"}


@pytest.mark.parametrize("verb", SURFACE)
def test_help_has_an_example(verb: str) -> None:
    assert f"example:\n  headrace {verb}" in verb_parsers(parser())[verb].format_help()


@pytest.mark.parametrize("verb", SURFACE)
def test_help_names_every_default(verb: str) -> None:
    for action in verb_parsers(parser())[verb]._actions:
        if action.option_strings and action.default not in (None, False, argparse.SUPPRESS, {}):
            assert "(default" in str(action.help), action.option_strings


def test_exit_codes_are_those() -> None:
    classes = {name: c for name, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.HeadraceError)}
    assert {name: c.exit_code for name, c in classes.items()} == EXIT_CODES
    assert INTERRUPTED == 130


def test_the_verbs_of_the_package_are_those() -> None:
    assert set(headrace.__all__) == VERBS
    with pytest.raises(AttributeError, match="its verbs are"):
        headrace.sweeep  # noqa: B018


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, headrace.cli\ntry: headrace.cli.main(['--help'])\nexcept SystemExit: pass\nprint(sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = out.splitlines()[-1]
    assert not [name for name in ("numpy", "scipy", "networkx", "rich", "torch", "simulator", "planner", "executor") if f"'{name}'" in loaded]

"""`python -m executor.cli program.json`: performs a saved program where only numpy and networkx are installed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor import checkpoint
from executor.train import Run, run
from ir.errors import HeadraceError, InputError
from ir.program import Program

INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m executor.cli", description="Performs a program that `headrace lower` saved, every rank on threads of this process.",
        epilog="example: python -m executor.cli program.json --steps 10 --data book.txt --timeline measured.json",
    )  # fmt: skip
    out.add_argument("program", help="a program JSON")
    out.add_argument("--steps", type=int, default=10, help="how many steps (10)")
    out.add_argument("--data", help="a text file; default: the interpreter's own library sources")
    out.add_argument("--lr", type=float, help="learning rate instead of the program's")
    out.add_argument("--warmup", type=int, default=0, help="steps over which the learning rate grows to its value (0)")
    out.add_argument("--seed", type=int, default=0, help="of weights, dropout and the choice of samples (0)")
    out.add_argument("--backend", choices=("numpy", "cupy", "null"), default="numpy")
    out.add_argument("--watchdog", type=float, default=30.0, metavar="S", help="seconds without anything running before the wait cycle is told (30)")
    out.add_argument("--checkpoint", metavar="DIR", help="where the state is written at the end")
    out.add_argument("--resume", metavar="DIR", help="where the state at the start is read from; any plan's")
    out.add_argument("--timeline", metavar="FILE", help="where the measured timeline is written")
    out.add_argument("--json", action="store_true", help="one JSON document on standard output, progress on standard error")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 2 for a wrong input, 1 for a failed run, 130 when interrupted (the result of what was done is printed all the same)."""
    options = parser().parse_args(argv)
    try:
        result, done = perform(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except HeadraceError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    try:
        print(json.dumps(result, indent=1) if options.json else told(result))
    except BrokenPipeError:
        sys.stderr.close()
    return INTERRUPTED if done.interrupted else 0


def perform(options: argparse.Namespace) -> tuple[dict[str, Any], Run]:
    """Reads the program, runs it, writes what was asked for; returns the document of `--json` and the run."""
    program = read_program(options.program)
    for path in filter(None, (options.timeline, options.checkpoint)):
        check_writable(Path(path))
    start = checkpoint.load(options.resume) if options.resume else None

    def progress(step: int, steps: int, loss: float) -> None:
        print(f"step {step}/{steps}  loss {loss:.6f}", file=sys.stderr)

    done = run(
        program, data=options.data, steps=options.steps, lr=options.lr, warmup=options.warmup, seed=options.seed, backend=options.backend,
        watchdog_s=options.watchdog, progress=progress, initial=start.tensors if start else None, first_step=start.step if start else 0,
    )  # fmt: skip
    if options.checkpoint and not done.interrupted:
        checkpoint.save(done, options.checkpoint, program=program.name, seed=options.seed)
    if options.timeline:
        write_whole(Path(options.timeline), json.dumps(done.timeline.to_json()))
    return document(done), done


def read_program(path: str) -> Program:
    """A program from a file; InputError where there is none, ProgramError where it is no program."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; `headrace lower plan.json -o program.json` writes a program") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON ({error}); `headrace lower plan.json -o program.json` writes a program") from error
    return Program.from_json(data)


def document(done: Run) -> dict[str, Any]:
    """What `headrace run --json` says of a run without a prediction and a verification."""
    return {
        "schema_version": 1, "kind": "run", "program": done.program.fingerprint, "steps": len(done.loss) or done.steps, "loss": done.loss,
        "step_s": done.step_s, "predicted_step_s": None, "verified": None, "overlap": done.overlap, "messages": done.messages, "nbytes": done.nbytes,
        "interrupted": done.interrupted,
        **{key: done.program.meta[key] for key in ("model", "cluster") if key in done.program.meta},
    }  # fmt: skip


def told(result: dict[str, Any]) -> str:
    losses = f"loss {result['loss'][0]:.6f} -> {result['loss'][-1]:.6f}" if result["loss"] else "no losses"
    messages = result["messages"]
    moved = f"moved {messages['nbytes'] / 1e6:.1f} MB"
    return (
        f"{result['steps']} steps of {result['step_s'] * 1e3:.1f} ms, {losses}\n"
        f"{messages['collectives']:.0f} collectives and {messages['p2p']:.0f} p2p {moved}, {result['overlap']:.0%} of the time hidden"
    )


def check_writable(path: Path) -> None:
    """InputError before the work is done, where its result could not be written."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: {path.parent} is no folder that can be written to")


def write_whole(path: Path, text: str) -> None:
    """Writes a file by a rename, whole or not at all; InputError where it cannot be."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())

"""`make demo`: GPT-2 planned, foretold, trained for ten steps on this machine and compared, through the commands that anyone would type."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from headrace.cli import main

OUT = Path("out")
BATCH, SEQ, STEPS = 4, 64, 10
"""Small enough for two slow cores: a step of GPT-2 (124 M parameters) on 256 tokens is 0.2 TFLOP."""

COMMANDS = (
    (f"headrace plan gpt2 local --batch {BATCH} --seq {SEQ} -o {OUT}/plan.json", "The best plan for GPT-2 on this machine, each core a device"),
    (f"headrace explain {OUT}/plan.json", "Why this one"),
    (f"headrace run {OUT}/plan.json --steps {STEPS} --verify --timeline {OUT}/measured.json", "Train as planned, and compare with one device"),
    (f"headrace simulate gpt2 local --plan {OUT}/plan.json --timeline {OUT}/predicted.json", "What the simulator says of the same program"),
    (f"headrace diff {OUT}/predicted.json {OUT}/measured.json --trace {OUT}/trace.json", "Prediction laid on reality"),
)


def demo() -> int:
    """Runs every command and says which; stops at the first that fails, with its exit code."""
    OUT.mkdir(exist_ok=True)
    for command, what in COMMANDS:
        print(f"\n# {what}\n$ {command}\n", flush=True)
        exit_code = main(shlex.split(command)[1:])
        if exit_code:
            return exit_code
    print(f"\nThe trace of both timelines lies in {OUT / 'trace.json'}: open it in https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(demo())

"""Programs as text and as JSON: stable, equal when read back, and clear about what cannot be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ir.errors import ProgramError
from ir.program import Actor, Program, Register
from ir.work import Work
from tests.programs import pipeline, random_program

GOLDEN = Path(__file__).parent.parent / "golden"


def rich() -> Program:
    """A program that uses every field of registers, actors and works."""
    w = Register("h.0.w@r0", 0, (4, 2), "float32", 32, "step", 1, 1, "parameter", "h.0.w", ((0, 4), (2, 4)), {"kind": "normal", "std": 0.02}, True, "pool", 128)
    x = Register("in (odd)", 0, (), "int32", 4, memory="input", tensor="x", region=())
    load = Actor("load x", 0, "load", "microbatch", Work("load", "tokens", "int32", attrs={"dst_region": ((0, 1),)}), (), ("in (odd)",))
    work = Work("compute", "matmul", "float32", 1e9, 24.5, (1, 2, 3, 4), (), {"a": [1, 2][0], "to": "B"}, {"b": 1}, {"b": 2}, {"b": 0}, 1)
    use = Actor("use#1", 0, "compute", "microbatch", work, ("in (odd)",), (), (), origin="h.0", phase="B", layer=3)
    adam = Actor("opt", 0, "compute", "step", Work("compute", "adamw", "float32"), (), (), ("h.0.w@r0",), phase="U")
    orders = {(0, "load"): (("load x", 1), ("load x", 0)), (0, "compute"): (("use#1", 1), ("use#1", 0), ("opt", 0))}
    return Program("rich: one", 2, (load, use, adam), (w, x), orders, {"plan": "abc", "cuts": ((0, 2), (2, 4))})


PROGRAMS = [rich(), pipeline(2, 2), pipeline(3, 4, "gpipe"), Program("empty", 1, (), (), {}), *map(random_program, range(40))]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_text_and_json_read_back_equal(program):
    assert Program.parse(str(program)) == program
    again = Program.from_json(json.loads(program.dumps()))
    assert again == program
    assert again.fingerprint == program.fingerprint
    assert str(again) == str(program)


@pytest.mark.parametrize("program", [pipeline(2, 2), rich()], ids=["1f1b-p2-m2", "rich"])
def test_text_is_the_golden_one(program, request):
    golden = GOLDEN / f"{request.node.callspec.id}.txt"
    assert str(program) == golden.read_text(), f"the text form changed; if this is meant, write str(program) to {golden}"


def test_comments_and_empty_lines_are_passed_over():
    text = str(pipeline(2, 2))
    assert Program.parse("// a note\n\n" + text) == pipeline(2, 2)


BROKEN_LINES = {
    "lorem ipsum": r"line 2 of the program text: ` ipsum` stands where program, register, actor or order should",
    "register x @0 float32[4 8) 16": r"line 2 .*`\) 16` stands where a dim should",
    "register x @0 float32[4] 16 colour=1": r"`colour=1` stands where a field \(clock, credits, .*\) should",
    "register x @0 float32[4] 16 credits=": r"`` stands where a JSON value should",
    "actor F @0 microbatch": "` microbatch` stands where `/` should",
    "actor F @0/q microbatch compute scale float32 (x -> y": r"` -> y` stands where `\)` should",
    "order @0/q F#0": "` F#0` stands where `:` should",
    "order @0/q: F#zero": "`zero` stands where a microbatch should",
}


@pytest.mark.parametrize("line", BROKEN_LINES)
def test_a_line_that_cannot_be_read_is_shown(line):
    with pytest.raises(ProgramError, match=BROKEN_LINES[line]):
        Program.parse(f"program p, 1 microbatches\n{line}\n")


def test_text_without_head_is_refused():
    with pytest.raises(ProgramError, match="no line `program NAME, N microbatches`"):
        Program.parse("register x @0 float32[4] 16\n")


def document(**changes: object) -> dict[str, object]:
    return json.loads(pipeline(2, 2).dumps()) | changes


def without(key: str) -> dict[str, object]:
    return {k: v for k, v in document().items() if k != key}


def with_register(**fields: object) -> dict[str, object]:
    data = document()
    data["registers"][0] |= fields
    return data


BROKEN = {
    "no program": [[], None, "text", {"kind": "plan"}, without("kind")],
    "schema version 7": [document(schema_version=7)],
    "schema version None": [without("schema_version")],
    "incomplete or damaged": [
        *(without(k) for k in ("name", "num_microbatches", "actors", "registers", "orders", "meta")),
        document(registers=[{"name": "x"}]), document(registers=3), document(actors=[[]]), document(orders=[{"rank": 0}]), document(orders=["q"]),
        *(with_register(**{k: v}) for k, v in (("colour", "red"), ("shape", "4"), ("rank", "0"), ("clock", 3), ("replica", 1), ("shape", ["4"]))),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("sentence", "data"), [(s, d) for s, many in BROKEN.items() for d in many])
def test_broken_documents_are_refused(sentence, data):
    with pytest.raises(ProgramError, match=sentence):
        Program.from_json(data)


def test_numbers_that_are_no_sizes_are_refused_by_check():
    for field, value in (("nbytes", -1), ("credits", 0), ("nbytes", True)):
        with pytest.raises(ProgramError, match=f"has {field} {value}"):
            Program.from_json(with_register(**{field: value})).check()


def test_fingerprint_tells_programs_apart():
    a = pipeline(2, 2)
    assert a.fingerprint == pipeline(2, 2).fingerprint
    assert a.fingerprint != replace(a, num_microbatches=3).fingerprint

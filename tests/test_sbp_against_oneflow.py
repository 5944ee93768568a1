"""The page of placements against OneFlow's is up to date, and a difference without a reason is found."""

from __future__ import annotations

import json

import pytest

from benchmarks import sbp_against_oneflow as page


def test_the_page_is_up_to_date() -> None:
    assert page.DOCUMENT.read_text("utf-8") == page.document(), "run benchmarks/sbp_against_oneflow.py"


def test_what_oneflow_declares_is_derived_but_for_the_vocabulary() -> None:
    rows = json.loads(page.DATA.read_text("utf-8"))["operators"]
    assert len(rows) >= 50
    theirs_alone = [(row["ours"], *found["vocabulary"]) for row in rows for *_, found in (page.differences(row),) if "vocabulary" in found]
    assert theirs_alone == [("cross_entropy", "theirs: S(2), B -> P, B")]


def test_a_signature_that_nothing_explains_ends_the_page() -> None:
    row = {"ours": "gelu", "leading": 2, "theirs": "gelu", "signatures": ["x:P -> out:P"]}
    with pytest.raises(SystemExit, match="no reason is known"):
        page.differences(row)
    with pytest.raises(SystemExit, match="names an operand"):
        page.differences({**row, "signatures": ["y:B -> out:B"]})

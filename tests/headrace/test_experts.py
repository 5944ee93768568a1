"""Experts through the command: split by `--fix ep`, waited for by `--moe-imbalance`."""

from __future__ import annotations

import json

import pytest

from headrace.cli import main

PLAN = ["plan", "mixtral-tiny", "1x4xH100-SXM", "--batch", "8", "--seq", "32", "--top", "1", "--json"]


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    assert main([*PLAN, *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_experts_are_split_as_asked_and_tokens_cross_to_them(capsys: pytest.CaptureFixture[str]) -> None:
    best = planned(capsys, "--fix", "dp=4,ep=4,mbs=2")["plans"][0]
    assert (best["layout"]["dp"], best["layout"]["ep"], best["layout"]["mbs"]) == (4, 4, 2)
    assert "ep" in {row["axis"] for row in best["comm"]}


def test_the_busiest_expert_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    even, uneven = (planned(capsys, "--fix", "dp=4,ep=4,mbs=2", "--moe-imbalance", x) for x in ("1", "2"))
    assert (even["model"]["name"], uneven["model"]["name"]) == ("mixtral-tiny[capacity=1.0]", "mixtral-tiny[capacity=2.0]")
    assert uneven["plans"][0]["step_s"] > even["plans"][0]["step_s"]
    assert uneven["plans"][0]["peak_gib"] > even["plans"][0]["peak_gib"]


def test_a_model_without_experts_has_no_imbalance(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2", "1x4xH100-SXM", "--moe-imbalance", "2"]) == 2
    assert "--moe-imbalance 2: `gpt2` has no experts" in capsys.readouterr().err

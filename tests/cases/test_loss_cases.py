"""The loss over a large vocabulary and long sequences, in cases from public reports. Each test names its thread."""

from __future__ import annotations

import pytest

import headrace as hr
from ir.errors import DoesNotFit
from ir.plan import Plan

MODEL, CLUSTER = "gemma-2-2b[num_layers=2,max_positions=131072]", "1x1xH100-SXM"
"""256,000 words."""


def planned(seq: int, **fix: int) -> Plan:
    return hr.plan(MODEL, CLUSTER, batch=1, seq=seq, top=1, fix=fix or None).plans[0]


def test_the_loss_in_chunks_is_chosen_only_where_nothing_fits_without_it() -> None:
    """B142, github.com/EvolvingLMMs-Lab/LongVA/issues/19: 43 GB became 8, at 45 % MFU in place of 57. Whatever is chosen, both are told."""
    assert planned(16384).loss_chunks == 1
    with pytest.raises(DoesNotFit):
        planned(65536, loss_chunks=1)
    found = planned(65536)
    told = found.predicted["loss_chunks"]
    assert found.loss_chunks == told["chunks"] > 1
    assert not told["fits_without"]
    assert told["saves_gib"] > 60.0
    assert 0.05 < told["costs_mfu"] < 0.2
    assert f"the loss over {told['chunks']} chunks of tokens saves" in found.predicted["why"]
    asked = planned(16384, loss_chunks=8).predicted["loss_chunks"]
    assert asked["fits_without"]
    assert asked["saves_gib"] == pytest.approx(43.9 - 22.5, abs=2.0)

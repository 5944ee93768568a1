"""Serving one sequence: chunks that follow each other through the devices, joins of split layers, devices that do not share out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.errors import InputError
from planner.recipes.run import Shape
from planner.recipes.serve import Server
from simulator.clusters import load_cluster
from simulator.cost import CostModel

SEVEN_B = Server(Shape("llama", 32, 4096, 32, 32, 128, 11008, 32000, gated=True), CostModel(load_cluster("4xL40S")))


def test_a_prompt_of_one_chunk_keeps_one_device_busy_at_a_time_and_a_long_one_all() -> None:
    alone = replace(SEVEN_B, cost=CostModel(load_cluster("1xL40S")))
    assert SEVEN_B.prompt_s(512) == pytest.approx(alone.prompt_s(512), rel=0.05)
    assert alone.prompt_s(32 * 512) / SEVEN_B.prompt_s(32 * 512) == pytest.approx(4 * 32 / (32 + 3), rel=0.1)


def test_a_token_reads_all_weights_and_its_cache_once() -> None:
    weights_s = 6.6e9 * 2 / SEVEN_B.cost.cluster.devices[0].bytes_per_s
    assert 1.0 < SEVEN_B.token_s(0) / weights_s < 1.6
    quarter = replace(SEVEN_B, weight=0.5).token_s(0)
    assert 0.25 < quarter / SEVEN_B.token_s(0) < 0.5
    cache_s = 32 * 2 * 32 * 128 * 2 * 32768 / SEVEN_B.cost.cluster.devices[0].bytes_per_s
    assert SEVEN_B.token_s(32768) - SEVEN_B.token_s(0) == pytest.approx(cache_s / 0.8, rel=0.05)


def test_gathering_moves_more_than_summing_where_the_mlp_is_wide() -> None:
    split = replace(SEVEN_B, tp=4)
    assert replace(split, gathers=True).prompt_s(4096) != split.prompt_s(4096)
    wide = replace(split, shape=replace(SEVEN_B.shape, ffn=8 * 4096))
    assert replace(wide, gathers=True).prompt_s(4096) > wide.prompt_s(4096)


def test_devices_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(InputError, match="4 devices and 32 layers: groups of 3"):
        replace(SEVEN_B, tp=3).prompt_s(512)
    with pytest.raises(InputError, match="4 devices and 2 layers"):
        replace(SEVEN_B, shape=replace(SEVEN_B.shape, layers=2)).token_s(0)

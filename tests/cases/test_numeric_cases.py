"""Figures that were wrong in public reports: flops, utilisation, units, exposed time. Each test names its thread."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ir.boxing import kind_1d
from ir.errors import ClusterError, InputError
from ir.intervals import length, minus, union
from ir.ops import catalogue
from ir.sbp import B, P, S
from planner.recipes.flops import attention_flops, mfu, train_flops
from planner.recipes.run import Shape
from simulator.clusters import load_cluster
from simulator.profile import bundled


def test_flops_by_the_size_of_a_head() -> None:
    """NVIDIA-NeMo/Automodel issue 3091 (GPT-OSS-20B, 93.848 TF), NVIDIA-NeMo/RL issue 2736 (Qwen3-235B at 196,608 tokens, 204.4 PF)."""
    oss = Shape("moe", 24, 2880, 64, 8, 64, 0, 201088, gated=True, tied=False, experts=32, topk=4, moe_ffn=2880)
    qwen = Shape("moe", 94, 4096, 64, 4, 128, 0, 151936, gated=True, tied=False, experts=128, topk=8, moe_ffn=1536)
    assert train_flops(oss, 4096, window=128, window_layers=12).value == pytest.approx(93.848e12, rel=0.005)
    assert train_flops(qwen, 196608).value == pytest.approx(2.044e17, rel=0.005)
    assert "half of all pairs" in train_flops(oss, 4096).convention


def test_causal_attention_is_half() -> None:
    """AI-Hypercomputer/maxtext issue 1988, verl-project/verl issue 6389."""
    assert attention_flops(4096, 4096, causal=True) == 412316860416
    assert attention_flops(4096, 4096, causal=False) == 824633720832
    assert train_flops(Shape("llama", 1, 4096, 32, 8, 128, 14336, 128256), 4096, causal=False).convention.count("all pairs") == 1


def test_utilisation_above_one_is_a_wrong_peak() -> None:
    """karpathy/nanoGPT issue 464, karpathy/autoresearch issue 5: 104 % of an A100's 312 Tflop/s are 32.8 % of the H100's dense 989."""
    reached = 1.04 * 312e12
    assert mfu(reached, "H100-SXM") == pytest.approx(0.328, abs=0.003)
    with pytest.raises(InputError, match=r"1\.04 of the dense bfloat16 peak of A100-SXM-80GB .* mismatch"):
        mfu(reached, "A100-SXM-80GB")
    with pytest.raises(InputError, match="no GPU `H1000` is known"):
        mfu(reached, "H1000")
    assert bundled("gpus")["gpus"]["H100-SXM"]["flops_per_s"]["bfloat16"] == 989e12


def test_a_figure_without_its_unit_is_no_profile(tmp_path: Path) -> None:
    """EleutherAI/gpt-neox issue 739: milliseconds read as seconds; every field of a cluster says its unit."""
    document = load_cluster("2xL4").to_json()
    document["links"][0]["latency"] = document["links"][0].pop("latency_s") * 1e3
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ClusterError, match="latency"):
        load_cluster(str(path))


def test_exposed_is_a_union_not_a_sum() -> None:
    """marin-community/marin issues 8053 and 8054: a collective on the compute stream is communication, whatever its stream."""
    compute, side, inline = union([(0, 10), (12, 20)]), union([(8, 13)]), union([(20, 22)])
    comm = union([*side, *inline])
    assert length(compute) == 18
    assert length(minus(comm, compute)) == 4
    assert length(minus(minus(union([(0, 23)]), compute), comm)) == 1


def test_the_norm_of_a_partial_sum_needs_one_reduction_before_it() -> None:
    """pytorch/pytorch PR 159856: locals [1, 3] and [2, 1] of a P(sum) tensor have the norm 5, not 5.398, the sum of their norms."""
    squares = catalogue("sum_squares").for_ranks([1])
    taken = [squares.placements(rule) for rule in squares.rules()]
    assert taken == [((B,), (B,)), ((S(0),), (P,))]
    assert [kind_1d(P, operands[0]) for operands, _ in taken] == ["all_reduce", "reduce_scatter"]
    parts = np.array([[1.0, 3.0], [2.0, 1.0]])
    reduced = [np.square(row).sum() for row in np.split(parts.sum(axis=0), 2)]
    assert np.sqrt(sum(reduced)) == pytest.approx(5.0, abs=1e-6)
    assert np.sqrt(np.square(parts).sum(axis=1)).sum() == pytest.approx(5.398, abs=1e-3)

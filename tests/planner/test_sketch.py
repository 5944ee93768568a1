"""Sketches order the work as drafts would, and know what memory costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import spearmanr

from ir.cluster import Cluster
from planner.bounds import Bounds
from planner.candidates import Candidate, bases
from planner.evaluate import Evaluator
from planner.footprint import Footprint
from planner.frontends import load
from planner.frontends.model import Model
from planner.optimizers import OPTIMIZERS
from planner.sketch import Sketches
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from tests.families import of_kind
from tests.models import llama

WIDE = llama(num_layers=6, hidden=256, head_dim=32, mlp_hidden=768)


def evaluator(model: Model, cluster: Cluster, batch: int, seq: int) -> Evaluator:
    return Evaluator(Bounds(model, seq, "bfloat16", CostModel(cluster)), cluster, batch, OPTIMIZERS["adamw"], {}, 0.95)


@pytest.mark.parametrize(("model", "name"), [(WIDE, "4x1xH100-SXM@eth25"), (WIDE, "1x4xA100-SXM-80GB"), (of_kind("mixtral"), "2x2xH100-SXM")], ids=str)
def test_they_order_candidates_as_drafts_do(model: Model, name: str) -> None:
    one = evaluator(model, load_cluster(name), 8, 256)
    some = [c for c in bases({}, 4, 8, one.bounds.graph(1)) if c.recompute != "selective"][::3]
    drafted = np.array([one.evaluate(c).estimate_s for c in some])
    sketched = np.array([one.sketches.step_s(c) for c in some])
    assert spearmanr(drafted, sketched).statistic > 0.85
    assert np.log(sketched / drafted).std() < 0.35


def sketches(model: Model, name: str, share: float = 1.0, zero: int | None = None) -> Sketches:
    """With so much of the devices' memory."""
    cluster = load_cluster(name)
    bounds = Bounds(model, 4096, "bfloat16", CostModel(cluster))
    return Sketches(bounds, Footprint(bounds, OPTIMIZERS["adamw"]), share, zero)


LARGE = load("llama-3-8b", num_layers=8)
ON_ONE = Candidate(8, 1, 1, 2, 4, "1f1b", "selective")


def test_less_memory_costs_time_and_too_little_most() -> None:
    much, some, little = (sketches(LARGE, "1x8xH100-SXM", share).step_s(ON_ONE) for share in (0.95, 0.15, 0.05))
    assert much < some < little
    none, full = (sketches(LARGE, "1x8xH100-SXM", 0.15).step_s(replace(ON_ONE, recompute=what)) for what in ("none", "full"))
    assert some < full < none
    assert sketches(LARGE, "1x8xH100-SXM").step_s(replace(ON_ONE, recompute="full")) > much


def test_a_level_of_zero_that_is_fixed_is_kept_to() -> None:
    free = sketches(LARGE, "1x8xH100-SXM").step_s(ON_ONE)
    fixed = [sketches(LARGE, "1x8xH100-SXM", zero=level).step_s(ON_ONE) for level in range(4)]
    assert free == min(fixed) < max(fixed)


def test_experts_pay_where_their_products_would_read_all_of_them() -> None:
    """One sample a rank, 64 experts: a rank that holds an eighth of them multiplies eight times the tokens with each."""
    model = load("mixtral-8x7b", num_layers=4, num_experts=64)
    alone = Candidate(8, 1, 1, 1, 16, "1f1b", "none")
    one = sketches(model, "1x8xH100-SXM", 8.0)
    assert one.step_s(replace(alone, ep=8)) < 0.9 * one.step_s(alone)

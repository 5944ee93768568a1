"""The least memory of a candidate is a bound, and a bound that is worth something."""

from __future__ import annotations

import pytest

from planner.bounds import Bounds
from planner.candidates import bases
from planner.evaluate import Evaluator
from planner.frontends.model import Model
from planner.optimizers import OPTIMIZERS
from simulator.clusters import load_cluster
from simulator.cost import CostModel
from tests.models import SEQ, gpt, llama


@pytest.mark.parametrize("model", [llama(num_layers=2), gpt(num_layers=2)], ids=lambda m: m.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_placement_needs_less(model: Model, dtype: str) -> None:
    cluster = load_cluster("1x4xH100-SXM")
    evaluator = Evaluator(Bounds(model, SEQ, dtype, CostModel(cluster)), cluster, 8, OPTIMIZERS["adamw"], {}, 0.95)
    for c in list(bases({}, 4, 8, model.graph(1, SEQ, dtype)))[::2]:
        least = evaluator.footprint.least_bytes(c)
        needs = [evaluator.evaluate_at(c, price).memory.peak_bytes for price in (0.0, 30.0)]
        assert least <= min(needs), c
        assert least >= 0.1 * min(needs), c


def test_recompute_keeps_less() -> None:
    model, cluster = llama(num_layers=2), load_cluster("1x4xH100-SXM")
    evaluator = Evaluator(Bounds(model, SEQ, "float32", CostModel(cluster)), cluster, 8, OPTIMIZERS["adamw"], {}, 0.95)
    assert sum(evaluator.footprint.saved("full")) < 0.5 * sum(evaluator.footprint.saved("none"))


def test_two_copies_need_the_room_of_two_stages() -> None:
    model, cluster = gpt(num_layers=2), load_cluster("1x2xH100-SXM")
    evaluator = Evaluator(Bounds(model, SEQ, "float32", CostModel(cluster)), cluster, 8, OPTIMIZERS["adamw"], {}, 0.95)
    (twice, *_), (once, *_) = (list(bases({"schedule": name, "pp": 2, "mbs": 1}, 2, 8, model.graph(1, SEQ, "float32"))) for name in ("dualpipe", "1f1b"))
    assert 1.3 * evaluator.footprint.least_bytes(once) < evaluator.footprint.least_bytes(twice) <= evaluator.evaluate(twice).memory.peak_bytes

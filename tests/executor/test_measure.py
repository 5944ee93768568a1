"""Measuring this machine: the tables have the shape that the cost model reads, a busy machine is refused with numbers. No figure is compared with a clock."""

from __future__ import annotations

import math
from time import perf_counter

import pytest

from executor import measure as module
from executor.exchange import exchange_s, firing_s, hop_s
from executor.measure import Witness, measure, num_cores, op_table
from executor.samples import Sample
from executor.together import Timing, together
from ir.cluster import Cluster
from ir.errors import ExecutionError, InputError


def test_the_cluster_holds_the_tables_that_the_cost_model_reads(monkeypatch):
    wanted = ("linear", "gelu", "attention", "embedding", "adamw", "dropout", "box.slice", "fill", "total")
    monkeypatch.setattr(module, "CATALOGUE", {name: module.CATALOGUE[name] for name in wanted})
    monkeypatch.setattr(module, "GEMM_SHAPES", ((1, 32, 32, 32), (4, 16, 16, 16)))
    monkeypatch.setattr(module, "LARGE", {**module.SMALL, "b": 2, "s": 64, "z": 64, "t": 128})
    said: list[str] = []
    cluster = measure(1, said.append, patient=True)
    assert Cluster.from_json(cluster.to_json()).to_json() == cluster.to_json()
    (device,) = cluster.devices
    assert set(device.profile["ops"]) == set(wanted) - {"linear", "fill"}
    for table in device.profile["ops"].values():
        for seconds in (table["launch_s"], *table["s_per_element"].values(), *table["s_per_flop"].values()):
            assert math.isfinite(seconds)
            assert seconds >= 0
        assert set(table["s_per_element"]) == {"float32", "float64"}
    for dtype, table in device.profile["gemm"].items():
        assert [row[:4] for row in table["rows"]] == [[1, 32, 32, 32], [4, 16, 16, 16]]
        assert {"source", "measured_on"} <= set(table)
        assert device.flops_per_s[dtype] == max(2.0 * math.prod(row[:4]) / row[4] for row in table["rows"])
    assert cluster.profile["transport"]["latency_s"] > 0
    assert cluster.profile["driver"]["firing_s"] > 0
    assert 0 < device.memory_bytes < 1e15
    assert said == ["matrix products", "memory", "operators", "transport between threads"]


def test_the_fit_finds_what_a_kernel_costs():
    """Made-up seconds give back launch, rate of bytes and, of attention, rate of flops; a small sample that took too long does not hide the rate."""

    def timer(one: Sample) -> float:
        return 3e-6 + 2e-9 * one.nbytes / {"float32": 4, "float64": 8}[one.dtype] + (5e-12 * one.flops if one.op.name == "attention" else 0.0)

    for name, per_flop in (("gelu", 0.0), ("attention", 5e-12)):
        table = op_table(module.CATALOGUE[name], timer)
        assert table["launch_s"] == pytest.approx(3e-6, rel=1e-3)
        for dtype in ("float32", "float64"):
            assert table["s_per_element"][dtype] == pytest.approx(2e-9, rel=1e-6)
            assert table["s_per_flop"][dtype] == pytest.approx(per_flop, rel=1e-6)
    slow_start = op_table(module.CATALOGUE["gelu"], lambda one: 1.0)
    assert slow_start["launch_s"] == 0.0
    assert min(slow_start["s_per_element"].values()) > 0


def test_more_devices_than_cores_are_refused():
    with pytest.raises(InputError, match=rf"{num_cores() + 1} devices were asked for; this process may use {num_cores()} cores"):
        measure(num_cores() + 1)


def witness(*looks: tuple[float, float], patient: bool = False) -> Witness:
    return Witness([lambda: None], patient, perf_counter(), [Timing(s, s, share) for s, share in looks])


def test_a_busy_machine_is_refused_with_the_numbers():
    assert witness((1.0, 0.99), (1.1, 0.95)).reason == ""
    assert "1 cores gave 55% of their time (at least 90% is needed)" in witness((1.0, 0.99), (1.0, 0.55)).reason
    assert "the same product took up to 50% longer (at most 25%)" in witness((1.0, 1.0), (1.5, 1.0)).reason
    with pytest.raises(ExecutionError, match="too busy to be measured"):
        witness((1e9, 1.0)).look()
    witness((1e9, 1.0), patient=True).look()


def test_a_measurement_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(module, "LIMIT_S", -1.0)
    monkeypatch.setattr(module, "MIN_CPU_SHARE", 0.0)
    monkeypatch.setattr(module, "MAX_SPREAD", math.inf)
    with pytest.raises(ExecutionError, match="were not enough"):
        witness().check_time()
    witness(patient=True).check_time()


def test_work_runs_on_every_thread_and_its_error_is_raised():
    calls = [0, 0]

    def count(i: int):
        def work() -> None:
            calls[i] += 1

        return work

    timing = together([count(0), count(1)], 0.0)
    assert min(calls) >= 5
    assert timing.seconds > 0

    def broken() -> None:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        together([broken, count(0)], 0.0)


def test_the_runtime_can_be_timed():
    assert firing_s(200) > 0
    assert hop_s(5, 1) > 0
    assert exchange_s(3, 800, steps=3) > 0

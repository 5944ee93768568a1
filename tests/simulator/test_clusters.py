"""Clusters by name: forms, topology, assumptions, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ir.cluster import Cluster
from ir.errors import ClusterError, InputError
from simulator.clusters import load_cluster
from simulator.profile import bundled, gpu_names, machine_names


@pytest.mark.parametrize(
    ("text", "num_nodes", "num_devices", "gpu"),
    [
        ("4x8xH100-SXM", 4, 32, "H100-SXM"), ("4x8xh100@ib400x8", 4, 32, "H100-SXM"), ("16xA100", 2, 16, "A100-SXM-80GB"),
        ("8xL4", 1, 8, "L4"),         ("H200", 1, 1, "H200"), ("4x1xV100-SXM2-16GB@eth25", 4, 4, "V100-SXM2-16GB"),
        ("p4d.24xlarge", 1, 8, "A100-SXM-40GB"), ("4xp5.48xlarge", 4, 32, "H100-SXM"),
        ("2xdgx-a100@roce200x8", 2, 16, "A100-SXM-80GB"), ("2x4xRTX-4090", 2, 8, "RTX-4090"),
    ],
)  # fmt: skip
def test_forms(text: str, num_nodes: int, num_devices: int, gpu: str) -> None:
    cluster = load_cluster(text)
    assert (len(cluster.nodes), cluster.num_devices, cluster.devices[0].name, cluster.name) == (num_nodes, num_devices, gpu, text)
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_a_nic_shared_by_eight_gpus_is_one_edge() -> None:
    nics = [k for k in load_cluster("4x8xA100@ib100").links if k.kind == "ib"]
    assert sorted(k.a for k in nics) == ["nic0.0", "nic1.0", "nic2.0", "nic3.0"]
    share = bundled("links")["nics"]["ib"]["share"]
    assert nics[0].bytes_per_s == 100e9 / 8 * share
    assert {k.b for k in load_cluster("4x8xA100@ib100").links if k.a == "gpu9"} == {"nvswitch1", "nic1.0"}
    assert len([k for k in load_cluster("4xp4d.24xlarge").links if k.kind == "efa"]) == 16
    assert len([k for k in load_cluster("2x8xH100@ib400x8").links if k.kind == "ib"]) == 16


def test_more_nics_than_gpus_are_one_faster_port_each() -> None:
    one, two = (next(k for k in load_cluster(f"2x2xH100@ib200x{n}").links if k.kind == "ib") for n in (2, 4))
    assert two.bytes_per_s == 2 * one.bytes_per_s


def test_what_was_not_said_is_told() -> None:
    assumed = " ".join(load_cluster("16xA100").assumed)
    assert "8 x 200 Gb/s ib" in assumed
    assert "2 nodes of 8" in assumed
    assert "taken as A100-SXM-80GB" in assumed
    assert load_cluster("2x8xA100-SXM-80GB@ib200x8").assumed == ()
    assert load_cluster("2x8xV100-SXM2-16GB").assumed[0].startswith("NICs: 1 x 100 Gb/s")


def test_traffic_in_a_node_takes_the_switch_and_between_nodes_the_nics() -> None:
    cluster = load_cluster("2x8xH100@ib400x8")
    assert cluster.path(0, 7) == (("gpu0", "nvswitch0"), ("gpu7", "nvswitch0"))
    assert cluster.path(1, 14) == (("gpu1", "nic0.1"), ("fabric", "nic0.1"), ("fabric", "nic1.6"), ("gpu14", "nic1.6"))


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_has_sources(name: str) -> None:
    profile = bundled("gpus")["gpus"][name]
    for key in ("source", "measured_on", "usable_source", "launch_source", "hbm_share_source", "attention_share_source", "pcie_share_source", "num_sms_source"):
        assert profile[key], key
    assert profile["gemm_tile"]["source"]
    assert profile["collective"]["source"]
    assert profile["link"]["share_source"]
    cluster = load_cluster(f"2x8x{name}")
    assert cluster.num_devices == 16
    assert not any("nic" in vertex for edge in cluster.path(0, 7) for vertex in edge)
    assert 0.9 < profile["usable_bytes"] / profile["memory_bytes"] < 1


def test_machines_have_sources_and_known_gpus() -> None:
    for name in machine_names():
        assert bundled("nodes")["nodes"][name]["source"]
        assert load_cluster(f"2x{name}").num_devices == 2 * bundled("nodes")["nodes"][name]["gpus_per_node"]
    assert all(nic["source"] for nic in bundled("links")["nics"].values())


def test_curves_do_not_fall_and_have_sources() -> None:
    for curve in bundled("collectives")["curves"]:
        assert curve["source"]
        sizes, seconds = zip(*curve["rows"], strict=True)
        assert list(sizes) == sorted(set(sizes))
        assert list(seconds) == sorted(seconds)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0x8xH100", "a count is 0; give a whole number of 1 or more"), ("-1x8xH100", "-1"), ("nanx8xH100", "nan"),
        ("4x0xH100", "0"), ("1.5x8xH100", "1.5"), ("2x8xH100@ib0", "bandwidth is 0"),
        ("2x8xH100@ibnan", "bandwidth is nan"), ("2x8xH100@ib-5", "bandwidth is -5"),
        ("2x8xH100@ib400x0", "number of NICs a node is 0"),
        ("2x8xH100@ibinf", "bandwidth is inf"), ("2x8xH100@", "nothing stands after @"), ("2x8xH100@token25", "kind"),
        ("2x2x2xH100", "not understood"), ("", "not understood"),
        ("12xH100", "do not fill nodes of 8"), ("4x8xH10", "near: H100"), ("3xdgx-h10", "near machines: dgx-h100"), ("2x4xdgx-h100", "8 GPUs a node already"),
        ("100000x8xH100", "at most"),
    ],
)  # fmt: skip
def test_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        load_cluster(text)
    assert words in str(error.value)


def test_local_is_what_the_caller_measures() -> None:
    measured = load_cluster("2xL4")
    assert load_cluster("local", lambda: measured) is measured
    with pytest.raises(InputError, match="headrace measure"):
        load_cluster("local")


def test_files(tmp_path: Path) -> None:
    good = load_cluster("2x2xH100")
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(good.to_json()))
    assert load_cluster(str(path)) == good


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (None, InputError, "no such file"), ("", InputError, "is empty"), (" \n", InputError, "is empty"), ("not json", InputError, "no JSON"),
        (b"\xff\xfe\x00", InputError, "not text"),
        (lambda d: json.dumps(d)[:400], InputError, "cut short"), ("[1]", ClusterError, "no cluster"),
        (lambda d: json.dumps(d | {"kind": "plan"}), ClusterError, "no cluster"),
        (lambda d: json.dumps(d | {"schema_version": 99}), ClusterError, "version 99"),
        (lambda d: json.dumps({k: v for k, v in d.items() if k != "links"}), ClusterError, "incomplete"),
        (lambda d: json.dumps(d | {"devices": 7}), ClusterError, "incomplete"),
        (lambda d: json.dumps(d | {"links": d["links"][:-1]}), ClusterError, "not connected"),
        (lambda d: json.dumps(d | {"devices": []}), ClusterError, "no devices"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, content: object, error: type[Exception], words: str) -> None:
    path = tmp_path / "cluster.json"
    if callable(content):
        content = content(load_cluster("2x1xH100").to_json())
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    with pytest.raises(error) as found:
        load_cluster(str(path))
    assert words in str(found.value)
    assert str(path) in str(found.value)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, None, "fast"])
def test_files_with_bad_bandwidth(tmp_path: Path, value: object) -> None:
    path = tmp_path / "cluster.json"
    for part, key in (("links", "bytes_per_s"), ("devices", "bytes_per_s")):
        document = load_cluster("2x1xH100").to_json()
        document[part][0][key] = value
        path.write_text(json.dumps(document))
        with pytest.raises(ClusterError, match=r"bytes_per_s|damaged"):
            load_cluster(str(path))

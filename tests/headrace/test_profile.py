"""`headrace profile`: a cluster from other tools' output, and what is odd about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main
from simulator.clusters import load_cluster

TOPO = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV12\tPIX\t0-9\nGPU1\tNV12\t X \tSYS\t10-19\n"


def test_import_writes_a_cluster_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topo, out = tmp_path / "topo.txt", tmp_path / "cluster.json"
    topo.write_text(TOPO)
    assert main(["profile", "import", str(topo), "--gpu", "A100", "--nodes", "2", "--nic", "ib200x2", "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["gpus_per_node"], document["findings"][0]["level"]) == ("profile-import", 2, "slow")
    cluster = load_cluster(str(out))
    assert (len(cluster.nodes), cluster.num_devices, cluster.fingerprint) == (2, 4, document["cluster"]["fingerprint"])
    assert {k.kind for k in cluster.links} == {"nvlink3", "pcie", "ib"}


def test_doctor_says_what_is_odd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topo = tmp_path / "topo.txt"
    topo.write_text(TOPO)
    assert main(["profile", "doctor", str(topo), "--gpu", "A100"]) == 0
    assert "slow: topology: GPU1 reach no NIC" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["import", "{topo}", "--gpu", "A100"], "say where with -o"), (["doctor", "{topo}"], "say it with --gpu"),
        (["doctor", "{topo}.none", "--gpu", "A100"], "cannot be read"), (["import", "{topo}", "--gpu", "A1000", "-o", "x.json"], "no GPU `A1000` is known"),
        (["import", "{topo}", "--gpu", "A100", "--nic", "wifi7", "-o", "x.json"], "NIC `@wifi7` is not understood"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str) -> None:
    topo = tmp_path / "topo.txt"
    topo.write_text(TOPO)
    assert main(["profile", *(w.format(topo=topo) for w in words)]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert "Traceback" not in err

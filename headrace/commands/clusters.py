"""`headrace clusters`: the devices and machines that are known by name."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from headrace.answer import Answer
from headrace.documents import SCHEMA_VERSION
from headrace.local import local_path
from headrace.progress import Progress
from headrace.tables import Table
from ir.units import GIB
from simulator.profile import bundled, gpu_names, gpu_profile, machine_names


def answer(args: Namespace, progress: Progress) -> Answer:
    gpus = [_gpu(name) for name in gpu_names()]
    machines = [{"name": name, **bundled("nodes")["nodes"][name]} for name in machine_names()]
    local = local_path()
    devices = tuple((g["name"], _rate(g), f"{g['bytes_per_s'] / 1e9:.0f}", f"{g['usable_bytes'] / GIB:.1f}", str(g["typical_node"])) for g in gpus)
    shown = (
        Table("devices, in NODESxGPUSxNAME such as 4x8xH100-SXM@ib400x8", ("name", ">TFLOP/s 16 bits", ">GB/s", ">usable GiB", ">usual node"), devices),
        Table("machines, alone or as 4xNAME", ("name", "devices", "NICs a node"), tuple(map(_machine_row, machines))),
        f"local: {local}" if local.exists() else "local: this machine, measured on first use (`headrace measure` does it now)",
    )
    document = {"schema_version": SCHEMA_VERSION, "kind": "clusters", "gpus": gpus, "machines": machines, "local": str(local) if local.exists() else None}
    return Answer(document, shown)


def _gpu(name: str) -> dict[str, Any]:
    profile = gpu_profile(name)[1]
    return {"name": name, **{k: profile[k] for k in ("aliases", "flops_per_s", "bytes_per_s", "memory_bytes", "usable_bytes", "typical_node", "source")}}


def _rate(gpu: Mapping[str, Any]) -> str:
    flops_per_s = gpu["flops_per_s"].get("bfloat16") or gpu["flops_per_s"].get("float16")
    return f"{flops_per_s / 1e12:.0f}" if flops_per_s else "-"


def _machine_row(machine: Mapping[str, Any]) -> tuple[str, ...]:
    nic = machine["nic"]
    return machine["name"], f"{machine['gpus_per_node']} x {machine['gpu']}", f"{nic['per_node']} x {nic['gbit_per_s']:g} Gb/s {nic['kind']}"

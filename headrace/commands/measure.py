"""`headrace measure`: what this machine can do."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from headrace.answer import Answer
from headrace.documents import SCHEMA_VERSION
from headrace.local import local_path, measure_local
from headrace.progress import Progress
from ir.units import nbytes, seconds


def answer(args: Namespace, progress: Progress) -> Answer:
    path = Path(args.output) if args.output else local_path()
    cluster = measure_local(path, progress)
    first = cluster.devices[0]
    rates = ", ".join(f"{flops / 1e9:.4g} GFLOP/s in {dtype}" for dtype, flops in first.flops_per_s.items())
    links = sorted({(link.bytes_per_s, link.latency_s) for link in cluster.links})
    lines = (
        f"{cluster.name}: {cluster.num_devices} devices ({first.name})",
        f"each: {rates}; {nbytes(first.bytes_per_s)}/s of memory traffic; {nbytes(first.usable_bytes)} usable; {seconds(first.launch_s)} a launch",
        *(f"link: {nbytes(rate)}/s after {seconds(latency)}" for rate, latency in links),
        f"wrote {path}" + ("; `local` stands for it" if args.output is None else f"; name it as CLUSTER: headrace plan gpt2 {path}"),
    )
    document = {
        "schema_version": SCHEMA_VERSION, "kind": "measured", "cluster": {"name": cluster.name, "fingerprint": cluster.fingerprint}, "path": str(path),
        "devices": cluster.num_devices, "flops_per_s": dict(first.flops_per_s), "bytes_per_s": first.bytes_per_s, "usable_bytes": first.usable_bytes,
    }  # fmt: skip
    return Answer(document, lines)

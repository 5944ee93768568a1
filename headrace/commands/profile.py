"""`headrace profile`: a cluster from the output of other tools, and what is odd about it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from headrace.answer import Answer
from headrace.documents import SCHEMA_VERSION, check_writable, write_json
from headrace.progress import Progress
from ir.cluster import Cluster
from ir.errors import InputError
from ir.units import nbytes
from simulator.clusters import parse_nic
from simulator.importers import Finding, Imported, assemble, read_files
from simulator.importers.assemble import diagnose


def answer(args: Namespace, progress: Progress) -> Answer:
    found = read_files(args.files)
    if args.action == "doctor":
        findings = diagnose(found, args.gpu or "")
        return Answer({**_head("profile-doctor", args.files), **_told(found, findings)}, _lines(found, findings))
    if not args.output:
        raise InputError("`headrace profile import` writes a cluster: say where with -o cluster.json")
    check_writable(args.output)
    cluster, findings = assemble(found, args.gpu or "", args.nodes or 0, parse_nic(args.nic, args.nic) if args.nic else None)
    write_json(args.output, cluster.to_json())
    document = {
        **_head("profile-import", args.files), **_told(found, findings), "cluster": {"name": cluster.name, "fingerprint": cluster.fingerprint},
        "assumed": list(cluster.assumed), "path": args.output,
    }  # fmt: skip
    return Answer(document, (*_cluster(cluster), *_lines(found, findings), f"wrote {args.output}; name it as CLUSTER: headrace plan MODEL {args.output}"))


def _head(kind: str, files: Sequence[str]) -> dict[str, object]:
    return {"schema_version": SCHEMA_VERSION, "kind": kind, "files": list(files)}


def _told(found: Imported, findings: Sequence[Finding]) -> dict[str, object]:
    sweeps = [{"kind": s.kind, "ranks": s.num_ranks, "nodes": s.num_nodes, "gpu": s.gpu, "best_busbw": s.best_busbw} for s in found.sweeps]
    return {"sweeps": sweeps, "gpus_per_node": found.gpus_per_node, "findings": [{"level": f.level, "text": f.text} for f in findings]}


def _cluster(cluster: Cluster) -> tuple[str, ...]:
    links = sorted({(k.kind, k.bytes_per_s) for k in cluster.links})
    told = ", ".join(f"{kind} {nbytes(rate)}/s" for kind, rate in links)
    return (f"{cluster.name}: {len(cluster.nodes)} nodes of {len(cluster.nodes[0])} {cluster.devices[0].name}; {told}", *cluster.assumed)


def _lines(found: Imported, findings: Sequence[Finding]) -> tuple[str, ...]:
    read = f"{len(found.sweeps)} sweeps, {len(found.matrices)} topologies, {len(found.peers)} peer matrices, {len(found.trees)} PCIe trees"
    return (f"read: {read}", *(f"{f.level}: {f.text}" for f in findings), *(() if findings else ("nothing is odd",)))

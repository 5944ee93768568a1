"""Clusters by name: `local`, a shorthand, a machine, a JSON file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ir.cluster import Cluster, Device, Link
from ir.errors import ClusterError, InputError
from simulator.profile import bundled, curves, gpu_profile, machine_names, near
from simulator.topology import Nic, layout_of, node_links, rail_links

_COUNT = re.compile(r"([+-]?(?:\d[\d.]*|nan|inf))x(.+)", re.IGNORECASE)
_NIC = re.compile(r"([a-z]+)([+-]?(?:\d[\d.]*|nan|inf))(?:x([+-]?[\d.]+)(r)?)?(?::([\d.]+))?(?:\+([\d.]+)us)?", re.IGNORECASE)
FORMS = (
    "write NODESxGPUSxNAME such as 4x8xH100-SXM, with @ib400, @ib400x8, @eth25, @roce200x8 or @tcp100 for the NICs of a node, "
    "@ib400x8:2 where the network between nodes is oversubscribed 2:1, @ib400x8r where it has rails, @ib400x8+300us for a far one; a machine name; `local`; "
    "or a cluster JSON"
)
MAX_DEVICES = 131_072


def load_cluster(text: str, local: Callable[[], Cluster] | None = None) -> Cluster:
    """The cluster that `text` names; `local()` is called for `local`.

    InputError where nothing has this name (near names are offered), a number is not a positive one or a file cannot be read; ClusterError where the
    document is no cluster or breaks its rules.

    >>> cluster = load_cluster("2x8xH100-SXM@ib400")
    >>> cluster.num_devices, cluster.path(0, 9)
    (16, (('gpu0', 'nic0.0'), ('fabric', 'nic0.0'), ('fabric', 'nic1.0'), ('gpu9', 'nic1.0')))
    """
    text = text.strip()
    if text == "local":
        if local is None:
            raise InputError("`local` is the measured machine, and nothing here measures it; run `headrace measure -o cluster.json` and name that file")
        return local()
    if text.lower().endswith(".json") or "/" in text or (len(text) < 200 and Path(text).is_file()):
        return read_cluster(Path(text))
    return shorthand(text)


def read_cluster(path: Path) -> Cluster:
    """A cluster document from disk; InputError where the file is missing, empty or no JSON."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "is not text" if isinstance(error, UnicodeDecodeError) else (error.strerror or str(error)).lower()
        raise InputError(f"cluster file {path}: {why}; {FORMS}") from error
    if not text.strip():
        raise InputError(f"cluster file {path} is empty; `headrace measure -o {path}` writes one")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"cluster file {path} is no JSON, or cut short (line {error.lineno}, column {error.colno}: {error.msg}); write it again") from error
    try:
        return Cluster.from_json(data)
    except ClusterError as error:
        raise ClusterError(f"cluster file {path}: {error}") from error
    except (ValueError, AttributeError) as error:
        raise ClusterError(f"cluster file {path} is damaged: {error!r}") from error


def shorthand(text: str) -> Cluster:
    """`4x8xH100-SXM@ib400x8`, `16xA100`, `4xdgx-h100`.

    >>> shorthand("4xdgx-a100").assumed
    ()
    >>> shorthand("2x8xA100-SXM-80GB").assumed
    ('NICs: 8 x 200 Gb/s ib a node, as typical for A100-SXM-80GB; say @ib400x8 or the like where yours differ',)
    """
    left, _, nic_text = text.partition("@")
    if "@" in text and not nic_text:
        raise InputError(f"cluster `{text}`: nothing stands after @; {FORMS}")
    counts, name = _counts(left, text)
    nic = parse_nic(nic_text, text) if nic_text else None
    machines = {m.lower(): m for m in machine_names()}
    if name.lower() in machines:
        return _machine(text, machines[name.lower()], counts, nic)
    return _by_gpu(text, name, counts, nic)


def _counts(left: str, text: str) -> tuple[list[int], str]:
    counts = []
    while (match := _COUNT.fullmatch(left)) is not None:
        counts.append(_whole(match[1], f"cluster `{text}`: a count"))
        left = match[2]
    if not left or len(counts) > 2:
        raise InputError(f"cluster `{text}` is not understood: {FORMS}")
    return counts, left


def _whole(word: str, what: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise InputError(f"{what} is {word}; give a whole number of 1 or more")
    return int(word)


def parse_nic(word: str, text: str) -> Nic:
    """The NICs after the @ of the cluster `text`; InputError where the word is none.

    >>> parse_nic("roce200x8", "2x8xA100@roce200x8")
    Nic(kind='roce', gbit_per_s=200.0, per_node=8, oversubscribed=1.0, far_s=0.0, rails=False)
    """
    kinds = bundled("links")["nics"]
    match = _NIC.fullmatch(word)
    if match is None or match[1].lower() not in kinds:
        forms = f"write a kind ({', '.join(kinds)}), Gb/s and, after x, ports a node: @ib400, @eth25, @roce200x8"
        raise InputError(f"cluster `{text}`: NIC `@{word}` is not understood; {forms}")
    try:
        rate = float(match[2])
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise InputError(f"cluster `{text}`: the NIC's bandwidth is {match[2]} Gb/s; give a finite number above 0")
    ports = _whole(match[3], f"cluster `{text}`: the number of NICs a node") if match[3] else 1
    narrow, far_s = _number(match[5] or "1", 1.0, f"cluster `{text}`: oversubscription"), _number(match[6] or "0", 0.0, f"cluster `{text}`: latency") * 1e-6
    return Nic(match[1].lower(), rate, ports, narrow, far_s, bool(match[4]))


def _number(word: str, least: float, what: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if value < least:
        raise InputError(f"{what} is {word}; give a number of {least:g} or more")
    return value


def _machine(text: str, machine: str, counts: list[int], nic: Nic | None) -> Cluster:
    spec = bundled("nodes")["nodes"][machine]
    if len(counts) > 1:
        raise InputError(f"cluster `{text}`: {machine} has {spec['gpus_per_node']} GPUs a node already; write {counts[0]}x{machine}")
    own = Nic(spec["nic"]["kind"], float(spec["nic"]["gbit_per_s"]), int(spec["nic"]["per_node"]))
    num_nodes = counts[0] if counts else 1
    return build(text, spec["gpu"], num_nodes, spec["gpus_per_node"], nic or (own if num_nodes > 1 else None), layout=spec.get("layout"))


def _by_gpu(text: str, name: str, counts: list[int], nic: Nic | None) -> Cluster:
    try:
        gpu, profile = gpu_profile(name)
    except InputError as error:
        raise InputError(f"cluster `{text}`: {error}{near(name, machine_names()).replace('near:', 'near machines:')}. {FORMS[0].upper()}{FORMS[1:]}") from error
    assumed = []
    num_nodes, per_node = (counts[0], counts[1]) if len(counts) == 2 else (1, counts[0] if counts else 1)
    if len(counts) == 1 and per_node > (typical := int(profile["typical_node"])):
        if per_node % typical:
            raise InputError(f"cluster `{text}`: {per_node} {gpu} do not fill nodes of {typical}; say how they stand: NODESxGPUSx{name}")
        num_nodes, per_node = per_node // typical, typical
        assumed.append(f"{num_nodes} nodes of {per_node} GPUs, as typical for {gpu}; write NODESxGPUSx{name} where yours differ")
    if name.lower() not in gpu.lower() or name.upper() in ("A100", "V100"):
        assumed.append(f"`{name}` is taken as {gpu}")
    if nic is None and num_nodes > 1:
        typical_nic = profile["typical_nic"] or bundled("links")["default_nic"]
        nic = Nic(typical_nic["kind"], float(typical_nic["gbit_per_s"]), int(typical_nic["per_node"]))
        assumed.append(f"NICs: {nic} a node, as typical for {gpu}; say @ib400x8 or the like where yours differ")
    if "note" in profile:
        assumed.append(f"{gpu}: {profile['note']}")
    return build(text, gpu, num_nodes, per_node, nic, tuple(assumed))


# ---- topology -----------------------------------------------------------------------------------------------------------------------------------------


def build(
    name: str, gpu: str, num_nodes: int, gpus_per_node: int, nic: Nic | None, assumed: tuple[str, ...] = (), layout: Mapping[str, Any] | None = None
) -> Cluster:  # fmt: skip
    """`num_nodes` nodes of `gpus_per_node` GPUs, joined as `layout` says (`simulator.topology`; default: as is usual for the card), NICs on one fabric."""
    if num_nodes * gpus_per_node > MAX_DEVICES:
        raise InputError(f"cluster `{name}` has {num_nodes * gpus_per_node} devices; at most {MAX_DEVICES} are simulated")
    gpu, profile = gpu_profile(gpu)
    devices = tuple(_device(rank, gpu, rank // gpus_per_node, profile) for rank in range(num_nodes * gpus_per_node))
    layout = layout or layout_of(profile, gpus_per_node)
    links: list[Link] = []
    for node in range(num_nodes):
        links += node_links(node, gpus_per_node, profile, layout, nic)
    links += rail_links(num_nodes, gpus_per_node, nic)
    if "gemm_class" in profile:
        assumed = (*assumed, f"GEMM times of {gpu}: {profile['gemm_class']}")
    about: dict[str, Any] = {
        "collective": dict(profile["collective"]),
        "collectives": curves(gpu, None if nic is None else (nic.kind, nic.gbit_per_s, nic.per_node)) if layout["kind"] != "pcie" else [],
    }
    if not layout.get("p2p", profile["link"].get("p2p", True)):
        about["p2p"] = False
    return Cluster(name, devices, tuple(links), about, assumed).check()


def _device(rank: int, gpu: str, node: int, profile: Mapping[str, Any]) -> Device:
    kept = ("num_sms", "gemm_tile", "gemm_grid", "hbm_share", "attention_share", "source", "measured_on")
    return Device(
        rank, gpu, node, float(profile["memory_bytes"]), float(profile["usable_bytes"]), dict(profile["flops_per_s"]), float(profile["bytes_per_s"]),
        float(profile["launch_s"]), {k: profile[k] for k in kept if k in profile},
    )  # fmt: skip

"""Published tables read as runs: one function from a row of text to a Run for each schema, and the reason where a row says too little.

Three schemas are known by their columns: `published` (whole configurations with their release and machine), `one-node` (sizes and splits within a node; what
its columns lack is given once for the whole table, in `assumptions.json`) and `frameworks` (two frameworks on the same cases).
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from ir.errors import InputError
from planner.recipes.release import release_of
from planner.recipes.run import Run, Shape

Row = Mapping[str, str]

SCHEDULES = {
    "": "none", "none": "none", "1f1b": "1f1b", "1f1b-or-interleaved": "1f1b", "interleaved-1f1b": "interleaved", "interleaved1f1b": "interleaved",
    "1f1b-i": "interleaved", "interleaved": "interleaved", "zb-1p": "zb-1p", "zb-2p": "zb-2p", "zb-v": "zb-v", "zb-h1": "zb-1p", "gpipe": "gpipe",
}  # fmt: skip
"""Schedules as tables spell them."""

PRECISIONS = (("nvfp4", "nvfp4"), ("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"))
"""The first of these words that a table's precision contains says what the products are computed in."""

ARCHS = ("gpt", "llama", "moe", "moe-mla")

OPTIONS = ("async-tp", "compile", "vanilla-tp", "tokendrop", "dropless", "w/ mtp", "mxfp8", "fp8-mx", "fp8-cs", "tensorwise", "rowwise")
"""Words in a row's precision, model and notes that say how it was run."""

TRUTHS = {"": "", "0": "0", "0.0": "0", "no": "0", "false": "0", "1": "1", "1.0": "1", "yes": "1", "true": "1"}
"""Yes and no as tables spell them."""

USUAL = "Megatron-Core"
"""The release that stands for one of which nothing is known."""

LARGEST = 10_000_000
"""No size or count of a run is larger."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: its run, or why there is none."""

    id: str
    family: str
    run: Run | None
    reason: str = ""


def read_runs(path: str | os.PathLike[str]) -> tuple[Entry, ...]:
    """The rows of a table; InputError where the file cannot be read or none of the schemas has its columns."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames = [column.strip().lower() for column in reader.fieldnames or ()]
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        raise InputError(f"`{name}` cannot be read as a table of runs: {why}") from error
    read = schema(tuple(columns), name)
    return tuple(entry(row, read, i) for i, row in enumerate(rows))


def schema(columns: tuple[str, ...], name: str) -> Callable[[Row], Run]:
    """The function that reads rows with these columns."""
    for needed, read in SCHEMAS:
        if needed <= set(columns):
            return read
    nearest = min((needed for needed, _ in SCHEMAS), key=lambda needed: len(needed - set(columns)) / len(needed))
    missing = sorted(nearest - set(columns))
    raise InputError(f"`{name}` is no table of runs that is known: columns {', '.join(missing)} are missing; the first line must name the columns")


def entry(row: Row, read: Callable[[Row], Run], number: int) -> Entry:
    """The run of a row, or the reason why it has none."""
    row = {k: (v or "").strip() for k, v in row.items() if isinstance(k, str) and not isinstance(v, list)}
    row["id"] = name = row.get("id") or f"row {number + 1}"
    try:
        row, assumed = _tidied(row)
        run = read(row).check()
    except InputError as error:
        return Entry(name, row.get("family", ""), None, str(error))
    return Entry(run.id, run.family, replace(run, assumed=(*run.assumed, *assumed)))


def _tidied(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with words in the spelling of the schemas and a release that is known, and what had to be assumed for it."""
    words = {column: row[column].lower() for column in ("arch", "recompute", "act_ckpt") if column in row}
    for column in ("gated", "seq_parallel"):
        text = row.get(column, "").lower()
        if text not in TRUTHS:
            raise InputError(f"run `{row['id']}`: `{column}` is `{text}`; 0 or 1 was expected")
        words[column] = TRUTHS[text]
    release = row.get("release") or row.get("framework", "")
    if "release" not in row or release_of(release) is not None:
        return {**row, **words}, ()
    return {**row, **words, "release": USUAL}, (f"release `{release}` is not known: taken as {USUAL}",)


# ---- the three schemas ---------------------------------------------------------------------------------------------------------------------------------


def published_run(row: Row) -> Run:
    """A row of the schema `published`; InputError with what is missing."""
    assumed: list[str] = []
    shape = _shape(row, assumed)
    recompute = _recompute(row, assumed)
    num_gpus, pp = _count(row, "n_gpus"), _count(row, "pp")
    schedule = SCHEDULES.get(row["schedule"].lower(), row["schedule"].lower())
    chunks = 2 if schedule == "interleaved" and "assume" not in row.get("flag", "") else 1
    vpp = _or_assumed(row, "vpp", "virtual stages", chunks, assumed)
    release = row.get("release") or row.get("framework", "")
    gbs, dp = _count(row, "gbs"), _count(row, "dp")
    mbs = _or_assumed(row, "mbs", "microbatch size", _usual_mbs(release, gbs // dp, pp * vpp), assumed)
    run = Run(
        row["id"], row["family"], row.get("model", ""), shape, seq=_count(row, "seq"), gpu=row["gpu"], num_gpus=num_gpus, tp=_count(row, "tp"), pp=pp,
        dp=dp, cp=_count(row, "cp", 1), ep=_count(row, "ep", 1), vpp=vpp, mbs=mbs, gbs=gbs, schedule="1f1b" if pp > 1 and schedule == "none" else schedule,
        recompute=recompute, zero=_size(row, "zero"), sp=row.get("seq_parallel") == "1", short_ends=_has_short_ends(shape.layers, pp * vpp),
        precision=_precision(row["precision"]), gpus_per_node=(per_node := _per_node(num_gpus, _count(row, "gpus_per_node", 8))),
        nic=nic_of(row.get("inter", ""), per_node), release=release, machine=row.get("machine", ""), memory_gib=_number(row, "peak_mem_gb"),
        memory_kind=row.get("mem_kind", ""), options=_options(row), flag=row.get("flag", ""), source=row.get("source", ""), assumed=tuple(assumed),
    )  # fmt: skip
    return _measured(run, row)


def one_node_run(row: Row) -> Run:
    """A row of the schema `one-node`: GPTs on one A100 node, their common facts from `assumptions.json`."""
    common = assumptions()["one_node"]
    full = {**common["columns"], "family": common["family"], "release": common["release"], "machine": common["machine"], **row}
    return published_run(full)


def frameworks_run(row: Row) -> Run:
    """A row of the schema `frameworks`."""
    common = assumptions()["frameworks"]
    model = common["models"].get(row["model"])
    software = common["releases"].get(row["framework"])
    if model is None or software is None:
        raise InputError(f"run `{row['id']}`: model `{row['model']}` or framework `{row['framework']}` is not known")
    hidden, heads = _count(row, "hidden"), _count(row, "heads")
    shape = Shape("gpt", _count(row, "num_layers"), hidden, heads, heads, hidden // heads, 4 * hidden, int(model["vocab"]))
    pp, num_gpus = _count(row, "pp"), _count(row, "total_gpus")
    run = Run(
        row["id"], f"{common['family']} {row['framework']}", row["model"], shape, seq=_count(row, "seq_len"), gpu=common["gpu"], num_gpus=num_gpus,
        tp=_count(row, "tp"), pp=pp, dp=_count(row, "dp"), mbs=_count(row, "micro_batch"), gbs=_count(row, "global_batch"),
        schedule="1f1b" if pp > 1 else "none", recompute="full" if row["act_ckpt"] == "yes" else "none", precision=_precision(row["precision"]),
        gpus_per_node=min(_count(row, "gpus_per_node"), num_gpus), nic=common["nic"], release=software, machine=common["machine"], source=row.get("source", ""),
        assumed=tuple(common["assumed"]),
    )  # fmt: skip
    return _measured(run, {**row, "samples_per_s": row["throughput"]})


SCHEMAS: tuple[tuple[frozenset[str], Callable[[Row], Run]], ...] = (
    (frozenset({"id", "family", "arch", "layers", "hidden", "heads", "seq", "gpu", "n_gpus", "tp", "pp", "dp", "gbs", "schedule", "precision"}), published_run),
    (frozenset({"id", "act_ckpt", "framework", "num_layers", "seq_len", "total_gpus", "throughput"}), frameworks_run),
    (frozenset({"id", "model", "layers", "hidden", "n_gpus", "tp", "pp", "dp", "mbs", "gbs", "iter_time_s"}), one_node_run),
)
"""Columns that tell a schema, and what reads its rows; the first that fits counts."""


# ---- cells ---------------------------------------------------------------------------------------------------------------------------------------------


@cache
def assumptions() -> Mapping[str, Any]:
    """What tables leave out, each figure with its source: `planner/recipes/assumptions.json`."""
    found: Mapping[str, Any] = json.loads(resources.files("planner.recipes").joinpath("assumptions.json").read_text("utf-8"))
    return found


def nic_of(text: str, gpus_per_node: int) -> str:
    """The NICs of a node as a cluster spells them, from how a table says it; "" where it says nothing that can be read.

    >>> nic_of("4x HDR IB 200Gb/s per node (800 Gb/s)", 8), nic_of("1600 Gb/s RoCE per node", 8), nic_of("NVL72 + 400Gb/s per GPU", 72), nic_of("", 8)
    ('ib200x4', 'roce200x8', 'ib400x72', '')
    """
    kind = "roce" if "roce" in text.lower() else "ib"
    if found := re.search(r"(\d+)x [^+]*?(\d+) ?Gb/s", text):
        return f"{kind}{found[2]}x{found[1]}"
    if found := re.search(r"(\d+) ?Gb/s[^,]* per GPU", text):
        return f"{kind}{found[1]}x{gpus_per_node}"
    if found := re.search(r"(\d+) ?Gb/s[^,]* per node", text):
        return f"{kind}{int(found[1]) // gpus_per_node}x{gpus_per_node}"
    return ""


def _shape(row: Row, assumed: list[str]) -> Shape:
    arch, known = row["arch"], assumptions()
    hidden, heads, layers = _count(row, "hidden"), _count(row, "heads"), _count(row, "layers")
    if arch not in ARCHS:
        raise InputError(f"run `{row['id']}`: `arch` is `{arch}`; known are {', '.join(ARCHS)}")
    experts, vocab, ffn = _size(row, "experts"), _size(row, "vocab"), _size(row, "ffn")
    if experts and not (_size(row, "topk") and _size(row, "moe_ffn")):
        raise InputError(f"run `{row['id']}`: {experts} experts, but `topk` or `moe_ffn` is not given")
    if not vocab:
        vocab = int(known["vocab"]["value"])
        assumed.append(f"vocabulary not given: {vocab}, {known['vocab']['source']}")
    if not ffn and not experts:
        ffn = known["ffn_per_hidden"]["value"] * hidden
        assumed.append(f"width of the MLP not given: {ffn}")
    mla = known["mla"] if arch == "moe-mla" else {}
    head_dim = int(mla.get("head_dim") or _size(row, "head_dim") or hidden // heads)
    dense = known["dense_layers"].get(arch, {})
    if mla:
        assumed.append(f"ranks of the latent attention not given: {mla['q_rank']} and {mla['kv_rank']}, {mla['source']}")
    return Shape(
        arch, layers, hidden, heads, _size(row, "kv_heads") or heads, head_dim, ffn, vocab, gated=row.get("gated") == "1", tied=arch == "gpt",
        experts=experts, topk=_size(row, "topk"), moe_ffn=_size(row, "moe_ffn"),
        shared_experts=_by(known["shared_experts"].get(arch, {}), experts),
        dense_layers=_by(dense, layers), q_rank=mla.get("q_rank", 0), kv_rank=mla.get("kv_rank", 0),
        rope_dim=mla.get("rope_dim", 0),
    )  # fmt: skip


def _by(table: Mapping[str, int], key: int) -> int:
    return int(table.get(str(key), table.get("default", 0)))


def _measured(run: Run, row: Row) -> Run:
    """The run with its seconds a step, from whichever figure the table gives."""
    seconds = _number(row, "iter_time_s")
    per_gpu = run.gbs / run.num_gpus
    if seconds is None and (rate := _number(row, "samples_per_s")):
        seconds = run.gbs / rate
    if seconds is None and (rate := _number(row, "tokens_per_s_per_gpu")):
        seconds = per_gpu * run.seq / rate
    if seconds is None and (rate := _number(row, "tflops_per_gpu")):
        seconds = per_gpu * run.seq * _flops_per_token(run.shape, run.seq, row.get("flops_convention", "")) / (rate * 1e12)
    return replace(run, measured_s=seconds)


def _flops_per_token(shape: Shape, seq: int, convention: str) -> float:
    """What a published TFLOP/s counts. With recomputation (arXiv:2104.04473, eq. 3) all passes of a GPT are 96 L h^2 (1 + s/6h + V/16Lh) a token; otherwise
    three times the forward products, attention in full.
    """
    s = shape
    if "recompute" in convention:
        return 96.0 * s.layers * s.hidden**2 * (1 + seq / (6 * s.hidden) + s.vocab / (16 * s.layers * s.hidden))
    products = s.layers * (s.attention_params + s.mlp_params(s.ffn)) + s.vocab * s.hidden
    return 6.0 * products + 12.0 * s.layers * s.heads * s.head_dim * seq


def _recompute(row: Row, assumed: list[str]) -> str:
    text = row.get("recompute", "")
    if not text:
        assumed.append("recomputation not given: none assumed")
        return "none"
    found = next((word for word in ("selective", "full", "none") if text.startswith(word)), None)
    if found is None:
        raise InputError(f"run `{row['id']}`: `recompute` is `{text}`; known are none, selective and full")
    return found


def _or_assumed(row: Row, column: str, what: str, value: int, assumed: list[str]) -> int:
    if row.get(column):
        return _count(row, column)
    assumed.append(f"{what} not given: {value} assumed")
    return value


def _usual_mbs(release: str, batch: int, stages: int) -> int:
    """Sequences of a microbatch where nobody says it: one, or what makes as many microbatches as stages of a rank's batch where that is the release's way."""
    found = release_of(release)
    return max(1, batch // stages) if found is not None and found.microbatch_a_stage and stages > 1 else 1


def _has_short_ends(layers: int, stages: int) -> bool:
    return layers % stages != 0 and (layers + 2) % stages == 0


def _per_node(num_gpus: int, domain: int) -> int:
    """GPUs on each node: a domain of 72 holds what divides the whole, such as 64 of 256.

    >>> _per_node(256, 72), _per_node(8, 72), _per_node(12, 8)
    (64, 8, 6)
    """
    return max(n for n in range(1, min(num_gpus, domain) + 1) if num_gpus % n == 0)


def _precision(text: str) -> str:
    found = next((name for word, name in PRECISIONS if word in text.lower()), None)
    if found is None:
        raise InputError(f"precision `{text}` is not known; known are {', '.join(name for _, name in PRECISIONS)}")
    return found


def _options(row: Row) -> tuple[str, ...]:
    text = " ".join(row.get(c, "") for c in ("precision", "model", "notes")).replace("AsyncTP", "async-TP").lower()
    return tuple(word for word in OPTIONS if word in text)


def _count(row: Row, column: str, default: int | None = None) -> int:
    text = row.get(column, "")
    if not text and default is not None:
        return default
    if not text:
        raise InputError(f"run `{row['id']}`: `{column}` is not given")
    if not re.fullmatch(r"\d+(\.0+)?", text) or float(text) < 1:
        raise InputError(f"run `{row['id']}`: `{column}` is `{text}`; a whole number of 1 or more was expected")
    return _bounded(row, column, text)


def _size(row: Row, column: str) -> int:
    """A whole number, 0 where the cell is empty."""
    text = row.get(column, "")
    if not re.fullmatch(r"(\d+(\.0+)?)?", text):
        raise InputError(f"run `{row['id']}`: `{column}` is `{text}`; a whole number was expected")
    return _bounded(row, column, text or "0")


def _bounded(row: Row, column: str, text: str) -> int:
    if float(text) > LARGEST:
        raise InputError(f"run `{row['id']}`: `{column}` is `{text}`; no more than {LARGEST} was expected")
    return int(float(text))


def _number(row: Row, column: str) -> float | None:
    text = row.get(column, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise InputError(f"run `{row['id']}`: `{column}` is `{text}`, which is no number") from error
    if not 0 < value < float("inf"):
        raise InputError(f"run `{row['id']}`: `{column}` is `{text}`; a finite number above 0 was expected")
    return value

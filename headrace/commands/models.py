"""`headrace models`: what is known by name."""

from __future__ import annotations

from argparse import Namespace

from headrace.answer import Answer
from headrace.documents import SCHEMA_VERSION
from headrace.progress import Progress
from headrace.tables import Table
from ir.units import count
from planner import frontends


def answer(args: Namespace, progress: Progress) -> Answer:
    facts = [frontends.load(name).summary for name in frontends.zoo_names()]
    rows = tuple(
        (
            m["name"],
            m["family"],
            count(m["num_params"]),
            str(m["layers"]),
            str(m["hidden"]),
            f"{m['heads']}/{m['kv_heads']}",
            str(m["vocab"]),
            str(m["max_positions"]),
        )
        for m in facts
    )
    table = Table("", ("model", "family", ">parameters", ">layers", ">hidden", ">heads/kv", ">vocabulary", ">longest sequence"), rows)
    hint = "A Hugging Face config.json of these families, or its folder, is taken as well."
    return Answer({"schema_version": SCHEMA_VERSION, "kind": "models", "models": [dict(m) for m in facts]}, (table, hint))

"""Layouts, fits and shares as people read them, for every table of the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.tables import Table
from ir.units import nbytes, seconds

FITS = {"yes": "fits", "tight": "tight", "no": "too big"}
DEGREES = ("dp", "tp", "pp", "cp", "ep", "vpp", "seq_chunks", "loss_chunks")


def describe(layout: Mapping[str, Any]) -> str:
    """A layout in a line; degrees of 1 and what is off are left out.

    >>> describe({"dp": 4, "tp": 2, "pp": 1, "mbs": 1, "num_microbatches": 8, "schedule": "1f1b", "recompute": "none", "zero": 1, "sp": True})
    'dp4 tp2 zero1 sp, 8 microbatches of 1 a rank'
    """
    words = [f"{k}{layout[k]}" for k in DEGREES if layout.get(k, 1) not in (1, None)] or ["1 device"]
    words += [f"({layout['cp_form']})"] if layout.get("cp_form") else []
    words += [f"zero{layout['zero']}"] if layout.get("zero") else []
    words += ["sp"] if layout.get("sp") else []
    words += [str(layout["schedule"])] if layout.get("pp", 1) != 1 and layout.get("schedule") else []
    words += [f"recompute {layout['recompute']}"] if layout.get("recompute") not in (None, False, 0, "", "none", [], ()) else []
    num = layout.get("num_microbatches", 1)
    return " ".join(words) + f", {num} microbatch{'' if num == 1 else 'es'} of {layout.get('mbs', '?')} a rank"


def percent(value: Any) -> str:
    return "-" if value is None else f"{100 * float(value):.1f} %"


def comm_table(comm: Sequence[Mapping[str, Any]]) -> Table:
    """Who communicates: one row an axis and kind of collective."""
    rows = tuple(
        (
            str(c["axis"]),
            str(c["kind"]),
            f"{c['count']:.6g}",
            nbytes(c["nbytes"]),
            seconds(c["time_s"]),
            seconds(c["exposed_s"]) if c.get("exposed_s") is not None else "-",
        )
        for c in comm
    )
    return Table("communication of one step", ("axis", "kind", ">count", ">bytes", ">time", ">exposed"), rows)

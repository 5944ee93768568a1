"""Our derived placements beside those that OneFlow declares by hand: writes `docs/sbp_against_oneflow.md`, which a test keeps up to date.

The facts about OneFlow are in `benchmarks/data/oneflow_sbp.json`. Every difference needs a reason of `REASONS`; one without ends the call with an error.
Usage: python benchmarks/sbp_against_oneflow.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ir.op import Op, Rule  # noqa: E402
from ir.ops import catalogue  # noqa: E402
from ir.sbp import P_MAX, B, Sbp, parse_sbp  # noqa: E402

DATA = ROOT / "benchmarks" / "data" / "oneflow_sbp.json"
DOCUMENT = ROOT / "docs" / "sbp_against_oneflow.md"

Signature = tuple[tuple[Sbp, ...], tuple[Sbp, ...]]

REASONS: Mapping[str, str] = {
    "linear": "**A sum passes through.** An operator that is linear in some operands, the others being whole on every rank, takes partial sums to partial "
    "sums. OneFlow declares this for products, sums and a few gradients; here it follows from `linear=` for every operator, gradients above all, since every "
    "backward is linear in its cotangent.",
    "sum": "**A summed dim may be split.** A label that vanishes as a sum gives P where it is split.",
    "max": "**A maximum is a partial too.** A label that vanishes as a maximum gives P(max); OneFlow's two-stage reductions do the same with operators of "
    "their own.",
    "dim": "**Every dim that the rule allows.** The sentence has the label in an operand and nothing keeps it whole, so a split of it is legal; OneFlow's "
    "loop stops before it, or lists the batch alone.",
    "norms": "**Norms of whole tensors are operators of their own.** OneFlow's LAMB computes its norms inside the update, which then needs whole tensors. "
    "Here `lamb_norms` gives sums of squares (P under a split), and the update is elementwise.",
    "vocabulary": "**A split vocabulary is a form, not a signature.** OneFlow's `_ms` operator takes the softmax as given and picks the label's entry, which "
    "is zero elsewhere, so its loss is P. `cross_entropy` computes the softmax itself and needs the whole row; its form `last_max`, `exp_sum`, `log_loss` "
    "splits the vocabulary, and there the two sums are P (the loss, a logarithm of one of them, is not).",
}
"""Why the sets differ. The first four: ours that are not theirs; the last: theirs that is not ours."""


def our_signatures(op: Op) -> dict[Signature, Rule]:
    """What the rules of an operator say, by signature; `B~P` is `B` forward and left out."""
    return {op.placements(rule): rule for rule in op.rules() if rule.kind != "B~P"}


def their_signatures(op: Op, texts: Sequence[str]) -> list[Signature]:
    """The signatures of a row; all B is always one of them."""

    def side(text: str, names: Sequence[str]) -> tuple[Sbp, ...]:
        given = dict(part.strip().split(":") for part in text.split(","))
        if set(given) - set(names):
            raise SystemExit(f"{op.sentence}: `{text}` names an operand that it has not")
        return tuple(parse_sbp(given[n]) if n in given else B for n in names)

    found: list[Signature] = [((B,) * len(op.inputs), (B,) * len(op.outputs))]
    for text in texts:
        ins, _, outs = text.partition("->")
        found.append((side(ins, [o.name for o in op.inputs]), side(outs, [o.name for o in op.outputs])))
    return found


def expanded(row: Mapping[str, Any]) -> Op:
    """Our operator of a row with `...` written out."""
    op = catalogue(row["ours"])
    return op.for_ranks([len(o.dims) - 1 + row["leading"] if ("...",) in o.dims else len(o.dims) for o in op.inputs])


def reason(row: Mapping[str, Any], signature: Signature, rule: Rule | None) -> str:
    """The key of the reason for a difference; `rule`: ours, None where the signature is theirs alone. Raises SystemExit where there is none."""
    _, outs = signature
    if rule is None:
        if row["theirs"] == "sparse_softmax_cross_entropy_ms":
            return "vocabulary"
        raise SystemExit(f"{row['ours']}: OneFlow's {row['theirs']} declares {signature}, which is not derived, and no reason is known")
    if row["theirs"] == "lamb_update":
        return "norms"
    if rule.kind == "linear":
        return "linear"
    if P_MAX in outs:
        return "max"
    return "sum" if any(s.is_partial for s in outs) else "dim"


def differences(row: Mapping[str, Any]) -> tuple[int, int, dict[str, list[str]]]:
    """(signatures of theirs, of ours, rules or signatures that differ by the key of their reason)."""
    op = expanded(row)
    ours, theirs = our_signatures(op), their_signatures(op, row["signatures"])
    found: dict[str, list[str]] = {}
    for signature, rule in ours.items():
        if signature not in theirs:
            found.setdefault(reason(row, signature, rule), []).append(repr(rule))
    for signature in theirs:
        if signature not in ours:
            ins, outs = signature
            told = f"{', '.join(map(repr, ins))} -> {', '.join(map(repr, outs))}"
            found.setdefault(reason(row, signature, None), []).append(f"theirs: {told}")
    return len(set(theirs)), len(ours), found


def document() -> str:
    """The whole page."""
    data = json.loads(DATA.read_text("utf-8"))
    rows = [(row, *differences(row)) for row in data["operators"]]
    missing = sum("vocabulary" in found for *_, found in rows)
    equal = sum(not found for *_, found in rows)
    lines = [
        "# Placements: derived here, declared in OneFlow",
        "",
        "Written by `benchmarks/sbp_against_oneflow.py`; a test checks that it is up to date. Edit the script or its data, not this page.",
        "",
        f"OneFlow lists for each of its operators by hand which placements it may have ({data['source']}). Here they follow from the operator's sentence, "
        "and `tests/ir/test_operator_oracle.py` tries every combination numerically, so that none is wrong and none is missing. This page compares the two "
        f"for the {len(rows)} pairs of operators that mean the same: {equal} are equal, ours has all of theirs in {len(rows) - missing}, and each difference "
        "has one of these reasons.",
        "",
        *(f"* `{key}` {text}" for key, text in REASONS.items()),
        "",
        "Numbers count signatures on one mesh axis, all B included. `B~P` (a partial cotangent passes through), which OneFlow has no word for, is left out.",
        "",
        "| ours | OneFlow | theirs | ours | differences |",
        "|---|---|---|---|---|",
    ]
    for row, num_theirs, num_ours, found in rows:
        told = "; ".join(f"`{key}`: {', '.join(items)}" for key, items in found.items()) or "none"
        note = f" ({row['note']})" if row.get("note") else ""
        lines.append(f"| `{expanded(row).sentence}` | `{row['theirs']}`{note} | {num_theirs} | {num_ours} | {told} |")
    return "\n".join(lines) + "\n"


def main(check: bool) -> int:
    text = document()
    if check:
        current = DOCUMENT.exists() and DOCUMENT.read_text("utf-8") == text
        print("up to date" if current else f"{DOCUMENT.relative_to(ROOT)} is out of date: run benchmarks/sbp_against_oneflow.py")
        return 0 if current else 1
    DOCUMENT.write_text(text, "utf-8")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the page is out of date, write nothing")
    sys.exit(main(parser.parse_args().check))

"""A Slot, one pass of one microbatch through one stage; what it waits for, and the words in which orders are spelled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ir.errors import PlanError

KINDS = ("F", "I", "W", "B")
_TEXT = re.compile(r"(\d+)([FIWB])(\d+)")


class Slot(NamedTuple):
    """F forward, I gradient of the input, W gradient of the weights, B both, of one microbatch through one stage; prints and reads back as in PyTorch.

    Where a schedule cuts every microbatch into k pieces of its sequence, `microbatch` counts the pieces: n is piece n % k of microbatch n // k.

    >>> str(Slot(2, "F", 0)), Slot.parse("1I3")
    ('2F0', Slot(stage=1, kind='I', microbatch=3))
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Slot:
        """Reads `str(slot)`; PlanError when it is none."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PlanError(f"`{text}` is no pass; write stage, one of {', '.join(KINDS)}, and microbatch, as in 2F0")
        return cls(int(match[1]), match[2], int(match[3]))


Orders = tuple[tuple[Slot, ...], ...]
"""The slots of every pipeline rank, in the order in which it runs them."""

Token = tuple[str, int]
"""(kind, stage): a slot whose microbatch follows from its place."""


def waits_for(slot: Slot, num_stages: int, num_pieces: int = 1) -> tuple[tuple[str, int, int], ...]:
    """What a slot needs: ("x", stage, microbatch) the output of that stage, ("dx", ...) the gradient of its input.

    `num_stages` is that of one pipeline; where there are two copies, the stages of the second count on from it. Of `num_pieces` pieces of a microbatch each
    reads the keys of those before it on the same stage, and its gradients those of the pieces after it.

    >>> waits_for(Slot(1, "B", 0), 4), waits_for(Slot(0, "F", 5), 4, num_pieces=2)
    ((('x', 1, 0), ('dx', 2, 0)), (('x', 0, 4),))
    """
    stage, kind, m = slot
    if kind == "W":
        return (("dx", stage, m),)
    if kind == "F":
        before = (("x", stage - 1, m),) if stage % num_stages else ()
        return (*before, ("x", stage, m - 1)) if m % num_pieces else before
    after = (("x", stage, m), ("dx", stage + 1, m)) if (stage + 1) % num_stages else (("x", stage, m),)
    return (*after, ("dx", stage, m + 1)) if (m + 1) % num_pieces else after


def gives(slot: Slot) -> tuple[str, int, int] | None:
    """What others wait for, once it has run: the output of its stage, or the gradient of its input.

    >>> gives(Slot(1, "B", 0))
    ('dx', 1, 0)
    """
    return None if slot.kind == "W" else ("x" if slot.kind == "F" else "dx", slot.stage, slot.microbatch)


def one_line(orders: Orders, num_pieces: int = 1) -> tuple[Slot, ...]:
    """All slots in one order in which they can run, each as early as it can where one takes as long as another; fewer where the ranks wait for each other.

    >>> orders = ((Slot(0, "F", 0), Slot(0, "F", 1), Slot(0, "B", 0), Slot(0, "B", 1)), (Slot(1, "F", 0), Slot(1, "B", 0), Slot(1, "F", 1), Slot(1, "B", 1)))
    >>> " ".join(map(str, one_line(orders)))
    '0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1'
    """
    num_stages = 1 + max(slot.stage for order in orders for slot in order)
    made = {gives(slot) for order in orders for slot in order}
    there: set[tuple[str, int, int] | None] = set()
    at, line, wave = [0] * len(orders), list[Slot](), list[int]()
    while True:
        wave = [
            rank for rank, order in enumerate(orders)
            if at[rank] < len(order) and all(need in there or need not in made for need in waits_for(order[at[rank]], num_stages, num_pieces))
        ]  # fmt: skip
        if not wave:
            return tuple(line)
        for rank in wave:
            line.append(orders[rank][at[rank]])
            at[rank] += 1
        there.update(gives(slot) for slot in line[-len(wave) :])


def spell(word: Iterable[Token], num_microbatches: int) -> tuple[Slot, ...]:
    """The slots of a word: every kind of every stage takes the microbatches in turn (B counts as I and as W); those past the last are left out.

    >>> " ".join(map(str, spell([("F", 0), ("F", 0), ("B", 0), ("I", 0), ("W", 0)], 2)))
    '0F0 0F1 0B0 0I1 0W1'
    """
    seen: Counter[Token] = Counter()
    slots = []
    for kind, stage in word:
        microbatch = seen["I" if kind == "B" else kind, stage]
        for counted in "IW" if kind == "B" else kind:
            seen[counted, stage] += 1
        if microbatch < num_microbatches:
            slots.append(Slot(stage, kind, microbatch))
    return tuple(slots)


def weave(forwards: Sequence[int], backwards: Sequence[int], ahead: int, lag: int | None = None) -> list[Token]:
    """A word over the stages of `forwards` and `backwards`: `ahead` forwards, then one forward and one backward in turn.

    With a `lag` the backward of k is I alone, and the W of k - lag follows it.
    """
    word: list[Token] = [("F", s) for s in forwards[:ahead]]
    for k, stage in enumerate(backwards):
        word += [("F", s) for s in forwards[ahead + k : ahead + k + 1]]
        word.append(("B" if lag is None else "I", stage))
        if lag is not None and k >= lag:
            word.append(("W", backwards[k - lag]))
    if lag is not None:
        word += [("W", s) for s in backwards[max(len(backwards) - lag, 0) :]]
    return word


def show(orders: Orders) -> str:
    """One line a rank, for the eye."""
    return "\n".join(" ".join(map(str, order)) for order in orders)

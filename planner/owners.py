"""Who works on what an operator of an update needs whole: equal parameters are updated together, and every rank owns one of them for as long.

Newton-Schulz rounds (`orthogonalize`) may split no dim of a matrix. Where ranks hold slices of it, or all hold it whole, as many equal matrices as there are
ranks are stacked; the stack, split along dims of the matrices, is brought to where it is split along its slots (an all-to-all), each rank works on its own
slot, and the way back is the same. So all that is needed are placements and operators that there are anyhow; what is reduced, kept and updated lies where the
plan says. Of matrices left over fewer than ranks share a stack; from which slot on is chosen so that no rank does much more than another.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ir.graph import Tensor
from ir.op import ALL_B, LEADING, Op, Rule, nd_placements
from ir.ops import catalogue
from ir.sbp import B, NdSbp, S
from planner.optimizers import Update, attrs_of, updated

Operand = tuple[str, int]
"""What an operator reads or gives: its name in the update, and whose it is: the number of a member, or all members'."""

ALL = -1


@dataclass(frozen=True, slots=True)
class Call:
    """One operator at work on what one member has, or all together. `made`: the tensors that it gives, `share`: how much of them is filled."""

    member: int
    op: Op
    rules: tuple[Rule, ...]
    attrs: Mapping[str, Any]
    reads: tuple[tuple[Operand, NdSbp], ...]
    writes: tuple[tuple[Operand, NdSbp], ...] = ()
    updates: tuple[Operand, ...] = ()
    made: tuple[Tensor, ...] = ()
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Bundle:
    """Parameters of one shape whose states lie alike and are updated together; member i owns slot (first + i) % slots."""

    members: tuple[str, ...]
    update: Update
    place: NdSbp
    slots: int
    first: int = 0

    @property
    def flops(self) -> float:
        """Of the operators that need members whole, for one member."""
        return sum(op.flops_of(self.update.sizes, self.update.attrs) for op in self.update.ops if self.update.needs_whole(op))


def num_slots(update: Update, place: NdSbp, mesh_shape: Sequence[int]) -> int:
    """How many ranks share the members of a bundle where the weights' state lies at `place`."""
    rules = [nd for op, nd in zip(update.ops, update.rules(place), strict=True) if update.needs_whole(op)]
    return math.prod(n for rule, n in zip(rules[0], mesh_shape, strict=True) if rule == ALL_B) if rules else 1


def bundles(params: Sequence[tuple[str, Update, NdSbp]], groups: Sequence[Hashable], mesh_shape: Sequence[int]) -> tuple[Bundle, ...]:
    """All parameters, those of a group (any hashable) together where they are equal; in the order in which their last members come."""
    waiting: dict[tuple[Hashable, Update, NdSbp, int], list[str]] = {}
    found: list[Bundle] = []
    for (name, update, place), group in zip(params, groups, strict=True):
        slots = num_slots(update, place, mesh_shape)
        members = waiting.setdefault((group, update, place, slots), [])
        members.append(name)
        if len(members) == slots:
            found.append(Bundle(tuple(members), update, place, slots))
            members.clear()
    rest = [Bundle(tuple(members), update, place, slots) for (_, update, place, slots), members in waiting.items() if members]
    return (*found, *_dealt(rest))


def _dealt(rest: Sequence[Bundle]) -> list[Bundle]:
    """Bundles that are not full, the dearest first, each beginning where it makes the busiest owner least busy."""
    loads: dict[int, list[float]] = {}
    out: list[Bundle] = []
    for b in sorted(rest, key=lambda b: -b.flops):
        load = loads.setdefault(b.slots, [0.0] * b.slots)
        first = min(range(b.slots), key=lambda at: (max(load[(at + i) % b.slots] for i in range(len(b.members))), at))
        for i in range(len(b.members)):
            load[(first + i) % b.slots] += b.flops
        out.append(Bundle(b.members, b.update, b.place, b.slots, first))
    return out


def stack_places(place: NdSbp, rules: Sequence[Rule]) -> tuple[NdSbp, NdSbp, NdSbp]:
    """Where a stack lies when it is laid, when its slots are worked on under the operator's `rules`, and when members are taken out of it.

    It is laid as its members are cut. Where they are whole each rank lays its own slots only, if no outer axis has to be brought to the slots after it.
    """
    working = tuple(S(0) if rule == ALL_B else S(LEADING.index(rule.on) + 1) for rule in rules)
    taken = tuple(S(s.dim + 1) if s.is_split else B for s in place)
    dealt = [axis for axis, rule in enumerate(rules) if rule == ALL_B]
    laid = list(taken)
    for axis in dealt:
        if place[axis].is_split:
            break
        laid[axis] = S(0)
    return tuple(laid), working, taken


def calls(b: Bundle) -> tuple[tuple[Call, ...], ...]:
    """What is done for a bundle, one step after another, the calls of a step being independent."""
    out: list[tuple[Call, ...]] = []
    for op, rules in zip(b.update.ops, b.update.rules(b.place), strict=True):
        if b.slots > 1 and b.update.needs_whole(op):
            out += [(call,) for call in _owned(b, op, rules)]
        else:
            out.append(tuple(_alone(b.update, op, rules, i) for i in range(len(b.members))))
    return tuple(out)


def _alone(update: Update, op: Op, rules: tuple[Rule, ...], member: int) -> Call:
    """An operator on one member."""
    changed = updated(op)
    reads = [(o.name, member) for o in op.inputs]
    writes = [] if changed else [(o.name, member) for o in op.outputs]
    made = tuple(update.between(op, name) for name, _ in writes)
    return _call(member, op, rules, attrs_of(update, op), reads, writes, made, 1.0, changed)


def _owned(b: Bundle, op: Op, rules: tuple[Rule, ...]) -> tuple[Call, Call, Call]:
    """Members stacked, the operator on the stack, and its results taken out again."""
    num, given, taken = len(b.members), op.inputs[0].name, op.outputs[0].name
    one, result = b.update.between(op, given), b.update.between(op, taken)
    each, rank, share = range(num), len(one.shape), num / b.slots
    whole, back = (replace(t, shape=(b.slots, *t.shape)) for t in (one, result))
    laid, working, out = stack_places(b.place, rules)
    stack, unstack = (catalogue(f"{name}.of{num}") for name in ("stack", "unstack"))
    some = {"members": num, "slots": b.slots, "first": b.first} if num < b.slots else {}
    return (
        _call(
            ALL, stack.for_ranks([rank] * num), _rules(laid, "k"), {"k": b.slots, "first": b.first}, [(given, i) for i in each], [(given, ALL)], (whole,), share
        ),
        _call(
            ALL, catalogue(op.name).for_ranks([rank + 1]), _rules(working, LEADING[0], 1), {**attrs_of(b.update, op), **some}, [(given, ALL)], [(taken, ALL)],
            (back,), share,
        ),
        _call(ALL, unstack.for_ranks([rank + 1]), _rules(out, "k"), {"first": b.first}, [(taken, ALL)], [(taken, i) for i in each], (result,) * num, 1.0),
    )  # fmt: skip


def _rules(place: NdSbp, slot: str, shift: int = 0) -> tuple[Rule, ...]:
    """Those of an operator that calls the slots `slot` and the dims after them by the leading labels from `shift` on."""
    return tuple(Rule("split", slot if s.dim == 0 else LEADING[s.dim - 1 + shift]) if s.is_split else ALL_B for s in place)


def _call(
    member: int, op: Op, rules: tuple[Rule, ...], attrs: Mapping[str, Any], reads: Sequence[Operand], writes: Sequence[Operand], made: tuple[Tensor, ...],
    share: float, changed: Sequence[str] = (),
) -> Call:  # fmt: skip
    ins, outs = nd_placements(rules, op)
    read = tuple((operand, nd) for operand, nd in zip(reads, ins, strict=True) if operand[0] not in changed)
    updates = tuple(operand for name in changed for operand in reads if operand[0] == name)
    return Call(member, op, rules, attrs, read, tuple(zip(writes, outs, strict=True)) if writes else (), updates, made, share)


__all__ = ["ALL", "Bundle", "Call", "bundles", "calls", "num_slots", "stack_places"]

"""Placements that the user asks for, tensor by tensor: `lm_head.weight=[tp: S(0)]`, `h.*.mlp.up=[dp: S(0), tp: S(2)]`.

A name may be a pattern. Of a value it says where the forward value exists once, of a parameter where the copy that computes is held; `NAME@state` and
`NAME@grad` say where a parameter's optimizer state lies and where its gradient accumulates, `d.NAME` where a value's cotangent is summed. Axes that are not
named are free.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ir.errors import InputError, PlanError, SbpError
from ir.graph import Graph, Tensor
from ir.sbp import B, P, S, Sbp, format_nd, parse_nd
from planner.space import Limit, Space

PARTS = {"state": 0, "held": 1, "grad": 2, "value": 0, "cotangent": 1}
"""The place of each part in the states of a parameter and of a hub."""


@dataclass(frozen=True, slots=True)
class Hint:
    """`pattern` of names, which `part` of what matches, and its placement on some axes.

    >>> parse_hint("d.h.*.attn.out", "[tp:P]")
    d.h.*.attn.out=[tp: P]
    """

    pattern: str
    part: str
    axes: tuple[str, ...]
    nd: tuple[Sbp, ...]

    def __repr__(self) -> str:
        prefix, suffix = ("d." if self.part == "cotangent" else ""), (f"@{self.part}" if self.part in ("state", "grad") else "")
        return f"{prefix}{self.pattern}{suffix}={format_nd(self.nd, self.axes)}"

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern)


def is_hint(value: Any) -> bool:
    """Whether what was fixed is a placement, not a number or a word."""
    return isinstance(value, Hint) or (isinstance(value, str) and value.strip().startswith("["))


def parse_hint(name: str, text: str) -> Hint:
    """Reads `NAME` and `[axis: placement, ...]`. Raises InputError."""
    try:
        axes, nd = parse_nd(text)
    except SbpError as error:
        raise InputError(f"--fix {name}={text}: {error}") from error
    if not axes or len(set(axes)) < len(axes):
        raise InputError(f"--fix {name}={text}: name each axis once, for example {name}=[tp: S(0)]")
    if name.startswith("d."):
        return Hint(name[2:], "cotangent", axes, nd)
    pattern, _, part = name.partition("@")
    if part not in ("", "state", "held", "grad"):
        raise InputError(f"--fix {name}={text}: `@{part}` is no part of a parameter; write @state, @held or @grad")
    return Hint(pattern, part, axes, nd)


def check_hint(hint: Hint, graph: Graph, axes: Sequence[str]) -> None:
    """Raises InputError where the hint names an axis or a tensor that there is not."""
    for axis in hint.axes:
        if axis not in axes:
            raise InputError(f"--fix {hint}: the mesh has no axis `{axis}`; its axes are {', '.join(axes)}")
    known = [name for name, t in graph.tensors.items() if _role(hint, t)]
    if not any(map(hint.matches, known)):
        near = difflib.get_close_matches(hint.pattern, known, 3, 0.5)
        what = {"cotangent": "value", "": "parameter or value"}.get(hint.part, "parameter")
        raise InputError(f"--fix {hint}: `{graph.name}` has no {what} `{hint.pattern}`" + (f"; near are {', '.join(near)}" if near else ""))


def _role(hint: Hint, tensor: Tensor) -> bool:
    roles = {"cotangent": ("value",), "": ("value", "param")}
    return tensor.role in roles.get(hint.part, ("param",))


def hinted_space(graph: Graph, axes: Sequence[str], mesh_shape: Sequence[int], hints: Iterable[Hint], uneven: Mapping[str, frozenset[int]]) -> Space:
    """What the hints leave to choose on this mesh. `uneven`: dims of tensors that need not divide.

    Raises PlanError with the numbers and the legal placements where a tensor cannot lie so.
    """
    hubs: list[Limit] = []
    params: list[Limit] = []
    size = dict(zip(axes, mesh_shape, strict=True))
    for hint in hints:
        matched = [t for name, t in graph.tensors.items() if _role(hint, t) and hint.matches(name)]
        for axis, sbp in zip(hint.axes, hint.nd, strict=True):
            for t in matched:
                _check_size(hint, t, axis, size.get(axis, 1), sbp, uneven.get(t.name, frozenset()))
        for axis, sbp in zip(hint.axes, hint.nd, strict=True):
            if hint.part != "cotangent":
                params.append(Limit(hint.pattern, axis, _is(PARTS[hint.part or "held"], sbp), said=f"--fix {hint}"))
            if hint.part in ("", "cotangent"):
                hubs.append(Limit(hint.pattern, axis, _is(PARTS[hint.part or "value"], sbp), said=f"--fix {hint}"))
    return Space(hubs=tuple(hubs), params=tuple(params))


def _is(place: int, sbp: Sbp) -> Callable[[Sequence[Sbp]], bool]:
    return lambda state: state[place] == sbp


def _check_size(hint: Hint, tensor: Tensor, axis: str, parts: int, sbp: Sbp, uneven: frozenset[int]) -> None:
    """A split must divide its dim, or leave no part empty where it may be uneven; the copy that computes and the states are never partial."""
    if parts == 1 or sbp in legal_on(tensor, parts, hint.part, uneven):
        return
    shape = tensor.shape
    why = f"it has {len(shape)} dims" if sbp.is_split and sbp.dim >= len(shape) else "it is no such part"
    if sbp.is_split and sbp.dim < len(shape):
        why = f"{shape[sbp.dim]} = {parts} x {shape[sbp.dim] // parts} + {shape[sbp.dim] % parts}"
    legal = ", ".join(map(repr, legal_on(tensor, parts, hint.part, uneven)))
    raise PlanError(f"--fix {hint}: `{tensor.name}` of shape {shape} cannot be {sbp} on axis {axis} = {parts}: {why}; legal there are {legal}")


def legal_on(tensor: Tensor, parts: int, part: str, uneven: frozenset[int]) -> tuple[Sbp, ...]:
    """The placements of a tensor, or of a `part` of it, on one axis by its size."""
    splits = tuple(S(d) for d, n in enumerate(tensor.shape) if n % parts == 0 or (d in uneven and n >= parts))
    partial = part in ("cotangent", "grad") or (tensor.role == "value" and part == "")
    return (B, *((P,) if partial else ()), *splits)

"""The operator oracle: runs a kernel on shards and sees which placements of its outputs hold numerically.

It knows placements only by what they mean: S(d) are slices, B are copies, P are random arrays that add up, P(max) random arrays whose maximum is the value.
Nothing here asks the operator for its rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from ir.op import Context, Op, Operand
from ir.ops import catalogue
from ir.sbp import P_MAX, B, P, S, Sbp, split_sizes

Placements = tuple[Sbp, ...]
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """An operator with sizes for its labels; `...` stands for `leading` dims. `positive` operands are above 0, `integers` below the size of a label."""

    name: str
    sizes: Mapping[str, int]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    leading: int = 2
    integers: Mapping[str, str] = field(default_factory=dict)
    positive: tuple[str, ...] = ()
    step: int = 3
    seed: int = 11

    def __str__(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.sizes.items())
        attrs = " ".join(f"{k}={v}" for k, v in self.attrs.items() if k not in self.sizes)
        return f"{self.name} {sizes} {attrs}".strip()

    @property
    def op(self) -> Op:
        raw = catalogue(self.name)
        return raw.for_ranks([len(o.dims) - 1 + self.leading if ("...",) in o.dims else len(o.dims) for o in raw.inputs])

    @property
    def label_sizes(self) -> dict[str, int]:
        """The sizes of the labels that the operator has here."""
        return {label: self.sizes[label] for label in self.op.labels}

    @property
    def all_attrs(self) -> dict[str, Any]:
        """`attrs`, and the sizes that the shapes of the inputs cannot tell."""
        ambiguous = {label for o in self.op.inputs for dim in o.dims if len(dim) > 1 for label in dim[1:]}
        told = {label for o in self.op.inputs for label in o.labels} - ambiguous
        return {**self.attrs, **{label: n for label, n in self.label_sizes.items() if label not in told}}

    def draw(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Whole inputs by name, float64 or int64."""
        out = {}
        for o in self.op.inputs:
            shape = o.shape(self.label_sizes)
            if o.name in self.integers:
                out[o.name] = rng.integers(0, self.sizes[self.integers[o.name]], shape)
            else:
                values = rng.normal(size=shape)
                out[o.name] = np.abs(values) + 0.5 if o.name in self.positive else values
        return out

    def run(
        self, ins: Sequence[np.ndarray], sizes: Mapping[str, int] | None = None, at: Mapping[str, int] | None = None, xp: Any = np, dtype: str = "float64",
    ) -> tuple[np.ndarray, ...]:  # fmt: skip
        """The outputs of the kernel on (local) inputs of these label sizes, computed by numpy or cupy in arrays that start as NaN."""
        op, local = self.op, dict(sizes or self.label_sizes)
        outs = tuple(xp.full(o.shape(local), math.nan, dtype) for o in op.outputs)
        room = (xp.full(op.room(local, self.all_attrs), math.nan, dtype),) if op.room else ()
        op.kernel(Context(xp, self.all_attrs, local, self.label_sizes, dict(at or {}), self.seed, self.step), *map(xp.asarray, ins), *outs, *room)
        return outs if xp is np else tuple(out.get() for out in outs)


# ---- what placements mean --------------------------------------------------------------------------------------------------------------------------


def shards(whole: np.ndarray, sbp: Sbp, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """What `n` ranks hold of `whole` under `sbp`."""
    if sbp.is_split:
        return [np.ascontiguousarray(part) for part in np.split(whole, np.cumsum(split_sizes(whole.shape[sbp.dim], n))[:-1], axis=sbp.dim)]
    if sbp == P:
        parts = [rng.normal(size=whole.shape) for _ in range(n - 1)]
        return [*parts, np.asarray(whole - sum(parts))]
    if sbp == P_MAX:
        owner = rng.integers(0, n, whole.shape)
        return [np.where(owner == i, whole, whole - rng.uniform(0.1, 2.0, whole.shape)) for i in range(n)]
    return [whole.copy() for _ in range(n)]


def joined(parts: Sequence[np.ndarray], sbp: Sbp) -> np.ndarray:
    """What the ranks' parts mean together under `sbp`; for B the first copy."""
    if sbp.is_split:
        return np.concatenate(parts, axis=sbp.dim)
    if sbp.is_partial:
        return reduce(np.maximum if sbp == P_MAX else np.add, parts)
    return parts[0]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE))


def placements_that_hold(parts: Sequence[np.ndarray], whole: np.ndarray) -> list[Sbp]:
    """Every placement under which `parts` are `whole`."""
    n = len(parts)
    found = [S(d) for d in range(whole.ndim) if whole.shape[d] >= n and _are_slices(parts, d, whole)]
    if all(part.shape == whole.shape for part in parts):
        found += [B] if all(same(part, whole) for part in parts) else []
        found += [sbp for sbp in (P, P_MAX) if same(joined(parts, sbp), whole)]
    return found


def _are_slices(parts: Sequence[np.ndarray], dim: int, whole: np.ndarray) -> bool:
    lengths = split_sizes(whole.shape[dim], len(parts))
    fits = all(p.ndim == whole.ndim and p.shape == (*whole.shape[:dim], k, *whole.shape[dim + 1 :]) for p, k in zip(parts, lengths, strict=True))
    return fits and same(np.concatenate(parts, axis=dim), whole)


# ---- every combination -----------------------------------------------------------------------------------------------------------------------------

Local = Mapping[str, tuple[tuple[int, int], ...]]
"""For each label the (size, offset) on every rank."""


def _labels_of(case: Case, operand: Operand, sbp: Sbp, n: int) -> Local | None:
    """What a placement of an operand says of its labels; None where the shards are not whole blocks of a composite dim, or a rank has nothing."""
    sizes = case.label_sizes
    local = {label: ((sizes[label], 0),) * n for label in operand.labels}
    if not sbp.is_split:
        return local
    outer, *inner = operand.dims[sbp.dim]
    block = math.prod(sizes[label] for label in inner)
    lengths = split_sizes(sizes[outer] * block, n)
    if any(length % block or not length for length in lengths):
        return None
    local[outer] = tuple((length // block, sum(lengths[:i]) // block) for i, length in enumerate(lengths))
    return local


def _merged(a: Local, b: Local) -> Local | None:
    return None if any(a[label] != b[label] for label in a.keys() & b.keys()) else {**a, **b}


def _combinations(case: Case, n: int) -> Iterator[tuple[Placements, Local]]:
    """Every tuple of placements of the inputs on which the sizes of all labels agree, with one label that only outputs have split, or none.

    Operators of many operands get P(max), which no rule has as an input, on one operand at a time.
    """
    op, sizes = case.op, case.label_sizes
    options = []
    for o in op.inputs:
        splits = [S(d) for d in range(len(o.dims))]
        wanted = splits + ([B] if o.name in case.integers else [B, P, P_MAX])
        options.append([(sbp, local) for sbp in wanted if (local := _labels_of(case, o, sbp, n)) is not None])
    free = [label for label in op.labels if not any(label in o.labels for o in op.inputs)]
    splits_of_free: list[Local] = [{label: ((sizes[label], 0),) * n for label in free}]
    for label in free:
        lengths = split_sizes(sizes[label], n)
        if lengths[-1]:
            splits_of_free.append({**splits_of_free[0], label: tuple((k, sum(lengths[:i])) for i, k in enumerate(lengths))})

    def grow(i: int, chosen: Placements, local: Local) -> Iterator[tuple[Placements, Local]]:
        if i == len(options):
            yield chosen, local
            return
        for sbp, here in options[i]:
            if sbp == P_MAX and len(options) > 4 and P_MAX in chosen:
                continue
            both = _merged(local, here)
            if both is not None:
                yield from grow(i + 1, (*chosen, sbp), both)

    for start in splits_of_free:
        yield from grow(0, (), start)


def survey(case: Case, n: int, seed: int = 0, xp: Any = np) -> set[tuple[Placements, Placements]]:
    """Every (placements of the inputs, placements of the outputs) that holds on `n` ranks for two random draws of the values."""
    found: list[set[tuple[Placements, Placements]]] = []
    for draw in range(2):
        rng = np.random.default_rng((seed, draw, n))
        ins = case.draw(rng)
        whole = case.run(list(ins.values()))
        pool = {(o, sbp): shards(ins[o], sbp, n, rng) for o in ins for sbp in (*map(S, range(ins[o].ndim)), B, P, P_MAX) if _fits(ins[o], sbp, n)}
        here: set[tuple[Placements, Placements]] = set()
        for placements, local in _combinations(case, n):
            if draw and not any(placements == known for known, _ in found[0]):
                continue
            parts = _run_on_shards(case, n, [pool[o, sbp] for o, sbp in zip(ins, placements, strict=True)], local, xp)
            holds = [placements_that_hold([p[j] for p in parts], w) for j, w in enumerate(whole)] if parts else [[]]
            here |= {(placements, outs) for outs in itertools.product(*holds)}
        found.append(here)
    return found[0] & found[1]


def _run_on_shards(case: Case, n: int, ins: Sequence[Sequence[np.ndarray]], local: Local, xp: Any) -> list[tuple[np.ndarray, ...]]:
    """The outputs of every rank; none where the kernel cannot run on such shards (a label beyond the part of the vocabulary that is here)."""
    parts = []
    for i in range(n):
        sizes, at = {k: v[i][0] for k, v in local.items()}, {k: v[i][1] for k, v in local.items()}
        with np.errstate(all="ignore"):
            try:
                parts.append(case.run([shard[i] for shard in ins], sizes, at, xp))
            except (IndexError, ValueError):  # no such row, or sizes that the operator ties to each other do not go together
                return []
    return parts


def _fits(whole: np.ndarray, sbp: Sbp, n: int) -> bool:
    return whole.dtype.kind == "f" or not sbp.is_partial if not sbp.is_split else whole.shape[sbp.dim] >= n


def derived(case: Case, n: int, op: Op | None = None) -> set[tuple[Placements, Placements]]:
    """What the rules of the operator (or of another in its place) say for these sizes."""
    op, sizes = op or case.op, case.label_sizes
    out = set()
    for rule in op.rules():
        if rule.kind == "split" and (sizes[rule.on] < n or (op.must_divide(rule.on) and sizes[rule.on] % n)):
            continue
        out.add(op.placements(rule))
    return out


def excused(entry: tuple[Placements, Placements], found: set[tuple[Placements, Placements]]) -> bool:
    """Whether a general rule (docstring of `ir.op`) leaves this out: P(max) is never read; equal copies are B, though they are a P(max) as well."""
    ins, outs = entry
    if P_MAX in ins:
        return True
    without = tuple(B if sbp == P_MAX else sbp for sbp in outs)
    return without != outs and (ins, without) in found


def compare(case: Case, n: int, op: Op | None = None, xp: Any = np) -> tuple[list[tuple[Placements, Placements]], list[tuple[Placements, Placements]]]:
    """(derived but not true, true but not derived) on `n` ranks."""
    found, said = survey(case, n, xp=xp), derived(case, n, op)
    return sorted(said - found), sorted(entry for entry in found - said if not excused(entry, found))


# ---- two axes --------------------------------------------------------------------------------------------------------------------------------------


def nd_shards(whole: np.ndarray, nd: Placements, mesh: tuple[int, ...], rng: np.random.Generator) -> list[np.ndarray]:
    """What the ranks of a mesh hold, in row-major order."""
    parts = [whole]
    for sbp, n in zip(nd, mesh, strict=True):
        parts = [piece for part in parts for piece in shards(part, sbp, n, rng)]
    return parts


def nd_joined(parts: Sequence[np.ndarray], nd: Placements, mesh: tuple[int, ...]) -> np.ndarray:
    for sbp, n in reversed(list(zip(nd, mesh, strict=True))):
        parts = [joined(parts[i : i + n], sbp) for i in range(0, len(parts), n)]
    return parts[0]

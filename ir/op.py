"""An operator is one sentence, `linear(x[... k], w[k n]) -> out[... n]`, plus what the sentence cannot say.

From the sentence follow shapes, error messages, bytes, the SBP signatures and, for contractions, flops, kernel and gradient. A name between the brackets
is a *label*: a dim that operands share. `(h d)` is one dim composed of two labels, outer first. `...` stands for the leading labels `b s t u`, as many as
the operand has; `b` is always the batch and `s` the sequence.

On one mesh axis an operator follows one `Rule`:

* `B`: all operands and outputs are B.
* `split L`: operands that have the label L are split on it, others are B; outputs that have it are split, outputs that lost it are P.
* `linear G`: the operands of a group in which the operator is jointly linear are P, others B; outputs that depend on the group are P, others B.
* `B~P`: forward as `B`; in the backward a P cotangent passes through, since every backward is linear in its cotangent.

The nd signature is one rule for each axis. No operator has more signatures than these (`tests/ir/test_operator_oracle.py` tries them all), save by what
holds in general: P(max) is only ever an output, whoever reads it gets it boxed; equal copies are B, though they are a P(max) as well; integers are never P;
inside a composite dim only the outermost label can be split.

Gradient operators are operators of the catalogue like any other: their operands carry the names of the forward operands, `dy` is the cotangent of output `y`,
and so the rule of a gradient operator follows from the rule of its forward operator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from ir.errors import GraphError
from ir.sbp import P_MAX, B, NdSbp, P, S, Sbp
from ir.zigzag import Run, runs

Attrs = Mapping[str, Any]
Sizes = Mapping[str, int]
LEADING = ("b", "s", "t", "u")
"""What `...` stands for, in this order."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A named tensor in a sentence; each of its dims is a tuple of labels, of more than one where the dim is composite.

    >>> Operand("x", (("b",), ("h", "d")))
    x[b (h d)]
    """

    name: str
    dims: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return f"{self.name}[{' '.join(d[0] if len(d) == 1 else '(' + ' '.join(d) + ')' for d in self.dims)}]"

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for dim in self.dims for label in dim)

    def dim_of(self, label: str) -> int | None:
        """The dim that a split of `label` cuts: only the outermost label of a dim can be split. None where it cannot."""
        return next((i for i, dim in enumerate(self.dims) if dim[0] == label), None)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(math.prod(sizes[label] for label in dim) for dim in self.dims)


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """What an operator does on one mesh axis; prints short and parses back.

    >>> [Rule.parse(t) for t in ("B", "B~P", "split b", "linear x+b")]
    [B, B~P, split b, linear x+b]
    """

    kind: str
    on: str = ""

    def __repr__(self) -> str:
        return f"{self.kind} {self.on}" if self.on else self.kind

    @classmethod
    def parse(cls, text: str) -> Rule:
        kind, _, on = text.partition(" ")
        if kind not in ("B", "B~P", "split", "linear") or (kind in ("split", "linear")) != bool(on):
            raise GraphError(f"`{text}` is no rule; write B, B~P, split LABEL or linear OPERAND+OPERAND")
        return cls(kind, on)


ALL_B = Rule("B")
PASS_P = Rule("B~P")


@dataclass(frozen=True, slots=True)
class Context:
    """What a kernel may know besides its arrays.

    `sizes` are the local sizes of the labels, `total` their sizes over all ranks, `at` the offset of the local shard for each label (0 where absent).
    `at["b"]` counts samples of the whole step, so random numbers and positions do not depend on the plan.
    `lr` is the learning rate of this step; None: the operator's attribute.
    """

    xp: Any
    attrs: Attrs
    sizes: Sizes
    total: Sizes
    at: Sizes
    seed: int = 0
    step: int = 0
    lr: float | None = None

    def runs(self, label: str = "s") -> tuple[Run, ...]:
        """The positions in the text of the tokens that `label` counts here: one run, or several where attrs say that sequences lie in zig-zag order."""
        at = self.at.get(label, 0)
        return runs(at, at + self.sizes[label], self.total[label], self.attrs.get("zigzag", 0))

    def positions(self, label: str = "s") -> Any:
        """The same, one by one, as an integer array."""
        found = [self.xp.arange(*run) for run in self.runs(label)]
        return found[0] if len(found) == 1 else self.xp.concatenate(found)


Kernel = Callable[..., None]
"""`kernel(context, *inputs, *outputs)`, in the order of the sentence; writes into the outputs it is given. All arrays are C-contiguous. An operator with
`room` is given an array of so many elements behind them."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Operands in which an operator is jointly linear, and the outputs that depend on them: P in gives P out, every other output stays B."""

    operands: frozenset[str]
    outputs: frozenset[str]


@dataclass(frozen=True, eq=False)
class Op:
    """One operator of the catalogue.

    `sums` and `maxes`: labels that vanish as a sum, as a maximum. `whole`: labels that may not be split. `linear`: groups of operands in which the operator
    is jointly linear. `stop`: operands and outputs without a cotangent. `grads`: names of the gradient operators. `flops(sizes, attrs)`: floating point
    operations for these label sizes. `forms`: for a whole label, sentences of an equal subgraph in which it can be split. `random`: draws random numbers.
    `copies`: the output is the input unchanged, so that whoever needs it may read the input.
    `gemm(sizes, attrs)`: (batch, m, n, k) of products that take as long as an operator that is no contraction but made of them.
    `stepped`: depends on the number of the step or the learning rate.
    `gathered`: inputs of which only as many elements are read as the first output has (the rows of a table). `integers`: outputs that are indices.
    `past`: the label of the positions that a causal operator looks back over (`ir.ops.over`).
    `room(sizes, attrs)`: elements of memory that the kernel works in besides its operands, an array that it is given behind its outputs.
    `moves(sizes, attrs)`: elements that it reads and writes, where that is more than every operand once.
    `flops_at(sizes, attrs, at, total)`: where the operations depend on where the shard lies, those of this shard; `flops` are then of the rank that has most.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    kernel: Kernel
    sums: frozenset[str] = frozenset()
    maxes: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    linear: tuple[Linear, ...] = ()
    stop: frozenset[str] = frozenset()
    grads: tuple[str, ...] = ()
    flops: Callable[[Sizes, Attrs], float] | None = None
    forms: Mapping[str, str] = field(default_factory=dict)
    is_contraction: bool = False
    random: bool = False
    copies: bool = False
    gathered: frozenset[str] = frozenset()
    integers: frozenset[str] = frozenset()
    stepped: bool = False
    gemm: Callable[[Sizes, Attrs], tuple[int, ...]] | None = None
    past: str = ""
    flops_at: Callable[[Sizes, Attrs, Sizes, Sizes], float] | None = None
    room: Callable[[Sizes, Attrs], int] | None = None
    moves: Callable[[Sizes, Attrs], float] | None = None

    @property
    def sentence(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.inputs))}) -> {', '.join(map(repr, self.outputs))}"

    def __repr__(self) -> str:
        return self.sentence

    def operand(self, name: str) -> Operand:
        return next(o for o in (*self.inputs, *self.outputs) if o.name == name)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Every label, in order of first appearance."""
        return tuple(dict.fromkeys(label for o in (*self.inputs, *self.outputs) for label in o.labels))

    # ---- shapes ----------------------------------------------------------------------------------------------------------------------------------

    def for_ranks(self, ranks: Sequence[int]) -> Op:
        """The operator with `...` written out for operands of these numbers of dims."""
        return _expand(self, tuple(ranks))

    def bind(self, shapes: Sequence[tuple[int, ...]], attrs: Attrs, node: str = "") -> dict[str, int]:
        """The size of every label, from the shapes of the inputs and, for labels that shapes cannot tell, from `attrs`.

        Raises GraphError with the sentence, the operand and the numbers when they disagree.
        """
        where = f"node `{node}`: " if node else ""
        if len(shapes) != len(self.inputs):
            raise GraphError(f"{where}{self.sentence} takes {len(self.inputs)} operands, {len(shapes)} were given")
        sizes: dict[str, int] = {label: int(attrs[label]) for label in self.labels if label in attrs}
        dims: list[tuple[Operand, tuple[str, ...], int]] = []
        for operand, shape in zip(self.inputs, shapes, strict=True):
            if len(shape) != len(operand.dims):
                raise GraphError(f"{where}{operand!r} has {len(operand.dims)} dims, the tensor given has shape {shape}")
            dims += [(operand, dim, size) for dim, size in zip(operand.dims, shape, strict=True)]
        # what another operand tells of a composite dim comes first
        for _, dim, size in sorted(dims, key=lambda d: len(d[1])):
            _settle(sizes, dim, size)
        for operand, dim, size in dims:
            unknown = _settle(sizes, dim, size)
            if len(unknown) > 1:
                raise GraphError(f"{where}{operand!r}: give the size of {' or '.join(unknown)} as an attribute")
            if unknown or math.prod(sizes[label] for label in dim) != size:
                raise GraphError(f"{where}{operand!r} of {self.sentence}: dim ({' '.join(dim)}) is {size}, but {sizes} was found before")
        missing = [label for label in self.labels if label not in sizes]
        if missing:
            raise GraphError(f"{where}{self.sentence}: the size of {', '.join(missing)} is not given by any operand; give it as an attribute")
        return sizes

    # ---- signatures ------------------------------------------------------------------------------------------------------------------------------

    def rules(self) -> tuple[Rule, ...]:
        """Every rule this operator may follow on one mesh axis, whatever the sizes."""
        splits = tuple(Rule("split", label) for label in self.labels if self._splittable(label))
        groups = tuple(Rule("linear", self._joined(group.operands)) for group in self.linear)
        through = (PASS_P,) if self.grads else ()
        return (ALL_B, *splits, *groups, *through)

    def _joined(self, names: Collection[str]) -> str:
        return "+".join(o.name for o in self.inputs if o.name in names)

    def _linear(self, on: str) -> Linear:
        found = next((group for group in self.linear if self._joined(group.operands) == on), None)
        if found is None:
            raise GraphError(f"{self.sentence} has no rule `linear {on}`; it has {', '.join(map(repr, self.rules()))}")
        return found

    def _splittable(self, label: str) -> bool:
        if label in self.whole:
            return False
        for operand in (*self.inputs, *self.outputs):
            if label in operand.labels and operand.dim_of(label) is None:
                return False
        lost = [o for o in self.outputs if label not in o.labels]
        return not lost or label in self.sums or label in self.maxes

    def must_divide(self, label: str) -> bool:
        """Whether a split of `label` must be even, because the label is the outer part of a composite dim."""
        return any(len(dim) > 1 and dim[0] == label for o in (*self.inputs, *self.outputs) for dim in o.dims)

    def placements(self, rule: Rule) -> tuple[tuple[Sbp, ...], tuple[Sbp, ...]]:
        """Placements of the inputs and of the outputs on an axis that follows `rule`."""
        if rule.kind == "split":
            ins = tuple(_split(o, rule.on, B) for o in self.inputs)
            return ins, tuple(_split(o, rule.on, P_MAX if rule.on in self.maxes else P) for o in self.outputs)
        if rule.kind == "linear":
            group = self._linear(rule.on)
            ins = tuple(P if o.name in group.operands else B for o in self.inputs)
            return ins, tuple(P if o.name in group.outputs else B for o in self.outputs)
        return (B,) * len(self.inputs), (B,) * len(self.outputs)

    def cotangents(self, rule: Rule) -> tuple[tuple[Sbp, ...], tuple[Sbp, ...]]:
        """(cotangent placements of the inputs as this rule gives them, cotangent placements of the outputs as this rule needs them).

        An input that was split has its cotangent split alike, one that was P has it B; one that was B has it B under `B`, else P.
        """
        ins, outs = self.placements(rule)
        for_b = B if rule.kind == "B" else P
        need = tuple(P if rule.kind == "B~P" else (s if s.is_split else B) for s in outs)
        return tuple(s if s.is_split else (B if s.is_partial else for_b) for s in ins), need

    def grad_rule(self, rule: Rule, grad: Op) -> Rule:
        """The rule that the gradient operator `grad` of this operator follows on an axis where this one follows `rule`.

        Under `linear` what the gradient reads of the forward's operands and outputs is P where the forward had it P.
        """
        names = [o.name for o in grad.inputs]
        if rule.kind == "B~P":
            own = {"d" + o.name for o in self.outputs}
            return Rule("linear", "+".join(n for n in names if n in own))
        if rule.kind == "linear":
            ins, outs = self.placements(rule)
            partial = {o.name for o, s in zip((*self.inputs, *self.outputs), (*ins, *outs), strict=True) if s.is_partial}
            read = [n for n in names if n in partial]
            return Rule("linear", "+".join(read)) if read else ALL_B
        if rule.kind == "split" and rule.on not in grad.labels:
            return ALL_B
        return rule

    # ---- work ------------------------------------------------------------------------------------------------------------------------------------

    def flops_of(self, sizes: Sizes, attrs: Attrs) -> float:
        """Floating point operations of one firing on these (local) label sizes."""
        if self.flops is not None:
            return float(self.flops(sizes, attrs))
        return float(sum(math.prod(o.shape(sizes)) for o in self.outputs))

    def elements_of(self, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Elements read of every input and written of every output on these label sizes."""
        outs = tuple(math.prod(o.shape(sizes)) for o in self.outputs)
        ins = tuple(math.prod(o.shape(sizes)) for o in self.inputs)
        return tuple(min(n, outs[0]) if o.name in self.gathered else n for o, n in zip(self.inputs, ins, strict=True)), outs

    def gemm_of(self, sizes: Sizes, attrs: Attrs | None = None) -> tuple[int, ...]:
        """(batch, m, n, k) of a contraction on these label sizes, m the labels of the first operand alone, n those of the second; else ()."""
        if not self.is_contraction:
            return self.gemm(sizes, attrs or {}) if self.gemm else ()
        a, b, out = (set(o.labels) for o in (*self.inputs, *self.outputs))

        def size(labels: set[str]) -> int:
            return math.prod(sizes[label] for label in self.labels if label in labels)

        return size(a & b & out), size((a & out) - b), size((b & out) - a), size((a & b) - out)


def _settle(sizes: dict[str, int], dim: tuple[str, ...], size: int) -> list[str]:
    """Adds the size of the one label of a dim that is not known yet, if it is a whole number; returns the labels that stay unknown."""
    unknown = [label for label in dim if label not in sizes]
    known = math.prod(sizes[label] for label in dim if label in sizes)
    if len(unknown) == 1 and known and size % known == 0:
        sizes[unknown.pop()] = size // known
    return unknown


def _split(operand: Operand, label: str, otherwise: Sbp) -> Sbp:
    dim = operand.dim_of(label)
    return otherwise if dim is None else S(dim)


def nd_placements(rules: Sequence[Rule], op: Op) -> tuple[tuple[NdSbp, ...], tuple[NdSbp, ...]]:
    """nd placements of the inputs and outputs of `op` under one rule for each mesh axis.

    A vanished label that one axis sums and P on another simply stand side by side: the nd set is the product over axes.
    """
    per_axis = [op.placements(rule) for rule in rules]
    ins = tuple(tuple(axis[0][i] for axis in per_axis) for i in range(len(op.inputs)))
    outs = tuple(tuple(axis[1][i] for axis in per_axis) for i in range(len(op.outputs)))
    return ins, outs


# ---- reading a sentence ----------------------------------------------------------------------------------------------------------------------------

_SENTENCE = re.compile(r"\s*([\w.]+)\s*\((.*)\)\s*->\s*(.+)", re.S)
_OPERAND = re.compile(r"\s*(\w+)\s*\[([^\]]*)\]\s*(?:,|$)")
_DIM = re.compile(r"\(([\w\s]+)\)|(\.\.\.|\w+)")


def parse_sentence(text: str) -> tuple[str, tuple[Operand, ...], tuple[Operand, ...]]:
    """Name, inputs and outputs of a sentence.

    >>> parse_sentence("heads(x[b s (h d)]) -> out[b h s d]")
    ('heads', (x[b s (h d)],), (out[b h s d],))
    """
    match = _SENTENCE.fullmatch(text)
    if not match:
        raise GraphError(f"`{text}` is no sentence; write name(a[m k], b[k n]) -> out[m n]")
    name, ins, outs = match.groups()
    return name, _operands(ins, text), _operands(outs, text)


def _operands(text: str, sentence: str) -> tuple[Operand, ...]:
    found: list[Operand] = []
    position = 0
    while position < len(text.rstrip()):
        match = _OPERAND.match(text, position)
        if not match:
            raise GraphError(f"`{sentence}`: cannot read the operands from `{text[position:]}`")
        dims = tuple(tuple((m.group(1) or m.group(2)).split()) for m in _DIM.finditer(match.group(2)))
        found.append(Operand(match.group(1), dims))
        position = match.end()
    return tuple(found)


@lru_cache(maxsize=1024)
def _expand(op: Op, ranks: tuple[int, ...]) -> Op:
    width = None
    for operand, rank in zip(op.inputs, ranks, strict=False):
        if ("...",) in operand.dims:
            here = rank - (len(operand.dims) - 1)
            if here < 0 or here > len(LEADING) or (width is not None and here != width):
                raise GraphError(f"{op.sentence}: `...` stands for {here} dims in {operand!r}, {'at most 4' if width is None else f'{width} before'}")
            width = here
    if width is None:
        return op
    leading = tuple((label,) for label in LEADING[:width])

    def written_out(operand: Operand) -> Operand:
        dims = tuple(d for dim in operand.dims for d in (leading if dim == ("...",) else (dim,)))
        return Operand(operand.name, dims)

    def all_labels(labels: frozenset[str]) -> frozenset[str]:
        return labels - {"..."} | ({d[0] for d in leading} if "..." in labels else set())

    return replace(
        op, inputs=tuple(map(written_out, op.inputs)), outputs=tuple(map(written_out, op.outputs)),
        sums=all_labels(op.sums), maxes=all_labels(op.maxes), whole=all_labels(op.whole),
    )  # fmt: skip


# ---- making operators ------------------------------------------------------------------------------------------------------------------------------


def op(
    sentence: str, kernel: Kernel, *, sums: str = "", maxes: str = "", whole: str = "", linear: Sequence[str] = (), stop: str = "",
    grads: Sequence[str] = (), flops: Callable[[Sizes, Attrs], float] | None = None, forms: Mapping[str, str] | None = None, random: bool = False,
    gathered: str = "", copies: bool = False, integers: str = "", stepped: bool = False, gemm: Callable[[Sizes, Attrs], tuple[int, ...]] | None = None,
    past: str = "", flops_at: Callable[[Sizes, Attrs, Sizes, Sizes], float] | None = None,
    room: Callable[[Sizes, Attrs], int] | None = None, moves: Callable[[Sizes, Attrs], float] | None = None,
) -> Op:  # fmt: skip
    """An operator from its sentence; label and operand sets are written as words separated by blanks, `...` stands for all leading labels.

    A linear group that does not reach every output names those that it reaches: `"v -> out"`.
    """
    name, ins, outs = parse_sentence(sentence)
    groups = tuple(_linear_group(group, outs) for group in linear)
    made = Op(
        name, ins, outs, kernel, frozenset(sums.split()), frozenset(maxes.split()), frozenset(whole.split()), groups, frozenset(stop.split()),
        tuple(grads), flops, dict(forms or {}), random=random, gathered=frozenset(gathered.split()), copies=copies, stepped=stepped, gemm=gemm,
        integers=frozenset(integers.split()), past=past, flops_at=flops_at, room=room, moves=moves,
    )  # fmt: skip
    unknown = sorted(n for group in groups for n in (group.operands - {o.name for o in ins}) | (group.outputs - {o.name for o in outs}))
    if unknown:
        raise GraphError(f"{made.sentence}: linear in {unknown}, which are no operands")
    return made


def _linear_group(text: str, outs: tuple[Operand, ...]) -> Linear:
    operands, arrow, reached = text.partition("->")
    return Linear(frozenset(operands.split()), frozenset(reached.split()) if arrow else frozenset(o.name for o in outs))


def contraction(sentence: str, contract: Callable[[Op], Kernel]) -> tuple[Op, ...]:
    """A product of two operands summed over the labels that vanish, and its two gradient operators, which are contractions too.

    `contract(op)` makes the kernel from the sentence. The gradient of operand `a` is named `NAME.da`.
    """
    name, ins, outs = parse_sentence(sentence)
    (a, b), (out,) = ins, outs
    cotangent = Operand("d" + out.name, out.dims)
    forward = _contraction(name, (a, b), out, contract, grads=(f"{name}.d{a.name}", f"{name}.d{b.name}"))
    da = _contraction(f"{name}.d{a.name}", (cotangent, b), Operand("d" + a.name, a.dims), contract)
    db = _contraction(f"{name}.d{b.name}", (a, cotangent), Operand("d" + b.name, b.dims), contract)
    return forward, da, db


def _contraction(name: str, ins: tuple[Operand, Operand], out: Operand, contract: Callable[[Op], Kernel], grads: tuple[str, ...] = ()) -> Op:
    labels = {label for o in ins for label in o.labels}
    draft = Op(
        name, ins, (out,), kernel=_unmade, sums=frozenset(labels - set(out.labels)), linear=tuple(_linear_group(o.name, (out,)) for o in ins),
        grads=grads, flops=_multiply_adds, is_contraction=True,
    )  # fmt: skip
    return replace(draft, kernel=contract(draft))


def _unmade(*_: Any) -> None:
    raise AssertionError("a contraction's kernel is made from its sentence")


def _multiply_adds(sizes: Sizes, _: Attrs) -> float:
    return 2.0 * math.prod(sizes.values())

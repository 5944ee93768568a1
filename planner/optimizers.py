"""How each parameter is updated once a step: which operators in which order, which states they keep, and where those lie.

An update is a tuple of operators whose operands are known by their names: `g` the whole gradient, `norm2` the square of the global norm, `w` the weights; an
operand `x` that the operator gives again as `x2` is changed in place, and but for `w` it is a state; what else an operator gives, later ones read. A label
means the same in all of them. So all else follows from the sentences: the states' shapes, and under a split of the weights the rule of every operator (the
same split where it has that label and may split it, else B), where the states lie and what has to be re-sharded on the way: the sum of LAMB's norms and of
Adafactor's means. What may not be split at all, as Muon's rounds, has an owner (`planner.owners`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ir.errors import PlanError
from ir.graph import Graph, Tensor
from ir.op import ALL_B, Op, Rule, nd_placements
from ir.ops import catalogue
from ir.sbp import NdSbp
from ir.units import DTYPE_BYTES

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0},
    "sgd": {"name": "sgd", "lr": 1e-2, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0, "max_norm": 1.0},
    "lamb": {"name": "lamb", "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01, "max_norm": 1.0},
    "adafactor": {"name": "adafactor", "lr": 1e-2, "beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.0, "max_norm": 0.0},
    "adamw8bit": {
        "name": "adamw8bit", "lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0, "block": 256, "min_size": 4096,
    },
    "muon": {
        "name": "muon", "lr": 3e-4, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust": "match_rms_adamw", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
        "weight_decay": 0.1, "max_norm": 1.0,
    },
}  # fmt: skip
"""Defaults. AdamW's are those of GPT-3 (Brown et al., 2020, arXiv:2005.14165, appendix B) but for the learning rate, which a run gives; Adafactor's and Muon's
those of `torch.optim`, Muon's rate as Liu et al. (2025, arXiv:2502.16982) match it to AdamW's, which updates what Muon does not; LAMB's those of its paper;
`block` and `min_size` as Dettmers et al. (2022, arXiv:2110.02861): smaller tensors keep states of full width."""

RECIPES: Mapping[str, tuple[str, ...]] = {
    "adamw": ("adamw",),
    "sgd": ("sgd",),
    "plain_sgd": ("plain_sgd",),
    "lamb": ("lamb_norms", "lamb"),
    "adafactor": ("adafactor_sums", "adafactor_mean", "adafactor_norms", "adafactor", "adafactor_rows", "adafactor_columns"),
    "adafactor_vector": ("adafactor_vector_norms", "adafactor_vector"),
    "adamw8bit": ("adamw8bit",),
    "muon": ("muon_direction", "orthogonalize", "muon"),
}

CODED: Mapping[str, Mapping[str, str]] = {"adamw8bit": {"mc": "uint8", "vc": "uint8"}}
"""States that are not as wide as the weights' master copy."""

AS_FAR = ("bfloat16",)
"""Dtypes narrower than float32 that reach as far, so that momentum of any size is told in them. Muon's rounds are taken in bfloat16 as in `torch.optim`."""

SMALLEST_SHARE = 4
"""A last dim without a divisor of at least this part of a block keeps states of full width: the scales would take more than the codes save."""


@dataclass(frozen=True, eq=False)
class Update:
    """The update of all parameters of one shape and kind; `update_of` makes it once.

    `ops`: with `...` written out; `sizes`: of every label of all of them; `dtype`: of the parameter.
    """

    ops: tuple[Op, ...]
    sizes: Mapping[str, int]
    attrs: Mapping[str, Any]
    states: tuple[Tensor, ...]
    dtype: str

    @cached_property
    def last(self) -> Op:
        """The operator that changes the weights."""
        return next(op for op in self.ops if "w" in updated(op))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.states)

    def needs_whole(self, op: Op) -> bool:
        """Whether an operator needs whole what a split of the weights cuts, and reads and gives nothing but that."""
        return len(op.inputs) == len(op.outputs) == 1 and not updated(op) and not op.whole.isdisjoint(self.last.operand("w").labels)

    def between(self, op: Op, name: str) -> Tensor:
        """What an operator gives to a later one: as wide as the states; what an operator needs whole as narrow as the parameter, if that reaches as far."""
        is_narrow = self.dtype in AS_FAR and any(self.needs_whole(o) and name in (o.inputs[0].name, o.outputs[0].name) for o in self.ops)
        return Tensor(name, op.operand(name).shape(self.sizes), self.dtype if is_narrow else state_dtype(self.dtype))

    def rules(self, nd: NdSbp) -> tuple[tuple[Rule, ...], ...]:
        """For each operator its rule on every axis, where the weights' state lies at `nd`. PlanError where the update cannot be split like that."""
        return tuple(tuple(self._rule(op, s.dim if s.is_split else -1) for s in nd) for op in self.ops)

    def _rule(self, op: Op, dim: int) -> Rule:
        if dim < 0:
            return ALL_B
        split = Rule("split", self.last.operand("w").dims[dim][0])
        if split in op.rules():
            return split
        if op is self.last:
            raise PlanError(f"the update {op.sentence} cannot be split on {split.on}")
        return ALL_B

    def is_legal(self, nd: NdSbp, mesh_shape: Sequence[int]) -> bool:
        """Whether the states can lie like that: what is split may be, and divides where blocks must stay whole."""
        dims = self.last.operand("w").dims
        for dim in {s.dim for s in nd if s.is_split}:
            parts = math.prod(n for s, n in zip(nd, mesh_shape, strict=True) if s.is_split and s.dim == dim)
            label = dims[dim][0]
            if Rule("split", label) not in self.last.rules() or self.sizes[label] < parts or (self.last.must_divide(label) and self.sizes[label] % parts):
                return False
        return True

    def state_places(self, nd: NdSbp) -> tuple[NdSbp, ...]:
        """Where each state lies when the weights' state lies at `nd`."""
        found = {}
        for op, rules in zip(self.ops, self.rules(nd), strict=True):
            ins, _ = nd_placements(rules, op)
            found.update({o.name: place for o, place in zip(op.inputs, ins, strict=True) if o.name in updated(op)})
        return tuple(found[t.name] for t in self.states)


def updated(op: Op) -> tuple[str, ...]:
    """The operands that an operator changes in place.

    >>> updated(catalogue("adamw")), updated(catalogue("orthogonalize"))
    (('w', 'm', 'v'), ())
    """
    given = {o.name for o in op.outputs}
    return tuple(o.name for o in op.inputs if f"{o.name}2" in given)


def with_defaults(optimizer: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of an optimizer by its name, or with some of them given. Raises PlanError naming what is not known, and what is near."""
    given = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer)
    defaults = OPTIMIZERS.get(given.get("name", ""))
    if defaults is None:
        raise PlanError(f"optimizer `{given.get('name')}` is not known; known are {', '.join(OPTIMIZERS)}")
    for key, value in given.items():
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, n=1)
            told = f"; did you mean {near[0]}?" if near else ""
            raise PlanError(f"{given['name']} has no setting `{key}`{told}; it has {', '.join(k for k in defaults if k != 'name')}")
        _check(given["name"], key, value, defaults[key])
    return {**defaults, **given}


def _check(name: str, key: str, value: Any, default: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        right, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, str):
        known = {"adjust": ("original", "match_rms_adamw")}.get(key, (value,))
        right, wanted = isinstance(value, str) and value in known, " or ".join(map(str, known))
    elif isinstance(default, int):
        right, wanted = isinstance(value, int) and is_number and value >= 1, "a whole number of 1 or more"
    elif key == "beta2_decay":
        right, wanted = is_number and value < 0, "a number below 0"
    else:
        below_1 = key in ("beta1", "beta2", "momentum")
        right = (is_number and math.isfinite(value) and value >= 0 and (value < 1 or not below_1)) or (value is None and default is None)
        wanted = "a number from 0 up to, but not including, 1" if below_1 else "a finite number of 0 or more"
    if not right:
        raise PlanError(f"{name}: {key} is {value!r}; give {wanted}")


def rule_of(optimizer: Mapping[str, Any], shape: Sequence[int], is_hidden: bool) -> str:
    """The recipe by which an optimizer updates a parameter of this shape; `is_hidden`: a matrix of a block, which Muon is for."""
    name = optimizer["name"]
    is_matrix = len(shape) > 1
    if name == "sgd" and not optimizer.get("momentum", 0.0):
        return "plain_sgd"
    if name == "adafactor":
        return "adafactor" if is_matrix else "adafactor_vector"
    if name == "muon":
        return "muon" if is_matrix and is_hidden else "adamw"
    if name == "lamb":
        # What is not decayed is not scaled either, as in the authors' own code: then the rule is Adam's.
        return "lamb" if is_matrix else "adamw"
    if name == "adamw8bit":
        block = int(optimizer["block"])
        is_large = math.prod(shape) >= optimizer["min_size"] and block_length(shape[-1], block) * SMALLEST_SHARE >= block
        return "adamw8bit" if is_large else "adamw"
    return str(name)


def block_length(length: int, longest: int) -> int:
    """Elements of a block of a dim: the largest divisor of its length that is not above `longest`.

    >>> block_length(11008, 256), block_length(96, 256), block_length(259, 256)
    (256, 96, 37)
    """
    return next(n for n in range(min(length, longest), 0, -1) if length % n == 0)


def is_hidden(graph: Graph, param: str) -> bool:
    """Whether only contractions between the first and the last layer read a parameter: no embedding, no head."""
    return all(graph.op(n).is_contraction and 0 < n.layer < graph.num_layers - 1 for n, _ in graph.consumers(param))


def update_of(optimizer: Mapping[str, Any], param: Tensor, hidden: bool) -> Update:
    """The update of a parameter; its states are as wide as its state, float32 at least, where their operator says nothing else."""
    return _update(tuple(optimizer.items()), param.shape, param.dtype, hidden)


@lru_cache(maxsize=4096)
def _update(settings: tuple[tuple[str, Any], ...], shape: tuple[int, ...], dtype: str, hidden: bool) -> Update:
    attrs = dict(settings)
    rule = rule_of(attrs, shape, hidden)
    del attrs["name"]
    raw = [catalogue(name) for name in RECIPES[rule]]
    main = next(op for op in raw if "w" in updated(op))
    width = len(shape) - sum(dim != ("...",) for dim in main.operand("w").dims)
    ops = tuple(op.for_ranks([len(o.dims) + width - 1 if ("...",) in o.dims else len(o.dims) for o in op.inputs]) for op in raw)
    weights = next(op for op in ops if "w" in updated(op)).operand("w")
    sizes = {"pair": 2}
    for dim, size in zip(weights.dims, shape, strict=True):
        inner = block_length(size, int(attrs["block"])) if len(dim) > 1 else 1
        sizes |= {dim[0]: size // inner, **dict.fromkeys(dim[1:], inner)}
    if len(shape) < 2:
        attrs["weight_decay"] = 0.0
    coded = CODED.get(rule, {})
    states = tuple(
        Tensor(o.name, o.shape(sizes), coded.get(o.name, state_dtype(dtype)), "value", {"init": "zeros"})
        for op in ops for o in op.inputs if o.name in updated(op) and o.name != "w"
    )  # fmt: skip
    used = {label for op in ops for label in op.labels}
    return Update(ops, {k: v for k, v in sizes.items() if k in used}, attrs, states, dtype)


def attrs_of(update: Update, op: Op) -> Mapping[str, Any]:
    """What a firing of one operator is told: the settings, and the sizes that its operands do not tell."""
    ambiguous = {label for o in op.inputs for dim in o.dims if len(dim) > 1 for label in dim[1:]}
    told = {label for o in op.inputs for label in o.labels} - ambiguous
    return {**update.attrs, **{label: update.sizes[label] for label in op.labels if label not in told}}


def state_dtype(dtype: str) -> str:
    """Optimizer states, master copy and gradient accumulators are float32 where the parameter is narrower.

    >>> state_dtype("bfloat16"), state_dtype("float64")
    ('float32', 'float64')
    """
    return "float32" if DTYPE_BYTES[dtype] < DTYPE_BYTES["float32"] else dtype


__all__ = [
    "OPTIMIZERS", "Update", "attrs_of", "block_length", "is_hidden", "rule_of", "state_dtype", "update_of", "updated", "with_defaults",
]  # fmt: skip

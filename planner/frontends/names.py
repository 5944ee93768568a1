"""Where the twin of a model in `transformers` keeps each parameter: names, and what is fused there, turned or shifted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.frontends.config import ModelConfig
from planner.frontends.writer import Param


@dataclass(frozen=True, slots=True)
class Columns:
    """Elements [start, stop) by `step` of each of `groups` groups of `width` in a fused dim.

    >>> Columns(2, 6, 2, 4).index
    array([2, 3, 8, 9])
    """

    groups: int
    width: int
    start: int
    stop: int
    step: int = 1

    @property
    def index(self) -> NDArray[np.intp]:
        inside = np.arange(self.start, self.stop, self.step)
        return (np.arange(self.groups)[:, None] * self.width + inside).reshape(-1)

    @property
    def total(self) -> int:
        return self.groups * self.width


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a parameter lies in a state dict: the whole of `key`, or `columns` of its last dim after it was `transposed` (its last two dims exchanged).

    `shape`: the shape that it has there, where that has other dims. `shift` is added to it here: Gemma's norms multiply by 1 + weight.
    """

    key: str
    transposed: bool = False
    columns: Columns | None = None
    shape: tuple[int, ...] = ()
    shift: float = 0.0


Where = Callable[[ModelConfig], Columns]
"""Which columns of a fused matrix something is."""


@dataclass(frozen=True, slots=True)
class Names:
    """A family's names. `outside`: whole names of parameters outside of blocks. `inside`: names inside a block, of a node or of a whole parameter.

    `block` is what stands before a block's name, `{i}` its number. `fused`: by the name inside a block. `straight`: projections that hold [inputs, outputs]
    there too. `shapes`: of parameters that have other dims there. `plus_one`: norms multiply by 1 + weight. `renamed`: names inside a block that depend on the
    config. `encoder`: the names of an encoder's stack.
    """

    block: str
    outside: Mapping[str, str]
    inside: Mapping[str, str]
    fused: Mapping[str, Where] = field(default_factory=dict)
    straight: tuple[str, ...] = ()
    shapes: Mapping[str, Callable[[ModelConfig], tuple[int, ...]]] = field(default_factory=dict)
    plus_one: bool = False
    renamed: Callable[[ModelConfig], Mapping[str, str]] = lambda _: {}
    encoder: Names | None = None

    def origin(self, c: ModelConfig, name: str, param: Param) -> Origin:
        """Where the parameter called `name` here lies there."""
        if self.encoder is not None and name.startswith("enc."):
            return self.encoder.origin(c, name.removeprefix("enc."), param)
        inside = name.split(".", 2)[2] if name.startswith("h.") else name
        at, _, kind = inside.rpartition(".")
        is_table = at in ("wte", "wpe", "wtt", "lm_head", "relative") or inside == "cls"
        turned = len(param.shape) > 1 and not is_table and not any(inside.startswith(s) for s in self.straight)
        shift = 1.0 if self.plus_one and len(param.shape) == 1 and kind == "weight" else 0.0
        columns = self.fused[at](c) if at in self.fused else None
        shape = self.shapes[inside](c) if inside in self.shapes else ()
        return Origin(self._key(c, name, inside, at, kind), turned, columns, shape, shift)

    def _key(self, c: ModelConfig, name: str, inside: str, at: str, kind: str) -> str:
        if not name.startswith("h."):
            return self.outside[inside] if inside in self.outside else f"{self.outside[at]}.{kind}"
        before = self.block.format(i=name.split(".", 2)[1])
        names = {**self.inside, **self.renamed(c)}
        return before + (names[inside] if inside in names else f"{names[at]}.{kind}")


def of_heads(which: str) -> Where:
    """Queries, keys or values fused head by head: [q of the group's heads, k, v] for every key head."""

    def columns(c: ModelConfig) -> Columns:
        a = c.attention
        queries = a.num_heads // a.num_kv_heads * a.head_dim
        start = {"q": 0, "k": queries, "v": queries + a.head_dim}[which]
        return Columns(a.num_kv_heads, queries + 2 * a.head_dim, start, start + (queries if which == "q" else a.head_dim))

    return columns


def side_by_side(which: str) -> Where:
    """All queries, then all keys, then all values."""

    def columns(c: ModelConfig) -> Columns:
        a = c.attention
        queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        start, stop = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}[which]
        return Columns(1, queries + 2 * keys, start, stop)

    return columns


def halves(of: Callable[[ModelConfig], int], which: str) -> Where:
    """The gate's half of a matrix, then the other."""

    def columns(c: ModelConfig) -> Columns:
        n = of(c)
        return Columns(1, 2 * n, 0, n) if which == "gate" else Columns(1, 2 * n, n, 2 * n)

    return columns

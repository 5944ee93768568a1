"""A table whose equal rows, columns and so on are held once, found by the classes of the states.

A cost depends on less than a state says: the edge of an operator and a tensor sees of the operator's rule where that one operand lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Index = NDArray[np.intp]

LARGEST = np.iinfo(np.intp).max


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """Entry (i, j, ...) is `base[classes[0][i], classes[1][j], ...]`. Classes are numbered as they first appear, and each has a state.

    >>> table = Gathered(np.array([[1.0, 2.0]]), (np.array([0, 0]), np.array([0, 1, 0])))
    >>> table.shape, float(table[1, 2]), table.dense().tolist()
    ((2, 3), 1.0, [[1.0, 2.0, 1.0], [1.0, 2.0, 1.0]])
    """

    base: Table
    classes: tuple[Index, ...]

    @classmethod
    def of(cls, table: Table | Gathered) -> Gathered:
        """A table as it stands: every state a class of its own."""
        return table if isinstance(table, Gathered) else cls(table, tuple(map(every, table.shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.classes))

    def __getitem__(self, at: Sequence[int]) -> Any:
        """One entry; with the state of the last axis left out, its entries for all of these."""
        found = self.base[tuple(int(c[i]) for c, i in zip(self.classes, at, strict=False))]
        return found if len(at) == len(self.classes) else found[self.classes[-1]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.dense(), dtype=dtype, copy=copy)

    def __add__(self, other: Gathered) -> Gathered:
        """The sum, by the classes that both tell apart."""
        joined = tuple(distinct(a, b) for a, b in zip(self.classes, other.classes, strict=True))
        first = tuple(first for first, _ in joined)
        return Gathered(self.at(first) + other.at(first), tuple(number for _, number in joined))

    def at(self, states: Sequence[Index]) -> Table:
        """The entries of some states of every axis."""
        out = self.base
        for axis, (classes, chosen) in enumerate(zip(self.classes, states, strict=True)):
            if chosen is classes and chosen is every(len(classes)):
                continue  # each state its own class
            wanted = classes[chosen]
            if not np.array_equal(wanted, np.arange(out.shape[axis])):
                out = out.take(wanted, axis=axis)
        return out

    def dense(self) -> Table:
        return self.at(tuple(map(every, self.shape)))

    def transpose(self, order: Sequence[int]) -> Gathered:
        return Gathered(self.base.transpose(order), tuple(self.classes[i] for i in order))

    def take(self, states: Index, axis: int) -> Gathered:
        """With these states of an axis alone, in this order."""
        first, number = distinct(self.classes[axis][states])
        wanted = self.classes[axis][states[first]]
        base = self.base if np.array_equal(wanted, np.arange(self.base.shape[axis])) else self.base.take(wanted, axis=axis)
        return Gathered(base, (*self.classes[:axis], number, *self.classes[axis + 1 :]))

    def diagonal(self, axis: int, image: Index, other: int) -> Gathered:
        """Without `axis`, whose state is `image` of the state of `other`."""
        rest = [i for i in range(self.base.ndim) if i not in (axis, other)]
        base = self.base.transpose(*rest, axis, other)[..., self.classes[axis][image], self.classes[other]]
        left = [np.arange(len(image)) if i == other else c for i, c in enumerate(self.classes) if i != axis]
        return Gathered(np.moveaxis(base, -1, other - (axis < other)) if rest else base, tuple(left))

    def lines(self, axis: int) -> Gathered:
        """[state of `axis`, entries]: each different entry of the other axes at least once."""
        base = self.base.swapaxes(0, axis).reshape(self.base.shape[axis], -1)
        return Gathered(base, (self.classes[axis], every(base.shape[1])))

    def is_possible(self, axis: int) -> NDArray[np.bool_]:
        """Of each state of `axis` whether any of its entries is finite."""
        others = tuple(i for i in range(self.base.ndim) if i != axis)
        return np.asarray(np.isfinite(self.base).any(axis=others))[self.classes[axis]]

    def image(self, axis: int) -> Index | None:
        """The one state of the other of two axes that leaves a finite entry, for each state of `axis`; None where some have more or none."""
        finite = np.isfinite(self.base if axis == 0 else self.base.T)
        others = self.classes[1 - axis]
        if not (finite.sum(axis=1) == 1).all():
            return None
        found = finite.argmax(axis=1)
        if (np.bincount(others, minlength=finite.shape[1])[found] != 1).any():
            return None
        return np.asarray(np.unique(others, return_index=True)[1][found][self.classes[axis]])


@cache
def every(num: int) -> Index:
    """The numbers of so many states, one array for all that ask."""
    found = np.arange(num)
    found.flags.writeable = False
    return found


def distinct(*keys: Index) -> tuple[Index, Index]:
    """(the first of each class, the class of each) of things that are alike where all keys are.

    >>> [found.tolist() for found in distinct(np.array([4, 4, 1, 4]), np.array([0, 0, 0, 7]))]
    [[0, 2, 3], [0, 0, 1, 2]]
    """
    states = every(len(keys[0]))
    if any(key is states or np.array_equal(key, states) for key in keys):
        return states, states
    code = keys[0]
    for key in keys[1:]:
        most = int(key.max(initial=0)) + 1
        if int(code.max(initial=0)) >= LARGEST // most:
            code = np.unique(code, return_inverse=True)[1]
        code = code * most + key
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[number]


def least_of_classes(costs: Table, number: Index) -> Table:
    """The minimum over the states of each class along the last axis."""
    if number is every(len(number)):
        return costs
    order = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[order], prepend=-1))
    return np.asarray(np.minimum.reduceat(costs[..., order], starts, axis=-1))

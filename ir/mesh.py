"""A device mesh: ranks laid out on named axes, outer axis first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ir.errors import PlanError

JOINED = "+"
"""Between the names of axes that something runs over at once."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in row-major order over named axes; one pipeline stage runs on one mesh.

    >>> mesh = Mesh(("dp", "tp"), (2, 4), tuple(range(8)))
    >>> mesh, mesh.coords(6), mesh.group(6, "tp"), mesh.group(6, "dp")
    (dp2 x tp4, (1, 2), (4, 5, 6, 7), (2, 6))
    >>> mesh.group(6, "dp+tp") == mesh.ranks
    True
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or len(set(self.axes)) != len(self.axes):
            raise PlanError(f"a mesh needs one size for each of its distinct axes: axes {self.axes}, sizes {self.shape}")
        if any(n < 1 for n in self.shape):
            raise PlanError(f"mesh axes {dict(zip(self.axes, self.shape, strict=True))}: every size must be 1 or more")
        if math.prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise PlanError(f"mesh {self.shape} has {math.prod(self.shape)} places, {len(set(self.ranks))} distinct ranks were given")

    def __repr__(self) -> str:
        return " x ".join(f"{axis}{size}" for axis, size in zip(self.axes, self.shape, strict=True)) or "one device"

    @property
    def size(self) -> int:
        return len(self.ranks)

    def axis_size(self, axis: str) -> int:
        return self.shape[self.axes.index(axis)]

    def coords(self, rank: int) -> tuple[int, ...]:
        """Where `rank` stands, one coordinate for each axis."""
        place = self.ranks.index(rank)
        out = []
        for size in reversed(self.shape):
            place, i = divmod(place, size)
            out.append(i)
        return tuple(reversed(out))

    def rank_at(self, coords: tuple[int, ...]) -> int:
        place = 0
        for i, size in zip(coords, self.shape, strict=True):
            place = place * size + i
        return self.ranks[place]

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axis` alone, or on the axes of `dp+tp`, in the order of the mesh."""
        joined = axis.split(JOINED)
        ranges = [range(n) if name in joined else (i,) for name, n, i in zip(self.axes, self.shape, self.coords(rank), strict=True)]
        return tuple(map(self.rank_at, itertools.product(*ranges)))

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Every group of `axis`; together they hold each rank once."""
        joined = axis.split(JOINED)
        ranges = [range(1) if name in joined else range(n) for name, n in zip(self.axes, self.shape, strict=True)]
        for at in itertools.product(*ranges):
            yield self.group(self.rank_at(at), axis)

    def on(self, ranks: tuple[int, ...]) -> Mesh:
        """The same axes over other ranks."""
        return Mesh(self.axes, self.shape, ranks)

    def to_json(self) -> dict[str, Any]:
        return {"axes": list(self.axes), "shape": list(self.shape), "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Mesh:
        return cls(tuple(data["axes"]), tuple(data["shape"]), tuple(data["ranks"]))

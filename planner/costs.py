"""What one table of the placement problem costs: seconds, bytes that are kept, and the price that turns bytes into seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.pricing import TIE_KEPT_S
from planner.solver.gathered import Gathered, Index, Table

ByLayer = float | Mapping[int, float]
"""One number, or one for each layer that has one."""


def _at(value: ByLayer, layer: int, otherwise: float) -> float:
    return value.get(layer, otherwise) if isinstance(value, Mapping) else value


Rate = tuple[float, float]
"""(seconds per byte, how many copies of it live at once)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The numbers of one search. `exposed`: the share of what can hide behind kernels (boxing of parameters and of their gradients) that is counted.

    `recompute`: layers and names of nodes that run again in the backward; `selective`: of all other nodes the search decides it.
    """

    num_microbatches: int
    memory_price: ByLayer
    state_price: ByLayer
    in_flight: ByLayer
    recompute: tuple[int | str, ...]
    optimizer: Mapping[str, Any]
    exposed: float = 1.0
    selective: bool = False

    def copies(self, layer: int) -> float:
        """Microbatches whose saved values of this layer live at once."""
        return _at(self.in_flight, layer, 1.0)

    def charge(self, layer: int) -> float:
        """Seconds per byte of a saved value of this layer."""
        return (_at(self.memory_price, layer, 0.0) + TIE_KEPT_S) * self.copies(layer)

    def state_charge(self, layer: int) -> float:
        """Seconds per byte of a parameter of this layer, its gradient and its states."""
        return _at(self.state_price, layer, 0.0) + TIE_KEPT_S

    def rate(self, layer: int) -> Rate:
        return self.charge(layer), self.copies(layer)


@dataclass(frozen=True, slots=True)
class Cost:
    """A table in seconds with the price of memory in it, the bytes kept of one microbatch, where the kept value is boxed again, where it is the common copy.

    `ways`: what was chosen from at this price: (seconds, bytes of all copies that live at once) of keeping, and of boxing again. All tables are by `classes` of
    the states along each axis, see `planner.solver.gathered`; absent: every state is one of its own.
    """

    table: Table
    kept: Table
    reboxed: NDArray[np.bool_] | None
    common: NDArray[np.bool_] | None
    ways: tuple[tuple[Table, Table], ...]
    classes: tuple[Index, ...] | None = None

    @property
    def gathered(self) -> Gathered:
        return self._gathered(self.table)

    @property
    def options(self) -> tuple[tuple[Table, Table], ...]:
        """`ways` by state."""
        return tuple((self._gathered(time_s).dense(), self._gathered(nbytes).dense()) for time_s, nbytes in self.ways)

    def _gathered(self, table: Table) -> Gathered:
        return Gathered.of(table) if self.classes is None else Gathered(table, self.classes)

    def place(self, *states: int) -> tuple[int, ...]:
        """Where the tables have the entry of some states."""
        return states if self.classes is None else tuple(int(c[i]) for c, i in zip(self.classes, states, strict=True))

    def spread(self, *classes: Index) -> Cost:
        """The same for states of these classes, as many times as there are ways to have each state."""
        repeats = [n // (int(c.max()) + 1) for n, c in zip(self.table.shape, classes, strict=True)]
        return replace(self, classes=tuple(np.concatenate([c + k * (int(c.max()) + 1) for k in range(n)]) for n, c in zip(repeats, classes, strict=True)))

    def way(self, at: tuple[int, ...]) -> int:
        """Which way was chosen where these are the states."""
        return int(self.reboxed is not None and self.reboxed[self.place(*at)])

    @classmethod
    def stacked(cls, parts: Sequence[Sequence[Cost]]) -> Cost:
        """One table of several, as `numpy.block` puts them together; a part that offers fewer ways than another never takes those."""
        if len(parts) == 1 and len(parts[0]) == 1:
            return parts[0][0]

        def block(what: Callable[[Cost], NDArray[Any]]) -> NDArray[Any]:
            made = [[what(part) for part in line] for line in parts]
            return np.concatenate(made[0]) if made[0][0].ndim == 1 else np.block(made)

        def option(part: Cost, k: int) -> tuple[Table, Table]:
            return part.ways[k] if k < len(part.ways) else (np.full(part.table.shape, np.inf), np.zeros(part.table.shape))

        num = max(len(part.ways) for line in parts for part in line)
        ways = tuple((block(lambda p, k=k: option(p, k)[0]), block(lambda p, k=k: option(p, k)[1])) for k in range(num))  # type: ignore[misc]
        reboxed, common = block(lambda p: _marks(p.reboxed, p.table)), block(lambda p: _marks(p.common, p.table))
        return cls(block(lambda p: p.table), block(lambda p: p.kept), reboxed, common, ways)

    @classmethod
    def of(
        cls, rate: Rate, time_s: Table, kept: Table, may_box: NDArray[np.bool_] | None = None, once: Table | float = 0.0, source: Table | float = 0.0,
        common: NDArray[np.bool_] | None = None,
    ) -> Cost:  # fmt: skip
        """Keeping `kept`; or, where it may be, keeping `source` and boxing it again for `once`, if that is cheaper."""
        charge, copies = rate
        if may_box is None or not may_box.any():
            none = None if may_box is None else np.zeros(time_s.shape, dtype=bool)
            return cls(time_s + charge * kept, kept, none, common, ((time_s, kept * copies),))
        reboxed = may_box & (once + charge * source < charge * kept)
        chosen = np.where(reboxed, source, kept)
        ways = ((time_s, kept * copies), (np.where(may_box, time_s + once, np.inf), np.broadcast_to(source * copies, time_s.shape)))
        return cls(time_s + charge * chosen + np.where(reboxed, once, 0.0), chosen, reboxed, common, ways)


def _marks(found: NDArray[np.bool_] | None, like: Table) -> NDArray[np.bool_]:
    return np.zeros(like.shape, dtype=bool) if found is None else found

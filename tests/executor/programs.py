"""Small Programs written by hand, and the same sums done by numpy at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ir.program import Actor, Program, Register
from ir.sbp import split_sizes
from ir.units import DTYPE_BYTES
from ir.work import Work

Region = tuple[tuple[int, int], ...]


@dataclass
class Writer:
    """Collects registers, actors and each queue's order, in the order in which they are added."""

    num_microbatches: int = 1
    registers: list[Register] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)
    orders: dict[tuple[int, str], list[tuple[str, int]]] = field(default_factory=dict)

    def register(self, name: str, rank: int, shape: Sequence[int], dtype: str = "float64", **more: Any) -> str:
        nbytes = DTYPE_BYTES[dtype]
        for n in shape:
            nbytes *= n
        self.registers.append(Register(name, rank, tuple(shape), dtype, nbytes, **more))
        return name

    def actor(self, name: str, rank: int, queue: str, work: Work, clock: str = "microbatch", **more: Any) -> str:
        self.actors.append(Actor(name, rank, queue, clock, work, **more))
        self.orders.setdefault((rank, queue), [])
        return name

    def compute(self, name: str, rank: int, op: str, reads: Sequence[str], writes: Sequence[str] = (), **more: Any) -> str:
        keys = ("attrs", "sizes", "total", "at", "batch_stride")
        work = Work("compute", op, "float64", **{k: more.pop(k) for k in keys if k in more})
        return self.actor(name, rank, more.pop("queue", "compute"), work, reads=tuple(reads), writes=tuple(writes), **more)

    def load(self, name: str, rank: int, tensor: str, region: Region, into: str, stride: int) -> str:
        return self.actor(name, rank, "load", Work("load", tensor, "int64", attrs={"dst_region": region}, batch_stride=stride), writes=(into,))

    def collective(
        self, channel: str, kind: str, group: Sequence[int], reads: Sequence[str], writes: Sequence[str], src: Sequence[Region], dst: Sequence[Region], **more: Any
    ) -> None:
        reduce = more.pop("reduce", "sum" if kind in ("all_reduce", "reduce_scatter") else "")
        clock = more.pop("clock", "microbatch")
        for rank, read, write, s, d in zip(group, reads, writes, src, dst, strict=True):
            attrs = {"src_region": s, "dst_region": d, "reduce": reduce}
            work = Work("collective", kind, "float64", nbytes=self._nbytes(read, write), group=tuple(group), attrs=attrs)
            self.actor(f"{channel}@{rank}", rank, more.get("queue", "comm"), work, clock, reads=(read,), writes=(write,), channel=channel)

    def p2p(self, channel: str, src: int, dst: int, read: str, write: str) -> None:
        for kind, rank, more in (("send", src, {"reads": (read,)}), ("recv", dst, {"writes": (write,)})):
            work = Work(kind, "p2p", "float64", nbytes=self._nbytes(read, write), group=(src, dst))
            self.actor(f"{channel}.{kind}", rank, f"p2p.{kind}", work, channel=channel, **more)

    def _nbytes(self, *names: str) -> int:
        return max(r.nbytes for r in self.registers if r.name in names)

    def program(self, order: dict[tuple[int, str], list[tuple[str, int]]] | None = None, **meta: Any) -> Program:
        """`order` replaces single queues' orders; else every queue runs its actors microbatch by microbatch, those of the step after the last."""
        orders: dict[tuple[int, str], tuple[tuple[str, int], ...]] = {}
        for queue in self.orders:
            mine = [a for a in self.actors if (a.rank, a.queue) == queue]
            each = [(a.name, m) for m in range(self.num_microbatches) for a in mine if a.clock == "microbatch"]
            orders[queue] = tuple((order or {}).get(queue, each + [(a.name, 0) for a in mine if a.clock == "step"]))
        return Program("hand", self.num_microbatches, tuple(self.actors), tuple(self.registers), orders, meta)


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """(start, stop) of each slice of a dim."""
    out, start = [], 0
    for n in split_sizes(size, parts):
        out.append((start, start + n))
        start += n
    return out

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
        self,
        channel: str,
        kind: str,
        group: Sequence[int],
        reads: Sequence[str],
        writes: Sequence[str],
        src: Sequence[Region],
        dst: Sequence[Region],
        **more: Any,
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


LR, FACTOR = 0.05, 0.125
MLP = {"batch": 16, "k": 6, "n": 10, "m": 5}


def pipeline(num_microbatches: int = 4, dp: int = 2, optimizer: str = "adamw", fail: str = "") -> Program:
    """A two-layer perceptron in two stages, each on `dp` ranks, 1F1B, gradients summed over the microbatches and then over the ranks.

    loss = FACTOR * sum(gelu(x @ w0) @ w1) over the batch. On the second stage `y` and `dy` share an arena.
    `fail`: the register that gets a wrong shape.
    """
    w = Writer(num_microbatches)
    rows = MLP["batch"] // num_microbatches // dp
    order: dict[tuple[int, str], list[tuple[str, int]]] = {}
    for i in range(dp):
        _first_stage(w, i, i, dp, rows)
        _second_stage(w, i, dp + i, dp, rows, fail)
        w.p2p(f"forward{i}", i, dp + i, f"a{i}", f"in{i}")
        w.p2p(f"back{i}", dp + i, i, f"da{i}", f"back{i}")
        order[i, "compute"] = _one_f_one_b(num_microbatches, 2, [f"lin0.{i}", f"gelu.{i}"], [f"gelu.dx.{i}", f"dw0.{i}"])
        order[i, "compute"] += [(f"zero.w0.{i}", 0), (f"step.w0.{i}", 0)]
    for name, base in (("w0", 0), ("w1", dp)):
        shape = (MLP["k"], MLP["n"]) if name == "w0" else (MLP["n"], MLP["m"])
        region = tuple((0, n) for n in shape)
        grads, sums = [f"d{name}.{i}" for i in range(dp)], [f"g.{name}.{i}" for i in range(dp)]
        w.collective(f"sum.{name}", "all_reduce", range(base, base + dp), grads, sums, [region] * dp, [region] * dp, clock="step")
        for i in range(dp):
            _update(w, name, i, base + i, optimizer)
    w.collective(
        "sum.loss", "all_reduce", range(dp, 2 * dp), [f"loss.{i}" for i in range(dp)], [f"total.{i}" for i in range(dp)], [()] * dp, [()] * dp, clock="step"
    )
    for i in range(dp):
        w.actor(f"report.{i}", dp + i, "store", Work("store", "loss", "float64"), "step", reads=(f"total.{i}",))
    return w.program(order, batch=MLP["batch"])


def _one_f_one_b(num: int, ahead: int, forward: Sequence[str], backward: Sequence[str]) -> list[tuple[str, int]]:
    ahead = min(ahead, num)
    out = [(name, m) for m in range(ahead) for name in forward]
    for m in range(num):
        out += [(name, m) for name in backward]
        if m + ahead < num:
            out += [(name, m + ahead) for name in forward]
    return out


def _parameter(w: Writer, name: str, i: int, rank: int, shape: Sequence[int]) -> None:
    region = tuple((0, n) for n in shape)
    more = {"clock": "step", "initial": 1, "region": region, "replica": i > 0}
    w.register(f"{name}.{i}", rank, shape, memory="parameter", tensor=name, init={"init": "normal", "std": 0.3}, **more)
    for moment in ("m", "v"):
        w.register(f"{moment}.{name}.{i}", rank, shape, memory="optimizer", tensor=f"{name}@{moment}", init={"init": "zeros"}, **more)
    w.register(f"d{name}.{i}", rank, shape, clock="step", tensor=f"d.{name}@acc", region=region)
    w.register(f"g.{name}.{i}", rank, shape, clock="step", memory="gradient", tensor=f"d.{name}", region=region)
    w.register(f"norm.{name}.{i}", rank, (), clock="step")


def _update(w: Writer, name: str, i: int, rank: int, optimizer: str) -> None:
    w.compute(f"zero.{name}.{i}", rank, "fill", (), [f"norm.{name}.{i}"], clock="step", attrs={"value": 0.0})
    updates = [f"{name}.{i}", f"m.{name}.{i}", *([f"v.{name}.{i}"] if optimizer == "adamw" else [])]
    attrs = {"lr": LR, "momentum": 0.9, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    w.compute(f"step.{name}.{i}", rank, optimizer, [f"g.{name}.{i}", f"norm.{name}.{i}"], (), updates=tuple(updates), clock="step", attrs=attrs)


def _first_stage(w: Writer, i: int, rank: int, dp: int, rows: int) -> None:
    k, n = MLP["k"], MLP["n"]
    for name, shape, credits in (("x", (rows, k), 3), ("h", (rows, n), 2), ("a", (rows, n), 2), ("back", (rows, n), 1), ("dh", (rows, n), 1)):
        w.register(f"{name}{i}", rank, shape, credits=credits)
    _parameter(w, "w0", i, rank, (k, n))
    w.load(f"load{i}", rank, "x", ((i * rows, (i + 1) * rows), (0, k)), f"x{i}", rows * dp)
    sizes = {"b": rows, "k": k, "n": n}
    w.compute(f"lin0.{i}", rank, "linear", [f"x{i}", f"w0.{i}"], [f"h{i}"], sizes=sizes)
    w.compute(f"gelu.{i}", rank, "gelu", [f"h{i}"], [f"a{i}"], sizes={"b": rows, "s": n})
    w.compute(f"gelu.dx.{i}", rank, "gelu.dx", [f"back{i}", f"h{i}"], [f"dh{i}"], sizes={"b": rows, "s": n})
    w.compute(f"dw0.{i}", rank, "linear.dw", [f"x{i}", f"dh{i}"], [f"dw0.{i}"], sizes=sizes)


def _second_stage(w: Writer, i: int, rank: int, dp: int, rows: int, fail: str) -> None:
    n, m = MLP["n"], MLP["m"]
    for name, shape in (("in", (rows, n)), ("da", (rows, n)), ("one", ())):
        w.register(f"{name}{i}", rank, shape)
    w.register(f"y{i}", rank, (rows, m), arena="tmp", offset=64)
    w.register(f"dy{i}", rank, (rows, m + (fail == f"dy{i}")), arena="tmp", offset=64)
    _parameter(w, "w1", i, rank, (n, m))
    w.register(f"loss.{i}", rank, (), clock="step")
    w.register(f"total.{i}", rank, (), clock="step")
    sizes = {"b": rows, "k": n, "n": m}
    w.compute(f"lin1.{i}", rank, "linear", [f"in{i}", f"w1.{i}"], [f"y{i}"], sizes=sizes)
    w.compute(f"loss.{i}!", rank, "total", [f"y{i}"], [f"loss.{i}"], sizes={"b": rows, "s": m}, attrs={"factor": FACTOR})
    w.compute(f"one.{i}", rank, "fill", (), [f"one{i}"], attrs={"value": 1.0})
    w.compute(f"total.dx.{i}", rank, "total.dx", [f"one{i}"], [f"dy{i}"], sizes={"b": rows, "s": m}, attrs={"factor": FACTOR, "b": rows, "s": m})
    w.compute(f"da.{i}", rank, "linear.dx", [f"dy{i}", f"w1.{i}"], [f"da{i}"], sizes=sizes)
    w.compute(f"dw1.{i}", rank, "linear.dw", [f"in{i}", f"dy{i}"], [f"dw1.{i}"], sizes=sizes)

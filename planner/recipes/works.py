"""The works of a layer, of the embedding and of the head, under a run's layout: products with their shapes, bytes, collectives, in closed form.

What `lower` writes for the same model under Megatron's placements (a law compares the two), with what the release fuses. One table, a row a kernel; from it
follow the three passes of a microbatch: F forward, I gradients of inputs (with recomputation), W gradients of weights.

>>> from planner.recipes.release import release_of
>>> from planner.recipes.run import Run, Shape
>>> shape = Shape("gpt", layers=24, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=51200)
>>> run = Run("mine", "", "", shape, seq=1024, gpu="A100", num_gpus=2, tp=2, mbs=4, gbs=4)
>>> for work in layer(run, release_of("Megatron-LM 2021")).f[:3]:
...     print(work.share, work.op, work.gemm)
memory norm ()
compute qkv (1, 4096, 1536, 1024)
attention attention.scores ()
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ir.units import DTYPE_BYTES
from planner.recipes.release import Release
from planner.recipes.run import Run

ALIGNED = 8
"""Tensor cores take fp16 rows of multiples of eight elements."""


class Kernel(NamedTuple):
    """One kernel or collective of a microbatch on a rank. `share`: which of a fit's shares multiplies its seconds: compute, low, grouped, attention,
    misaligned, memory, or the axis of a collective (tp, cp, ep, fsdp). `flops`, `nbytes`, `gemm` as in `ir.work.Work`; `op` a collective's kind where `share`
    is an axis. `times`: what a release's kernel takes over the best of the device.
    """

    share: str
    op: str
    dtype: str
    flops: float = 0.0
    nbytes: float = 0.0
    gemm: tuple[int, ...] = ()
    times: float = 1.0


Kernels = tuple[Kernel, ...]
AXES = ("tp", "cp", "ep", "fsdp")


class Works(NamedTuple):
    """The kernels of one microbatch, by pass; `plain_softmax`: the release's fused softmax does not take this shape."""

    f: Kernels
    i: Kernels
    w: Kernels
    plain_softmax: bool = False


def layer(run: Run, release: Release, experts: bool = False) -> Works:
    """The works of one transformer layer; `experts`: of one with experts."""
    table = _Table(run, release)
    table.norm()
    table.attention()
    table.norm()
    if experts:
        table.experts()
    else:
        table.mlp(run.shape.ffn)
    return table.works(recompute=run.recompute)


def embedding(run: Run, release: Release) -> Works:
    """The works of the embedding of tokens and positions; split over the vocabulary its partial sums are reduced."""
    table = _Table(run, release)
    table.moved("embedding", table.tokens * run.shape.hidden)
    table.leave_split()
    return table.works()


def head(run: Run, release: Release) -> Works:
    """The works of the last norm, the logits and the loss; split over the vocabulary, two reductions of a number a token."""
    table = _Table(run, release)
    table.norm()
    table.enter_split()
    words = -(-run.shape.vocab // run.tp)
    table.linear("logits", run.shape.hidden, words, low=False)
    table.moved("logits", table.tokens * words)
    for _ in range(2):
        table.collective("tp", "all_reduce", table.tokens * 4.0, backward="")
    return table.works()


class _Table:
    """Writes the rows of one part; every row adds its kernels to the passes."""

    def __init__(self, run: Run, release: Release) -> None:
        self.run, self.release, self.shape = run, release, run.shape
        self.width = DTYPE_BYTES[run.dtype]
        self.tokens = run.mbs * run.seq // run.cp
        self.outside = self.tokens / (run.tp if run.sp else 1)
        self._f: list[Kernel] = []
        self._i: list[Kernel] = []
        self._w: list[Kernel] = []
        self._core: list[Kernel] = []
        self._plain = False

    def works(self, recompute: str = "none") -> Works:
        again = {"full": self._f, "selective": self._core}.get(recompute, [])
        return Works(tuple(self._f), (*again, *self._i), tuple(self._w), self._plain)

    # ---- rows ------------------------------------------------------------------------------------------------------------------------------------------

    def norm(self) -> None:
        self.moved("norm", self.outside * self.shape.hidden)

    def attention(self) -> None:
        s, tp = self.shape, self.run.tp
        heads, groups, d = s.heads / tp, max(s.kv_heads / tp, 1.0), s.head_dim
        self.enter_split()
        if s.kv_rank:
            self.linear("q_down", s.hidden, s.q_rank)
            self.linear("q_up", s.q_rank, heads * (d + s.rope_dim))
            self.linear("kv_down", s.hidden, s.kv_rank + s.rope_dim)
            self.linear("kv_up", s.kv_rank, heads * 2 * d)
            self.moved("norm", self.tokens * (s.q_rank + s.kv_rank))
        else:
            self.linear("qkv", s.hidden, (heads + 2 * groups) * d)
        if not s.is_gpt:
            self.moved("rope", self.tokens * (heads + groups) * (s.rope_dim or d))
        self._ring(groups * d)
        if self.release.attention == "unfused":
            self._unfused(heads)
        else:
            self._flash(heads)
        self.linear("out", heads * d, s.hidden)
        self.leave_split()
        self.moved("residual", self.outside * s.hidden)

    def mlp(self, ffn: float) -> None:
        s, tp = self.shape, self.run.tp
        self.enter_split()
        self.linear("up", s.hidden, ffn / tp * (2 if s.gated else 1))
        self.moved("gated" if s.gated else "activation", self.tokens * ffn / tp)
        self.linear("down", ffn / tp, s.hidden)
        self.leave_split()
        self.moved("residual", self.outside * s.hidden)

    def experts(self) -> None:
        """Router, dispatch to the ranks that hold the chosen experts, their MLPs as grouped products, the way back; the load is taken as balanced."""
        s, run = self.shape, self.run
        tokens = self.tokens / run.tp  # experts are not split over tp: each of its ranks sends its part of the tokens
        taken = tokens * s.topk
        self.linear("router", s.hidden, s.experts, tokens, low=False)
        self.moved("dispatch", taken * s.hidden)
        self.collective("ep", "all_to_all", taken * s.hidden * self.width)
        held = max(1, s.experts // run.ep)
        self._grouped("expert_up", held, taken / held, s.hidden, s.moe_ffn * (2 if s.gated else 1))
        self.moved("gated" if s.gated else "activation", taken * s.moe_ffn)
        self._grouped("expert_down", held, taken / held, s.moe_ffn, s.hidden)
        self.collective("ep", "all_to_all", taken * s.hidden * self.width)
        self.moved("dispatch", taken * s.hidden)
        if s.shared_experts:
            self.linear("shared_up", s.hidden, s.shared_experts * s.moe_ffn * (2 if s.gated else 1), tokens)
            self.linear("shared_down", s.shared_experts * s.moe_ffn, s.hidden, tokens)
        self.moved("residual", self.outside * s.hidden)

    # ---- kernels ---------------------------------------------------------------------------------------------------------------------------------------

    def linear(self, op: str, k: float, n: float, m: float | None = None, low: bool = True) -> None:
        """tokens x k times k x n; `low`: in the run's lowest precision."""
        self._grouped(op, 1, self.tokens if m is None else m, k, n, low)

    def _grouped(self, op: str, batch: int, m: float, k: float, n: float, low: bool = True) -> None:
        low = low and self.run.precision in LOW
        share, dtype = ("low", self.release.low_as or self.run.precision) if low else ("compute", self.run.dtype)
        times = 1.0
        if op.startswith("expert"):
            share, times = "grouped", self.release.grouped_low_cost if low else self.release.grouped_cost
        if low:
            forward, backward = self.release.moved["quantize"]
            self._f.append(Kernel("memory", "quantize", self.run.dtype, 0.0, forward * batch * m * k))
            self._i.append(Kernel("memory", "quantize", self.run.dtype, 0.0, backward * batch * m * n))
        for kernels, shape in ((self._f, (m, n, k)), (self._i, (m, k, n)), (self._w, (k, n, m))):
            kernels.append(self._product(share, op, dtype, (batch, *shape))._replace(times=times))
        self._w.append(Kernel("memory", "accumulate", self.run.dtype, 0.0, self.release.accumulate_bytes * batch * k * n))

    def moved(self, op: str, elements: float, core: bool = False) -> None:
        """A memory-bound operator with so many elements of output."""
        forward, backward = self.release.moved[op]
        kernel = Kernel("memory", op, self.run.dtype, 0.0, forward * elements)
        self._f.append(kernel)
        self._i.append(kernel._replace(nbytes=backward * elements))
        if core:
            self._core.append(kernel)

    def collective(self, axis: str, kind: str, nbytes: float, backward: str | None = None) -> None:
        """A collective among the ranks of an axis, and that of its backward: the same kind where `backward` is not given, none where it is empty."""
        if getattr(self.run, axis) > 1:
            self._f.append(Kernel(axis, kind, self.run.dtype, 0.0, nbytes))
            if backward != "":
                self._i.append(Kernel(axis, backward or kind, self.run.dtype, 0.0, nbytes))

    def enter_split(self) -> None:
        """Into the products that are split over tp: nothing forward and a sum backward; with sequence parallelism all tokens are gathered first, and again for
        W."""
        if self.run.sp:
            nbytes = self.tokens * self.shape.hidden * self.width
            self.collective("tp", "all_gather", nbytes, backward="reduce_scatter")
            if self.run.tp > 1:
                self._w.append(Kernel("tp", "all_gather", self.run.dtype, 0.0, nbytes))
        elif self.run.tp > 1:
            self._i.append(Kernel("tp", "all_reduce", self.run.dtype, 0.0, self.tokens * self.shape.hidden * self.width))

    def leave_split(self) -> None:
        """Out of them: a sum forward, nothing backward; with sequence parallelism each rank keeps its tokens."""
        nbytes = self.tokens * self.shape.hidden * self.width
        if self.run.sp:
            self.collective("tp", "reduce_scatter", nbytes, backward="all_gather")
        else:
            self.collective("tp", "all_reduce", nbytes, backward="")

    def _ring(self, width: float) -> None:
        """Context parallelism: keys and values go round, and their gradients too."""
        self.collective("cp", "all_gather", 2 * self.run.cp * self.tokens * width * self.width)

    def _unfused(self, heads: float) -> None:
        """Scores, softmax with its dropout, and the sum over values; scores are written to memory."""
        run, d = self.run, self.shape.head_dim
        batch, rows = int(heads * run.mbs), run.seq // run.cp
        self._plain = not self.release.fuses_softmax(batch, run.seq)
        self._batched("scores", (batch, rows, run.seq, d))
        self.moved("softmax_plain" if self._plain else "softmax", batch * rows * run.seq, core=True)
        self._batched("values", (batch, rows, d, run.seq))

    def _batched(self, op: str, shape: tuple[int, int, int, int]) -> None:
        """A product of activations: two products backward, both gradients of inputs."""
        batch, m, n, k = shape
        forward = self._product("attention", op, self.run.dtype, shape)
        self._f.append(forward)
        self._core.append(forward)
        self._i += [self._product("attention", op, self.run.dtype, s) for s in ((batch, m, k, n), (batch, k, n, m))]

    def _flash(self, heads: float) -> None:
        run, s = self.run, self.shape
        pairs = heads * run.mbs * (run.seq / run.cp) * run.seq * self.release.causal
        flops = 2.0 * pairs * (2 * s.head_dim + s.rope_dim)
        nbytes = 4.0 * self.tokens * heads * s.head_dim * self.width
        kernel = Kernel("attention", "attention", run.dtype, flops, nbytes, times=self.release.flash_cost)
        self._f.append(kernel)
        self._core.append(kernel)
        self._i.append(kernel._replace(flops=flops * self.release.flash_backward, nbytes=2 * nbytes))

    def _product(self, share: str, op: str, dtype: str, shape: tuple[float, ...]) -> Kernel:
        batch, m, n, k = (max(1, round(x)) for x in shape)
        if share == "attention":  # short in one dim: bytes bind, or a share of peak, not the tiles of large products
            share = "misaligned" if self.shape.head_dim % ALIGNED else share
            return Kernel(share, f"attention.{op}", dtype, 2.0 * batch * m * n * k, float(batch * (m * k + k * n + m * n)) * self.width)
        nbytes = float(batch * (m * k + k * n + m * n)) * self.width
        return Kernel(share, op, dtype, 2.0 * batch * m * n * k, nbytes, (batch, m, n, k))


LOW = ("fp8", "nvfp4")
"""Precisions in which only the products of weights are computed."""


def flops(kernels: Iterable[Kernel]) -> float:
    """All flops of some kernels.

    >>> flops([Kernel("compute", "a", "bfloat16", 2.0), Kernel("memory", "b", "bfloat16")])
    2.0
    """
    return sum(k.flops for k in kernels)

"""What a layer keeps from its forward to its backward, tensor by tensor, in bytes on one rank for one microbatch.

For a GPT without fused attention the sum is s b h (34 + 5 a s / h), of which 10 s b h is not split over tensor parallelism without sequence parallelism
(Korthikanti et al., 2022, arXiv:2205.05198, section 4).

>>> from planner.recipes.run import Run, Shape
>>> shape = Shape("gpt", layers=1, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=51200)
>>> run = Run("one", "", "", shape, seq=2048, gpu="A100", num_gpus=1, mbs=1, gbs=1)
>>> saved(Saved.of(run, "unfused"), "none") == 2048 * 1024 * (34 + 5 * 16 * 2048 / 1024)
True
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.units import DTYPE_BYTES
from planner.recipes.run import Run

LSE_BYTES = 4.0
"""What fused attention keeps of the scores: a float32 for each query and head."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Tensors of one layer: (name, bytes, part). Parts: `input`, the layer's; `child`, that of one of its parts; `core`, between the products of attention;
    `product`, results of products that recomputation by operator keeps, and `only-selective` those that nothing else keeps.
    """

    tensors: tuple[tuple[str, float, str], ...]

    @classmethod
    def of(cls, run: Run, attention: str, keeps: str = "tensors", experts: bool = False) -> Saved:
        """The table of a layer without or with experts. `attention`: `unfused` or `flash`. `keeps`: `tensors` as fused kernels do, `eager` with what unfused
        norms, gates and rotary positions keep as well.
        """
        return _Table(run, attention, keeps == "eager").saved(experts)


def saved(table: Saved, recompute: str) -> float:
    """Bytes that a layer keeps under recomputation: `none`; `selective`, all but the core of attention; `by-operator`, its input and every other product's
    result (the policy of torchtitan); `children`, the inputs of norms, attention and MLP, as where these are wrapped instead of the layer; `full`, its input.
    """
    kept = {
        "none": ("", "input", "child", "core", "product"), "selective": ("", "input", "child", "product"),
        "by-operator": ("input", "product", "only-selective"), "children": ("input", "child"), "full": ("input",),
    }  # fmt: skip
    return sum(nbytes for _, nbytes, part in table.tensors if part in kept[recompute])


class _Table:
    def __init__(self, run: Run, attention: str, eager: bool) -> None:
        self.run, self.shape, self.attention, self.eager = run, run.shape, attention, eager
        self.width = DTYPE_BYTES[run.dtype]
        self.tokens = run.mbs * run.seq / run.cp
        self._tokens_outside = self.tokens / (run.tp if run.sp else 1)
        self.rows: list[tuple[str, float, str]] = []
        self._products = 0

    def saved(self, experts: bool) -> Saved:
        self._norm("input", first=True)
        self._attention()
        self._norm("between")
        if experts:
            self._experts()
        else:
            self._mlp(self.shape.ffn)
        return Saved(tuple(self.rows))

    def _keep(self, name: str, elements: float, width: float | None = None, part: str = "") -> None:
        self.rows.append((name, elements * (self.width if width is None else width), part))

    def _result(self, name: str, elements: float, read: bool = True) -> None:
        """What a product gives; `read`: the backward of what follows reads it. Recomputation by operator keeps every other product's."""
        self._products += 1
        kept = self._products % 2 == 1
        if read:
            self._keep(name, elements, part="product" if kept else "")
        elif kept and self.eager:
            self._keep(name, elements, part="only-selective")

    def _outside(self, name: str, width: float | None = None, part: str = "") -> None:
        """A tensor between the split parts: whole on every rank of tp, or split over the sequence."""
        self._keep(name, self._tokens_outside * self.shape.hidden, width, part)

    def _norm(self, name: str, first: bool = False) -> None:
        self._outside(f"{name} of norm", part="input" if first else "child")
        if self.eager:
            self._outside(f"{name} of norm in float32", 4.0)

    def _attention(self) -> None:
        s, run = self.shape, self.run
        heads, groups, d = s.heads / run.tp, max(s.kv_heads / run.tp, 1.0), s.head_dim
        self._outside("input of qkv", part="child")
        if s.kv_rank:
            if s.q_rank:
                self._result("latents of queries", self.tokens * s.q_rank)
            self._result("queries", self.tokens * heads * (d + s.rope_dim))
            self._result("latents of keys", self.tokens * s.kv_rank)
            self._result("keys and values", self.tokens * heads * 2 * d)
            self._keep("normed latents", self.tokens * (s.q_rank + s.kv_rank))
            self._keep("positions of keys", self.tokens * heads * s.rope_dim)
        else:
            self._result("queries", self.tokens * heads * d)
            self._result("keys", self.tokens * groups * d)
            self._result("values", self.tokens * groups * d)
        pairs = heads * run.mbs * (run.seq / run.cp) * run.seq
        if self.attention == "unfused":
            self._keep("softmax", pairs, part="core")
            self._keep("dropped softmax", pairs, part="core")
            self._keep("mask of softmax", pairs, 1.0, part="core")
        else:
            self._keep("log-sum-exp", self.tokens * heads, LSE_BYTES, part="product")
        self._keep("input of projection", self.tokens * heads * d, part="product")
        self._result("output of projection", self._tokens_outside * s.hidden, read=False)
        self._mask()

    def _mask(self) -> None:
        if self.shape.is_gpt:
            self._outside("mask", 1.0)

    def _mlp(self, ffn: float) -> None:
        width = ffn / self.run.tp
        self._outside("input of mlp", part="child")
        self._result("input of activation", self.tokens * width)
        if self.shape.gated:
            self._result("gated value", self.tokens * width)
        if self.eager and self.shape.gated:
            self._keep("activated gate", self.tokens * width)
        self._keep("output of activation", self.tokens * width)
        self._result("output of mlp", self._tokens_outside * self.shape.hidden, read=False)
        self._mask()

    def _experts(self) -> None:
        """Tokens as they were sent to their experts, the MLPs on them, their results; the shared experts as an MLP."""
        s, run = self.shape, self.run
        taken = self.tokens / run.tp * s.topk
        self._keep("scores of router", self.tokens / run.tp * s.experts, 4.0)
        self._keep("tokens of experts", taken * s.hidden)
        self._keep("input of activation, experts", taken * s.moe_ffn * (2 if s.gated else 1))
        self._keep("output of activation, experts", taken * s.moe_ffn)
        self._keep("results of experts", taken * s.hidden)
        if s.shared_experts:
            self._mlp(s.shared_experts * s.moe_ffn)

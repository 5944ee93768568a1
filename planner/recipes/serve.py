"""Serving one sequence on several devices: seconds of its prompt and of one more token, the layers dealt out to the devices or every layer split over all.

Where every layer is split (tensor parallelism) what its devices computed is joined twice a layer, however small the model is. Where layers are dealt out only a
hidden state crosses, but one token keeps one device busy at a time; the chunks of a long prompt follow each other through the devices.

>>> from planner.recipes.run import Shape
>>> from simulator.clusters import load_cluster
>>> one_b, cost = Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256, gated=True), CostModel(load_cluster("4xRTX-4090"))
>>> split, dealt = Server(one_b, cost, tp=4), Server(one_b, cost)
>>> split.token_s(512) < dealt.token_s(512), split.prompt_s(512) < dealt.prompt_s(512)
(True, False)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ir.errors import InputError
from ir.units import DTYPE_BYTES
from planner.recipes import works
from planner.recipes.kv import KvCache
from planner.recipes.release import Release, releases
from planner.recipes.run import Run, Shape
from planner.recipes.works import Kernel
from simulator.cost import CostModel

DTYPE = "float16"
"""Of activations and of the cache of keys and values."""


@dataclass(frozen=True, slots=True)
class Server:
    """One sequence of a model on all devices of a cost model's cluster: `tp` of them hold each layer together, these groups hold equal runs of layers.

    A prompt is taken `chunk` tokens at a time. `weight`: bytes of a weight; `carried`: bytes of an element of the stream between devices. `sums`: what products
    are computed in, `float16_sum16` where their sums are kept in float16, too. `gathers`: all products are split by their outputs, so that the inputs of the
    second of two are gathered as well; otherwise it is split by its inputs and its outputs are summed.
    """

    shape: Shape
    cost: CostModel
    tp: int = 1
    chunk: int = 512
    weight: float = 2.0
    carried: float = 4.0
    sums: str = DTYPE
    gathers: bool = False

    @property
    def num_stages(self) -> int:
        """InputError where the devices are not whole groups, or are more than layers."""
        num_devices = self.cost.cluster.num_devices
        if num_devices % self.tp or num_devices // self.tp > self.shape.layers:
            raise InputError(f"{num_devices} devices and {self.shape.layers} layers: groups of {self.tp} devices do not share them out")
        return num_devices // self.tp

    def prompt_s(self, tokens: int) -> float:
        """Until the first token is there: chunks one after the other, each as soon as its device and its input are free."""
        free = [0.0] * self.num_stages
        for past in range(0, tokens, self.chunk):
            arrived = 0.0
            for stage, seconds in enumerate(self._stages(min(self.chunk, tokens - past), past)):
                free[stage] = arrived = max(arrived, free[stage]) + seconds
        return free[-1] + self._head_s()

    def token_s(self, past: int) -> float:
        """One more token after `past`: while one group of devices works the others wait."""
        return sum(self._stages(1, past)) + self._head_s()

    def _stages(self, tokens: int, past: int) -> list[float]:
        """Seconds of so many tokens on each group of devices, the way to the next group included."""
        run, stages = self._run(tokens), self.num_stages
        layer_s = self._seconds((*works.layer(run, _kernels()).f, self._cached(run, past))) + (self._joins_s(tokens) if self.tp > 1 else 0.0)
        hop_s = self.cost.p2p_s(tokens * self.shape.hidden * self.carried, 0, self.tp) if stages > 1 else 0.0
        whole, more = divmod(self.shape.layers, stages)
        return [(whole + (s < more)) * layer_s + hop_s * (s < stages - 1) for s in range(stages)]

    def _run(self, tokens: int) -> Run:
        return Run("served", "", "", self.shape, seq=tokens, gpu="", num_gpus=self.tp, tp=self.tp, precision="fp16")

    def _joins_s(self, tokens: int) -> float:
        """What crosses the links of one layer: two sums, or the outputs of attention, of its projection, and of both products of the MLP."""
        s, group = self.shape, tuple(range(self.tp))
        if not self.gathers:
            return 2 * self.cost.collective_s("all_reduce", tokens * s.hidden * self.carried, group)
        return sum(self.cost.collective_s("all_gather", tokens * n * self.carried, group) for n in (s.heads * s.head_dim, s.hidden, s.ffn, s.hidden))

    def _cached(self, run: Run, past: int) -> Kernel:
        """Attention of a chunk to the tokens before it: its products, and the cache read once."""
        s = self.shape
        cache = KvCache(s.kv_heads, s.head_dim, DTYPE_BYTES[DTYPE], self.tp)
        return Kernel("attention", "attention", DTYPE, 4.0 * run.seq * past * s.heads / self.tp * s.head_dim, past * cache.layer_bytes())

    def _head_s(self) -> float:
        """The logits of the last token."""
        return self._seconds(works.head(self._run(1), _kernels()).f)

    def _seconds(self, kernels: Iterable[Kernel]) -> float:
        """Of kernels without the collectives among them, weights in the bytes that they are kept in."""
        total = 0.0
        for k in kernels:
            if k.share not in works.AXES:
                batch, _, n, inner = k.gemm or (0, 0, 0, 0)
                nbytes = k.nbytes + (self.weight - DTYPE_BYTES[DTYPE]) * batch * n * inner
                total += k.times * self.cost.compute_s(k.op, self.sums if k.gemm else k.dtype, k.flops, nbytes, k.gemm)
        return total


def _kernels() -> Release:
    """The release whose forward kernels stand for those of a server: norms, gates and rotary positions fused, flash attention."""
    return next(r for r in releases() if r.name == "megatron-core")

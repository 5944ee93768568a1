"""One training run as its framework describes it: the model's shape, the layout, the machine, and what was measured of it.

>>> shape = Shape("gpt", layers=24, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=50257)
>>> run = Run("mine", "mine", "gpt2-medium", shape, seq=1024, gpu="A100-SXM-80GB", num_gpus=16, tp=2, pp=4, dp=2, mbs=4, gbs=64)
>>> run.num_microbatches, run.num_nodes, f"{shape.num_params / 1e6:.0f} M"
(8, 2, '354 M')
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ir.errors import InputError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder-only transformer, in elements.

    `arch`: `gpt` (layer norm with bias, learned positions, GELU), `llama` (RMS norm, rotary positions, gated where `gated`), `moe` (llama with experts),
    `moe-mla` (experts and multi-head latent attention of ranks `q_rank`, `kv_rank`). `ffn` is the width of a dense MLP, `moe_ffn` that of one of `experts`
    experts, `topk` of which take each token; `shared_experts` take all tokens; the first `dense_layers` layers of a model with experts have none.
    `tied`: the head reads the embedding.
    """

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = True
    experts: int = 0
    topk: int = 0
    moe_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0

    @property
    def is_gpt(self) -> bool:
        return self.arch == "gpt"

    @property
    def attention_params(self) -> int:
        """Elements of one layer's attention projections, without biases."""
        if self.kv_rank:
            queries, inner = self.heads * (self.head_dim + self.rope_dim), 2 * self.heads * self.head_dim
            down = self.hidden * (self.q_rank + self.kv_rank + self.rope_dim)
            return down + self.q_rank * queries + self.kv_rank * inner + self.heads * self.head_dim * self.hidden
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def mlp_params(self, width: int) -> int:
        """Elements of an MLP of `width`, without biases."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def dense_layer_params(self) -> int:
        """Elements of a layer without experts, with biases and norms."""
        return self.attention_params + self.mlp_params(self.ffn) + self._small_params

    @property
    def expert_layer_params(self) -> int:
        """Elements of a layer with experts: attention, shared experts, router and norms, and all `experts` experts."""
        return self.attention_params + self._small_params + self.hidden * self.experts + self.mlp_params(self.moe_ffn) * (self.experts + self.shared_experts)

    @property
    def _small_params(self) -> int:
        if not self.is_gpt:
            return 2 * self.hidden
        return 4 * self.hidden + self.head_dim * (self.heads + 2 * self.kv_heads) + self.hidden + self.ffn + self.hidden

    @property
    def num_expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def num_params(self) -> int:
        """Elements of all parameters but learned positions; a tied table counts once."""
        dense = (self.layers - self.num_expert_layers) * self.dense_layer_params
        return dense + self.num_expert_layers * (self.expert_layer_params if self.experts else 0) + self.vocab * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True, slots=True)
class Run:
    """A run and, where it was measured, its seconds a step and its peak memory.

    `mbs` sequences of `seq` tokens are one microbatch of a data-parallel rank, `gbs` the global batch. `schedule`: `none` | `1f1b` | `interleaved` | `zb-1p`
    | `zb-2p` | `zb-v` | a name of `planner.schedules`; `vpp` virtual stages a rank. `recompute`: `none` | `selective` | `full`. `zero`: 0 to 3. `sp`:
    sequence parallelism. `short_ends`: the first and the last virtual stage hold one layer fewer than the others. `precision`: `fp16` | `bf16` | `fp32` |
    `fp8` | `nvfp4`. `gpu` is named as in `simulator/profiles/gpus.json`, `nic` as after the @ of a cluster ("ib200x4"; "" on one node or where it is not
    known), `release` the software and its version, `machine` whose cluster. `options`: what else the table says of the run ("compile", "async-tp"). `flag`:
    why the row is odd. `assumed`: a sentence for each thing that the table does not say. `memory_gib` is the peak as published, `memory_kind` what was
    measured there.
    """

    id: str
    family: str
    model: str
    shape: Shape
    seq: int
    gpu: str
    num_gpus: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    mbs: int = 1
    gbs: int = 1
    schedule: str = "none"
    recompute: str = "none"
    zero: int = 0
    sp: bool = False
    short_ends: bool = False
    precision: str = "bf16"
    gpus_per_node: int = 8
    nic: str = ""
    release: str = ""
    machine: str = ""
    measured_s: float | None = None
    memory_gib: float | None = None
    memory_kind: str = ""
    options: tuple[str, ...] = ()
    flag: str = ""
    source: str = ""
    assumed: tuple[str, ...] = field(default=())

    @property
    def num_microbatches(self) -> int:
        return self.gbs // (self.dp * self.mbs)

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    @property
    def dtype(self) -> str:
        """In which activations and weights travel: 16 bits, but where the products are float32."""
        return {"fp16": "float16", "fp32": "float32"}.get(self.precision, "bfloat16")

    def check(self) -> Run:
        """Returns the run, or raises InputError with what contradicts itself."""
        ranks = self.dp * self.tp * self.pp * self.cp
        if ranks != self.num_gpus:
            raise InputError(f"run `{self.id}`: dp {self.dp} x tp {self.tp} x pp {self.pp} x cp {self.cp} = {ranks}, but {self.num_gpus} GPUs are given")
        if self.num_stages > self.shape.layers + 2:  # the embedding and the head may be stages of their own
            raise InputError(f"run `{self.id}`: pp {self.pp} x vpp {self.vpp} = {self.num_stages} stages, but {self.shape.layers} layers")
        if self.gbs % (self.dp * self.mbs):
            raise InputError(f"run `{self.id}`: a batch of {self.gbs} is not whole microbatches of {self.mbs} on {self.dp} data-parallel ranks")
        if self.dp * self.cp * self.tp % self.ep:
            raise InputError(f"run `{self.id}`: ep {self.ep} does not divide dp {self.dp} x cp {self.cp} x tp {self.tp}")
        return self

"""What one actor does, in flops and bytes and never in seconds; enough for a simulator to price it and for an executor to do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("compute", "collective", "send", "recv", "load", "store")


@dataclass(frozen=True, slots=True)
class Work:
    """One firing of an actor.

    * `compute`: run the kernel of catalogue operator `op` on the actor's reads and writes. `flops` floating point operations, `nbytes` bytes of memory traffic,
      `gemm` = (batch, m, n, k) where it is a contraction. `sizes`, `total`, `at` are those of `ir.op.Context` (`at["b"]` grows by `batch_stride` a microbatch).
      Local re-sharding is compute too: `box.slice`, `box.zero`, `box.pad` of `ir/ops/boxing.py`.
    * `collective`: `op` is all_gather, reduce_scatter, all_reduce, all_to_all or shift (each to the next, the last to the first) among `group`, in that order;
      `nbytes` is the larger of what a rank reads and writes; `attrs` has `reduce` ("sum" | "max" | "" where nothing is reduced),
      `src` and `dst` (placements on the axis, for people).
    * `send` / `recv`: p2p between the two ranks of `group` = (source, destination), `nbytes` on the wire.
    * `load`: `op` names the input tensor; writes this rank's region of this microbatch.
    * `store`: hands the value of its read to whoever runs the program, under the name `op` (the loss).

    `attrs["src_region"]`, `attrs["dst_region"]`: ((start, stop), ...) in the whole tensor of what this rank reads and writes, for collective and load.
    """

    kind: str
    op: str
    dtype: str
    flops: float = 0.0
    nbytes: float = 0.0
    gemm: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    total: Mapping[str, int] = field(default_factory=dict)
    at: Mapping[str, int] = field(default_factory=dict)
    batch_stride: int = 0

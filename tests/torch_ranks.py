"""PyTorch's own pipeline runtime under a schedule that it reads from a file: one process a rank, gloo between them.

Started as `python -m tests.torch_ranks RANK FOLDER`: trains under every schedule that the folder's `forms.json` names, all over one process group, and writes
what the rank saw into `rank<RANK>.npz`, and each schedule as the runtime knows it into `NAME.rank<RANK>`. `alone` is the same training in one process.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUM_RANKS, NUM_MICROBATCHES, NUM_STEPS = 2, 4, 3
NUM_BLOCKS, HIDDEN, VOCAB, BATCH, SEQ = 8, 12, 19, 8, 5

Seen = dict[str, np.ndarray]
"""`loss.<step>` and `<step>.<parameter>`: losses and gradients."""


def model() -> Any:
    """Embedding, blocks with norm, residual and two matrices, head: the parts of a language model that a pipeline sees; always the same weights."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    torch.manual_seed(5)
    parts = [nn.Embedding(VOCAB, HIDDEN), *(Block() for _ in range(NUM_BLOCKS)), nn.Linear(HIDDEN, VOCAB)]
    return nn.Sequential(*parts).to(torch.float64)


def batch(step: int) -> tuple[Any, Any]:
    """(ids, labels) of a step."""
    import torch

    tokens = torch.from_numpy(np.random.default_rng(step).integers(0, VOCAB, (BATCH, SEQ + 1)))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))


def alone() -> Seen:
    """The training in one process, over the whole batch at once."""
    import torch

    whole, seen = model(), Seen()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        ids, labels = batch(step)
        loss = loss_of(whole(ids), labels)
        loss.backward()
        seen[f"loss.{step}"] = np.array(loss.item())
        seen |= finish(step, whole, optimizer)
    return seen


def finish(step: int, module: Any, optimizer: Any) -> Seen:
    """The gradients of the step, which ends with the update."""
    seen = {f"{step}.{name}": p.grad.numpy().copy() for name, p in module.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return seen


def blocks_of(stage: int, num_stages: int) -> range:
    """The children of the whole model that a stage holds: equal runs of blocks, the embedding with the first, the head with the last."""
    each = NUM_BLOCKS // num_stages
    return range(1 + stage * each - (stage == 0), 1 + (stage + 1) * each + (stage == num_stages - 1))


def held(path: Path) -> Iterator[list[int]]:
    """The stages whose forwards stand in each row of the file."""
    for line in path.read_text("utf-8").splitlines():
        yield sorted({int(stage) for stage in re.findall(r"(\d+)F\d", line)})


def train(path: Path, rank: int, form: str) -> Seen:
    """Three steps of the rank's stages under the schedule of the file, as PyTorch's runtime runs it."""
    import torch
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    stages_of = list(held(path))
    num_stages = sum(map(len, stages_of))
    whole = list(model().named_children())
    parts = {s: torch.nn.Sequential() for s in stages_of[rank]}
    for stage, part in parts.items():
        for i in blocks_of(stage, num_stages):
            part.add_module(*whole[i])
    stages = [PipelineStage(part, s, num_stages, torch.device("cpu")) for s, part in parts.items()]
    runtime = _PipelineScheduleRuntime(stages, NUM_MICROBATCHES, loss_fn=loss_of)
    runtime._load_csv(str(path), format=form)
    runtime._dump_csv(str(path.with_name(f"{path.stem}.rank{rank}")), format=form)
    mine = torch.nn.ModuleDict({str(s): part for s, part in parts.items()})
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
    seen = Seen()
    for step in range(NUM_STEPS):
        ids, labels = batch(step)
        losses: list[Any] = []
        runtime.step(*((ids,) if 0 in parts else ()), target=labels if num_stages - 1 in parts else None, losses=losses)
        if losses:
            seen[f"loss.{step}"] = np.array(torch.stack(losses).mean().item())
        seen |= {f"{step}.{key.split('.', 2)[2]}": grad for key, grad in finish(step, mine, optimizer).items()}
    return seen


def main(rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "meet").as_uri(), rank=rank, world_size=NUM_RANKS)
    forms = json.loads((folder / "forms.json").read_text("utf-8"))
    out: Seen = {}
    for name, form in forms.items():
        out |= {f"{name}/{key}": array for key, array in train(folder / f"{name}.csv", rank, form).items()}
    np.savez(folder / f"rank{rank}.npz", **out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

"""One of two processes that train a small chain under PyTorch's pipeline runtime, in the order of tables that it reads; prints the losses of every table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, LAYERS, ROWS, STEPS, RATE = 8, 8, 2, 3, 0.05


def layers() -> list[torch.nn.Module]:
    """The same chain in every process."""
    torch.manual_seed(5)
    return [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double() for _ in range(LAYERS)]


def batches(num_microbatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(7)
    size = (ROWS * num_microbatches, WIDTH)
    return [(torch.randn(size, generator=made, dtype=torch.float64), torch.randn(size, generator=made, dtype=torch.float64)) for _ in range(STEPS)]


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(out, target)


def alone(num_microbatches: int) -> list[float]:
    """Losses of the whole chain in one process."""
    chain = torch.nn.Sequential(*layers())
    optimizer = torch.optim.SGD(chain.parameters(), lr=RATE)
    found = []
    for x, target in batches(num_microbatches):
        loss = loss_of(chain(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def together(path: str, home: list[int], num_microbatches: int, form: Any) -> list[float]:
    """Losses under the table at `path`, known on the rank of the last stage; `home` is the rank of every stage."""
    rank, every = dist.get_rank(), layers()
    share = LAYERS // len(home)
    mine = {s: torch.nn.Sequential(*every[s * share : (s + 1) * share]) for s, r in enumerate(home) if r == rank}
    stages = [PipelineStage(part, s, len(home), torch.device("cpu")) for s, part in mine.items()]
    runtime = _PipelineScheduleRuntime(stages, num_microbatches, loss_of)
    runtime._load_csv(path, format=form)
    optimizer = torch.optim.SGD([p for part in mine.values() for p in part.parameters()], lr=RATE)
    found = []
    for x, target in batches(num_microbatches):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        last = home[-1] == rank
        runtime.step(*((x,) if home[0] == rank else ()), **({"target": target, "losses": losses} if last else {}))
        optimizer.step()
        found.append(float(sum(loss.item() for loss in losses)) / num_microbatches)
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder / 'meet'}")
    found = {}
    for name, (home, num_microbatches, form) in json.loads((folder / "tables.json").read_text()).items():
        losses = together(str(folder / f"{name}.csv"), home, num_microbatches, form)
        if home[-1] == rank:
            found[name] = [losses, alone(num_microbatches)]
    (folder / f"losses{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

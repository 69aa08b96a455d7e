"""Train with a cost put in on purpose: ``injected.py WHAT SECONDS WORKERS``.

WHAT is ``sleep`` or ``work`` (of a sample), ``wire`` (of a million bytes of an all-reduce) or none.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH, WIDTH = 8, 512


class Costly(Dataset[Any]):
    """Vectors that take a time to prepare."""

    def __init__(self, what: str, seconds: float) -> None:
        self.what, self.seconds = what, seconds

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.what == "sleep":
            time.sleep(self.seconds)
        elif self.what == "work":
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        return torch.ones(WIDTH)


def main() -> None:
    """Train until the hooks end it."""
    what, seconds, workers = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in DataLoader(Costly(what, seconds), batch_size=BATCH, num_workers=workers):
        # What a step computes is slept, so that cores are free for what is measured.
        time.sleep(0.05)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if dist.get_world_size() > 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                if what == "wire":
                    time.sleep(seconds * parameter.grad.nbytes / 1e6)
        optimizer.step()


if __name__ == "__main__":
    main()

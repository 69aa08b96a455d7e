"""Train with a cost put in on purpose: ``injected.py WHAT SECONDS WORKERS [FOLDER [loader]]``.

WHAT is ``sleep`` or ``work`` (of a sample), ``wire`` (of a million bytes of an all-reduce) or none.
A sample is read from a file of FOLDER, by each rank from its own ones. With ``loader`` it measures
the loader by `estimator.measure_loader` and prints it as JSON instead.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH, WIDTH, LAYERS = 8, 512, 4
GRADIENT_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
FILE_BYTES = 25 * 4096


class Costly(Dataset[Any]):
    """Vectors that take a time to prepare."""

    def __init__(self, what: str, seconds: float, files: list[Path]) -> None:
        self.what, self.seconds, self.files = what, seconds, files

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.what == "sleep":
            time.sleep(self.seconds)
        elif self.what == "work":
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        if self.files:
            self.files[index % len(self.files)].read_bytes()
        return torch.ones(WIDTH)


def loader_of(what: str, seconds: float, workers: int, files: list[Path]) -> DataLoader[Any]:
    """The loader of one rank."""
    return DataLoader(Costly(what, seconds, files), batch_size=BATCH, num_workers=workers)


def write_files(folder: Path, count: int) -> list[Path]:
    """As many files as a run reads, on the disk."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number:05}.bin" for number in range(count)]
    for path in paths:
        if not path.exists():
            path.write_bytes(os.urandom(FILE_BYTES))
    return paths


def main() -> None:
    """Train until the hooks end it, or measure the loader."""
    what, seconds, workers = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    files = sorted(Path(sys.argv[4]).glob("*.bin")) if sys.argv[4:] else []
    if sys.argv[5:]:
        import estimator

        loader = loader_of(what, seconds, workers, files)
        batches = 3 if what == "sleep" else 8
        print(json.dumps(estimator.measure_loader(loader, batches=batches).to_dict()))
        return
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in loader_of(what, seconds, workers, files[rank::ranks]):
        # What a step computes is slept, so that cores are free for what is measured.
        time.sleep(0.05)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if ranks > 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            if what == "wire":
                # Once for all tensors: between them it would keep the exchanges from following
                # each other as closely as they do without it.
                time.sleep(seconds * GRADIENT_BYTES / 1e6)
        optimizer.step()


if __name__ == "__main__":
    main()

"""Train layers whose gradients ranks exchange: ``exchange.py TENSORS WIDTH bucketed|unbucketed``.

Bucketed by DDP, or one all-reduce for each tensor as soon as its gradient is ready. Both take the
mean over the ranks: each divides its gradients before it sends them, as DDP does.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

BATCH = 16


def layers(tensors: int, width: int, batch: int = BATCH) -> tuple[nn.Module, torch.Tensor]:
    """Square products without bias, one tensor each, and a batch for them."""
    made = (nn.Linear(width, width, bias=False) for _ in range(tensors))
    return nn.Sequential(*made), torch.randn(batch, width)


def main() -> None:
    """Train until the hooks end it."""
    tensors, width, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    model, batch = layers(tensors, width)
    ranks = dist.get_world_size()
    waiting: list[Any] = []
    if how == "bucketed" and ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    elif ranks > 1:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda tensor: waiting.append(
                    dist.all_reduce(tensor.grad.div_(ranks), async_op=True)
                )
            )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for inputs in DataLoader(batch.repeat(4096, 1), batch_size=BATCH):
        optimizer.zero_grad()
        model(inputs).mean().backward()
        for work in waiting:
            work.wait()
        waiting.clear()
        optimizer.step()


if __name__ == "__main__":
    main()

"""Synchronous training with parameter servers over gloo's sends and receives, for real.

Every server holds an equal part of every bucket of parameters. A worker pushes a bucket as soon as
its last gradient is there and goes on; a server adds up what all workers have pushed, updates its
part, and sends it back while later buckets still come in. Ranks 0 … W−1 are the workers, the rest
are servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import Tensor, nn

from . import paced

dist: Any = torch_distributed


def bucket_numbers(model: nn.Module, first_cap_bytes: int, cap_bytes: int) -> list[list[int]]:
    """Numbers of the parameters in each bucket, in the order in which gradients become ready.

    By PyTorch's own rule, which DDP uses.
    """
    ready = list(reversed(list(model.parameters())))
    buckets, _ = dist._compute_bucket_assignment_by_size(ready, [first_cap_bytes, cap_bytes])
    return [[len(ready) - 1 - number for number in bucket] for bucket in buckets]


class Worker:
    """A model whose parameters live in flat buckets that servers send."""

    def __init__(
        self, model: nn.Module, buckets: Sequence[Sequence[int]], servers: Sequence[int]
    ) -> None:
        self.model, self.servers = model, servers
        parameters = list(model.parameters())
        self._values: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._missing: list[int] = []
        self._pending: list[Any] = []
        self._sizes = [len(bucket) for bucket in buckets]
        for number, bucket in enumerate(buckets):
            members = [parameters[index] for index in bucket]
            flat = torch.cat([member.detach().reshape(-1) for member in members])
            self._values.append(flat)
            self._gradients.append(torch.zeros_like(flat))
            offset = 0
            for member in members:
                member.data = flat[offset : offset + member.numel()].view_as(member)
                place = slice(offset, offset + member.numel())
                member.register_post_accumulate_grad_hook(self._hook(number, place))
                offset += member.numel()

    def begin_step(self) -> None:
        """Forget the last step's gradients and be ready for what servers send."""
        self._missing = list(self._sizes)
        for number, flat in enumerate(self._values):
            self._pending += [
                dist.irecv(part, src=server, tag=number)
                for server, part in zip(self.servers, self._parts(flat), strict=True)
            ]

    def end_step(self) -> None:
        """Wait for all updated parameters."""
        for work in self._pending:
            work.wait()
        self._pending.clear()

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return list(torch.tensor_split(flat, len(self.servers)))

    def _hook(self, number: int, place: slice) -> Any:
        def pushed(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            self._gradients[number][place] = parameter.grad.reshape(-1)
            self._missing[number] -= 1
            if self._missing[number] == 0:
                self._pending += [
                    dist.isend(part, dst=server, tag=number)
                    for server, part in zip(
                        self.servers, self._parts(self._gradients[number]), strict=True
                    )
                ]

        return pushed


class Server:
    """One server's part of every bucket."""

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Sequence[int]],
        workers: Sequence[int],
        *,
        part: int,
        parts: int,
        parameter_s: float,
    ) -> None:
        self.workers, self.parameter_s = workers, parameter_s
        parameters = list(model.parameters())
        self._values = []
        for bucket in buckets:
            flat = torch.cat([parameters[index].detach().reshape(-1) for index in bucket])
            self._values.append(torch.tensor_split(flat, parts)[part].clone())
        self._pushed = [[torch.zeros_like(value) for _ in workers] for value in self._values]

    def step(self) -> None:
        """Take every bucket from all workers, update it, send it back."""
        coming = [
            [
                dist.irecv(buffer, src=worker, tag=number)
                for worker, buffer in zip(self.workers, buffers, strict=True)
            ]
            for number, buffers in enumerate(self._pushed)
        ]
        going = []
        for number, works in enumerate(coming):
            for work in works:
                work.wait()
            total = self._pushed[number][0]
            for buffer in self._pushed[number][1:]:
                total += buffer
            value = self._values[number]
            paced.pace.restart()
            paced.pace.wait(paced.UPDATE_S + self.parameter_s * value.numel())
            going += [dist.isend(value, dst=worker, tag=number) for worker in self.workers]
        for work in going:
            work.wait()

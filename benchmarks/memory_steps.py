"""Run one training step on the CPU and read off how much memory is held, when."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from estimator.graph.op_graph import OpGraph
from estimator.graph.training_call import TrainingCall

# Operators of a graph that a step may leave out, such as those of values known when it was traced.
_AHEAD = 20
_MARK = "estimator op "


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredStep:
    """Bytes held after each change, when that was, and when each op that was followed began."""

    held_bytes: NDArray[np.int64]
    at_ns: NDArray[np.int64]
    begin_ns: Mapping[int, int]

    @property
    def peak_bytes(self) -> int:
        return int(self.held_bytes.max())

    def most_bytes(self, begin_ns: int, end_ns: int) -> int:
        """The most held between two instants."""
        first, last = np.searchsorted(self.at_ns, [begin_ns, end_ns])
        return int(self.held_bytes[max(first - 1, 0) : max(last, first, 1)].max())

    def beside(self, levels: NDArray[np.int64]) -> list[tuple[int, int]]:
        """(predicted, measured): the most held from each op that was followed to the next one."""
        order = sorted(self.begin_ns.items())
        return [
            (int(levels[first:last].max()), self.most_bytes(begin, end))
            for (first, begin), (last, end) in pairwise(order)
        ]


class _Marked(TorchDispatchMode):
    """Marks in the profile where each operator of a graph begins, as far as they come in turn."""

    def __init__(self, graph: OpGraph) -> None:
        super().__init__()
        self.targets = [op.call.target for op in graph.ops]
        self.place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        ahead = self.targets[self.place : self.place + _AHEAD]
        if name not in ahead:
            return func(*args, **(kwargs or {}))
        self.place += ahead.index(name) + 1
        with record_function(f"{_MARK}{self.place - 1}"):
            return func(*args, **(kwargs or {}))


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer with torch's own defaults."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-5)
    if name == "sgd-momentum":
        return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](parameters, lr=1e-5)


def step(model: nn.Module, call: TrainingCall, optimizer: torch.optim.Optimizer) -> None:
    """One training step; the output of the model is not kept, as in the trace."""
    optimizer.zero_grad(set_to_none=True)
    call.run(model, call.batch).backward()
    optimizer.step()


def storage_bytes(tree: Any) -> dict[int, int]:
    """Bytes of every storage in nested tuples, lists and mappings, by address."""
    if isinstance(tree, Tensor):
        storage = tree.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    found: dict[int, int] = {}
    items = tree.values() if isinstance(tree, dict) else tree
    for item in items if isinstance(tree, (dict, list, tuple)) else ():
        found |= storage_bytes(item)
    return found


def measured_step(
    model: nn.Module,
    call: TrainingCall,
    optimizer: torch.optim.Optimizer,
    *,
    follow: OpGraph | None = None,
) -> MeasuredStep:
    """One step in steady state: what stands before it plus the allocator's changes.

    `follow` is the graph whose operators are marked; without it nothing is between them. The
    optimizer's first step, which makes its state, is run before.
    """
    if not optimizer.state:
        step(model, call, optimizer)
    optimizer.zero_grad(set_to_none=True)
    standing = storage_bytes([*model.parameters(), *model.buffers()]) | storage_bytes(call.batch)
    standing |= storage_bytes(list(optimizer.state.values()))
    marks = _Marked(follow) if follow else nullcontext()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, marks:
        step(model, call, optimizer)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = accumulate((size for _, size in changes), initial=sum(standing.values()))
    return MeasuredStep(
        held_bytes=np.array(list(held)[1:]),
        at_ns=np.array([at for at, _ in changes]),
        begin_ns={
            int(e.name().removeprefix(_MARK)): e.start_ns()
            for e in events
            if e.name().startswith(_MARK)
        },
    )

"""Run one training step on the CPU and read off how much memory is held, when."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.trace.training_call import TrainingCall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredStep:
    """Bytes held after each change, when that was, and when each op that was found began."""

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
        """(predicted, measured): the most held from each op that was found to the next one."""
        order = sorted(self.begin_ns.items())
        return [
            (int(levels[first:last].max()), self.most_bytes(begin, end))
            for (first, begin), (last, end) in pairwise(order)
        ]


def _begins_ns(graph: OpGraph, events: Iterable[Any]) -> dict[int, int]:
    """When each operator of a graph begins, as far as both come in the same order.

    What runs inside an operator that the graph has is passed over. A sum of gradients may run in
    place.
    """
    names = [_name(*op.call.target.split(".")[:2]) for op in graph.ops]
    known = set(names)
    outermost: list[tuple[int, str]] = []
    until_ns = 0
    for begin_ns, end_ns, name in sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), _name(*e.name().split("::")))
        for e in events
        if e.name().count("::") == 1
    ):
        if begin_ns >= until_ns and name in known:
            outermost.append((begin_ns, name))
            until_ns = end_ns
    ran = [name for _, name in outermost]
    return {
        block.a + place: outermost[block.b + place][0]
        for block in SequenceMatcher(None, names, ran, autojunk=False).get_matching_blocks()
        for place in range(block.size)
    }


def _name(*words: str) -> str:
    return ".".join(words).rstrip("_")


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


def events_of(run: Callable[[], None]) -> list[Any]:
    """What torch's profiler saw of a run on the CPU, its allocator's work included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    return list(profiled.profiler.kineto_results.events())


def changes_of(events: Iterable[Any]) -> list[tuple[int, int]]:
    """(nanoseconds, bytes taken or given back) of each change, in their order."""
    return sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")


def measured_step(
    model: nn.Module, call: TrainingCall, optimizer: torch.optim.Optimizer, graph: OpGraph
) -> MeasuredStep:
    """One step in steady state: what stands before it plus the allocator's changes.

    The optimizer's first step, which makes its state, is run before. Operators are found in torch's
    profile: under a dispatch mode autograd would not add gradients up in place.
    """
    step(model, call, optimizer)
    optimizer.zero_grad(set_to_none=True)
    # What lies in cycles of references would go at some moment of the step.
    gc.collect()
    standing = storage_bytes([*model.parameters(), *model.buffers()]) | storage_bytes(call.batch)
    standing |= storage_bytes(list(optimizer.state.values()))
    events = events_of(lambda: step(model, call, optimizer))
    changes = changes_of(events)
    held = accumulate((size for _, size in changes), initial=sum(standing.values()))
    return MeasuredStep(
        held_bytes=np.array(list(held)[1:]),
        at_ns=np.array([at for at, _ in changes]),
        begin_ns=_begins_ns(graph, events),
    )

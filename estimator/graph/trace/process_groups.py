"""Trace a model that asks torch.distributed itself, as one of as many ranks as it is asked for.

A forward pass that gathers its features (CLIP's contrastive loss), guarded by
``torch.distributed.is_initialized()``, exchanges nothing where one process traces it. It is run
once more under torch's fake process group then, whose collectives do nothing, and what it calls is
recorded as collectives of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch.distributed as dist

from estimator.graph.ir.collectives import WORLD, collective_call_of
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Op, with_calls
from estimator.machines.profile import CollectiveName, DeviceKind
from estimator.tensors import OpCall
from estimator.workload.strategies import check_count

# Of each operator of torch's process groups: the collective, and the places of the argument that a
# rank gives and of the one that it gets (torch/csrc/distributed/c10d/Ops.cpp).
_OPERATORS: dict[str, tuple[CollectiveName, int, int]] = {
    "c10d.allreduce_": ("all_reduce", 0, 0),
    "c10d.broadcast_": ("broadcast", 0, 0),
    "c10d.allgather_": ("all_gather", 1, 0),
    "c10d._allgather_base_": ("all_gather", 1, 0),
    "c10d.reduce_scatter_": ("reduce_scatter", 1, 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, 0),
    "c10d.alltoall_": ("all_to_all", 1, 0),
    "c10d.alltoall_base_": ("all_to_all", 1, 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0, 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0, 0),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0, 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0, 0),
    "_c10d_functional.broadcast": ("broadcast", 0, 0),
}
_WAIT = "_c10d_functional.wait_tensor"
# Libraries ask whether they are distributed without exchanging anything in a forward pass.
_LIBRARIES = ("torch.", "transformers.", "accelerate.", "lightning.", "estimator.")
# What torch.distributed.nn asks for, to choose the collective of a gather's gradient.
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def as_one_of(
    ranks: int | None, name: str, target: DeviceKind, traced: Callable[[], OpGraph]
) -> OpGraph:
    """The graph that `traced` gives of a model as one of so many ranks, where it asks for them.

    Where it is not known for how many (None), the graph says what it lacks.
    """
    if ranks is not None:
        ranks = check_count(ranks, "ranks")
    with _asks_noted() as asked:
        graph = traced()
    if not asked or ranks == 1:
        return graph
    if ranks is None:
        unseen = (
            f"{name} asks torch.distributed whether it is initialized: traced as one process, what "
            "it would exchange with others is not counted; trace it with --ranks N, "
            "trace_model(..., ranks=N)"
        )
        return replace(graph, assumptions=(*graph.assumptions, unseen))
    with _fake_ranks(ranks, target):
        graph = traced()
    return replace(graph, ops=tuple([_as_collective(op, ranks) for op in graph.ops]))


@contextmanager
def _asks_noted() -> Iterator[list[str]]:
    """Note which modules outside of libraries ask whether torch.distributed is initialized."""
    asked: list[str] = []
    original = dist.is_initialized

    def is_initialized() -> bool:
        module = str(sys._getframe(1).f_globals.get("__name__", ""))
        if not module.startswith(_LIBRARIES):
            asked.append(module)
        return original()

    with patch.object(dist, "is_initialized", is_initialized):
        yield asked


@contextmanager
def _fake_ranks(count: int, target: DeviceKind) -> Iterator[None]:
    """Be rank 0 of as many, whose collectives do nothing; a group that there is already stays."""
    if dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        with patch.object(dist, "get_backend", lambda group=None: _BACKENDS[target]):
            yield
    finally:
        dist.destroy_process_group()


def _as_collective(op: Op, ranks: int) -> Op:
    name = op.call.target.rpartition(".")[0]
    if name == _WAIT:
        calls = [OpCall("aten.alias.default", call.inputs, (), call.outputs) for call in op.calls]
        return with_calls(op, calls, is_view=True)
    if name not in _OPERATORS:
        return op
    kind, given, got = _OPERATORS[name]
    calls = [collective_call_of(kind, WORLD, call, given=given, ranks=ranks) for call in op.calls]
    # What a rank gives stands first.
    inputs = op.inputs
    if given > got:
        first = len(OpCall("", (op.call.arguments[got],), (), ()).inputs)
        inputs = (*inputs[first:], *inputs[:first])
    return with_calls(op, calls, inputs=inputs, is_view=True)

"""Say which memory a training step holds, when, and how much of it at most."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from estimator.errors import StrategyError
from estimator.graph.ops import BoundGraph, Op, OpGraph
from estimator.tensors import TensorSpec
from estimator.workload import OPTIMIZER_STATE_TENSORS, Strategy, check_optimizer

StorageKind = Literal["parameter", "buffer", "input", "constant", "activation", "gradient"]

# The CUDA caching allocator rounds every block up to kMinBlockSize
# (c10/core/AllocatorConfig.h, torch 2.13).
CUDA_BLOCK_BYTES = 512

BEFORE_STEP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One piece of memory and the values that share it.

    `root` is the value that owns it. It is held from the start of op `born` (-1: from before the
    step) to the end of op `dies` (the number of ops: to the end of backward and beyond).
    """

    values: tuple[int, ...]
    root: int
    born: int
    dies: int
    kind: StorageKind


class Lifetime(NamedTuple):
    """A storage of a graph at one batch size; `storage` is its index in `storages(graph)`."""

    born: int
    storage_bytes: int
    dies: int
    storage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The most memory that live tensors of one rank take during a step, and its parts.

    Each part is that part's own maximum; `total_bytes` is the maximum over time of their sum, which
    is less: gradients grow while activations shrink. `activations_bytes` is the most that
    activations and temporaries of the graph hold at once. `update_bytes` is what the optimizer
    needs beyond its state while it updates. `peak_op` is the op at which the total is reached
    (None: during the update).
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    bucket_bytes: int
    buffers_bytes: int
    inputs_bytes: int
    activations_bytes: int
    update_bytes: int
    total_bytes: int
    peak_op: int | None


def storages(graph: OpGraph) -> tuple[Storage, ...]:
    """Every piece of memory of the step with its lifetime, in order of birth.

    A value and all its views and in-place results share one storage, held until the last op that
    uses any of them: autograd releases a saved tensor after the backward node that reads it.
    Parameters, buffers, inputs and constants are held throughout, gradients of parameters from
    their birth to the end.
    """
    roots = _roots(graph)
    born, last_use = _uses(graph, roots)
    gradients = {
        roots[parameter.gradient]
        for parameter in graph.parameters
        if parameter.gradient is not None
    }
    members: dict[int, list[int]] = {}
    for value, root in enumerate(roots):
        members.setdefault(root, []).append(value)
    found = []
    for root, values in members.items():
        kind: StorageKind = graph.values[root].kind
        start = born.get(root, BEFORE_STEP)
        end = len(graph.ops)
        if kind == "activation" and root in gradients:
            kind = "gradient"
        elif kind == "activation":
            end = max(start, last_use.get(root, start))
        else:
            start = BEFORE_STEP
        found.append(Storage(values=tuple(values), root=root, born=start, dies=end, kind=kind))
    return tuple(sorted(found, key=lambda storage: (storage.born, storage.root)))


def _roots(graph: OpGraph) -> list[int]:
    """For each value, the value that owns its storage."""
    bases = [value.base for value in graph.values]
    last_read: dict[int, int] = {}

    def root_of(value: int) -> int:
        while (base := bases[value]) is not None and base != value:
            value = base
        return value

    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            last_read[root_of(value)] = index
    held = {
        root_of(parameter.gradient)
        for parameter in graph.parameters
        if parameter.gradient is not None and parameter.ready_after is not None
    }
    for index, op in enumerate(graph.ops):
        if not _accumulates(graph, op):
            continue
        old = root_of(op.inputs[0])
        unshared = last_read[old] == index and root_of(op.inputs[1]) != old
        if graph.values[old].kind == "activation" and unshared and old not in held:
            bases[op.outputs[0]] = old
            last_read[old] = max(index, last_read.get(op.outputs[0], index))
            if op.outputs[0] in held:
                held.add(old)
    return [root_of(value) for value in range(len(graph.values))]


def _accumulates(graph: OpGraph, op: Op) -> bool:
    """Whether autograd runs this sum of two gradients in place of the first.

    torch/csrc/autograd/input_buffer.cpp does so where it holds the last reference to a dense
    tensor; a trace with fake tensors, which are subclasses, shows a fresh sum instead.
    """
    if op.phase != "backward" or op.call.target != "aten.add.Tensor" or len(op.inputs) != 2:
        return False
    if not op.outputs or graph.values[op.outputs[0]].base is not None:
        return False
    old, new, total = (graph.values[value].spec for value in (*op.inputs, op.outputs[0]))
    return old.shape == new.shape == total.shape and old.dtype == total.dtype and is_dense(old)


def is_dense(spec: TensorSpec) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dims.

    >>> is_dense(TensorSpec((2, 3), "float32", (1, 2))), is_dense(TensorSpec((2, 3), "float32", (0, 1)))
    (True, False)
    """
    if spec.strides is None:
        return True
    expected = 1
    for stride, size in sorted(zip(spec.strides, spec.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _uses(graph: OpGraph, roots: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """The op that makes each storage, and the last op that touches it."""
    born: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for value in op.outputs:
            born.setdefault(roots[value], index)
            last_use[roots[value]] = index
        for value in op.inputs:
            last_use[roots[value]] = index
    return born, last_use


def lifetimes(bound: BoundGraph) -> list[Lifetime]:
    """Every storage of the step with its size at this batch, in order of birth."""
    return [
        Lifetime(
            born=storage.born,
            storage_bytes=max(bound.specs[value].storage_bytes for value in storage.values),
            dies=storage.dies,
            storage=index,
        )
        for index, storage in enumerate(storages(bound.graph))
    ]


def peak_memory(bound: BoundGraph, *, optimizer: str, strategy: Strategy, ranks: int) -> PeakMemory:
    """The peak of live tensors of one rank over a whole step, in steady state.

    Optimizer state exists from the start (any step but the first), gradients are released before
    it (`zero_grad(set_to_none=True)`, the default). DDP's buckets (ranks > 1) are as large as the
    gradients and always held; as bucket views, gradients live in them.
    """
    if ranks < 1:
        raise StrategyError(f"a step runs on at least 1 rank, found {ranks}; use 1 or more")
    graph = bound.graph
    block_bytes = CUDA_BLOCK_BYTES if graph.target == "cuda" else 1
    sizes = [_rounded(parameter.spec.nbytes, block_bytes) for parameter in graph.parameters]
    trained = [
        size
        for size, parameter in zip(sizes, graph.parameters, strict=True)
        if parameter.gradient is not None
    ]
    in_buckets = ranks > 1 and strategy.gradient_as_bucket_view
    held = {"input": 0, "constant": 0}
    gradients, activations = _Curve(len(graph.ops)), _Curve(len(graph.ops))
    every = storages(graph)
    for life in lifetimes(bound):
        size, kind = _rounded(life.storage_bytes, block_bytes), every[life.storage].kind
        if kind in held:
            held[kind] += size
        elif kind == "activation":
            activations.add(life.born, life.dies, size)
        elif kind == "gradient" and in_buckets:
            activations.add(life.born, _ready(graph, every[life.storage]), size)
        elif kind == "gradient":
            gradients.add(life.born, life.dies, size)
    state_bytes = OPTIMIZER_STATE_TENSORS[check_optimizer(optimizer)] * sum(trained)
    bucket_bytes = sum(trained) if ranks > 1 else 0
    standing_bytes = (
        sum(sizes) + graph.frozen_parameter_bytes + graph.buffer_bytes + sum(held.values())
    ) + (state_bytes + bucket_bytes)
    update_bytes = _update_bytes(trained, optimizer, graph.target == "cuda")
    step = [a + b for a, b in zip(gradients.levels(), activations.levels(), strict=True)]
    gradient_bytes = max(gradients.levels(), default=0)
    most = max(step, default=0)
    in_update = gradient_bytes + update_bytes > most
    return PeakMemory(
        parameters_bytes=sum(sizes) + graph.frozen_parameter_bytes,
        gradients_bytes=bucket_bytes if in_buckets else gradient_bytes,
        optimizer_state_bytes=state_bytes,
        bucket_bytes=0 if in_buckets else bucket_bytes,
        buffers_bytes=graph.buffer_bytes + held["constant"],
        inputs_bytes=held["input"],
        activations_bytes=max(activations.levels(), default=0),
        update_bytes=update_bytes,
        total_bytes=standing_bytes + max(most, gradient_bytes + update_bytes),
        peak_op=None if in_update or not step else step.index(most),
    )


def _rounded(size_bytes: int, block_bytes: int) -> int:
    return -(-size_bytes // block_bytes) * block_bytes


def _ready(graph: OpGraph, storage: Storage) -> int:
    """The op after which the last gradient in this storage is final and is copied to its bucket."""
    values = set(storage.values)
    return max(
        (
            parameter.ready_after
            for parameter in graph.parameters
            if parameter.gradient in values and parameter.ready_after is not None
        ),
        default=storage.dies,
    )


class _Curve:
    """Bytes held during each op, from intervals."""

    def __init__(self, ops: int) -> None:
        self.changes = [0] * (ops + 1)

    def add(self, born: int, dies: int, size_bytes: int) -> None:
        """Hold `size_bytes` from the start of op `born` to the end of op `dies`."""
        self.changes[max(born, 0)] += size_bytes
        if dies + 1 < len(self.changes):
            self.changes[dies + 1] -= size_bytes

    def levels(self) -> list[int]:
        return list(accumulate(self.changes))[: len(self.changes) - 1]


def _update_bytes(sizes: list[int], optimizer: str, foreach: bool) -> int:
    """Temporaries of torch's optimizers, torch/optim/adam.py (torch 2.13).

    Adam takes the square root of the second moment into a fresh tensor: of every parameter at once
    where it runs foreach (CUDA); one at a time in the loop (CPU), where the quotient is another
    fresh tensor and the denominator of the previous parameter is still held.
    """
    if optimizer not in ("adam", "adamw") or not sizes:
        return 0
    if foreach:
        return sum(sizes)
    in_order = sizes[::-1]
    return max(
        previous + 2 * size for previous, size in zip([0, *in_order], in_order, strict=False)
    )

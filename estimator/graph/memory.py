"""Say which memory a training step holds, when, and how much of it at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from estimator.errors import StrategyError
from estimator.graph.costs import family_of
from estimator.graph.ops import BoundGraph, Op, OpGraph
from estimator.graph.workspace import workspace_bytes
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
    activations, temporaries of the graph and workspaces of its operators hold at once.
    `bucket_bytes` are DDP's buckets, or the buffers of a sharded step's collectives.
    `update_bytes` is what the optimizer needs beyond its state while it updates. `peak_op` is the
    op at which the total is reached (None: during the update).
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


def value_roots(graph: OpGraph) -> list[int]:
    """For each value, the value that owns its storage, sums of gradients apart."""
    bases = _bases(graph)
    return [_owner(bases, value) for value in range(len(graph.values))]


def _roots(graph: OpGraph) -> list[int]:
    """For each value, the value that owns its storage."""
    bases = _bases(graph)
    _share_sums(graph, bases)
    return [_owner(bases, value) for value in range(len(graph.values))]


def _bases(graph: OpGraph) -> list[int | None]:
    bases = [value.base for value in graph.values]
    for op in graph.ops:
        # The schemas of unsafe_split and of views that return lists do not name what they share.
        if op.inputs and family_of(op.call.target) == "view":
            for value in op.outputs:
                if bases[value] is None and graph.values[value].kind == "activation":
                    bases[value] = op.inputs[0]
    return bases


def _owner(bases: list[int | None], value: int) -> int:
    while (base := bases[value]) is not None and base != value:
        value = base
    return value


def _share_sums(graph: OpGraph, bases: list[int | None]) -> None:
    """Let the sum of two gradients take the place of the first where autograd does so."""
    last_read: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            last_read[_owner(bases, value)] = index
    held = {
        _owner(bases, parameter.gradient)
        for parameter in graph.parameters
        if parameter.gradient is not None
    }
    for index, op in enumerate(graph.ops):
        if not _accumulates(graph, op):
            continue
        old = _owner(bases, op.inputs[0])
        unshared = last_read[old] == index and _owner(bases, op.inputs[1]) != old
        if graph.values[old].kind == "activation" and unshared and old not in held:
            total = op.outputs[0]
            bases[total] = old
            last_read[old] = max(index, last_read.get(total, index))
            if total in held:
                held.add(old)


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

    >>> [is_dense(TensorSpec((2, 3), "float32", strides)) for strides in ((1, 2), (0, 1))]
    [True, False]
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
    """The op that makes each storage, and the last op that touches or holds it."""
    born: dict[int, int] = {}
    last_use: dict[int, int] = {}
    gathered: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for value in op.outputs:
            born.setdefault(roots[value], index)
            last_use[roots[value]] = index
        for value in op.inputs:
            last_use[roots[value]] = index
        if op.phase == "backward":
            for source in _held_by_node(graph, index, roots, gathered):
                last_use[source] = index
        elif op.call.target == "aten.gather.default":
            gathered[roots[op.inputs[1]]] = roots[op.inputs[0]]
    return born, last_use


def _held_by_node(
    graph: OpGraph, index: int, roots: list[int], gathered: dict[int, int]
) -> list[int]:
    """Storages that op `index` does not read but that its autograd node still holds.

    A node releases what it saved once all of its ops have run. The gradient of a product is two
    products with the same factor, the gradient that came in; that of `gather`, a scatter, saves the
    gathered tensor for its shape alone (tools/autograd/derivatives.yaml, torch 2.13).
    """
    op, before = graph.ops[index], graph.ops[index - 1]
    held = []
    if op.call.target == before.call.target == "aten.mul.Tensor" and before.phase == op.phase:
        incoming = set(op.inputs) & set(before.inputs)
        if incoming and not set(op.inputs) & set(before.outputs):
            held = [roots[value] for value in before.inputs]
    elif op.call.target.startswith("aten.scatter_add"):
        held = [gathered[roots[value]] for value in op.inputs if roots[value] in gathered]
    return held


def lifetimes(bound: BoundGraph, every: Sequence[Storage] | None = None) -> list[Lifetime]:
    """Every storage of the step with its size at this batch, in order of birth.

    `every` is `storages(bound.graph)` where that is at hand.
    """
    return [
        Lifetime(
            born=storage.born,
            storage_bytes=max(bound.specs[value].storage_bytes for value in storage.values),
            dies=storage.dies,
            storage=index,
        )
        for index, storage in enumerate(storages(bound.graph) if every is None else every)
    ]


def peak_memory(
    bound: BoundGraph, *, optimizer: str, strategy: Strategy, ranks: int, threads: int = 1
) -> PeakMemory:
    """The peak of live tensors of one rank over a whole step, in steady state.

    Optimizer state exists from the start (any step but the first), gradients are released before
    it (`zero_grad(set_to_none=True)`, the default). DDP's buckets (ranks > 1) are as large as the
    gradients and always held; as bucket views, gradients live in them. `threads` are those that one
    rank has on a CPU: they decide how convolutions run.
    """
    if ranks < 1:
        raise StrategyError(f"a step runs on at least 1 rank, found {ranks}; use 1 or more")
    graph = bound.graph
    on_gpu = graph.target == "cuda"
    rounding = block_bytes(graph)
    sizes = [rounded_bytes(parameter.spec.nbytes, rounding) for parameter in graph.parameters]
    trained = [
        size
        for size, parameter in zip(sizes, graph.parameters, strict=True)
        if parameter.gradient is not None
    ]
    in_buckets = ranks > 1 and strategy.gradient_as_bucket_view
    held = _Held.of(bound, rounding, threads, gradients_in_buckets=in_buckets)
    gradients, activations = held.gradients.levels(), held.activations.levels()
    parameters_bytes = sum(sizes) + graph.frozen_parameter_bytes
    buffers_bytes = graph.buffer_bytes + held.constants_bytes
    state_bytes = OPTIMIZER_STATE_TENSORS[check_optimizer(optimizer)] * sum(trained)
    bucket_bytes = sum(trained) if ranks > 1 else 0
    update_bytes = update_temporaries_bytes(trained, optimizer, foreach=on_gpu)
    in_graph = [a + b for a, b in zip(gradients, activations, strict=True)]
    most = max(in_graph, default=0)
    gradients_bytes = max(gradients, default=0)
    in_update = gradients_bytes + update_bytes
    standing_bytes = parameters_bytes + buffers_bytes + held.inputs_bytes
    return PeakMemory(
        parameters_bytes=parameters_bytes,
        gradients_bytes=bucket_bytes if in_buckets else gradients_bytes,
        optimizer_state_bytes=state_bytes,
        bucket_bytes=0 if in_buckets else bucket_bytes,
        buffers_bytes=buffers_bytes,
        inputs_bytes=held.inputs_bytes,
        activations_bytes=max(activations, default=0),
        update_bytes=update_bytes,
        total_bytes=standing_bytes + state_bytes + bucket_bytes + max(most, in_update),
        peak_op=None if in_update > most or not in_graph else in_graph.index(most),
    )


def block_bytes(graph: OpGraph) -> int:
    """What the allocator of the graph's device rounds sizes up to."""
    return CUDA_BLOCK_BYTES if graph.target == "cuda" else 1


def rounded_bytes(size_bytes: int, block: int) -> int:
    """A size in whole blocks of an allocator."""
    return -(-size_bytes // block) * block


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


@dataclass(slots=True)
class _Held:
    """What the graph's own values hold: throughout, and op by op."""

    gradients: _Curve
    activations: _Curve
    inputs_bytes: int = 0
    constants_bytes: int = 0

    @classmethod
    def of(
        cls, bound: BoundGraph, rounding: int, threads: int, *, gradients_in_buckets: bool
    ) -> _Held:
        """`rounding` is what sizes are rounded up to; gradients in buckets are copied there."""
        graph, every = bound.graph, storages(bound.graph)
        held = cls(_Curve(len(graph.ops)), _Curve(len(graph.ops)))
        for life in lifetimes(bound, every):
            storage = every[life.storage]
            size = rounded_bytes(life.storage_bytes, rounding)
            if storage.kind == "input":
                held.inputs_bytes += size
            elif storage.kind == "constant":
                held.constants_bytes += size
            elif storage.kind == "activation":
                held.activations.add(life.born, life.dies, size)
            elif storage.kind == "gradient" and gradients_in_buckets:
                held.activations.add(life.born, _ready(graph, storage), size)
            elif storage.kind == "gradient":
                held.gradients.add(life.born, life.dies, size)
        if graph.target == "cpu":
            for index, call in enumerate(bound.calls):
                held.activations.add(index, index, workspace_bytes(call, threads=threads))
        return held


def update_temporaries_bytes(sizes: Sequence[int], optimizer: str, *, foreach: bool) -> int:
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

"""Turn a traced graph into what torch.compile makes of it: fewer kernels, fewer values in memory.

Follows torch's default backend, Inductor, at its default settings: pointwise work, sums and
normalisations are fused (`fusion_groups`), cheap forward values are computed again in the backward
pass instead of being saved (`recompute`), library kernels stay. Read off its rules, not off its
output: no compiler runs here.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import get_args

from estimator.errors import ModelError
from estimator.graph.fused_calls import FusedFamily, FusedKernel
from estimator.graph.fusion_groups import Grouping, Kernel
from estimator.graph.fusion_parts import SplitGraph, split_graph
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Execution, Op, Parameter, Value
from estimator.graph.recompute import with_recomputation
from estimator.tensors import TensorSpec

COMPILED_ASSUMPTION = (
    "torch.compile fuses pointwise operators, sums and normalisations into one kernel where "
    "Inductor's rules allow it, and computes cheap values again in backward; DDP cuts the compiled "
    "graph at its buckets"
)
CUDA_GRAPHS_ASSUMPTION = (
    "every step replays two CUDA graphs, one of the forward and one of the backward pass"
)
# Of several families in one kernel the first one here names it.
_FAMILIES: tuple[FusedFamily, ...] = ("normalization", "softmax", "reduction", "elementwise")


def compile_graph(graph: OpGraph, execution: Execution) -> OpGraph:
    """The graph as "compiled" (Inductor's kernels), "cuda-graphs" (the same, replayed) or
    "compiled-blocks" (each repeated block by itself, the rest eager).

    Raises ModelError for a graph that cannot run so.
    """
    if execution not in get_args(Execution):
        raise ModelError(
            f"a model is compiled as True, 'blocks' or 'cuda-graphs', found {execution!r}; use one "
            "of these"
        )
    if execution == "eager":
        return graph
    if graph.is_summary or graph.execution != "eager":
        raise ModelError(
            f"{graph.name} is no eager trace ({graph.execution}, {len(graph.ops)} operators); "
            "trace the model itself to compile it"
        )
    if execution == "cuda-graphs" and graph.target != "cuda":
        raise ModelError(
            f"{graph.name} is traced for {graph.target}, which has no CUDA graphs; compile it "
            "without them"
        )
    split = split_graph(graph, blocks_only=execution == "compiled-blocks")
    grouping = Grouping(split, with_recomputation(split))
    said = (COMPILED_ASSUMPTION, *((CUDA_GRAPHS_ASSUMPTION,) * (execution == "cuda-graphs")))
    fused = _rebuilt(split, grouping)
    return replace(fused, execution=execution, assumptions=(*graph.assumptions, *said))


def _rebuilt(split: SplitGraph, grouping: Grouping) -> OpGraph:
    """The graph with kernels for operators, and only the values that they bring into memory."""
    graph, order = split.graph, _in_order(grouping)
    names: Counter[str] = Counter()
    ops = [_op(split, grouping, number, names) for number in order]
    made_at: dict[int, int] = {}
    for position, number in enumerate(order):
        for root in grouping.kernels[number].writes - grouping.kernels[number].again:
            made_at[root] = position
    made = {split.roots[value]: value for op in ops for value in op.outputs}
    parameters = [_parameter(p, split, made_at, made) for p in graph.parameters]
    parameters.sort(key=lambda p: len(ops) if p.ready_after is None else p.ready_after)
    kept = _Kept(split, ops, parameters)
    return replace(
        graph,
        ops=tuple(kept.op(op) for op in ops),
        values=kept.values,
        parameters=tuple(
            replace(p, gradient=None if p.gradient is None else kept.number[p.gradient])
            for p in parameters
        ),
        inputs=tuple(replace(i, value=kept.number[i.value]) for i in graph.inputs),
    )


def _parameter(
    parameter: Parameter, split: SplitGraph, made_at: dict[int, int], made: dict[int, int]
) -> Parameter:
    """A parameter whose gradient is what a kernel makes: views of it are gone."""
    if parameter.gradient is None:
        return parameter
    root = split.roots[parameter.gradient]
    gradient = made.get(root, parameter.gradient)
    return replace(parameter, gradient=gradient, ready_after=made_at.get(root))


def _in_order(grouping: Grouping) -> list[int]:
    """Every kernel after those that it needs, otherwise by its last part."""
    kernels = grouping.kernels
    waits: dict[int, int] = {}
    after: defaultdict[int, list[int]] = defaultdict(list)
    for number in kernels:
        needed = grouping.before(number)
        waits[number] = len(needed)
        for other in needed:
            after[other].append(number)
    ready = [(kernels[number].last, number) for number, count in waits.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for other in after[number]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, (kernels[other].last, other))
    return order


def _op(split: SplitGraph, grouping: Grouping, number: int, names: Counter[str]) -> Op:
    kernel = grouping.kernels[number]
    source = split.graph.ops[kernel.placed[kernel.last].op]
    if kernel.kind == "whole":
        kind = source.call.target.split(".")[1]
        names[kind] += 1
        return replace(source, name=f"{kind}_{names[kind]}")
    inputs, read_bytes = _inputs(split, kernel)
    outputs = _outputs(split, grouping, number)
    flops = [round(sum(part.flops[side] for part in kernel.parts)) for side in (0, 1)]
    summing = [part for part in kernel.parts if part.kind in ("row", "across")]
    walked = summing[0] if summing else max(kernel.parts, key=lambda part: part.elements[0])
    family = min((p.family for p in kernel.parts), key=_FAMILIES.index)
    calls = []
    for side in (0, 1):
        fused = FusedKernel(
            family=family,
            flops=flops[side],
            read_bytes=read_bytes[side],
            rows=walked.rows[side],
            row_length=walked.elements[side] // max(walked.rows[side], 1),
            members=tuple(dict.fromkeys(split.graph.ops[p.op].call.target for p in kernel.parts)),
        )
        calls.append(fused.call(*(_specs(split, ends, side) for ends in (inputs, outputs))))
    names["fused"] += 1
    return Op(
        name=f"fused_{names['fused']}",
        call=calls[0],
        # One object where nothing depends on the batch.
        other_call=calls[0] if calls[0] == calls[1] else calls[1],
        phase=kernel.phase,
        module=source.module,
        inputs=inputs,
        outputs=outputs,
    )


def _specs(split: SplitGraph, values: Iterable[int], side: int) -> tuple[TensorSpec, ...]:
    found = [split.values[value] for value in values]
    return tuple(value.other_spec if side else value.spec for value in found)


def _inputs(split: SplitGraph, kernel: Kernel) -> tuple[tuple[int, ...], tuple[int, int]]:
    """One value for each storage read from outside, and the bytes read at both batch sizes."""
    views: defaultdict[int, dict[int, None]] = defaultdict(dict)
    looked_up: dict[int, tuple[int, int]] = {}
    made: set[int] = set()
    for part in kernel.parts:
        tables = dict(part.looked_up)
        for value in part.reads:
            root = split.roots[value]
            if root in made:
                continue
            if value in tables:
                one, two = looked_up.get(root, (0, 0))
                looked_up[root] = one + tables[value][0], two + tables[value][1]
                views.setdefault(root, {})
            else:
                views[root][value] = None
        made |= split.writes(part)
    inputs, total = [], [0, 0]
    for root, seen in views.items():
        inputs.append(next(iter(seen)) if len(seen) == 1 else root)
        for side in (0, 1):
            (whole,) = _specs(split, (root,), side)
            read = sum(spec.storage_bytes for spec in _specs(split, seen, side))
            total[side] += min(read + looked_up.get(root, (0, 0))[side], whole.storage_bytes)
    return tuple(inputs), (total[0], total[1])


def _outputs(split: SplitGraph, grouping: Grouping, number: int) -> tuple[int, ...]:
    """The last value written of each storage that others read, or else of the last part."""
    kernel = grouping.kernels[number]
    last = {split.roots[value]: value for part in kernel.parts for value in part.writes}
    found = [value for root, value in last.items() if grouping.escapes(number, root)]
    return tuple(found) or kernel.placed[kernel.last].writes


@dataclass(slots=True, init=False)
class _Kept:
    """The values that a fused graph still has, numbered anew."""

    number: dict[int, int]
    values: tuple[Value, ...]

    def __init__(self, split: SplitGraph, ops: list[Op], parameters: list[Parameter]) -> None:
        used = {value for op in ops for value in (*op.inputs, *op.outputs)}
        used |= {p.gradient for p in parameters if p.gradient is not None}
        used |= {index for index, v in enumerate(split.values) if v.kind != "activation"}
        self.number = {value: index for index, value in enumerate(sorted(used))}
        owner: dict[int, int] = {}
        values = []
        for value in sorted(used):
            root = split.roots[value]
            base = owner.setdefault(root, value)
            base_number = None if base == value else self.number[base]
            values.append(replace(split.values[value], base=base_number))
        self.values = tuple(values)

    def op(self, op: Op) -> Op:
        """The operator, with its values by their new numbers; what no longer exists is not held."""
        inputs, outputs = (tuple(self.number[v] for v in ends) for ends in (op.inputs, op.outputs))
        holds = tuple(self.number[v] for v in op.holds if v in self.number)
        return replace(op, inputs=inputs, outputs=outputs, holds=holds)

"""Split operators into the parts that a compiler fuses, and choose which values it recomputes.

Inductor lowers layer norm, batch norm, softmax and their gradients to sums and to pointwise work
that uses them (torch/_decomp/decompositions.py, torch/_inductor/decomposition.py); what it calls as
a library's kernel (matmuls, convolutions, attention, recurrent layers) or compiles by itself
(pooling, scatters, sorts) stays whole.

As torch's partitioner does (torch/_functorch/partitioners.py, solve_min_cut): the saved values are
the cheapest cut between what cannot be repeated and what the backward pass reads. A value weighs
its bytes, twice if nothing but fused kernels read it (it could stay unwritten), and more the
further it is from the backward pass.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from estimator.graph.costs.call_costs import FusedFamily, family_of, op_cost
from estimator.graph.costs.registry import argument, formula_of, item_bytes
from estimator.graph.ir.collectives import is_collective
from estimator.graph.ir.op_graph import OpGraph, unit_path
from estimator.graph.ir.ops import Op, OpCost, Phase, Value, gives_views
from estimator.graph.ir.structure import value_roots
from estimator.tensors import TensorSpec

PartKind = Literal["pointwise", "row", "across", "whole"]
Sizes = tuple[int, int]

# Of the work of an operator that sums before it applies its sums: half is summing.
_SUMMED_RATIO = 0.5
_LOOKUPS = ("embedding", "index", "index_select", "gather", "take", "take_along_dim")
_RANDOM = (
    *("bernoulli", "exponential", "normal", "rand", "rand_like", "randint", "randn"),
    *("randn_like", "randperm", "uniform", "native_dropout"),
)
_SCANS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "median", "nanmedian")
# A sum over this many elements that gives fewer rows than a GPU can share is cut into pieces
# (torch/_inductor/choices.py, reduction_split_factor), and then nothing after it can be fused.
_LONG_ROW, _FEW_ROWS = 8192, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPart:
    """A part of op `op` of a graph, with its sizes at both batch sizes.

    It reads and writes `values`. A "row" part sums along memory, so that what is computed from its
    `rows` sums can follow in the same kernel; an "across" part gives sums that are only known once
    the whole kernel is done. `elements` are those that it walks over; of tables in `looked_up` only
    as many bytes are read. A `block` is compiled by itself.
    """

    op: int
    phase: Phase
    kind: PartKind
    family: FusedFamily = "elementwise"
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    elements: Sizes = (0, 0)
    rows: Sizes = (1, 1)
    flops: tuple[float, float] = (0.0, 0.0)
    looked_up: tuple[tuple[int, Sizes], ...] = ()
    can_repeat: bool = False
    ends_fusion: bool = False
    block: str = ""


@dataclass(slots=True)
class SplitGraph:
    """The parts of a graph in issue order; `values` are the graph's, then those between parts.

    `roots` is for each value the one whose storage it shares.
    """

    graph: OpGraph
    values: list[Value]
    roots: list[int]
    parts: list[KernelPart] = field(default_factory=list)

    def new_value(self, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
        """A float32 value that passes between parts of one operator."""
        one, two = (TensorSpec(shape) for shape in shapes)
        self.values.append(Value(spec=one, other_spec=two, kind="activation"))
        self.roots.append(len(self.values) - 1)
        return self.roots[-1]

    def new_copy(self, value: int) -> int:
        """A value like another one, in memory of its own."""
        self.values.append(replace(self.values[value], kind="activation", base=None))
        self.roots.append(len(self.values) - 1)
        return self.roots[-1]

    def reads(self, part: KernelPart) -> set[int]:
        """The storages that a part reads."""
        return {self.roots[value] for value in part.reads}

    def writes(self, part: KernelPart) -> set[int]:
        """The storages that a part writes."""
        return {self.roots[value] for value in part.writes}

    def size_bytes(self, root: int) -> int:
        """Bytes of a storage at the traced batch size."""
        return self.values[root].spec.storage_bytes


def split_graph(graph: OpGraph, *, blocks_only: bool = False) -> SplitGraph:
    """Every operator of the graph as parts; views have none, a compiler reads through them.

    With `blocks_only` what is outside all repeated blocks stays whole.
    """
    split = SplitGraph(graph, list(graph.values), value_roots(graph))
    written = Counter(r for op in graph.ops if not _is_view(op) for r in _roots(split, op.outputs))
    sharing: defaultdict[int, list[int]] = defaultdict(list)
    for value, root in enumerate(split.roots):
        sharing[root].append(value)
    found: dict[tuple[object, ...], tuple[int, ...]] = {}
    for index, op in enumerate(graph.ops):
        if _is_view(op):
            continue
        block = unit_path(op.module) if blocks_only else ""
        parts = [_whole(index, op)] if blocks_only and not block else _parts(split, index, op)
        parts = [replace(part, block=block) for part in parts] if block else parts
        outputs = _roots(split, op.outputs)
        if all(part.can_repeat and written[root] == 1 for part in parts for root in outputs):
            # What is computed twice from the same values is computed once (_inductor/fx_passes and
            # torch/_functorch/compile_utils.py, fx_graph_cse): autocast casts one input often.
            key = op.phase, op.call, _roots(split, op.inputs), block
            same = found.setdefault(key, outputs)
            if same != outputs:
                for root, other in zip(outputs, same, strict=True):
                    for value in sharing[root]:
                        split.roots[value] = other
                continue
        split.parts.extend(parts)
    return split


def _is_view(op: Op) -> bool:
    # A collective runs no kernel of its own either, but makes what was not there.
    return (op.is_view and not is_collective(op.call)) or gives_views(op.call.target)


def _roots(split: SplitGraph, values: Sequence[int]) -> tuple[int, ...]:
    return tuple(split.roots[value] for value in values)


def _whole(index: int, op: Op) -> KernelPart:
    return KernelPart(op=index, phase=op.phase, kind="whole", reads=op.inputs, writes=op.outputs)


def _parts(split: SplitGraph, index: int, op: Op) -> list[KernelPart]:
    family, name = family_of(op.call.target), _name(op)
    whole = _whole(index, op)
    is_library = op.call.target.startswith(("te.", "eager."))
    if not op.outputs or is_library or op_cost(op.call) == OpCost():
        return [whole]
    rule = _RULES.get(family)
    if family == "index" and name in _LOOKUPS:
        rule = _lookup
    return [whole] if rule is None else rule(split, whole, op)


def _name(op: Op) -> str:
    return op.call.name.rstrip("_")


def _flops(op: Op, share_ratio: float = 1.0) -> tuple[float, float]:
    one, two = (op_cost(call) or OpCost() for call in op.calls)
    return share_ratio * one.flops, share_ratio * two.flops


def _most(op: Op) -> Sizes:
    """Elements of the largest tensor that a call writes or reads."""
    one, two = (max(s.numel for s in (*call.outputs, *call.inputs)) for call in op.calls)
    return one, two


def _written(op: Op) -> Sizes:
    one, two = (max(spec.numel for spec in call.outputs) for call in op.calls)
    return one, two


def _part(whole: KernelPart, op: Op, kind: PartKind = "pointwise", **changes: Any) -> KernelPart:
    """All work of an operator, on each element that it writes, but for some changes."""
    own = {"kind": kind, "elements": _written(op), "flops": _flops(op), **changes}
    return replace(whole, **own)


def _pointwise(split: SplitGraph, whole: KernelPart, op: Op) -> list[KernelPart]:
    name, family = _name(op), family_of(op.call.target)
    if name == "native_dropout":
        return _dropout(whole, op)
    in_place = any(split.graph.values[value].base is not None for value in op.outputs)
    reads = op.inputs[1:] if name == "copy" and in_place else op.inputs
    cost = op_cost(op.call)
    if family == "fill" and (cost is None or cost.read_bytes == 0):
        reads = ()
    # torch/_functorch/partitioners.py, is_fusible: a cat starts no fusion.
    ends_fusion, can_repeat = name in ("cat", "stack"), not in_place and name not in _RANDOM
    return [_part(whole, op, reads=reads, can_repeat=can_repeat, ends_fusion=ends_fusion)]


def _dropout(whole: KernelPart, op: Op) -> list[KernelPart]:
    """The mask is drawn once and kept; what it is applied to can be applied again."""
    result, mask = op.outputs
    drawn = _part(whole, op, reads=(), writes=(mask,))
    applied = replace(drawn, reads=(*op.inputs, mask), writes=(result,), can_repeat=True)
    return [drawn, replace(applied, flops=(0.0, 0.0))]


def _lookup(split: SplitGraph, whole: KernelPart, op: Op) -> list[KernelPart]:
    one, two = (sum(spec.nbytes for spec in call.outputs) for call in op.calls)
    return [_part(whole, op, looked_up=((op.inputs[0], (one, two)),), can_repeat=True)]


def _reduction(split: SplitGraph, whole: KernelPart, op: Op) -> list[KernelPart]:
    if _name(op) in _SCANS:
        return [whole]
    source, rows = op.call.inputs[0], _written(op)
    if source.numel == rows[0]:
        return [_part(whole, op, can_repeat=True)]
    kind = _direction(source, argument(op.call, 1, "dim", None), rows[0])
    return [_part(whole, op, kind, family="reduction", elements=_most(op), rows=rows)]


def _direction(source: TensorSpec, over: object, rows: int) -> PartKind:
    """ "row" where the last dimensions are summed, in rows that fit one block of threads."""
    listed = over if isinstance(over, tuple) else (over,)
    summed = {dim % len(source.shape) for dim in listed if isinstance(dim, int) and source.shape}
    last = set(range(len(source.shape) - len(summed), len(source.shape)))
    if not summed or summed != last or _is_cut(rows, source.numel):
        return "across"
    return "row"


def _is_cut(rows: int, elements: int) -> bool:
    return rows < _FEW_ROWS and elements > rows * _LONG_ROW


def _softmax(split: SplitGraph, whole: KernelPart, op: Op) -> list[KernelPart]:
    """The sums of each row, then what uses them; the gradient likewise."""
    if "masked" in op.call.target:
        return [whole]
    dim = argument(op.call, 2 if "backward" in op.call.target else 1, "dim", -1)
    kind = _direction(op.call.inputs[0], dim, _rows(op)[0])
    summed = replace(whole, kind=kind, family="softmax", writes=())
    return _summed_and_applied(split, op, summed, op.inputs, op.outputs)


def _rows(op: Op) -> Sizes:
    formula = formula_of(op.call.target)
    dims = [formula.dims(call) if formula else (1.0,) for call in op.calls]
    return round(dims[0][0]), round(dims[1][0])


def _summed_and_applied(
    split: SplitGraph, op: Op, summed: KernelPart, used: Sequence[int], applied: tuple[int, ...]
) -> list[KernelPart]:
    """The part that sums (into a new value, if it has none), and what uses sums and values."""
    rows = _rows(op)
    sums = summed.writes or (split.new_value(((rows[0], 2), (rows[1], 2))),)
    summed = replace(
        summed, writes=sums, elements=_most(op), rows=rows, flops=_flops(op, _SUMMED_RATIO)
    )
    pointwise = KernelPart(
        op=summed.op,
        phase=summed.phase,
        kind="pointwise",
        reads=(*used, *sums),
        writes=applied,
        elements=summed.elements,
        flops=summed.flops,
        can_repeat=True,
    )
    return [summed, pointwise]


def _normalization(split: SplitGraph, whole: KernelPart, op: Op) -> list[KernelPart]:
    name = _name(op)
    if "weight_norm" in name:
        return [whole]
    is_batch = "batch_norm" in name
    kind: PartKind = "across" if is_batch or _is_cut(_rows(op)[0], _most(op)[0]) else "row"
    big = _most(op)[0]
    applied = tuple(v for v in op.outputs if split.values[v].spec.numel == big)
    rest = tuple(value for value in op.outputs if value not in applied)
    summed = replace(whole, kind=kind, family="normalization", writes=())
    if "backward" in name:
        return _normalization_backward(split, op, summed, applied, rest, is_batch=is_batch)
    if "no_training" in name or argument(op.call, 5, "training", True) is False:
        return [_part(whole, op, elements=_most(op), can_repeat=True)]
    # Image, scale and shift are applied; running statistics are only written.
    summed = replace(summed, reads=op.inputs[:1], writes=(*rest, *applied[1:]))
    return _summed_and_applied(split, op, summed, op.inputs[:3], applied[:1])


def _normalization_backward(
    split: SplitGraph,
    op: Op,
    summed: KernelPart,
    applied: tuple[int, ...],
    rest: tuple[int, ...],
    *,
    is_batch: bool,
) -> list[KernelPart]:
    """Two sums give the input's gradient; a batch norm's are those of its scale and shift."""
    # cuDNN's reserve space is of no use to another kernel.
    used = tuple(v for v in op.inputs if split.values[v].spec.dtype != "uint8")
    summed = replace(summed, reads=used, writes=rest if is_batch else ())
    if not applied:
        return [replace(summed, writes=rest, elements=_most(op), rows=_rows(op), flops=_flops(op))]
    found = _summed_and_applied(split, op, summed, used, applied)
    if rest and not is_batch:
        one, two = (most // max(row, 1) for most, row in zip(_most(op), _rows(op), strict=True))
        found.append(replace(found[0], kind="across", writes=rest, rows=(one, two)))
    return found


def _loss(split: SplitGraph, whole: KernelPart, op: Op) -> list[KernelPart]:
    """The gradient is pointwise; the loss is one sum, of a likelihood the scores looked up."""
    name = _name(op)
    if "ctc" in name or "multilabel" in name:
        return [whole]
    if name.startswith("nll_loss") and "backward" not in name:
        return _likelihood(split, whole, op)
    rows, most = _written(op), _most(op)
    if rows[0] < most[0]:
        return [_part(whole, op, "across", family="reduction", elements=most, rows=rows)]
    # The gradient of a likelihood knows the scores by their shape alone.
    reads = tuple(v for i, v in enumerate(op.inputs) if not (name.startswith("nll") and i == 1))
    return [_part(whole, op, reads=reads, can_repeat=True)]


def _likelihood(split: SplitGraph, whole: KernelPart, op: Op) -> list[KernelPart]:
    scores, targets = op.inputs[:2]
    one, two = split.values[targets].specs
    counts, item = (one.numel, two.numel), item_bytes(split.values[scores].spec)
    picked = split.new_value((one.shape, two.shape))
    looked_up = ((scores, (int(one.numel * item), int(two.numel * item))),)
    first = _part(whole, op, writes=(picked,), elements=counts, flops=(0.0, 0.0), can_repeat=True)
    first = replace(first, looked_up=looked_up)
    summed = _part(whole, op, "across", family="reduction", reads=(picked,), elements=counts)
    return [first, summed]


_RULES: dict[str, Callable[[SplitGraph, KernelPart, Op], list[KernelPart]]] = {
    "elementwise": _pointwise,
    "copy": _pointwise,
    "fill": _pointwise,
    "reduction": _reduction,
    "softmax": _softmax,
    "normalization": _normalization,
    "loss": _loss,
}


_PER_STEP_AWAY, _MOST_STEPS_AWAY = 1.1, 100
_LONGEST_CHAIN = 100
# scipy's flows are 32-bit: all finite capacities together are scaled to this.
_WHOLE_CAPACITY = 1 << 30


def with_recomputation(split: SplitGraph) -> list[KernelPart]:
    """The parts, with a copy of each that is computed again before its first backward reader."""
    uses = _Uses(split)
    saved = _cheapest_cut(split, uses)
    again: dict[int, int] = {}
    found: list[KernelPart] = []
    for part in split.parts:
        if part.phase == "backward" and part.kind != "whole":
            for maker in _wanted(split, uses, saved, part, again):
                found.append(_repeated(split, split.parts[maker], again))
            part = _reading_again(split, part, again)
        found.append(part)
    return found


def _wanted(
    split: SplitGraph, uses: _Uses, saved: set[int], part: KernelPart, again: Mapping[int, int]
) -> list[int]:
    """The forward parts to run again for what a part reads that is not saved, in their order."""
    makers: set[int] = set()
    ahead = list(split.reads(part))
    while ahead:
        root = ahead.pop()
        maker = uses.maker.get(root)
        if maker is None or root in saved or root in again or not uses.can_repeat[maker]:
            continue
        if maker not in makers:
            makers.add(maker)
            ahead.extend(split.reads(split.parts[maker]))
    return sorted(makers)


def _repeated(split: SplitGraph, part: KernelPart, again: dict[int, int]) -> KernelPart:
    reading = _reading_again(split, part, again)
    for root in sorted(split.writes(part)):
        again[root] = split.new_copy(root)
    writes = tuple(again[split.roots[value]] for value in part.writes)
    return replace(reading, phase="backward", writes=writes)


def _reading_again(split: SplitGraph, part: KernelPart, again: Mapping[int, int]) -> KernelPart:
    instead = {value: again.get(split.roots[value], value) for value in part.reads}
    looked_up = tuple((instead.get(value, value), size) for value, size in part.looked_up)
    reads = tuple(instead[value] for value in part.reads)
    return replace(part, reads=reads, looked_up=looked_up)


class _Uses:
    """Who makes and reads each storage, by index into the parts, and what may be repeated."""

    def __init__(self, split: SplitGraph) -> None:
        self.maker: dict[int, int] = {}
        self.readers: defaultdict[int, list[int]] = defaultdict(list)
        self.backward: set[int] = set()
        self.materialised: set[int] = set()
        in_backward: set[int] = set()
        rewritten: set[int] = set()
        for index, part in enumerate(split.parts):
            if part.kind == "whole":
                self.materialised |= split.reads(part) | split.writes(part)
            for root in split.reads(part):
                if part.phase == "backward":
                    self.backward.add(root)
                    if part.kind == "whole":
                        in_backward.add(root)
                else:
                    self.readers[root].append(index)
            if part.phase == "forward":
                for root in split.writes(part):
                    rewritten.update({root} & self.maker.keys())
                    self.maker[root] = index
        apart = self._used_far_apart(split) | self._ends_of_long_chains(split)
        self.can_repeat = [
            part.can_repeat
            and part.phase == "forward"
            and index not in apart
            # What a matmul or convolution reads must be in memory anyway.
            and not split.writes(part) & (in_backward | rewritten)
            for index, part in enumerate(split.parts)
        ]

    def _used_far_apart(self, split: SplitGraph) -> set[int]:
        """Parts that read a value beyond the first unfusible operator that depends on it."""
        never = len(split.parts)
        first_whole = [never] * never
        apart: set[int] = set()
        for index in range(never - 1, -1, -1):
            part = split.parts[index]
            if part.phase == "backward":
                continue
            if part.kind == "whole":
                first_whole[index] = index
                continue
            ahead = [first_whole[r] for root in split.writes(part) for r in self.readers[root]]
            first_whole[index] = min(ahead, default=never)
        for readers in self.readers.values():
            limit = min((first_whole[reader] for reader in readers), default=never)
            apart.update(reader for reader in readers if reader > limit)
        return apart

    def _ends_of_long_chains(self, split: SplitGraph) -> set[int]:
        """Parts that a chain of pointwise work reaches only after many others (recurrences)."""
        ends: set[int] = set()
        visited: set[int] = set()
        for start, part in enumerate(split.parts):
            ahead = [start] if part.phase == "forward" and part.kind != "whole" else []
            while ahead:
                index = heapq.heappop(ahead)
                if index in visited:
                    continue
                visited.add(index)
                if index > start + _LONGEST_CHAIN and not ahead:
                    ends.add(index)
                    break
                for root in split.writes(split.parts[index]):
                    for reader in self.readers[root]:
                        if split.parts[reader].kind != "whole":
                            heapq.heappush(ahead, reader)
        return ends


def _cheapest_cut(split: SplitGraph, uses: _Uses) -> set[int]:
    """Storages of the forward pass to save, so that all that backward reads can be had again."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    number = {root: index for index, root in enumerate(sorted(uses.maker))}
    source, sink, nodes = 2 * len(number), 2 * len(number) + 1, 2 * len(number) + 2
    weights = _weights(split, uses)
    scale = _WHOLE_CAPACITY / max(sum(weights.values()), 1.0)
    edges: dict[tuple[int, int], int] = {}
    for root, index in number.items():
        edges[2 * index, 2 * index + 1] = int(weights[root] * scale) + 1
        maker = uses.maker[root]
        if not uses.can_repeat[maker]:
            edges[source, 2 * index] = 2 * _WHOLE_CAPACITY - 1
        for read in split.reads(split.parts[maker]) if uses.can_repeat[maker] else ():
            if read in number:
                edges[2 * number[read] + 1, 2 * index] = 2 * _WHOLE_CAPACITY - 1
        if root in uses.backward:
            edges[2 * index + 1, sink] = 2 * _WHOLE_CAPACITY - 1
    if not edges:
        return set()
    ends = np.array(list(edges), dtype=np.int32)
    capacity = csr_array(
        (np.array(list(edges.values()), dtype=np.int32), (ends[:, 0], ends[:, 1])),
        shape=(nodes, nodes),
    )
    flow = maximum_flow(capacity, source, sink).flow
    left = csr_array((capacity - flow) > 0)
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return {
        root
        for root, index in number.items()
        if 2 * index in reached and 2 * index + 1 not in reached
    }


def _weights(split: SplitGraph, uses: _Uses) -> dict[int, float]:
    away: dict[int, int] = {}
    for index in range(len(split.parts) - 1, -1, -1):
        part = split.parts[index]
        if part.phase == "forward":
            for root in split.writes(part):
                after = [
                    away.get(written, _MOST_STEPS_AWAY) + 1
                    for reader in uses.readers[root]
                    for written in split.writes(split.parts[reader])
                ]
                near = 1 if root in uses.backward else _MOST_STEPS_AWAY
                away[root] = min([near, *after])
    return {
        root: split.size_bytes(root)
        * (1 if root in uses.materialised else 2)
        * _PER_STEP_AWAY ** min(away[root], _MOST_STEPS_AWAY)
        for root in uses.maker
    }

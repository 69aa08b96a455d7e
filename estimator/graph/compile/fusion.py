"""Turn a traced graph into what torch.compile makes of it: fewer kernels, fewer values.

Follows torch's default backend, Inductor, at its default settings: pointwise work, sums and
normalisations are fused, cheap forward values are computed again in the backward pass instead of
being saved, library kernels stay. Read off its rules, not off its output: no compiler runs here.

Parts that share data are fused where they walk over the same elements, where no kernel between them
would have to wait for itself, and where what is summed is known in time
(torch/_inductor/scheduler.py, can_fuse; codegen/simd.py). Inductor scores pairs; here each part, in
issue order, joins the kernel with which it shares most bytes, and brings others it reads with it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from estimator.errors import ModelError
from estimator.graph.compile.parts import (
    KernelPart,
    PartKind,
    SplitGraph,
    split_graph,
    with_recomputation,
)
from estimator.graph.costs.call_costs import FusedFamily, FusedKernel
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Execution, Op, Parameter, Phase
from estimator.tensors import TensorSpec

# torch/_inductor/config.py: max_fusion_size; realize_reads_threshold; realize_opcount_threshold.
_MOST_PARTS, _MOST_INLINED_READS, _MOST_INLINED_PARTS = 64, 4, 30
# How many parts back a kernel may lie that another one joins.
_REACH = 200


@dataclass(slots=True)
class Kernel:
    """Parts that run as one kernel, by their place in issue order; a whole operator is alone.

    `reads` and `writes` are storages, `again` those written ones that another kernel makes too;
    `before` are the kernels whose results it needs.
    """

    kind: PartKind
    phase: Phase
    block: str
    elements: int
    rows: int
    placed: dict[int, KernelPart] = field(default_factory=dict)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)
    is_closed: bool = False

    @property
    def parts(self) -> list[KernelPart]:
        return [self.placed[index] for index in sorted(self.placed)]

    @property
    def first(self) -> int:
        return min(self.placed)

    @property
    def last(self) -> int:
        return max(self.placed)


class Grouping:
    """The kernels of a compiled step, each before those that need it, by number."""

    def __init__(self, split: SplitGraph, parts: Sequence[KernelPart]) -> None:
        self.split = split
        self.kernels: dict[int, Kernel] = {}
        self.readers: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._writer: dict[int, int] = {}
        self._merged: dict[int, int] = {}
        self._uses: defaultdict[int, int] = defaultdict(int)
        # What outlives the step's own readers: gradients, and what was there before the step.
        roots, gradients = split.roots, [p.gradient for p in split.graph.parameters]
        self._kept = {roots[gradient] for gradient in gradients if gradient is not None}
        self._kept |= {r for r in set(roots) if split.values[r].kind != "activation"}
        for part in parts:
            for root in split.reads(part):
                self._uses[root] += 1
        for index, part in enumerate(parts):
            self._place(index, part)
        for number in list(self.kernels):
            self._inline(number)

    def before(self, number: int) -> set[int]:
        """The kernels that have to run before this one."""
        earlier = {self._now(other) for other in self.kernels[number].before}
        return {other for other in earlier if other in self.kernels and other != number}

    def escapes(self, number: int, root: int) -> bool:
        """Whether a kernel has to bring a storage that it writes into memory."""
        if root in self.kernels[number].again:
            return False
        return root in self._kept or any(other != number for other in self.readers[root])

    def _now(self, number: int) -> int:
        while number in self._merged:
            number = self._merged[number]
        return number

    # Placing

    def _place(self, index: int, part: KernelPart) -> None:
        reads, writes = self.split.reads(part), self.split.writes(part)
        needed = {self._writer[root] for root in reads | writes if root in self._writer}
        for root in writes:  # written again: after all that read the old content
            needed.update(self.readers[root])
        number = self._best(index, part, needed) if part.kind != "whole" else None
        if number is None:
            number = len(self.kernels) + len(self._merged)
            sizes = part.elements[0], part.rows[0]
            self.kernels[number] = Kernel(part.kind, part.phase, part.block, *sizes)
        self._join(number, index, part, needed)
        if part.kind == "pointwise":
            for other in sorted(needed - {number}):
                if self._can_merge(number, other):
                    self._merge(number, other)

    def _join(self, number: int, index: int, part: KernelPart, needed: set[int]) -> None:
        kernel = self.kernels[number]
        kernel.placed[index] = part
        kernel.elements = max(kernel.elements, part.elements[0])
        if part.kind != "pointwise" and kernel.kind == "pointwise":
            kernel.kind, kernel.rows = part.kind, part.rows[0]
        kernel.is_closed = kernel.is_closed or part.ends_fusion
        kernel.before |= needed - {number}
        for root in self.split.reads(part):
            kernel.reads.add(root)
            self.readers[root][number] = None
        for root in self.split.writes(part):
            kernel.writes.add(root)
            self._writer[root] = number

    def _best(self, index: int, part: KernelPart, needed: set[int]) -> int | None:
        reads = self.split.reads(part)
        near = needed | {number for root in reads for number in list(self.readers[root])[-3:]}
        best, most = None, 0
        for number in sorted(near):
            kernel = self.kernels[number]
            shared = reads & (kernel.reads | kernel.writes)
            score = sum(self.split.size_bytes(root) for root in shared)
            if score <= most or index - kernel.last > _REACH or not self._can_join(kernel, part):
                continue
            if not self._is_before(number, needed):
                best, most = number, score
        return best

    def _is_before(self, number: int, needed: set[int]) -> bool:
        """Whether another kernel among those needed comes after this one itself."""
        first, met = self.kernels[number].first, {number}
        ahead = list(needed - {number})
        while ahead:
            other = ahead.pop()
            if other not in met and self.kernels[other].last >= first:
                met.add(other)
                earlier = self.before(other)
                if number in earlier:
                    return True
                ahead.extend(earlier)
        return False

    def _can_join(self, kernel: Kernel, part: KernelPart) -> bool:
        full = len(kernel.placed) >= _MOST_PARTS
        if kernel.kind == "whole" or kernel.is_closed or kernel.phase != part.phase or full:
            return False
        if kernel.block != part.block:
            return False
        elements = part.elements[0]
        if kernel.kind == "row":
            if part.kind == "pointwise":
                return elements in (kernel.elements, kernel.rows)
            return part.kind == "row" and (elements, part.rows[0]) == (kernel.elements, kernel.rows)
        if kernel.kind == "across":
            parts = kernel.placed.values()
            sums = {r for p in parts if p.kind == "across" for r in self.split.writes(p)}
            after = bool(sums & self.split.reads(part))
            if part.kind == "pointwise":
                return elements == (kernel.rows if after else kernel.elements)
            same = (elements, part.rows[0]) == (kernel.elements, kernel.rows)
            return part.kind == "across" and same and not after
        # A sum across is cut into pieces, which walk in an order of their own; a smaller producer
        # is computed again for each element. Both need that nothing else reads what is fused.
        if part.kind == "across" or elements > kernel.elements:
            return elements >= kernel.elements and self._is_all_that_reads(kernel, part)
        return elements == kernel.elements

    def _is_all_that_reads(self, kernel: Kernel, part: KernelPart) -> bool:
        if kernel.writes & self._kept:
            return False
        parts = (*kernel.placed.values(), part)
        own = sum(len(self.split.reads(part) & kernel.writes) for part in parts)
        return own == sum(self._uses[root] for root in kernel.writes)

    def _can_merge(self, number: int, other: int) -> bool:
        """Whether a kernel whose result the last part read can become part of its kernel."""
        one, two = self.kernels[number], self.kernels[other]
        alike = two.kind == "pointwise" and one.kind in ("pointwise", "row")
        full = len(one.placed) + len(two.placed) > _MOST_PARTS
        if not alike or full or two.is_closed or (one.phase, one.block) != (two.phase, two.block):
            return False
        if one.elements != two.elements or one.last - two.last > _REACH:
            return False
        return not (
            self._is_before(other, self.before(number) - {other})
            or self._is_before(number, self.before(other) - {number})
        )

    def _merge(self, number: int, other: int) -> None:
        one, two = self.kernels[number], self.kernels.pop(other)
        one.placed |= two.placed
        one.reads |= two.reads
        one.writes |= two.writes
        one.before |= two.before
        self._merged[other] = number
        for root in two.reads:
            self.readers[root].pop(other, None)
            self.readers[root][number] = None
        for root in two.writes:
            if self._writer[root] == other:
                self._writer[root] = number

    # Inlining

    def _inline(self, number: int) -> None:
        """Compute pointwise values again in each kernel that reads them, written nowhere.

        torch/_inductor/ir.py, mark_reuse: what one operator uses, or what few reads make, is not
        brought into memory.
        """
        kernel = self.kernels[number]
        if kernel.kind == "whole":
            return
        for root in sorted(kernel.writes - kernel.again - self._kept):
            readers = [other for other in self.readers[root] if other != number]
            take_it = all(
                other.kind != "whole"
                and (other.phase, other.block) == (kernel.phase, kernel.block)
                and len(other.placed) < _MOST_PARTS
                for other in map(self.kernels.__getitem__, readers)
            )
            if not readers or not take_it:
                continue
            chain = self._chain(kernel, root)
            if not self._can_inline(chain, root, readers):
                continue
            for reader in readers:
                self._copy_into(reader, chain)
                self.readers[root].pop(reader, None)
        self._drop_unused(number)

    def _chain(self, kernel: Kernel, root: int) -> dict[int, KernelPart]:
        """The parts of a kernel that compute a storage from what the kernel reads."""
        wanted, chain = {root}, {}
        for index in sorted(kernel.placed, reverse=True):
            part = kernel.placed[index]
            if wanted & self.split.writes(part):
                chain[index] = part
                wanted |= self.split.reads(part)
        return chain

    def _outside(self, chain: dict[int, KernelPart]) -> set[int]:
        made = {written for part in chain.values() for written in self.split.writes(part)}
        return {read for part in chain.values() for read in self.split.reads(part)} - made

    def _can_inline(self, chain: dict[int, KernelPart], root: int, readers: Sequence[int]) -> bool:
        if len(chain) > (_MOST_INLINED_PARTS if self._uses[root] > 1 else _MOST_PARTS):
            return False
        if not all(part.can_repeat for part in chain.values()):
            return False
        if self._uses[root] > 1 and len(self._outside(chain)) > _MOST_INLINED_READS:
            return False
        elements = max((part.elements[0] for part in chain.values()), default=0)
        return all(self.kernels[reader].elements >= elements for reader in readers)

    def _copy_into(self, number: int, chain: dict[int, KernelPart]) -> None:
        kernel = self.kernels[number]
        for index, part in chain.items():
            if index not in kernel.placed:
                kernel.placed[index] = part
                kernel.again |= self.split.writes(part)
        kernel.writes |= kernel.again
        for read in self._outside(chain):
            kernel.reads.add(read)
            self.readers[read][number] = None
            if read in self._writer:
                kernel.before.add(self._writer[read])

    def _drop_unused(self, number: int) -> None:
        """Leave out parts whose results are only computed elsewhere; drop a kernel without any."""
        kernel = self.kernels[number]
        wanted = {root for root in kernel.writes if self.escapes(number, root)}
        final = self.split.writes(kernel.placed[kernel.last])
        if not any(self._uses[root] for root in final):
            wanted |= final
        used: set[int] = set()
        for index in sorted(kernel.placed, reverse=True):
            part = kernel.placed[index]
            if wanted & self.split.writes(part):
                wanted |= self.split.reads(part)
                used |= self.split.reads(part)
            else:
                del kernel.placed[index]
        for root in kernel.reads - used:
            self.readers[root].pop(number, None)
        kernel.reads = used
        if not kernel.placed:
            del self.kernels[number]


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
    assumed = (COMPILED_ASSUMPTION, *((CUDA_GRAPHS_ASSUMPTION,) * (execution == "cuda-graphs")))
    fused = _rebuilt(split, grouping)
    return replace(fused, execution=execution, assumptions=(*graph.assumptions, *assumed))


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
    # The values that there still are, numbered anew; what no longer exists is not held.
    used = {value for op in ops for value in (*op.inputs, *op.outputs)}
    used |= {p.gradient for p in parameters if p.gradient is not None}
    used |= {index for index, v in enumerate(split.values) if v.kind != "activation"}
    place = {value: index for index, value in enumerate(sorted(used))}
    owner: dict[int, int] = {}
    bases = [owner.setdefault(split.roots[value], value) for value in place]

    def numbered(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(place[value] for value in values if value in place)

    return replace(
        graph,
        ops=tuple(
            replace(
                op,
                inputs=numbered(op.inputs),
                outputs=numbered(op.outputs),
                holds=numbered(op.holds),
            )
            for op in ops
        ),
        values=tuple(
            replace(split.values[value], base=None if base == value else place[base])
            for value, base in zip(place, bases, strict=True)
        ),
        parameters=tuple(
            replace(p, gradient=None if p.gradient is None else place[p.gradient])
            for p in parameters
        ),
        inputs=tuple(replace(i, value=place[i.value]) for i in graph.inputs),
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
        kind = source.call.name
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
    return tuple(split.values[value].specs[side] for value in values)


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
            (spec_of_root,) = _specs(split, (root,), side)
            read = sum(spec.storage_bytes for spec in _specs(split, seen, side))
            total[side] += min(read + looked_up.get(root, (0, 0))[side], spec_of_root.storage_bytes)
    return tuple(inputs), (total[0], total[1])


def _outputs(split: SplitGraph, grouping: Grouping, number: int) -> tuple[int, ...]:
    """The last value written of each storage that others read, or else of the last part."""
    kernel = grouping.kernels[number]
    last = {split.roots[value]: value for part in kernel.parts for value in part.writes}
    values = [value for root, value in last.items() if grouping.escapes(number, root)]
    return tuple(values) or kernel.placed[kernel.last].writes

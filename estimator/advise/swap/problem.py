"""Lay a step out as what a plan of memory needs: operators in order, tensors, the host link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from estimator.elementwise import Array, Sizes
from estimator.errors import ProfileError, WorkloadError
from estimator.estimates.estimate import Estimate
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.ir.ops import Op
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.sizes import StepTensors, block_bytes, rounded_bytes, trained_tensors
from estimator.machines.profile import Link, LinkKind, MachineProfile
from estimator.timeline.rank.program import StepProgram
from estimator.workload.optimizers import RULES, state_sizes


class UpdateSlice(NamedTuple):
    """The update of one slice of a parameter, which comes after op `after` of the graph."""

    after: int
    parameter: int
    size_bytes: int


def updated_at_the_end(
    structure: GraphStructure, parameter_of: dict[int, int], op_ends_s: Array
) -> list[UpdateSlice]:
    """Whole parameters after the last op, as torch updates them.

    `parameter_of` are the storages of parameters, `op_ends_s` when each op ends.
    """
    graph, block = structure.graph, block_bytes(structure.graph)
    last = len(graph.ops) - 1
    return [
        UpdateSlice(last, number, rounded_bytes(parameter.spec.nbytes, block))
        for number, parameter in enumerate(graph.parameters)
        if parameter.gradient is not None
    ]


# When the parameters of a step are updated, and how much of one at once.
Updates = Callable[[GraphStructure, dict[int, int], Array], Sequence[UpdateSlice]]

TensorKind = Literal["parameter", "gradient", "state", "activation"]

# What draws random numbers gives others when it runs again.
_RANDOM = ("dropout", "bernoulli", "rand", "normal", "uniform", "multinomial", "exponential")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One piece of memory that a plan may move: held from op `born` to op `dies`, both included.

    `accesses` are the ops that read or write it, in order, `writers` those that write it. What is
    there before the step has `born` -1 and is held across steps. `value` is the graph's value that
    owns it, -1 for a parameter that no value stands for or for optimizer state; `name` that of the
    parameter to which it belongs.
    """

    number: int
    kind: TensorKind
    size_bytes: int
    born: int
    dies: int
    accesses: tuple[int, ...]
    writers: tuple[int, ...]
    value: int = -1
    name: str = ""

    @property
    def is_standing(self) -> bool:
        return self.born < 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwapProblem:
    """A step whose memory is to be planned.

    Op i takes `op_s[i]`, holds `workspace_bytes[i]` beside its tensors and reads and writes the
    tensors with these numbers. `repeatable` says which ops may run again. `fixed_bytes` is what no
    plan moves; `d2h` and `h2d` are the host link, one transfer at a time in each direction. Op i is
    the graph's op `order[i]`, -1 for the update of one parameter or slice. `plain_bytes` is the
    peak of the step with its updates at the end, where here they are elsewhere.
    """

    op_s: Array
    tensors: tuple[PlannedTensor, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    repeatable: tuple[bool, ...]
    workspace_bytes: Sizes
    fixed_bytes: int
    d2h: Link
    h2d: Link
    order: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    plain_bytes: int | None = None
    _known: dict[str, Sizes] = field(default_factory=dict, repr=False)

    @property
    def ops(self) -> int:
        return len(self.op_s)

    @property
    def vanilla_s(self) -> float:
        """Seconds of the step without a plan."""
        return float(self.op_s.sum())

    def levels(self) -> Sizes:
        """Bytes held during each op without a plan."""
        if "levels" not in self._known:
            changes = np.zeros(self.ops + 1, dtype=np.int64)
            for tensor in self.tensors:
                changes[max(tensor.born, 0)] += tensor.size_bytes
                changes[min(tensor.dies, self.ops - 1) + 1] -= tensor.size_bytes
            held = np.cumsum(changes)[: self.ops] + self.workspace_bytes + self.fixed_bytes
            self._known["levels"] = held
        return self._known["levels"]

    @property
    def vanilla_bytes(self) -> int:
        """The peak of the step as torch runs it, without a plan."""
        return int(self.levels().max()) if self.plain_bytes is None else self.plain_bytes

    def born_bytes(self) -> Sizes:
        """What each op allocates of its own: its results and workspace."""
        if "born" not in self._known:
            born = self._known["born"] = self.workspace_bytes.copy()
            for tensor in self.tensors:
                if tensor.born >= 0:
                    born[tensor.born] += tensor.size_bytes
        return self._known["born"]


def swap_problem(
    answer: Estimate,
    *,
    d2h: Link | None = None,
    h2d: Link | None = None,
    updates: Updates = updated_at_the_end,
) -> SwapProblem:
    """The step of an estimate for one rank with one micro-batch.

    Every parameter is updated by itself, which then releases its gradient; `updates` say when. On a
    GPU they are those of torch's fused optimizers, which hold no temporaries. Links default to
    those of the machine. Raises WorkloadError, ProfileError.
    """
    plan = answer.plan
    if answer.ranks > 1 or answer.accumulation_steps > 1:
        raise WorkloadError(
            f"a plan of memory is made for one rank with one micro-batch, found {answer.ranks} "
            f"ranks and {answer.accumulation_steps} micro-batches; ask for 1x1 of the machine"
        )
    kind = plan.kinds[0]
    profile = kind.program.profile
    build = partial(
        _Builder,
        kind.program,
        update_s=kind.update.update_s(plan.share),
        d2h=d2h or host_link(profile, "d2h"),
        h2d=h2d or host_link(profile, "h2d"),
    )
    plain = build(updates=updated_at_the_end).problem()
    if updates is updated_at_the_end:
        return plain
    return replace(build(updates=updates).problem(), plain_bytes=plain.vanilla_bytes)


def host_link(profile: MachineProfile, kind: LinkKind) -> Link:
    """The fastest known link between a device and the host in one direction."""
    links = [link for link in profile.links if link.kind == kind]
    if not links:
        raise ProfileError(
            f"profile '{profile.name}' has no {kind} link; run 'estimator probe' on a machine with "
            "a GPU, or give the link"
        )
    return max(links, key=lambda link: link.bandwidth_bytes_per_s)


class _Builder:
    """Lists tensors and ops of one rank's step."""

    def __init__(
        self,
        program: StepProgram,
        *,
        update_s: float,
        d2h: Link,
        h2d: Link,
        updates: Updates,
    ) -> None:
        self.bound: BoundGraph = program.bound
        self.graph: OpGraph = program.bound.graph
        self.links = d2h, h2d
        self.structure = GraphStructure.of(self.graph)
        threads = program.profile.devices[0].threads
        self.held = StepTensors(self.bound, self.structure, threads)
        ends_s = program.lanes.ends_s(0)
        self.op_s = np.diff(ends_s, prepend=0.0)
        self.update_s = update_s
        self.parameter_of = self._parameter_of()
        self.order = self._order(updates(self.structure, self.parameter_of, ends_s))

    def _order(self, slices: Sequence[UpdateSlice]) -> list[tuple[int, UpdateSlice | None]]:
        """(op of the graph, None) and (-1, slice to update), in the order in which they run."""
        after: dict[int, list[UpdateSlice]] = {}
        for update in slices:
            after.setdefault(update.after, []).append(update)
        order: list[tuple[int, UpdateSlice | None]] = []
        for op in range(len(self.graph.ops)):
            order.append((op, None))
            order += [(-1, update) for update in after.get(op, [])]
        return order

    def problem(self) -> SwapProblem:
        graph, order = self.graph, self.order
        place = {op: index for index, (op, _) in enumerate(order) if op >= 0}
        trained = sum(update.size_bytes for _, update in order if update) or 1
        op_s = [
            self.update_s * update.size_bytes / trained if update else self.op_s[op]
            for op, update in order
        ]
        workspace = [
            self._temporary(update.size_bytes) if update else int(self.held.workspaces[op])
            for op, update in order
        ]
        tensors = self._tensors(place)
        reads: list[list[int]] = [[] for _ in order]
        writes: list[list[int]] = [[] for _ in order]
        for tensor in tensors:
            for access in tensor.accesses:
                reads[access].append(tensor.number)
            for writer in tensor.writers:
                writes[writer].append(tensor.number)
        # What an op writes into fresh memory it does not read.
        for tensor in tensors:
            if tensor.born >= 0:
                reads[tensor.born].remove(tensor.number)
        d2h, h2d = self.links
        return SwapProblem(
            op_s=np.array(op_s),
            tensors=tuple(tensors),
            reads=tuple(tuple(storages) for storages in reads),
            writes=tuple(tuple(storages) for storages in writes),
            repeatable=tuple(op >= 0 and is_repeatable(graph.ops[op]) for op, _ in order),
            workspace_bytes=np.array(workspace, dtype=np.int64),
            fixed_bytes=self.held.inputs_bytes
            + self.held.buffers_bytes
            + graph.frozen_parameter_bytes,
            d2h=d2h,
            h2d=h2d,
            order=tuple(op for op, _ in order),
            names=tuple(
                f"update {graph.parameters[update.parameter].name}"
                if update
                else graph.ops[op].name
                for op, update in order
            ),
        )

    def _temporary(self, size_bytes: int) -> int:
        """On a CPU the root of the second moment and the quotient (`temporaries_bytes`)."""
        fused = self.graph.target == "cuda"
        return 0 if fused or not RULES[self.graph.optimizer].root_tensors else 2 * size_bytes

    def _tensors(self, place: dict[int, int]) -> list[PlannedTensor]:
        structure, graph = self.structure, self.graph
        self.touched = self._touched(place)
        updates: dict[int, list[tuple[int, int]]] = {}
        for index, (_, update) in enumerate(self.order):
            if update:
                updates.setdefault(update.parameter, []).append((index, update.size_bytes))
        tensors = self._standing(updates)
        gradient_of = {
            int(structure.storage_of[p.gradient]): number
            for number, p in enumerate(graph.parameters)
            if p.gradient is not None
        }
        for storage in (*self.held.gradient_storages.tolist(), *self.held.activations.tolist()):
            if not self.held.size_bytes[storage]:
                continue
            parameter = gradient_of.get(storage)
            own = [] if parameter is None else [index for index, _ in updates[parameter]]
            made = self._made(len(tensors), storage, place, own)
            if parameter is not None:
                made = replace(made, kind="gradient", name=graph.parameters[parameter].name)
            tensors.append(made)
        return tensors

    def _standing(self, updates: dict[int, list[tuple[int, int]]]) -> list[PlannedTensor]:
        """Parameters, and what the optimizer keeps of each slice of them."""
        structure, graph, block = self.structure, self.graph, block_bytes(self.graph)
        storage_of = {number: storage for storage, number in self.parameter_of.items()}
        trained = iter(trained_tensors(graph))
        standing: list[PlannedTensor] = []
        for number, parameter in enumerate(graph.parameters):
            size = rounded_bytes(parameter.spec.nbytes, block)
            storage, own = storage_of.get(number), updates.get(number, [])
            held = partial(PlannedTensor, born=-1, dies=len(self.order), name=parameter.name)
            touched = [] if storage is None else self.touched[0].get(storage, [])
            at = tuple(index for index, _ in own)
            sizes = state_sizes(graph.optimizer, next(trained)) if own else ()
            if not size:
                continue
            standing.append(
                held(
                    number=len(standing),
                    kind="parameter",
                    size_bytes=size,
                    accesses=tuple(sorted({*touched, *at})),
                    writers=at,
                    value=-1 if storage is None else int(structure.roots[storage]),
                )
            )
            for index, part in own:
                for state in sizes:
                    standing.append(
                        held(
                            number=len(standing),
                            kind="state",
                            size_bytes=-(-state * part // size),
                            accesses=(index,),
                            writers=(index,),
                        )
                    )
        return standing

    def _made(
        self, number: int, storage: int, place: dict[int, int], updates: Sequence[int]
    ) -> PlannedTensor:
        """What an op of the step makes; a gradient is read last by updates of its parameter."""
        structure, (accesses, writers) = self.structure, self.touched
        born, dies = place[int(structure.born[storage])], int(structure.dies[storage])
        touched = {born, *accesses.get(storage, []), *updates}
        return PlannedTensor(
            number=number,
            kind="activation",
            size_bytes=int(self.held.size_bytes[storage]),
            born=born,
            dies=updates[-1] if updates else place.get(dies, len(self.order)),
            accesses=tuple(sorted(touched)),
            writers=tuple(sorted({born, *writers.get(storage, [])})),
            value=int(structure.roots[storage]),
        )

    def _parameter_of(self) -> dict[int, int]:
        """The storages of parameters, each with the number of its parameter.

        Values of parameters stand in the graph without their names; a parameter is found by its
        shape and by the module of the first op that reads it.
        """
        graph, structure = self.graph, self.structure
        left: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        for number, parameter in enumerate(graph.parameters):
            key = parameter.name.rpartition(".")[0], parameter.spec.shape, parameter.spec.dtype
            left.setdefault(key, []).append(number)
        parameters: dict[int, int] = {}
        for op in graph.ops:
            for value in op.inputs:
                storage = int(structure.storage_of[value])
                root = graph.values[int(structure.roots[storage])]
                if root.kind != "parameter" or storage in parameters:
                    continue
                options = left.get((op.module, root.spec.shape, root.spec.dtype))
                if options:
                    parameters[storage] = options.pop(0)
        return parameters

    def _touched(self, place: dict[int, int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """(ops that touch each storage, ops that write it).

        Views touch what they are of: of a storage that `apply_plan` has emptied torch makes none.
        """
        accesses: dict[int, list[int]] = {}
        writers: dict[int, list[int]] = {}
        number_of = self.structure.storage_of
        for index, op in enumerate(self.graph.ops):
            written = {int(number_of[value]) for value in op.outputs}
            if op.is_view:
                for storage in {int(number_of[value]) for value in op.inputs}:
                    accesses.setdefault(storage, []).append(place[index])
                continue
            for storage in {int(number_of[value]) for value in op.inputs} | written:
                accesses.setdefault(storage, []).append(place[index])
            for storage in written:
                writers.setdefault(storage, []).append(place[index])
        return accesses, writers


def is_repeatable(op: Op) -> bool:
    """Whether running it again gives the same: of the forward pass, and not random."""
    name = op.call.target.lower()
    return op.phase == "forward" and not op.is_view and not any(word in name for word in _RANDOM)

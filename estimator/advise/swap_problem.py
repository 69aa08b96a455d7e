"""Lay a step out as what a plan of memory needs: operators in order, tensors, the host link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from estimator.errors import ProfileError, WorkloadError
from estimator.estimates import Estimate
from estimator.graph.memory import StorageSizes
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.ops import Op
from estimator.graph.optimizer_memory import block_bytes, rounded_bytes, trained_tensors
from estimator.graph.structure import GraphStructure
from estimator.machines.profile import Link, LinkKind, MachineProfile
from estimator.optimizers import state_sizes
from estimator.timeline.program import StepProgram

Array = NDArray[np.float64]
Sizes = NDArray[np.int64]
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
    the graph's op `order[i]`, -1 for the update of one parameter.
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
        """The peak without a plan."""
        return int(self.levels().max())

    def born_bytes(self) -> Sizes:
        """What each op allocates of its own: its results and workspace."""
        if "born" not in self._known:
            found = self._known["born"] = self.workspace_bytes.copy()
            for tensor in self.tensors:
                if tensor.born >= 0:
                    found[tensor.born] += tensor.size_bytes
        return self._known["born"]


def swap_problem(
    answer: Estimate,
    *,
    d2h: Link | None = None,
    h2d: Link | None = None,
    early_updates: bool = False,
    fused_updates: bool = True,
) -> SwapProblem:
    """The step of an estimate for one rank with one micro-batch.

    Every parameter is updated by itself, which then releases its gradient: at the end of the step
    or, with `early_updates`, as soon as the gradient is final, which is possible where nothing
    (clipping, a gradient scaler, another rank) needs all gradients first. On a GPU
    `fused_updates` are those of torch's fused optimizers, which hold no temporaries. Links default
    to those of the machine. Raises WorkloadError, ProfileError.
    """
    plan = answer.plan
    if answer.ranks > 1 or answer.accumulation_steps > 1:
        raise WorkloadError(
            f"a plan of memory is made for one rank with one micro-batch, found {answer.ranks} "
            f"ranks and {answer.accumulation_steps} micro-batches; ask for 1x1 of the machine"
        )
    kind = plan.kinds[0]
    if early_updates and kind.program.bound.graph.grad_scaler:
        raise WorkloadError(
            "a gradient scaler checks all gradients before the update; leave out early updates"
        )
    profile = kind.program.profile
    return _Builder(
        kind.program,
        update_s=kind.update.update_s(plan.share),
        d2h=d2h or host_link(profile, "d2h"),
        h2d=h2d or host_link(profile, "h2d"),
        early=early_updates,
        fused=fused_updates and kind.program.bound.graph.target == "cuda",
    ).problem()


def host_link(profile: MachineProfile, kind: LinkKind) -> Link:
    """The fastest known link between a device and the host in one direction."""
    found = [link for link in profile.links if link.kind == kind]
    if not found:
        raise ProfileError(
            f"profile '{profile.name}' has no {kind} link; run 'estimator probe' on a machine with "
            "a GPU, or give the link"
        )
    return max(found, key=lambda link: link.bandwidth_bytes_per_s)


class _Builder:
    """Lists tensors and ops of one rank's step."""

    def __init__(
        self,
        program: StepProgram,
        *,
        update_s: float,
        d2h: Link,
        h2d: Link,
        early: bool,
        fused: bool,
    ) -> None:
        self.bound: BoundGraph = program.bound
        self.graph: OpGraph = program.bound.graph
        self.links = d2h, h2d
        self.structure = GraphStructure.of(self.graph)
        self.sizes = StorageSizes.of(self.bound, self.structure, 1)
        ends_s = program.lanes.ends_s(0)
        self.op_s = np.diff(ends_s, prepend=0.0)
        self.update_s = update_s
        self.order = self._order(early)
        self.fused = fused

    def _order(self, early: bool) -> list[tuple[int, int]]:
        """(op of the graph, -1) and (-1, trained parameter), in the order in which they run."""
        ops = len(self.graph.ops)
        after: dict[int, list[int]] = {}
        for number, parameter in enumerate(self.graph.parameters):
            if parameter.gradient is None:
                continue
            ready = parameter.ready_after if early else None
            after.setdefault(ops - 1 if ready is None else ready, []).append(number)
        found: list[tuple[int, int]] = []
        for op in range(ops):
            found.append((op, -1))
            found += [(-1, number) for number in after.get(op, [])]
        return found

    def problem(self) -> SwapProblem:
        graph, order = self.graph, self.order
        place = {op: index for index, (op, _) in enumerate(order) if op >= 0}
        update = {number: index for index, (_, number) in enumerate(order) if number >= 0}
        block = block_bytes(graph)
        size_of = [rounded_bytes(p.spec.nbytes, block) for p in graph.parameters]
        trained = sum(size_of[number] for number in update) or 1
        op_s = [
            self.op_s[op] if op >= 0 else self.update_s * size_of[number] / trained
            for op, number in order
        ]
        workspace = [
            int(self.sizes.workspaces[op]) if op >= 0 else self._temporary(size_of[number])
            for op, number in order
        ]
        tensors = self._tensors(place, update, size_of)
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
            reads=tuple(tuple(each) for each in reads),
            writes=tuple(tuple(each) for each in writes),
            repeatable=tuple(op >= 0 and is_repeatable(graph.ops[op]) for op, _ in order),
            workspace_bytes=np.array(workspace, dtype=np.int64),
            fixed_bytes=self.sizes.inputs_bytes
            + graph.buffer_bytes
            + self.sizes.constants_bytes
            + graph.frozen_parameter_bytes,
            d2h=d2h,
            h2d=h2d,
            order=tuple(op for op, _ in order),
            names=tuple(
                graph.ops[op].name if op >= 0 else f"update {graph.parameters[number].name}"
                for op, number in order
            ),
        )

    def _temporary(self, size_bytes: int) -> int:
        """The root of the second moment, and on CPUs the quotient (`temporaries_bytes`)."""
        if self.fused or self.graph.optimizer not in ("adam", "adamw"):
            return 0
        return size_bytes if self.graph.target == "cuda" else 2 * size_bytes

    def _tensors(
        self, place: dict[int, int], update: dict[int, int], size_of: Sequence[int]
    ) -> list[PlannedTensor]:
        structure, graph, end = self.structure, self.graph, len(self.order)
        self.touched = accesses, _ = self._touched(place)
        number_of = structure.storage_of
        parameter_of = self._parameter_of()
        gradient_of = {
            int(number_of[p.gradient]): number
            for number, p in enumerate(graph.parameters)
            if p.gradient is not None
        }
        found: list[PlannedTensor] = []

        def add(kind: TensorKind, size: int, born: int, dies: int, **more: object) -> None:
            if size:
                number = len(found)
                found.append(
                    PlannedTensor(
                        number=number,
                        kind=kind,
                        size_bytes=size,
                        born=born,
                        dies=dies,
                        **more,  # type: ignore[arg-type]
                    )
                )

        tensors = iter(trained_tensors(graph))
        seen: set[int] = set()
        for storage, number in parameter_of.items():
            seen.add(number)
            own = [update[number]] if number in update else []
            touched = tuple(sorted({*accesses.get(storage, []), *own}))
            name = graph.parameters[number].name
            root = structure.storages[storage].root
            more = {"accesses": touched, "writers": tuple(own), "name": name, "value": root}
            add("parameter", size_of[number], -1, end, **more)
        for number, parameter in enumerate(graph.parameters):
            own = [update[number]] if number in update else []
            more = {"accesses": tuple(own), "writers": tuple(own), "name": parameter.name}
            if number not in seen:
                add("parameter", size_of[number], -1, end, **more)
            if own:
                for size in state_sizes(graph.optimizer, next(tensors)):
                    add("state", size, -1, end, **more)
        for storage in (*self.sizes.gradients.tolist(), *self.sizes.activations.tolist()):
            if not self.sizes.size_bytes[storage]:
                continue
            of = gradient_of.get(storage)
            made = self._made(len(found), storage, place, None if of is None else update[of])
            if of is not None:
                made = replace(made, kind="gradient", name=graph.parameters[of].name)
            found.append(made)
        return found

    def _made(
        self, number: int, storage: int, place: dict[int, int], update: int | None
    ) -> PlannedTensor:
        """What an op of the step makes; a gradient is read last by the update of its parameter."""
        structure, (accesses, writers) = self.structure, self.touched
        born, dies = place[int(structure.born[storage])], int(structure.dies[storage])
        touched = {born, *accesses.get(storage, [])}
        if update is not None:
            touched.add(update)
        return PlannedTensor(
            number=number,
            kind="activation",
            size_bytes=int(self.sizes.size_bytes[storage]),
            born=born,
            dies=place.get(dies, len(self.order)) if update is None else update,
            accesses=tuple(sorted(touched)),
            writers=tuple(sorted({born, *writers.get(storage, [])})),
            value=structure.storages[storage].root,
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
        found: dict[int, int] = {}
        for op in graph.ops:
            for value in op.inputs:
                storage = int(structure.storage_of[value])
                root = graph.values[structure.storages[storage].root]
                if root.kind != "parameter" or storage in found:
                    continue
                options = left.get((op.module, root.spec.shape, root.spec.dtype))
                if options:
                    found[storage] = options.pop(0)
        return found

    def _touched(self, place: dict[int, int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """(ops that touch each storage, ops that write it).

        Views touch nothing, but `apply_plan` empties storages on CPUs, of which torch makes none.
        """
        accesses: dict[int, list[int]] = {}
        writers: dict[int, list[int]] = {}
        number_of = self.structure.storage_of
        for index, op in enumerate(self.graph.ops):
            if op.is_view and self.graph.target != "cpu":
                continue
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

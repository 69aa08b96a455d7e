"""Lay a step out as what a plan of memory needs: operators in order, tensors, the host link."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

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
from estimator.timeline.rank.updates import cost_of_update
from estimator.workload.optimizers import RULES, state_sizes

# At the step's end, as torch does it, or each as soon as its gradient is ready
# (`torch.Tensor.register_post_accumulate_grad_hook`).
Updates = Literal["end", "ready"]

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
    the graph's op `order[i]`, -1 for the update of one parameter. Where these are not at the end,
    `plain_bytes` and `plain_s` are peak and seconds of the step with its `updates` there.
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
    updates: Updates = "end"
    plain_bytes: int | None = None
    plain_s: float | None = None
    _known: dict[str, Sizes] = field(default_factory=dict, repr=False)

    @property
    def ops(self) -> int:
        return len(self.op_s)

    @property
    def length_s(self) -> float:
        """Seconds of these ops one after the other."""
        return float(self.op_s.sum())

    @property
    def vanilla_s(self) -> float:
        """Seconds of the step as torch runs it, without a plan."""
        return self.length_s if self.plain_s is None else self.plain_s

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
    updates: Updates = "end",
) -> SwapProblem:
    """The step of an estimate for one rank with one micro-batch.

    Every parameter is updated by itself, which then releases its gradient; `updates` say when. On a
    GPU they are those of torch's fused optimizers, which hold no temporaries. Links default to
    those of the machine. Raises WorkloadError, also where updates may not come before the step's
    end (`why_at_the_end`), and ProfileError.
    """
    reason = why_at_the_end(answer.plan.kinds[0].program.bound.graph)
    if updates == "ready" and reason:
        raise WorkloadError(f"parameters can be updated at the step's end alone: {reason}")
    if updates == "ready":
        return swap_problems(answer, d2h=d2h, h2d=h2d)[1]
    return _built(answer, d2h, h2d, updates)


def swap_problems(
    answer: Estimate, *, d2h: Link | None = None, h2d: Link | None = None
) -> list[SwapProblem]:
    """`swap_problem` with its updates wherever they may be, those at the step's end first."""
    plain = _built(answer, d2h, h2d, "end")
    if why_at_the_end(answer.plan.kinds[0].program.bound.graph):
        return [plain]
    ready = _built(answer, d2h, h2d, "ready")
    return [plain, replace(ready, plain_bytes=plain.vanilla_bytes, plain_s=plain.vanilla_s)]


def _built(answer: Estimate, d2h: Link | None, h2d: Link | None, updates: Updates) -> SwapProblem:
    plan = answer.plan
    if answer.ranks > 1 or answer.accumulation_steps > 1:
        raise WorkloadError(
            f"a plan of memory is made for one rank with one micro-batch, found {answer.ranks} "
            f"ranks and {answer.accumulation_steps} micro-batches; ask for 1x1 of the machine"
        )
    kind = plan.kinds[0]
    return _Builder(
        kind.program,
        update_s=float(kind.update.update_s(plan.share)),
        d2h=d2h or host_link(kind.program.profile, "d2h"),
        h2d=h2d or host_link(kind.program.profile, "h2d"),
        updates=updates,
    ).problem()


def why_at_the_end(graph: OpGraph) -> str | None:
    """Why no parameter may be updated before the gradients of all are there, None if one may."""
    if graph.clip_grad_norm:
        return "the norm by which gradients are clipped is that of all of them"
    if graph.grad_scaler:
        return "the gradient scaler skips the update where any gradient is not finite"
    if any(p.optimizer is not None or p.updates != 1 for p in graph.parameters):
        return "the step has updates of its own"
    # apex/optimizers/fused_lamb.py: max_grad_norm=1.0 clips by the norm of all gradients.
    if graph.optimizer == "lamb":
        return "lamb scales gradients by the norm of all of them"
    return None


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
        self.lanes, self.profile = program.lanes, program.profile
        self.update_s, self.updates = update_s, updates
        self.parameter_of = self._parameter_of()
        self.order = self._order()

    def _order(self) -> list[tuple[int, int | None]]:
        """(op of the graph, None) and (-1, parameter to update), in the order in which they run."""
        last = len(self.graph.ops) - 1
        after = {
            number: last
            if self.updates == "end" or parameter.ready_after is None
            else parameter.ready_after
            for number, parameter in enumerate(self.graph.parameters)
            if parameter.gradient is not None
        }
        # Nobody may read a parameter with this step's gradient in it: a matmul's gradient may
        # be final before that of what the matrix multiplied.
        for index, op in enumerate(self.graph.ops):
            for value in op.inputs:
                number = self.parameter_of.get(int(self.structure.storage_of[value]))
                if number in after:
                    after[number] = max(after[number], index)
        updated: dict[int, list[tuple[int, int | None]]] = {}
        for number, place in after.items():
            updated.setdefault(place, []).append((-1, number))
        order: list[tuple[int, int | None]] = []
        for index in range(len(self.graph.ops)):
            order += [(index, None), *updated.get(index, [])]
        return order

    def _size_bytes(self, parameter: int) -> int:
        return rounded_bytes(self.graph.parameters[parameter].spec.nbytes, block_bytes(self.graph))

    def _op_s(self) -> Array:
        """Seconds of every op and update."""
        sizes = np.array([0 if own is None else self._size_bytes(own) for _, own in self.order])
        is_update = np.array([own is not None for _, own in self.order])
        update_s = self.update_s * sizes / max(sizes.sum(), 1)
        if self.updates == "end":
            op_s = np.zeros(len(self.order))
            op_s[~is_update] = np.diff(self.lanes.ends_s(0), prepend=0.0)
            return np.asarray(op_s + update_s)
        # Each is a call of the optimizer's step, which the host issues among the operators.
        cost = cost_of_update(self.profile, self.graph.optimizer, self.graph.target)
        call_s = cost.launch_s + (0.0 if self.lanes.is_shared else cost.per_tensor_s)
        host_s, device_s = np.where(is_update, call_s, 0.0), update_s
        host_s[~is_update] = self.lanes.last_host_s
        device_s[~is_update] = self.lanes.last_device_s
        places = np.flatnonzero(~is_update)
        lanes = replace(
            self.lanes,
            host_s=host_s,
            device_s=device_s,
            last_host_s=host_s,
            last_device_s=device_s,
            awaited=tuple(int(places[op]) for op in self.lanes.awaited),
        )
        return np.asarray(np.diff(lanes.ends_s(0), prepend=0.0))

    def problem(self) -> SwapProblem:
        graph, order = self.graph, self.order
        place = {op: index for index, (op, _) in enumerate(order) if op >= 0}
        workspace = [
            int(self.held.workspaces[op]) if own is None else self._temporary(self._size_bytes(own))
            for op, own in order
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
            op_s=self._op_s(),
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
                graph.ops[op].name if own is None else f"update {graph.parameters[own].name}"
                for op, own in order
            ),
            updates=self.updates,
        )

    def _temporary(self, size_bytes: int) -> int:
        """On a CPU the root of the second moment and the quotient (`temporaries_bytes`)."""
        fused = self.graph.target == "cuda"
        return 0 if fused or not RULES[self.graph.optimizer].root_tensors else 2 * size_bytes

    def _tensors(self, place: dict[int, int]) -> list[PlannedTensor]:
        structure, graph = self.structure, self.graph
        self.touched = self._touched(place)
        update_at = {own: at for at, (_, own) in enumerate(self.order) if own is not None}
        tensors = self._standing(update_at)
        gradient_of = {
            int(structure.storage_of[p.gradient]): number
            for number, p in enumerate(graph.parameters)
            if p.gradient is not None
        }
        for storage in (*self.held.gradient_storages.tolist(), *self.held.activations.tolist()):
            if not self.held.size_bytes[storage]:
                continue
            parameter = gradient_of.get(storage)
            own = None if parameter is None else update_at[parameter]
            made = self._made(len(tensors), storage, place, own)
            if parameter is not None:
                made = replace(made, kind="gradient", name=graph.parameters[parameter].name)
            tensors.append(made)
        return tensors

    def _standing(self, update_at: dict[int, int]) -> list[PlannedTensor]:
        """Parameters, and what the optimizer keeps of each."""
        structure, graph = self.structure, self.graph
        storage_of = {number: storage for storage, number in self.parameter_of.items()}
        trained = iter(trained_tensors(graph))
        standing: list[PlannedTensor] = []
        for number, parameter in enumerate(graph.parameters):
            size, storage = self._size_bytes(number), storage_of.get(number)
            at = [update_at[number]] if number in update_at else []
            held = partial(
                PlannedTensor, born=-1, dies=len(self.order), writers=tuple(at), name=parameter.name
            )
            touched = [] if storage is None else self.touched[0].get(storage, [])
            sizes = state_sizes(graph.optimizer, next(trained)) if at else ()
            if not size:
                continue
            standing.append(
                held(
                    number=len(standing),
                    kind="parameter",
                    size_bytes=size,
                    accesses=tuple(sorted({*touched, *at})),
                    value=-1 if storage is None else int(structure.roots[storage]),
                )
            )
            for state in sizes:
                standing.append(
                    held(number=len(standing), kind="state", size_bytes=state, accesses=tuple(at))
                )
        return standing

    def _made(
        self, number: int, storage: int, place: dict[int, int], update: int | None
    ) -> PlannedTensor:
        """What an op of the step makes; a gradient is read last by the update of its parameter."""
        structure, (accesses, writers) = self.structure, self.touched
        born, dies = place[int(structure.born[storage])], int(structure.dies[storage])
        touched = {born, *accesses.get(storage, [])} | ({update} if update is not None else set())
        return PlannedTensor(
            number=number,
            kind="activation",
            size_bytes=int(self.held.size_bytes[storage]),
            born=born,
            dies=place.get(dies, len(self.order)) if update is None else update,
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

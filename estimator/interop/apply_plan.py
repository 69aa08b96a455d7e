"""Run a training step under a plan of memory: move and recompute its activations as planned.

A dispatch mode follows the operators of the step, which come in the order of the traced graph, and
frees, fills and recomputes the storages that the plan names. Autograd keeps its tensors: only the
memory behind them goes and comes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from estimator.advise.swap_plan import Recompute, SwapPlan
from estimator.advise.swap_problem import SwapProblem
from estimator.errors import WorkloadError
from estimator.graph.op_graph import OpGraph
from estimator.graph.structure import GraphStructure
from estimator.interop.host_copies import Arena, Host, PinnedHost

_BATCH_NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
# Where those take what they keep of the batches seen.
_RUNNING = (3, 4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryPlan:
    """A plan with the step that it is for, as `apply_plan` runs it."""

    graph: OpGraph
    problem: SwapProblem
    plan: SwapPlan

    def __post_init__(self) -> None:
        moved = {swap.tensor for swap in self.plan.swaps}
        others = {self.problem.tensors[number].kind for number in moved} - {"activation"}
        if others:
            raise WorkloadError(
                f"a plan that is run moves activations alone, found {', '.join(sorted(others))}; "
                "plan with Means(kinds=('activation',))"
            )


@contextmanager
def apply_plan(plan: MemoryPlan, model: nn.Module, *, host: Host | None = None) -> Iterator[None]:
    """Run the training steps inside under a plan made for them.

    Gradients and buffers are what they are without it, bit for bit where operators are
    deterministic. Swapped tensors go to pinned memory on side streams from a GPU, and from a CPU to
    an arena of their own at the rate of the planned link; `host` is another place. Raises
    WorkloadError where a step is not the one that was traced, or runs on another kind of device.
    """
    target = plan.graph.target
    elsewhere = {each.device.type for each in model.parameters()} - {target}
    if elsewhere and host is None:
        raise WorkloadError(
            f"the plan was made for a step on {target}, found parameters on {min(elsewhere)}; move "
            "the model, or trace it for that kind of device"
        )
    if host is None:
        links = plan.problem.d2h, plan.problem.h2d
        host = PinnedHost() if target == "cuda" else Arena(*links)
    with host:
        mode = _PlannedStep(plan, host)
        handle = model.register_forward_pre_hook(lambda _module, _inputs: mode.begin())
        try:
            with mode:
                yield
            mode.end()
        finally:
            handle.remove()


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor argument of an op, by the storage that it lies in; None: one outside the plan."""

    tensor: int | None
    outside: Tensor | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _PlannedStep(TorchDispatchMode):
    """Follows a step op by op."""

    def __init__(self, plan: MemoryPlan, host: Host) -> None:
        super().__init__()
        self.graph, self.problem, self.plan = plan.graph, plan.problem, plan.plan
        self.host = host
        structure = GraphStructure.of(self.graph)
        root_of = [structure.storages[number].root for number in structure.storage_of]
        of_root = {t.value: t.number for t in self.problem.tensors if t.value >= 0}
        tensor_of = [of_root.get(root) for root in root_of]
        wanted = self._wanted()
        # By op, the tensors among its results that a plan needs to find again.
        self.results = [
            [
                (index, number)
                for index, value in enumerate(op.outputs)
                if (number := tensor_of[value]) in wanted and number is not None
            ]
            for op in self.graph.ops
        ]
        self.targets = [op.call.target for op in self.graph.ops]
        self.names: dict[Any, str] = {}
        self.place = len(self.targets)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.numbers: dict[int, int] = {}
        self.sent: dict[int, Any] = {}
        self.fetched: dict[int, Any] = {}
        self.calls: dict[int, tuple[Any, Any, Any]] = {}
        self._list_events(wanted)

    def _wanted(self) -> set[int]:
        """Activations that are moved or made again, or that making them again touches."""
        found = {swap.tensor for swap in self.plan.swaps}
        for again in self.plan.recomputes:
            found.add(again.tensor)
            for op in again.ops:
                found.update(self.problem.reads[op], self.problem.writes[op])
        return {n for n in found if self.problem.tensors[n].kind == "activation"}

    def _list_events(self, wanted: set[int]) -> None:
        self.at: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        for swap in self.plan.swaps:
            self.at[swap.free_before].append(("free", swap.tensor))
            self.at[swap.fetch_before].append(("fetch", swap.tensor))
            self.at[swap.use].append(("use", swap.tensor))
        self.after: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        for swap in self.plan.swaps:
            self.after[swap.after].append(("send", swap.tensor))
        self.again: defaultdict[int, list[Recompute]] = defaultdict(list)
        for each in self.plan.recomputes:
            self.after[each.after].append(("drop", each.tensor))
            self.again[each.before].append(each)
        self.repeated = {op for each in self.plan.recomputes for op in each.ops}
        self.dies: defaultdict[int, list[int]] = defaultdict(list)
        for number in wanted:
            self.dies[self.problem.tensors[number].dies].append(number)
        results = [place for place, each in enumerate(self.results) if each]
        self.events = {*results, *self.at, *self.after, *self.again, *self.repeated, *self.dies}

    def begin(self) -> None:
        """A step begins: the model is called."""
        self.end()
        self.place = 0

    def end(self) -> None:
        """Raise WorkloadError where the step before has not come to its end."""
        if self.place < len(self.targets):
            raise self._left()
        for kept in (self.storages, self.numbers, self.sent, self.fetched, self.calls):
            kept.clear()

    def _left(self) -> WorkloadError:
        expected = self.targets[self.place]
        return WorkloadError(
            f"the step left the traced one before op {self.place} ({expected}); apply a plan that "
            "was made for this model, batch and loss"
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = self.names.get(func)
        if name is None:
            name = self.names[func] = str(func)
        place = self.place
        # Operators that no trace keeps, such as detach, run as they come.
        if place >= len(self.targets) or name != self.targets[place]:
            if any(_is_away(leaf) for leaf in tree_flatten((args, kwargs))[0]):
                raise self._left()
            return func(*args, **kwargs)
        if place not in self.events:
            self.place += 1
            return func(*args, **kwargs)
        self._before(place)
        if place in self.repeated:
            self.calls[place] = func, *tree_map(self._seen, (args, dict(kwargs)))
        found = func(*args, **kwargs)
        self.place += 1
        if self.results[place]:
            outputs = [each for each in tree_flatten(found)[0] if isinstance(each, Tensor)]
            for index, number in self.results[place]:
                if index < len(outputs):
                    self._register(number, outputs[index])
            del outputs
        self._after(place)
        return found

    def _register(self, number: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if number not in self.storages:
            self.storages[number] = storage
            self.numbers[storage._cdata] = number

    def _seen(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        number = self.numbers.get(leaf.untyped_storage()._cdata)
        return _Seen(
            tensor=number,
            outside=None if number is not None else leaf.detach(),
            size=tuple(leaf.shape),
            stride=tuple(leaf.stride()),
            offset=int(leaf.storage_offset()),
            dtype=leaf.dtype,
        )

    # around an op

    def _before(self, place: int) -> None:
        for wanted in ("free", "fetch", "use"):
            for what, tensor in self.at.get(place, ()):
                if what == wanted:
                    getattr(self, f"_{what}")(tensor)
        for each in self.again.get(place, ()):
            self._recompute(each)

    def _after(self, place: int) -> None:
        for what, tensor in self.after.get(place, ()):
            getattr(self, f"_{what}")(tensor)
        for number in self.dies.get(place, ()):
            storage = self.storages.pop(number, None)
            if storage is not None:
                self.numbers.pop(storage._cdata, None)
            self.sent.pop(number, None)

    def _send(self, tensor: int) -> None:
        self.sent[tensor] = self.host.send(self.storages[tensor])

    def _free(self, tensor: int) -> None:
        self.host.free(self.sent[tensor], self.storages[tensor])

    def _fetch(self, tensor: int) -> None:
        self.fetched[tensor] = self.host.fetch(self.sent[tensor], self.storages[tensor])

    def _use(self, tensor: int) -> None:
        self.host.use(self.fetched.pop(tensor))

    def _drop(self, tensor: int) -> None:
        self.storages[tensor].resize_(0)

    def _recompute(self, again: Recompute) -> None:
        fresh: dict[int, torch.UntypedStorage] = {}

        def rebuilt(leaf: Any) -> Any:
            if not isinstance(leaf, _Seen):
                return leaf
            if leaf.tensor is None:
                return leaf.outside
            storage = fresh.get(leaf.tensor) or self.storages[leaf.tensor]
            empty = torch.empty(0, dtype=leaf.dtype, device=storage.device)
            return empty.set_(storage, leaf.offset, leaf.size, leaf.stride)

        last_read = {t: op for op in again.ops for t in self.problem.reads[op]}
        # As in the forward pass: without gradients oneDNN's LSTM leaves nothing for its backward.
        with torch._C._DisableTorchDispatch(), torch.enable_grad():
            for op in again.ops:
                func, args, kwargs = self.calls[op]
                args, kwargs = tree_map(rebuilt, (args, kwargs))
                found = func(*_without_running(func, args), **kwargs)
                outputs = [each for each in tree_flatten(found)[0] if isinstance(each, Tensor)]
                for index, number in self.results[op]:
                    if index < len(outputs) and self.problem.tensors[number].born == op:
                        fresh[number] = outputs[index].untyped_storage()
                del args, kwargs, found, outputs
                for number in [n for n in fresh if last_read.get(n, -1) <= op]:
                    if number != again.tensor:
                        del fresh[number]
            target = self.storages[again.tensor]
            target.resize_(fresh[again.tensor].nbytes())
            target.copy_(fresh[again.tensor])


def _is_away(leaf: Any) -> bool:
    """Whether the memory of a tensor is not there."""
    return isinstance(leaf, Tensor) and leaf.numel() > 0 and leaf.untyped_storage().nbytes() == 0


def _without_running(func: Any, args: Any) -> Any:
    """The arguments of a batch norm without what it keeps of the batches seen: once is enough."""
    if func._schema.name.removeprefix("aten::") not in _BATCH_NORMS:
        return args
    return tuple(None if index in _RUNNING else each for index, each in enumerate(args))

"""Run training steps under a plan of memory: move and recompute their activations as planned.

A dispatch mode follows the operators of the first step, which come in the order of the traced
graph, and frees, fills and recomputes the storages that the plan names. Autograd keeps its tensors:
only the memory behind them goes and comes back. Python at every operator costs a small step a tenth
of its time, so later steps are followed by the tensors that autograd saves (`saved_tensors`), where
those show all that the plan names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten

from estimator.advise.swap.plan import SwapPlan
from estimator.advise.swap.problem import SwapProblem
from estimator.errors import WorkloadError
from estimator.graph.ir.op_graph import OpGraph
from estimator.integrations.swap.planned_storages import Arena, Host, PinnedHost, PlannedStorages
from estimator.integrations.swap.saved_tensors import SavedTensors


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
    an arena of their own at the rate of the planned link; `host` is another place. All steps inside
    do the same but for their data: numbers that operators get from Python are those of the first.
    Raises WorkloadError where a step is not the one that was traced, or runs on another kind of
    device.
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
    owners = [*model.parameters(), *model.buffers()]
    storages = PlannedStorages(plan.graph, plan.problem, plan.plan, host, owners)
    steps = _PlannedSteps(plan.graph, storages)
    handle = model.register_forward_pre_hook(lambda _module, _inputs: steps.begin())
    with host:
        try:
            with steps, saved_tensors_hooks(steps.saved.pack, steps.saved.unpack):
                yield
                steps.end()
        finally:
            handle.remove()


class _PlannedSteps:
    """Steps, the first of which is followed by its operators."""

    def __init__(self, graph: OpGraph, storages: PlannedStorages) -> None:
        self._ops = _FollowedOps(graph, storages)
        self._steps = 0
        self._by_ops = False
        self.saved = SavedTensors(storages, self._ops.reach)

    def __enter__(self) -> None:
        self._ops.__enter__()
        self._by_ops = True

    def __exit__(self, *error: Any) -> None:
        if self._by_ops:
            self._ops.__exit__(*error)
            self._by_ops = False

    def begin(self) -> None:
        """A step begins: the model is called."""
        self.end()
        self._steps += 1
        # A mode that was entered since would have to be left first.
        is_last = _get_current_dispatch_mode() is self._ops
        if self._steps == 2 and self.saved.take_over() and is_last:
            self.__exit__(None, None, None)
        if self._by_ops:
            self._ops.begin()
        else:
            self.saved.begin()

    def end(self) -> None:
        """Raise WorkloadError where the step before has not come to its end."""
        if self._by_ops:
            self._ops.end()
        else:
            self.saved.end()


class _FollowedOps(TorchDispatchMode):
    """Follows a step op by op."""

    def __init__(self, graph: OpGraph, storages: PlannedStorages) -> None:
        super().__init__()
        self._storages = storages
        self._targets = [op.call.target for op in graph.ops]
        self._names: dict[Any, str] = {}
        self.place = len(self._targets)
        self._reached = -1

    def begin(self) -> None:
        """A step begins."""
        self.place, self._reached = 0, -1

    def reach(self) -> int | None:
        """Let happen what comes before the next op, which is said; None out of steps."""
        if self.place >= len(self._targets):
            return None
        if self._reached < self.place:
            self._reached = self.place
            self._storages.run(self.place)
        return self.place

    def end(self) -> None:
        """Raise WorkloadError where the step before has not come to its end."""
        if self.place < len(self._targets):
            raise self._left()
        self._storages.clear()

    def _left(self) -> WorkloadError:
        expected = self._targets[self.place]
        return WorkloadError(
            f"the step left the traced one before op {self.place} ({expected}); apply a plan that "
            "was made for this model, batch and loss"
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(func)
        place, storages = self.place, self._storages
        # Operators that no trace keeps, such as detach, run as they come.
        if place >= len(self._targets) or name != self._targets[place]:
            # Autograd detaches what its hooks give back, there or not.
            reads = func is not torch.ops.aten.detach.default
            if reads and any(_is_away(leaf) for leaf in tree_flatten((args, kwargs))[0]):
                raise self._left()
            return func(*args, **kwargs)
        self.reach()
        if place in storages.repeated:
            storages.keep_call(place, func, args, kwargs)
        found = func(*args, **kwargs)
        self.place += 1
        if storages.results[place]:
            outputs = [each for each in tree_flatten(found)[0] if isinstance(each, Tensor)]
            for index, number in storages.results[place]:
                if index < len(outputs):
                    storages.register(number, outputs[index])
            del outputs
        if self.place == len(self._targets):
            storages.run(self.place)
        return found


def _is_away(leaf: Any) -> bool:
    """Whether the memory of a tensor is not there."""
    return isinstance(leaf, Tensor) and leaf.numel() > 0 and leaf.untyped_storage().nbytes() == 0

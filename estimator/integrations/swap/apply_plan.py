"""Run training steps under a plan of memory: move and recompute their activations as planned.

A dispatch mode follows the operators of the first step, which come in the order of the traced
graph, and frees, fills and recomputes the storages that the plan names. Autograd keeps its tensors:
only the memory behind them goes and comes back. Python at every operator costs a small step a tenth
of its time, so later steps are followed by the tensors that autograd saves (`SavedTensors`), where
those show all that the plan names.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from estimator.advise.swap.plan import Swap, SwapPlan, planned_levels
from estimator.advise.swap.problem import SwapProblem
from estimator.errors import WorkloadError
from estimator.graph.ir.op_graph import OpGraph
from estimator.integrations.swap.planned_storages import (
    KINDS,
    Arena,
    Host,
    PinnedHost,
    PlannedStorages,
    StorageView,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryPlan:
    """A plan with the step that it is for, as `apply_plan` runs it.

    >>> import estimator as est, torch
    >>> from estimator.advise.swap.problem import swap_problem
    >>> from estimator.advise.swap.search import Means, plan_within
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    >>> graph = est.trace_model(model, torch.randn(256, 64), target="cuda")
    >>> problem = swap_problem(est.estimate(graph, "1x1:t4-g4dn"))
    >>> found = plan_within(problem, problem.vanilla_bytes, means=Means(kinds=("activation",)))
    >>> MemoryPlan(graph=graph, problem=problem, plan=found.plan).plan.swaps
    ()
    """

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
        if self.problem.updates != "end":
            raise WorkloadError(
                "a plan that is run has its updates at the step's end, found them as gradients are "
                "ready; plan for swap_problem(answer)"
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

    >>> import estimator as est, torch
    >>> from estimator.advise.swap.problem import swap_problem
    >>> from estimator.advise.swap.search import Means, plan_within
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    >>> batch = torch.randn(256, 64)
    >>> graph = est.trace_model(model, batch, target="cuda")
    >>> problem = swap_problem(est.estimate(graph, "1x1:t4-g4dn"))
    >>> found = plan_within(problem, problem.vanilla_bytes, means=Means(kinds=("activation",)))
    >>> try:
    ...     with est.apply_plan(MemoryPlan(graph=graph, problem=problem, plan=found.plan), model):
    ...         model(batch).mean().backward()
    ... except est.EstimatorError as error:
    ...     str(error).partition(",")[0]
    'the plan was made for a step on cuda'
    """
    target = plan.graph.target
    elsewhere = {parameter.device.type for parameter in model.parameters()} - {target}
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
        result = func(*args, **kwargs)
        self.place += 1
        if storages.results[place]:
            outputs = [tensor for tensor in tree_flatten(result)[0] if isinstance(tensor, Tensor)]
            for index, number in storages.results[place]:
                if index < len(outputs):
                    storages.register(number, outputs[index])
            del outputs
        if self.place == len(self._targets):
            storages.run(self.place)
        return result


def _is_away(leaf: Any) -> bool:
    """Whether the memory of a tensor is not there."""
    return isinstance(leaf, Tensor) and leaf.numel() > 0 and leaf.untyped_storage().nbytes() == 0


# Later steps are followed by the tensors that autograd saves and takes back.
#
# Between two operators of a plan there may be no call of a hook, as between those of one autograd
# node. What then happens later than planned would be waited for, and what happens earlier takes
# memory; so copies are issued in time where the plan's peak leaves room for it.
#
# Autograd saves most tensors of a forward pass right before or after the operator that reads or
# makes them, and takes them back right before the operator of the backward pass that reads them.
# What is to happen between two operators happens when a tensor is saved or taken back between them;
# if none is, at the next one, and what an operator has to wait for at the last one before it.


@dataclass(slots=True, kw_only=True)
class SwapCalls:
    """One swap with the calls of hooks at which its parts happen."""

    swap: Swap
    size_bytes: int
    send: int
    free: int
    fetch: int
    use: int


class CallTimes:
    """When calls of hooks come, by planned seconds, and what is held then."""

    def __init__(self, places: Sequence[int], problem: SwapProblem, plan: SwapPlan) -> None:
        begins_s = np.concatenate([[0.0], np.cumsum(problem.op_s)])
        self.places = places
        self.call_s = begins_s[list(places)].tolist()
        self._problem = problem
        held, again = planned_levels(problem, plan)
        self._levels = held
        self._budget_bytes = int(max(held.max(), again.max()))

    def retime(self, swaps: Sequence[SwapCalls]) -> None:
        """Free when copies out have ended and fetch in time, as far as the plan's peak allows."""
        for swap in swaps:
            self._hold(swap.swap.free_before, self.places[swap.free], swap.size_bytes)
            self._hold(self.places[swap.fetch], swap.swap.fetch_before, swap.size_bytes)
        self._free_after_copies(swaps)
        self._fetch_before_uses(swaps)

    def _free_after_copies(self, swaps: Sequence[SwapCalls]) -> None:
        lane_s = 0.0
        for timed in sorted(swaps, key=lambda timed: (timed.send, timed.swap.after)):
            copy_s = self._problem.d2h.transfer_time_s(timed.size_bytes)
            lane_s = max(lane_s, self.call_s[timed.send]) + copy_s
            wanted = min(max(bisect_left(self.call_s, lane_s), timed.free), timed.fetch)
            while wanted > timed.free and not self._fits(timed.free, wanted, timed.size_bytes):
                wanted -= 1
            self._hold(self.places[timed.free], self.places[wanted], timed.size_bytes)
            timed.free = wanted

    def _fetch_before_uses(self, swaps: Sequence[SwapCalls]) -> None:
        lane_s = np.inf
        for timed in sorted(swaps, key=lambda timed: (-timed.use, -timed.swap.use)):
            copy_s = self._problem.h2d.transfer_time_s(timed.size_bytes)
            lane_s = min(lane_s, self.call_s[timed.use]) - copy_s
            wanted = max(bisect_right(self.call_s, lane_s) - 1, timed.free)
            while wanted < timed.fetch and not self._fits(wanted, timed.fetch, timed.size_bytes):
                wanted += 1
            if wanted < timed.fetch:
                self._hold(self.places[wanted], self.places[timed.fetch], timed.size_bytes)
                timed.fetch = wanted

    def _hold(self, first: int, last: int, size_bytes: int) -> None:
        """Count a tensor during ops `first` .. `last` - 1, or no longer where these are swapped."""
        if first <= last:
            self._levels[first:last] += size_bytes
        else:
            self._levels[last:first] -= size_bytes

    def _fits(self, first: int, last: int, size_bytes: int) -> bool:
        held = self._levels[self.places[first] : self.places[last]]
        return not len(held) or int(held.max()) + size_bytes <= self._budget_bytes


# The number of a tensor that is saved outside of a step.
_OUTSIDE = -1


@dataclass(slots=True)
class HookCalls:
    """The calls of both hooks in one step, as they come.

    Call i came before op `places[i]`; `sizes[i]` is the size of the tensor that it packed, -1 - j
    where it unpacked what call j had packed. `saved_at` are the first calls that packed a tensor of
    the plan, `of_storage` all that packed one of a storage.
    """

    places: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    saved_at: dict[int, int] = field(default_factory=dict)
    of_storage: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, place: int, size: int) -> int:
        """The number of a call."""
        self.places.append(place)
        self.sizes.append(size)
        return len(self.sizes) - 1

    def after(self, place: int) -> int:
        """The first call from the end of the op before `place` on."""
        return bisect_left(self.places, place)

    def before(self, place: int) -> int:
        """The first call right before op `place`, or the last one before the op that precedes."""
        call = self.after(place)
        return call if call < len(self.places) and self.places[call] == place else call - 1


class SavedTensors:
    """Hooks of saved tensors: in the first step they take notes, later they run the plan.

    `reach` says before which op the first step is, None out of steps, and lets happen what comes
    before that op.
    """

    def __init__(self, storages: PlannedStorages, reach: Callable[[], int | None]) -> None:
        self._storages, self._reach = storages, reach
        self._calls = HookCalls()
        self._actions: dict[int, list[tuple[Callable[[Any], None], Any]]] = defaultdict(list)
        self._registered: dict[int, list[int]] = defaultdict(list)
        self._is_recording = True
        self._next = 0

    def take_over(self) -> bool:
        """Run the plan from now on; False where the tensors saved in the first step do not do."""
        self._is_recording = False
        try:
            calls, events = planned_events(self._calls, self._storages)
        except _NotSavedError:
            self._calls = HookCalls()
            return False
        self._storages.calls = calls
        for event in sorted(events, key=lambda event: event[:3]):
            self._actions[event.call].append((event.action, event.which))
        for number, call in self._calls.saved_at.items():
            self._registered[call].append(number)
        self._next = len(self._calls.sizes)
        return True

    def begin(self) -> None:
        """A step begins that the hooks alone follow."""
        self.end()
        self._next = 0

    def end(self) -> None:
        """Raise WorkloadError where the step before has not come to its end."""
        if self._next < len(self._calls.sizes):
            raise self._left()
        self._storages.clear()

    def _left(self) -> WorkloadError:
        return WorkloadError(
            f"the step left the first one before op {self._calls.places[self._next]}; apply a plan "
            "to steps that do the same"
        )

    def pack(self, tensor: Tensor) -> tuple[int, Tensor]:
        """Autograd saves a tensor."""
        call = self._call(tensor.numel())
        if call == _OUTSIDE:
            return call, tensor
        if self._is_recording:
            storage = tensor.untyped_storage()._cdata
            self._calls.of_storage[storage].append(call)
            number = self._storages.numbers.get(storage)
            if number is not None:
                self._calls.saved_at.setdefault(number, call)
            return call, tensor
        for number in self._registered.get(call, ()):
            self._storages.register(number, tensor)
        self._run(call)
        return call, tensor

    def unpack(self, packed: tuple[int, Tensor]) -> Tensor:
        """Autograd takes a tensor back."""
        saved, tensor = packed
        if saved != _OUTSIDE:
            self._run(self._call(-1 - saved))
        return tensor

    def _run(self, call: int) -> None:
        for action, which in self._actions.get(call, ()):
            action(which)

    def _call(self, size: int) -> int:
        if self._storages.is_recomputing:
            return _OUTSIDE
        if self._is_recording:
            place = self._reach()
            return _OUTSIDE if place is None else self._calls.add(place, size)
        call, sizes = self._next, self._calls.sizes
        if call == len(sizes):
            return _OUTSIDE
        if sizes[call] != size:
            raise self._left()
        self._next = call + 1
        return call


class _Event(NamedTuple):
    """What happens at one call of a hook, in this order."""

    call: int
    place: float
    kind: int
    action: Callable[[Any], None]
    which: Any


class _NotSavedError(Exception):
    """Autograd does not save in time what a plan has to find."""


def planned_events(
    calls: HookCalls, storages: PlannedStorages
) -> tuple[dict[int, tuple[Any, Any, Any]], list[_Event]]:
    """The calls of ops that run again, and what happens when; raises _NotSavedError."""
    saved_at = calls.saved_at
    repeated = dict(_with_numbers(calls, storages))
    events: list[_Event] = []
    last: dict[int, int] = {}

    def add(call: int, place: int, kind: str, which: Any) -> None:
        action = getattr(storages, kind)
        events.append(_Event(call, place, KINDS.index(kind), action, which))

    def found_at(number: int, by: int) -> int:
        if saved_at.get(number, len(calls.places)) > by:
            raise _NotSavedError
        last[number] = max(last.get(number, 0), by)
        return saved_at[number]

    swaps = []
    for swap in storages.plan.swaps:
        use = calls.before(swap.use)
        send = max(calls.after(swap.after + 1), found_at(swap.tensor, use))
        free = max(calls.after(swap.free_before), send)
        fetch = max(min(calls.after(swap.fetch_before), use), free)
        if fetch > use:
            raise _NotSavedError
        size_bytes = storages.problem.tensors[swap.tensor].size_bytes
        swaps.append(
            SwapCalls(swap=swap, size_bytes=size_bytes, send=send, free=free, fetch=fetch, use=use)
        )
    CallTimes(calls.places, storages.problem, storages.plan).retime(swaps)
    for timed in swaps:
        swap = timed.swap
        add(timed.send, swap.after + 1, "send", swap.tensor)
        add(timed.free, swap.free_before, "free", swap.tensor)
        # At one call what is needed first is fetched first.
        add(timed.fetch, swap.use, "fetch", swap.tensor)
        add(timed.use, swap.use, "use", swap.tensor)
    for again in storages.plan.recomputes:
        before = calls.before(again.before)
        drop = max(calls.after(again.after + 1), found_at(again.tensor, before))
        if drop > before:
            raise _NotSavedError
        for number in _read_again(repeated, storages, again.ops):
            found_at(number, before)
        add(drop, again.after + 1, "drop", again.tensor)
        add(before, again.before, "recompute", again)
    # Autograd alone holds what the plan no longer needs.
    forget = storages.forget
    events += [_Event(call, math.inf, 0, forget, number) for number, call in last.items()]
    return repeated, events


def _with_numbers(
    calls: HookCalls, storages: PlannedStorages
) -> Iterator[tuple[int, tuple[Any, Any, Any]]]:
    """Calls in which tensors that each step has of its own are numbered, from -1 downwards."""
    numbers: dict[int, int] = {}
    for op, (func, args, kwargs) in storages.calls.items():

        def numbered(leaf: Any, op: int = op) -> Any:
            if not isinstance(leaf, StorageView) or isinstance(leaf.owner, int):
                return leaf
            if storages.is_owned(leaf.owner):
                return leaf
            storage = leaf.owner.untyped_storage()._cdata
            # Before that op another storage may have been there.
            saved = [i for i in calls.of_storage.get(storage, ()) if calls.places[i] >= op]
            if not saved:
                raise _NotSavedError
            number = numbers.setdefault(storage, -1 - len(numbers))
            calls.saved_at.setdefault(number, saved[0])
            return replace(leaf, owner=number)

        yield op, (func, *tree_map(numbered, (args, kwargs)))


def _read_again(
    calls: dict[int, tuple[Any, Any, Any]], storages: PlannedStorages, ops: tuple[int, ...]
) -> set[int]:
    """The numbered tensors that ops read and that none of them makes."""
    made = {number for op in ops for _, number in storages.results[op]}
    views = [leaf for op in ops for leaf in tree_leaves(calls[op][1:])]
    read = {v.owner for v in views if isinstance(v, StorageView) and isinstance(v.owner, int)}
    return read - made

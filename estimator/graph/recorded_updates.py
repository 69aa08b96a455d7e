"""Note which gradients a traced step completes, and which parameters its optimizers update.

A step may call backward() and its optimizers' step() itself, as that of a GAN does: while it is
watched, optimizers that hold the real parameters clear the gradients of the fakes in their place,
and their step() updates nothing, but is counted for each parameter that has a gradient by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from estimator.errors import StrategyError, quoted
from estimator.graph.fake_tensors import FakeTensors
from estimator.graph.ops import Parameter
from estimator.graph.record import Recorder
from estimator.workload.optimizers import BESIDE_MUON, check_optimizer

DEFAULT_OPTIMIZER = "adamw"
RECORDED = (
    "the step calls backward() and its optimizers' step() itself: it is traced as for its first "
    "batch, gradients are reduced once, and all updates come at its end"
)
_NOT_UPDATED = "the step calls no optimizer's step(): every parameter is updated once"


@dataclass(slots=True)
class Updates:
    """By the name of a parameter, the optimizer that updates it, and how often in a step.

    Those that are not there are not updated.
    """

    optimizers: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    assumptions: dict[str, None] = field(default_factory=dict)

    def add(self, names: Sequence[str], optimizer: str | Optimizer) -> None:
        """Note an update; an optimizer that is not known is taken to be the default one."""
        try:
            kind = check_optimizer(optimizer)
        except StrategyError:
            kind, name = DEFAULT_OPTIMIZER, type(optimizer).__name__
            self.assumptions[f"nothing is known of {quoted(name)}, taken as {kind}"] = None
        self.optimizers.update(dict.fromkeys(names, kind))
        self.counts.update(names)

    def of(
        self, parameters: Sequence[Parameter], asked: str | None
    ) -> tuple[str, tuple[Parameter, ...]]:
        """(the optimizer of most elements, the parameters with what updates each).

        With an optimizer that is `asked` for, that updates them.
        """
        sizes: Counter[str] = Counter()
        for each in parameters:
            if each.name in self.optimizers:
                sizes[self.optimizers[each.name]] += each.spec.numel
        most = asked or max(sizes, key=lambda name: sizes[name], default=DEFAULT_OPTIMIZER)
        alike = {most}
        if asked is None and "muon" in sizes:
            # Its rule has what is left to AdamW.
            most, alike = "muon", {"muon", BESIDE_MUON}
        updated = [
            replace(
                each,
                optimizer=None if asked or kind in alike else kind,
                updates=self.counts[each.name],
            )
            for each in parameters
            for kind in (self.optimizers.get(each.name, most),)
        ]
        return most, tuple(updated)


class RecordedStep:
    """Watches a step on fake tensors: when gradients are complete, and what is updated.

    `backwards` counts the calls of backward() that the step makes itself.
    """

    def __init__(self, recorder: Recorder, fakes: FakeTensors) -> None:
        self._recorder, self._fakes = recorder, fakes
        self._names = {id(each): name for name, each in fakes.parameters.items()}
        # Of each parameter the gradient and the op that completed it, so far and when it was used.
        self._done: dict[str, tuple[int | None, int]] = {}
        self._used: dict[str, tuple[int | None, int]] = {}
        self._held: dict[int, tuple[Optimizer, list[list[Tensor]]]] = {}
        self.updates = Updates()
        self.backwards = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note gradients and updates; nothing of torch stays replaced."""
        with ExitStack() as stack:
            for name, parameter in self._fakes.parameters.items():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(self._completes(name))
                    stack.callback(handle.remove)
            stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_update).remove)
            for owner, name, made in (
                (Tensor, "backward", self._own_tensor_backward),
                (torch.autograd, "backward", self._own_backward),
                (Optimizer, "zero_grad", self._own_zero_grad),
            ):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, made())
            stack.callback(self._give_back)
            yield

    def _completes(self, name: str) -> Any:
        def note(parameter: Tensor) -> None:
            value = self._recorder.gradient_of(name, parameter)
            self._done.pop(name, None)
            self._done[name] = (value, len(self._recorder.ops) - 1)

        return note

    def fake_of(self, parameter: Tensor) -> Tensor:
        """The fake in the place of a parameter, or what is none of the model as it is."""
        return self._fakes.made.get(id(parameter), parameter)

    def ready(self) -> tuple[tuple[str, int, int | None, int | None], ...]:
        """(name, value, value of the gradient, the op after which it is final) of each parameter.

        Trainable ones in order of readiness; those without a gradient come last. What is added to
        a gradient after its last update is not waited for.
        """
        recorder, parameters = self._recorder, self._fakes.parameters
        found: list[tuple[str, int, int | None, int | None]] = []
        done = sorted((self._done | self._used).items(), key=lambda item: item[1][1])
        for name, (value, op) in done:
            index = recorder.index_of(parameters[name])
            assert index is not None
            found.append((name, index, value, op))
        for name, parameter in parameters.items():
            index = recorder.index_of(parameter)
            if parameter.requires_grad and name not in self._done and index is not None:
                found.append((name, index, None, None))
        return tuple(found)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What is taken for granted of a step that calls backward() itself."""
        if not self.backwards:
            return ()
        more = self.updates.assumptions if self.updates.counts else (_NOT_UPDATED,)
        return (RECORDED, *more)

    # The step's own calls

    def run_backward(
        self,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor | None] = (None,),
        *,
        retains: bool = False,
        creates: bool = False,
        inputs: Sequence[Any] = (),
    ) -> None:
        """Accumulate gradients as torch.autograd.backward does, in the phase that is for it.

        That is below its override for function modes: what a checkpoint computes again in backward
        must meet the same functions as before.
        """
        recorder, phase = self._recorder, self._recorder.phase
        recorder.phase = "backward"
        try:
            with torch.autocast("cpu", enabled=False):
                known = tuple(
                    torch.ones_like(root, memory_format=torch.preserve_format)
                    if seed is None
                    else seed
                    for root, seed in zip(roots, seeds, strict=True)
                )
                _engine_run_backward(
                    *(tuple(roots), known, retains, creates, tuple(inputs)),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
        finally:
            recorder.phase = phase

    def _own_backward(self) -> Any:
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            roots, given = _several(tensors), _several(grad_tensors)
            if not given and any(root.numel() != 1 for root in roots):
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            self.backwards += 1
            self._recorder.constants.reads_are_logs = True
            self.run_backward(
                roots,
                given or (None,) * len(roots),
                retains=create_graph if retain_graph is None else retain_graph,
                creates=create_graph,
                inputs=_several(inputs),
            )

        return backward

    def _own_tensor_backward(self) -> Any:
        def backward(
            tensor: Tensor,
            gradient: Tensor | None = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            inputs: Any = None,
        ) -> None:
            torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

        return backward

    def _own_zero_grad(self) -> Any:
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            for parameter in self._parameters(optimizer):
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()

        return zero_grad

    def _parameters(self, optimizer: Optimizer) -> list[Tensor]:
        held = self._held.get(id(optimizer))
        groups = [g["params"] for g in optimizer.param_groups] if held is None else held[1]
        return [self.fake_of(parameter) for group in groups for parameter in group]

    def _before_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # Without parameters it still calls its closure.
        self._held[id(optimizer)] = optimizer, [g["params"] for g in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []

    def _after_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        updated = [each for each in self._parameters(optimizer) if each.grad is not None]
        self._give_back(optimizer)
        names = [self._names[id(each)] for each in updated if id(each) in self._names]
        self.updates.add(names, optimizer)
        self._used.update((name, self._done[name]) for name in names if name in self._done)

    def _give_back(self, only: Optimizer | None = None) -> None:
        for key in list(self._held) if only is None else [id(only)]:
            optimizer, groups = self._held.pop(key)
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return tuple(given.values())
    return tuple(given) if isinstance(given, Sequence) else (given,)

"""Note which parameters the optimizers of a step update, also of one that calls them itself.

A step may call backward() and its optimizers' step() itself, as that of a GAN does: while it is
watched, optimizers that hold the real parameters clear the gradients of the fakes in their place,
and their step() updates nothing, but is counted for each parameter that has a gradient by then.

Modules are told by their methods: nothing of Lightning is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from estimator.errors import StrategyError, one_line, quoted
from estimator.graph.ir.ops import Parameter, Value
from estimator.graph.trace.fake_tensors import FakeTensors
from estimator.graph.trace.record import Recorder
from estimator.workload.optimizers import BESIDE_MUON, check_optimizer

DEFAULT_OPTIMIZER = "adamw"
RECORDED = (
    "the step calls backward() and its optimizers' step() itself: it is traced as for its first "
    "batch, gradients are reduced once, and all updates come at its end"
)
_NOT_UPDATED = "the step calls no optimizer's step(): every parameter is updated once"


@dataclass(slots=True)
class OptimizerUpdates:
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
        self, parameters: Sequence[Parameter], optimizer: str | None
    ) -> tuple[str, tuple[Parameter, ...]]:
        """(the optimizer of most elements, the parameters with what updates each).

        With an `optimizer` that is asked for, that updates them.
        """
        sizes: Counter[str] = Counter()
        for parameter in parameters:
            if parameter.name in self.optimizers:
                sizes[self.optimizers[parameter.name]] += parameter.spec.numel
        most = optimizer or max(sizes, key=lambda name: sizes[name], default=DEFAULT_OPTIMIZER)
        alike = {most}
        if optimizer is None and "muon" in sizes:
            # Its rule has what is left to AdamW.
            most, alike = "muon", {"muon", BESIDE_MUON}
        updated = [
            replace(
                parameter,
                optimizer=None if optimizer or kind in alike else kind,
                updates=self.counts[parameter.name],
            )
            for parameter in parameters
            for kind in (self.optimizers.get(parameter.name, most),)
        ]
        return most, tuple(updated)


class RecordedStep:
    """Watches a step on fake tensors: when gradients are complete, and what is updated.

    `backwards` counts the calls of backward() that the step makes itself.
    """

    def __init__(self, recorder: Recorder, fakes: FakeTensors) -> None:
        self._recorder, self._fakes = recorder, fakes
        self._names = {id(fake): name for name, fake in fakes.parameters.items()}
        # Of each parameter the gradient and the op that completed it, so far and when it was used.
        self._done: dict[str, tuple[int | None, int]] = {}
        self._used: dict[str, tuple[int | None, int]] = {}
        self._held: dict[int, tuple[Optimizer, list[list[Tensor]]]] = {}
        self.updates = OptimizerUpdates()
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
                (Tensor, "backward", _tensor_backward),
                (torch.autograd, "backward", self._own_backward),
                (Optimizer, "zero_grad", self._own_zero_grad()),
            ):
                stack.enter_context(patch.object(owner, name, made))
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

    def parameters(self, values: Sequence[Value]) -> tuple[Parameter, ...]:
        """Trainable ones in order of readiness; those without a gradient come last.

        What is added to a gradient after its last update is not waited for.
        """
        fakes, done = self._fakes.parameters, self._done | self._used
        order = sorted(done, key=lambda name: done[name][1])
        order += [name for name, fake in fakes.items() if fake.requires_grad and name not in done]
        parameters = []
        for name in order:
            value = self._recorder.index_of(fakes[name])
            assert value is not None
            gradient, ready_after = done.get(name, (None, None))
            parameters.append(
                Parameter(
                    name=name,
                    spec=values[value].spec,
                    gradient=gradient,
                    ready_after=ready_after,
                )
            )
        return tuple(parameters)

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

    def _own_backward(
        self,
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
        updated = [
            parameter for parameter in self._parameters(optimizer) if parameter.grad is not None
        ]
        self._give_back(optimizer)
        names = [
            self._names[id(parameter)] for parameter in updated if id(parameter) in self._names
        ]
        self.updates.add(names, optimizer)
        self._used.update((name, self._done[name]) for name in names if name in self._done)

    def _give_back(self, only: Optimizer | None = None) -> None:
        for key in list(self._held) if only is None else [id(only)]:
            optimizer, groups = self._held.pop(key)
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters


def _tensor_backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return tuple(given.values())
    return tuple(given) if isinstance(given, Sequence) else (given,)


# What schedules may ask a trainer for; learning rates cost no time.
_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Configured:
    """The optimizers and schedulers of ``configure_optimizers()``, or why they are not known."""

    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    unknown: str | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Configured | None:
        """Those of a module, None for one that configures nothing."""
        configure = getattr(model, "configure_optimizers", None)
        if not callable(configure):
            return None
        try:
            with standing_in(model, cls(), lambda parameter: parameter):
                configured = configure()
        except Exception as error:  # noqa: BLE001 (code of the user, which may need its trainer)
            return cls(unknown=f"raised {type(error).__name__}: {one_line(str(error), 80)}")
        optimizers, schedulers = _read(configured)
        if not optimizers:
            return cls(unknown=f"gave {type(configured).__name__}, in which no optimizer was found")
        return cls(optimizers, schedulers)

    def updates(self, model: nn.Module) -> OptimizerUpdates:
        """What each optimizer updates in a step whose trainer calls them."""
        updates = OptimizerUpdates()
        trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        for optimizer in self.optimizers:
            held = [id(p) for group in optimizer.param_groups for p in group["params"]]
            updates.add([trained[key] for key in held if key in trained], optimizer)
        if self.unknown is not None:
            updates.add(list(trained.values()), DEFAULT_OPTIMIZER)
            remark = f"configure_optimizers() {self.unknown}: taken as {DEFAULT_OPTIMIZER}"
            updates.assumptions[remark] = None
        return updates


def _read(configured: Any) -> tuple[tuple[Optimizer, ...], tuple[Any, ...]]:
    """(optimizers, schedulers) in the forms that Lightning takes.

    An optimizer; a list of them; one list of optimizers and one of schedulers; a mapping with
    "optimizer" and perhaps "lr_scheduler", or several.
    """
    if hasattr(configured, "param_groups"):
        return (configured,), ()
    if isinstance(configured, Mapping):
        plan = configured.get("lr_scheduler")
        plan = plan.get("scheduler") if isinstance(plan, Mapping) else plan
        return _read(configured.get("optimizer"))[0], () if plan is None else (plan,)
    optimizers: list[Optimizer] = []
    schedulers: list[Any] = []
    for part in configured if isinstance(configured, (list, tuple)) else ():
        if hasattr(part, "step") and not hasattr(part, "param_groups"):
            schedulers.append(part)
            continue
        if isinstance(part, Mapping) and "scheduler" in part:
            schedulers.append(part["scheduler"])
            continue
        more, plans = _read(part)
        optimizers += more
        schedulers += plans
    return tuple(optimizers), tuple(schedulers)


@dataclass(frozen=True, slots=True)
class _StandIn:
    """What a module asks its trainer in a step; `parameter_of` is as in `standing_in`."""

    configured: Configured
    parameter_of: Callable[[Tensor], Tensor]
    frozen: list[Tensor] = field(default_factory=list)

    def toggle(self, optimizer: Optimizer) -> None:
        """Freeze what other optimizers update."""
        own = {id(parameter) for parameter in self._held(optimizer)}
        for parameter in (
            parameter for other in self.configured.optimizers for parameter in self._held(other)
        ):
            if id(parameter) not in own and parameter.requires_grad:
                parameter.requires_grad_(False)
                self.frozen.append(parameter)

    def untoggle(self, *_optimizer: Optimizer) -> None:
        while self.frozen:
            self.frozen.pop().requires_grad_(True)

    def clip(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_val:
            by_value = gradient_clip_algorithm == "value"
            clip = clip_grad_value_ if by_value else clip_grad_norm_
            clip(self._held(optimizer), gradient_clip_val)

    def _held(self, optimizer: Optimizer) -> list[Tensor]:
        return [self.parameter_of(p) for group in optimizer.param_groups for p in group["params"]]

    @property
    def attributes(self) -> dict[str, Any]:
        """What a module finds in itself instead of the methods and properties of its class."""
        trainer = _trainer(self.configured)
        return {
            **dict.fromkeys(("_trainer", "trainer"), trainer),
            "logger": trainer.logger,
            **dict.fromkeys(("current_epoch", "global_step"), 0),
            "optimizers": lambda *_args, **_options: _one_or_all(self.configured.optimizers),
            "lr_schedulers": lambda: _one_or_all(self.configured.schedulers),
            "manual_backward": lambda loss, *args, **options: loss.backward(*args, **options),
            "toggle_optimizer": self.toggle,
            "untoggle_optimizer": self.untoggle,
            "clip_gradients": self.clip,
            **dict.fromkeys(("log", "log_dict", "print"), lambda *_args, **_options: None),
        }


def _trainer(configured: Configured) -> SimpleNamespace:
    logger = MagicMock()
    return SimpleNamespace(
        logger=logger,
        loggers=[logger],
        optimizers=list(configured.optimizers),
        **dict.fromkeys(("max_steps", "estimated_stepping_batches"), _STEPS),
        num_training_batches=_STEPS,
        **dict.fromkeys(("max_epochs", "accumulate_grad_batches", "world_size"), 1),
        **dict.fromkeys(("current_epoch", "global_step", "global_rank", "local_rank"), 0),
        is_global_zero=True,
        is_last_batch=False,
        training=True,
    )


@contextmanager
def standing_in(
    model: nn.Module, configured: Configured, parameter_of: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Let a module's step call what its trainer would answer: optimizers, backward, logs.

    `parameter_of` gives what stands in the place of a parameter that an optimizer holds.
    """
    stand_in = _StandIn(configured, parameter_of)
    attributes, own = stand_in.attributes, vars(model)
    # Properties of Lightning's class go before what is set here, and read `_trainer`.
    for name, _ in model.named_children():
        attributes.pop(name, None)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        stand_in.untoggle()
        for name in attributes:
            own.pop(name, None)
        own.update(before)


def _one_or_all(losses: tuple[Any, ...]) -> Any:
    if not losses:
        return None
    return losses[0] if len(losses) == 1 else list(losses)

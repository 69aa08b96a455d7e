"""Read what optimizers a LightningModule configures, and stand in for its trainer in a step.

Modules are told by their methods: nothing of Lightning is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from estimator.graph.recorded_updates import DEFAULT_OPTIMIZER, Updates
from estimator.graph.user_code import one_line

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
                found = configure()
        except Exception as error:  # noqa: BLE001 (code of the user, which may need its trainer)
            return cls(unknown=f"raised {type(error).__name__}: {one_line(str(error), 80)}")
        optimizers, schedulers = _read(found)
        if not optimizers:
            return cls(unknown=f"gave {type(found).__name__}, in which no optimizer was found")
        return cls(optimizers, schedulers)

    def updates(self, model: nn.Module) -> Updates:
        """What each optimizer updates in a step whose trainer calls them."""
        found = Updates()
        trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        for optimizer in self.optimizers:
            held = [id(p) for group in optimizer.param_groups for p in group["params"]]
            found.add([trained[key] for key in held if key in trained], optimizer)
        if self.unknown is not None:
            found.add(list(trained.values()), DEFAULT_OPTIMIZER)
            said = f"configure_optimizers() {self.unknown}: taken as {DEFAULT_OPTIMIZER}"
            found.assumptions[said] = None
        return found


def _read(found: Any) -> tuple[tuple[Optimizer, ...], tuple[Any, ...]]:
    """(optimizers, schedulers) in the forms that Lightning takes.

    An optimizer; a list of them; one list of optimizers and one of schedulers; a mapping with
    "optimizer" and perhaps "lr_scheduler", or several.
    """
    if hasattr(found, "param_groups"):
        return (found,), ()
    if isinstance(found, Mapping):
        plan = found.get("lr_scheduler")
        plan = plan.get("scheduler") if isinstance(plan, Mapping) else plan
        return _read(found.get("optimizer"))[0], () if plan is None else (plan,)
    optimizers: list[Optimizer] = []
    schedulers: list[Any] = []
    for part in found if isinstance(found, (list, tuple)) else ():
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


class _Silent:
    """A logger that takes every call."""

    def __getattr__(self, name: str) -> _Silent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_options: Any) -> _Silent:
        return self


@dataclass(frozen=True, slots=True)
class _StandIn:
    """What a module asks its trainer in a step; `parameter_of` is as in `standing_in`."""

    configured: Configured
    parameter_of: Callable[[Tensor], Tensor]
    frozen: list[Tensor] = field(default_factory=list)

    def toggle(self, optimizer: Optimizer) -> None:
        """Freeze what other optimizers update."""
        own = {id(each) for each in self._held(optimizer)}
        for each in (each for other in self.configured.optimizers for each in self._held(other)):
            if id(each) not in own and each.requires_grad:
                each.requires_grad_(False)
                self.frozen.append(each)

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
            **dict.fromkeys(("log", "log_dict", "print"), _nothing),
        }


def _nothing(*_args: Any, **_options: Any) -> None: ...


def _trainer(configured: Configured) -> SimpleNamespace:
    logger = _Silent()
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


def _one_or_all(found: tuple[Any, ...]) -> Any:
    if not found:
        return None
    return found[0] if len(found) == 1 else list(found)

"""Read what optimizers a LightningModule configures, and stand in for its trainer in a step.

Modules are told by their methods: nothing of Lightning is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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


@contextmanager
def standing_in(
    model: nn.Module, configured: Configured, parameter_of: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Let a module's step call what its trainer would answer: optimizers, backward, logs.

    `parameter_of` gives what stands in the place of a parameter that an optimizer holds.
    """
    frozen: list[Tensor] = []

    def toggle(optimizer: Optimizer) -> None:
        own = {id(each) for each in _held(optimizer)}
        others = [each for other in configured.optimizers for each in _held(other)]
        for each in others:
            if id(each) not in own and each.requires_grad:
                each.requires_grad_(False)
                frozen.append(each)

    def untoggle(*_optimizer: Optimizer) -> None:
        while frozen:
            frozen.pop().requires_grad_(True)

    def _held(optimizer: Optimizer) -> list[Tensor]:
        return [parameter_of(p) for group in optimizer.param_groups for p in group["params"]]

    def clip(
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_val:
            by_value = gradient_clip_algorithm == "value"
            (clip_grad_value_ if by_value else clip_grad_norm_)(_held(optimizer), gradient_clip_val)

    def back(loss: Tensor, *args: Any, **options: Any) -> None:
        loss.backward(*args, **options)  # type: ignore[no-untyped-call]

    def nothing(*_args: Any, **_options: Any) -> None: ...

    logger = _Silent()
    trainer = SimpleNamespace(
        logger=logger,
        loggers=[logger],
        optimizers=list(configured.optimizers),
        current_epoch=0,
        global_step=0,
        max_epochs=1,
        max_steps=_STEPS,
        estimated_stepping_batches=_STEPS,
        num_training_batches=_STEPS,
        accumulate_grad_batches=1,
        world_size=1,
        global_rank=0,
        local_rank=0,
        is_global_zero=True,
        is_last_batch=False,
        training=True,
    )
    stand_ins: dict[str, Any] = {
        **dict.fromkeys(("_trainer", "trainer"), trainer),
        "logger": logger,
        **dict.fromkeys(("current_epoch", "global_step"), 0),
        "optimizers": lambda *_args, **_options: _one_or_all(configured.optimizers),
        "lr_schedulers": lambda: _one_or_all(configured.schedulers),
        "manual_backward": back,
        "toggle_optimizer": toggle,
        "untoggle_optimizer": untoggle,
        "clip_gradients": clip,
        "log": nothing,
        "log_dict": nothing,
        "print": nothing,
    }
    own = vars(model)
    before = {name: own[name] for name in stand_ins if name in own}
    # Properties of Lightning's class go before what is set here, and read `_trainer`.
    for name, _ in model.named_children():
        stand_ins.pop(name, None)
    own.update(stand_ins)
    try:
        yield
    finally:
        untoggle()
        for name in stand_ins:
            with suppress(KeyError):
                del own[name]
        own.update(before)


def _one_or_all(found: tuple[Any, ...]) -> Any:
    if not found:
        return None
    return found[0] if len(found) == 1 else list(found)

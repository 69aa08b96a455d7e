"""Find out how a model, its batch and its loss are called, in the forms that people have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from estimator.errors import ModelError, TraceError, UserCode, quoted
from estimator.graph.trace.fake_tensors import map_tensors
from estimator.graph.trace.own_steps import Configured, standing_in

Step = Callable[[Any, Any], Any]
SUMMED = (
    "the losses of a step's phases are traced as one sum: all forward passes, then one backward "
    "pass, whose gradients are reduced and applied once"
)


class Phases(nn.Module):
    """Models that `step(models, batch)` gives the losses of, one loss or several."""

    def __init__(self, models: Sequence[nn.Module] | Mapping[str, nn.Module], step: Step) -> None:
        super().__init__()
        self.models: nn.Module
        if isinstance(models, Mapping):
            self.models = nn.ModuleDict(models)
        else:
            self.models = nn.ModuleList(models)
        self._step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """What the step returns: its losses, or whatever it likes where it trains by itself."""
        return self._step(self.models, batch)

    @staticmethod
    def sum_of(losses: Any) -> Tensor:
        """The sum of the losses that a step returned; raises ModelError."""
        if isinstance(losses, Mapping):
            losses = tuple(losses.values())
        several = losses if isinstance(losses, (tuple, list)) else (losses,)
        if not several or not all(isinstance(loss, Tensor) for loss in several):
            raise ModelError(
                f"step(models, batch) returned {quoted(losses)} and called no backward(); return "
                "its loss, or one for each phase"
            )
        total: Tensor = sum(loss.mean() for loss in several)
        return total


def as_phases(model: Any, loss: Any) -> tuple[Any, Any]:
    """(model, loss), several models with a step made one; raises ModelError without a step."""
    several = list(model.values()) if isinstance(model, Mapping) else model
    if not isinstance(several, (list, tuple)) or isinstance(model, nn.Module):
        return model, loss
    if not several or not all(isinstance(module, nn.Module) for module in several):
        return model, loss
    if not callable(loss) or isinstance(loss, nn.Module):
        raise ModelError(
            f"{len(several)} models are trained together by a function; return (models, batch, "
            "step), where step(models, batch) returns the losses, or calls backward() itself"
        )
    return Phases(model, loss), None


PADDED_ASSUMPTION = "packed sequences are computed at the length that they are padded to"
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def packed_as_padded(assumptions: MutableMapping[str, None]) -> AbstractContextManager[Any]:
    """Let every sequence that is packed have the full length; `assumptions` gets a line if one is.

    torch.nn.utils.rnn packs, and recurrent modules run, by functions of `torch._VF`.
    """
    functions: Any = torch._C._VariableFunctions

    def pack(source: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        assumptions[PADDED_ASSUMPTION] = None
        padded = source.transpose(0, 1) if batch_first else source
        steps, samples = padded.shape[:2]
        with unset_fake_temporarily():
            batch_sizes = torch.full((steps,), samples)
        return padded.reshape(steps * samples, *padded.shape[2:]), batch_sizes

    def pad(
        data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, longest: int
    ) -> tuple[Tensor, Tensor]:
        padded = _padded(data, batch_sizes)
        lengths = torch.full((padded.shape[1],), len(padded))
        return padded.transpose(0, 1) if batch_first else padded, lengths

    def recurrent(name: str) -> Any:
        run = getattr(functions, name)

        def ran(*arguments: Any) -> Any:
            # A packed sequence comes as (data, batch sizes, state, weights, ...).
            if not isinstance(arguments[3], (list, tuple)):
                return run(*arguments)
            data, batch_sizes, *rest = arguments
            output, *state = run(_padded(data, batch_sizes), *rest, False)
            return (output.reshape(-1, output.shape[-1]), *state)

        return ran

    made: dict[str, Any] = {name: recurrent(name) for name in _RECURRENT}
    return patch.multiple(torch._VF, _pack_padded_sequence=pack, _pad_packed_sequence=pad, **made)


def _padded(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """(steps, samples, ...) of what `pack` laid out row by row."""
    return data.reshape(len(batch_sizes), -1, *data.shape[1:])


# A function of (output, targets) or of the output alone, or a step of (model, batch).
Loss = Callable[..., Tensor]

# Samples of a dataset that is given without a loader.
_DATASET_SAMPLES = 8
# The first parameter of a function that is given the model, not its output.
_MODEL_WORDS = frozenset({"model", "models", "module", "net", "network"})
# What batches call what the loss compares with.
_TARGET_WORDS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCall:
    """One call of a model for its loss.

    `batch` holds what is called with: a tensor, a tuple or a mapping. Of a tuple the last `targets`
    parts, of a mapping those named in `target_names`, go to the loss and not to the model.
    `as_one` says that forward() takes all of its inputs as one argument, `by_step` that the loss is
    a ``step(model, batch)``, which calls the model itself. `assumptions` say how the batch was
    read, where it could be read in several ways, `configured` which optimizers a training step has.
    """

    batch: Any
    loss: Loss | None = None
    targets: int = 0
    target_names: tuple[str, ...] = ()
    by_training_step: bool = False
    by_step: bool = False
    as_one: bool = False
    configured: Configured | None = None
    assumptions: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, batch: Any, loss: Loss | None) -> TrainingCall:
        """The call of `model` with a batch, a DataLoader or Dataset that gives one.

        With a loss, ``(inputs, targets)`` is told from ``(input, input)`` by what ``forward()``
        takes. A function whose first parameter is `model` is a ``step(model, batch)``. Without a
        loss, a ``training_step(batch, batch_idx)`` as Lightning's modules have it gives it. Raises
        ModelError where a loader is empty or raises.
        """
        batch, assumptions = _first_batch(batch)
        call = partial(cls, loss=loss, assumptions=assumptions)
        if isinstance(loss, type):
            raise ModelError(
                f"loss is the class {loss.__name__}, not a loss; write {loss.__name__}()"
            )
        if loss is not None and not callable(loss):
            raise ModelError(
                f"loss is a function of (output, targets) or a module such as "
                f"nn.CrossEntropyLoss(), found {quoted(loss)}; give one"
            )
        if loss is None and callable(getattr(model, "training_step", None)):
            return call(batch=batch, by_training_step=True, configured=Configured.of(model))
        if loss is None:
            return call(batch=batch, as_one=_is_one_argument(model, batch))
        if _is_step(loss):
            return call(batch=batch, by_step=True)
        if isinstance(batch, Mapping):
            names, as_one = _target_names(model, batch, loss)
            return call(batch=batch, target_names=names, as_one=as_one)
        # Where forward() would take the last part, losses of torch.nn decide: they have a target.
        several = isinstance(batch, (tuple, list)) and len(batch) > 1
        if several and (isinstance(loss, nn.Module) or not _binds(model, *batch)):
            inputs = batch[0] if len(batch) == 2 else batch[:-1]
            as_one = isinstance(inputs, Mapping) and _is_one_argument(model, inputs)
            are_several = isinstance(inputs, (tuple, list)) and _binds(model, *inputs)
            parts = tuple(inputs) if are_several else (inputs,)
            return call(batch=(*parts, batch[-1]), targets=1, as_one=as_one)
        return call(batch=batch, as_one=_is_one_argument(model, batch))

    @property
    def advice(self) -> str:
        """What to do where the model does not run on the batch."""
        check = "check that the model accepts it"
        if self.as_one and isinstance(self.batch, (tuple, list)) and not self.targets:
            check = (
                f"forward() has no place for {len(self.batch)} inputs and got them as one; {check}"
            )
        if self.by_training_step:
            return (
                "let training_step(batch, batch_idx) run without a trainer, or return (models, "
                "batch, step), where step(models, batch) returns the losses or trains by itself"
            )
        if self.by_step:
            return "let step(model, batch) return its loss, or call backward() itself"
        if self.loss is not None or isinstance(self.batch, Tensor):
            return check
        return (
            f"{check}, or give the loss that gets its targets, as in "
            "(model, (inputs, targets), nn.CrossEntropyLoss())"
        )

    def run(self, model: Any, batch: Any) -> Any:
        """The loss of a model, or of one that wraps it, on a batch of this form."""
        return self.loss_of(model, self.called(model, batch), batch)

    def called(
        self,
        model: Any,
        batch: Any,
        parameter_of: Callable[[Tensor], Tensor] = lambda parameter: parameter,
    ) -> Any:
        """What the model returns on a batch, or the step that calls it.

        `parameter_of` gives what stands in the place of a parameter that optimizers hold.
        """
        if self.by_step and self.loss is not None:
            return self.loss(model, batch)
        if self.configured is None:
            return self._output(model, batch)
        with standing_in(model, self.configured, parameter_of):
            return self._output(model, batch)

    def trained(self, model: Any, batch: Any) -> tuple[Any, bool]:
        """What was `called` returns, and whether it called an optimizer's step() itself."""
        steps: list[Any] = []
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(optimizer))
        try:
            return self.called(model, batch), bool(steps)
        finally:
            handle.remove()

    def loss_of(self, model: Any, output: Any, batch: Any) -> Any:
        """The loss of what was `called` on a batch."""
        if self.by_step:
            # It alone, or first, as in (loss, outputs).
            if isinstance(output, Mapping):
                return loss_of(output)
            return output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(model, Phases):
            return model.sum_of(output)
        if self.loss is None:
            return loss_of(output)
        if not _binds(self.loss, output, batch):
            return self.loss(output)
        beside, said = self._targets_of(batch)
        advice = "check that it takes these; "
        if isinstance(self.loss, nn.Module):
            advice += "leave only its targets in the batch, or give a function of (output, targets)"
        else:
            advice += "a function that calls the model itself names it: step(model, batch)"
        with UserCode(
            f"the loss cannot run on the output and {said}", advice=advice, error=TraceError
        ):
            return self.loss(output, beside)

    def _targets_of(self, batch: Any) -> tuple[Any, str]:
        """What the loss gets beside the output, and that in words."""
        if self.targets:
            return batch[-1], "the last of the batch"
        if not self.target_names:
            return batch, "the batch"
        targets = {name: batch[name] for name in self.target_names}
        names = ", ".join(quoted(name) for name in targets)
        if len(targets) == 1:
            return targets.popitem()[1], f"{names} alone, which forward() does not take"
        return targets, f"a mapping of {names}, which forward() does not take"

    def is_loss_assumed(self, model: Any, output: Any) -> bool:
        """Whether nothing says what the loss of an output is."""
        if self.loss is not None or self.by_training_step or isinstance(model, Phases):
            return False
        is_one_number = isinstance(output, Tensor) and output.numel() == 1
        return not is_one_number and not isinstance(_own_loss(output), Tensor)

    def _output(self, model: Any, batch: Any) -> Any:
        """What the model returns; of a training step, its loss."""
        if self.by_training_step:
            step = model.training_step
            return step(batch, 0) if _binds(step, batch, 0) else step(batch)
        if self.as_one:
            return model(batch[0] if self.targets else batch)
        if isinstance(batch, Mapping):
            return model(**{k: v for k, v in batch.items() if k not in self.target_names})
        if not isinstance(batch, (tuple, list)):
            return model(batch)
        inputs = batch[: len(batch) - self.targets]
        if self.targets and len(inputs) == 1 and isinstance(inputs[0], Mapping):
            return model(**inputs[0])
        return model(*inputs)


def _target_names(
    model: nn.Module, batch: Mapping[Any, Any], loss: Loss
) -> tuple[tuple[str, ...], bool]:
    """(the targets of a mapping: what forward() has no parameter for, whether it takes it whole)"""
    names = _unaccepted(model, batch)
    as_one = _is_one_argument(model, batch, without=names)
    if isinstance(loss, nn.Module) and (as_one or not names):
        # Nothing tells the targets but what they are called.
        names = tuple(name for name in _TARGET_WORDS if name in batch)[:1]
    elif as_one:
        names = ()
    return names, as_one


def loss_of(output: Any) -> Tensor:
    """The loss of a model that names none: `output.loss`, else the mean of its floating outputs."""
    loss = _own_loss(output)
    if isinstance(loss, Tensor):
        return loss if loss.numel() == 1 else loss.mean()
    means: list[Tensor] = []

    def collect(_path: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.requires_grad:
            means.append(tensor.mean())
        return tensor

    map_tensors(output if not hasattr(output, "__dataclass_fields__") else vars(output), collect)
    if not means:
        raise ModelError(
            "the model returns no floating tensor that depends on its parameters; give loss="
        )
    return sum(means[1:], means[0])


def _own_loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _first_batch(batch: Any) -> tuple[Any, tuple[str, ...]]:
    """The first batch of a loader or dataset, and what was assumed; anything else as it is."""
    what, assumed = "loader", "the batch is the loader's first"
    if isinstance(batch, Dataset):
        batch, what = DataLoader(batch, batch_size=_DATASET_SAMPLES), "dataset"
        assumed = f"the batch is the dataset's first samples, {_DATASET_SAMPLES} at most"
    elif not isinstance(batch, DataLoader):
        return batch, ()
    with UserCode(
        f"no batch could be drawn from the {what}",
        advice=f"give a batch instead of the {what}",
        error=ModelError,
    ):
        for first in batch:
            return first, (assumed,)
    raise ModelError(f"the {what} is empty; give a batch instead of it")


def _binds(function: Any, *arguments: Any, **named: Any) -> bool:
    """Whether a function, or a module's forward(), takes these arguments."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        inspect.signature(called).bind(*arguments, **named)
    except TypeError:
        return False
    # A signature that cannot be read is taken to fit.
    except ValueError:
        return True
    return True


def _is_one_argument(model: nn.Module, batch: Any, *, without: tuple[str, ...] = ()) -> bool:
    """Whether forward() takes a batch of several parts only as one argument."""
    if isinstance(batch, Mapping):
        named = {str(name): value for name, value in batch.items() if name not in without}
        return not _binds(model, **named) and _binds(model, batch)
    if isinstance(batch, (tuple, list)):
        return not _binds(model, *batch) and _binds(model, batch)
    return False


def _is_step(loss: Loss) -> bool:
    """Whether a function takes the model itself, as step(model, batch) and compute_loss do."""
    if isinstance(loss, nn.Module):
        return False
    try:
        names = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):
        return False
    return len(names) > 1 and names[0] in _MODEL_WORDS


def _unaccepted(model: nn.Module, batch: Mapping[Any, Any]) -> tuple[str, ...]:
    """The names in a batch that forward() has no parameter for."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return ()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ()
    return tuple(name for name in batch if name not in parameters)

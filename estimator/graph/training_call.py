"""Find out how a model, its batch and its loss are called, in the forms that people have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from estimator.errors import ModelError, quoted
from estimator.graph.fake_tensors import map_tensors
from estimator.graph.phases import ASSUMPTION, Phases
from estimator.graph.user_code import UserCode

Loss = Callable[[Any, Any], Tensor]

# Samples of a dataset that is given without a loader.
_DATASET_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCall:
    """One call of a model for its loss.

    `batch` holds what is called with: a tensor, a tuple or a mapping. Of a tuple the last `targets`
    parts, of a mapping those named in `target_names`, go to the loss and not to the model.
    `assumptions` say how the batch was read, where it could be read in several ways.
    """

    batch: Any
    loss: Loss | None = None
    targets: int = 0
    target_names: tuple[str, ...] = ()
    by_training_step: bool = False
    assumptions: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, batch: Any, loss: Loss | None) -> TrainingCall:
        """The call of `model` with a batch, a DataLoader or Dataset that gives one.

        With a loss, ``(inputs, targets)`` is told from ``(input, input)`` by what ``forward()``
        takes. Without one, a ``training_step(batch, batch_idx)`` as Lightning's modules have it
        gives the loss. Raises ModelError where a loader is empty or raises.
        """
        batch, assumptions = _first_batch(batch)
        if loss is not None and not callable(loss):
            raise ModelError(
                f"loss is a function of (output, targets) or a module such as "
                f"nn.CrossEntropyLoss(), found {quoted(loss)}; give one"
            )
        if loss is None:
            if isinstance(model, Phases):
                assumptions += (ASSUMPTION,)
            if callable(getattr(model, "training_step", None)):
                return cls(batch=batch, by_training_step=True, assumptions=assumptions)
            return cls(batch=batch, assumptions=assumptions)
        if isinstance(batch, Mapping):
            names = _unaccepted(model, batch)
            return cls(batch=batch, loss=loss, target_names=names, assumptions=assumptions)
        if isinstance(batch, (tuple, list)) and len(batch) > 1 and _has_target(model, batch, loss):
            inputs = batch[0] if len(batch) == 2 else batch[:-1]
            are_several = isinstance(inputs, (tuple, list)) and _takes(model, *inputs)
            parts = tuple(inputs) if are_several else (inputs,)
            batch = (*parts, batch[-1])
            return cls(batch=batch, loss=loss, targets=1, assumptions=assumptions)
        return cls(batch=batch, loss=loss, assumptions=assumptions)

    @property
    def advice(self) -> str:
        """What to do where the model does not run on the batch."""
        check = "check that the model accepts it"
        if self.by_training_step:
            return (
                "let training_step(batch, batch_idx) return its loss without a trainer, or return "
                "(models, batch, step), where step(models, batch) returns the losses"
            )
        if isinstance(self.loss, nn.Module) and len(self.target_names) > 1:
            names = ", ".join(quoted(name) for name in self.target_names)
            return (
                f"forward() takes none of {names}, so the loss gets them as one mapping; leave "
                "only its targets in the batch, or give a function of (output, targets)"
            )
        if self.loss is not None or isinstance(self.batch, Tensor):
            return check
        return (
            f"{check}, or give the loss that gets its targets, as in "
            "(model, (inputs, targets), nn.CrossEntropyLoss())"
        )

    def run(self, model: Any, batch: Any) -> Any:
        """The loss of a model, or of one that wraps it, on a batch of this form."""
        output = self._output(model, batch)
        if self.loss is None:
            return loss_of(output)
        if self.targets:
            return self.loss(output, batch[-1])
        if self.target_names:
            targets = {name: batch[name] for name in self.target_names}
            one = len(targets) == 1
            return self.loss(output, next(iter(targets.values())) if one else targets)
        return self.loss(output, batch)

    def _output(self, model: Any, batch: Any) -> Any:
        """What the model returns; of a training step, its loss."""
        if self.by_training_step:
            return model.training_step(batch, 0)
        if isinstance(batch, Mapping):
            return model(**{k: v for k, v in batch.items() if k not in self.target_names})
        if not isinstance(batch, (tuple, list)):
            return model(batch)
        inputs = batch[: len(batch) - self.targets]
        if self.targets and len(inputs) == 1 and isinstance(inputs[0], Mapping):
            return model(**inputs[0])
        return model(*inputs)


def loss_of(output: Any) -> Tensor:
    """The loss of a model that names none: `output.loss`, else the mean of its floating outputs."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
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
    total = means[0]
    for mean in means[1:]:
        total = total + mean
    return total


def _first_batch(batch: Any) -> tuple[Any, tuple[str, ...]]:
    """The first batch of a loader or dataset, and what was assumed; anything else as it is."""
    if isinstance(batch, DataLoader):
        return _drawn(batch, "loader"), ("the batch is the loader's first",)
    if isinstance(batch, (Dataset, IterableDataset)):
        loader: DataLoader[Any] = DataLoader(batch, batch_size=_DATASET_SAMPLES)
        words = f"the batch is the dataset's first samples, {_DATASET_SAMPLES} at most"
        return _drawn(loader, "dataset"), (words,)
    return batch, ()


def _drawn(loader: DataLoader[Any], what: str) -> Any:
    with UserCode(
        f"no batch could be drawn from the {what}",
        advice=f"give a batch instead of the {what}",
        error=ModelError,
    ):
        for batch in loader:
            return batch
    raise ModelError(f"the {what} is empty; give a batch instead of it")


def _has_target(model: nn.Module, batch: Any, loss: Loss) -> bool:
    """Whether the last part of a batch is for the loss: the model has no place for it.

    Where forward() would take it, the losses of torch.nn decide: they compare with a target.
    """
    return isinstance(loss, nn.Module) or not _takes(model, *batch)


def _takes(model: nn.Module, *arguments: Any) -> bool:
    try:
        inspect.signature(model.forward).bind(*arguments)
    except TypeError:
        return False
    # A signature that cannot be read is taken to fit.
    except ValueError:
        return True
    return True


def _unaccepted(model: nn.Module, batch: Mapping[Any, Any]) -> tuple[str, ...]:
    """The names in a batch that forward() has no parameter for."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return ()
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return ()
    return tuple(name for name in batch if name not in parameters)

"""Train several models in one step, as the generator and discriminator of a GAN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from estimator.errors import ModelError, quoted

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
        found = losses if isinstance(losses, (tuple, list)) else (losses,)
        if not found or not all(isinstance(loss, Tensor) for loss in found):
            raise ModelError(
                f"step(models, batch) returned {quoted(losses)} and called no backward(); return "
                "its loss, or one for each phase"
            )
        total: Tensor = sum(loss.mean() for loss in found)
        return total


def as_phases(model: Any, loss: Any) -> tuple[Any, Any]:
    """(model, loss), several models with a step made one; raises ModelError without a step."""
    several = list(model.values()) if isinstance(model, Mapping) else model
    if not isinstance(several, (list, tuple)) or isinstance(model, nn.Module):
        return model, loss
    if not several or not all(isinstance(each, nn.Module) for each in several):
        return model, loss
    if not callable(loss) or isinstance(loss, nn.Module):
        raise ModelError(
            f"{len(several)} models are trained together by a function; return (models, batch, "
            "step), where step(models, batch) returns the losses, or calls backward() itself"
        )
    return Phases(model, loss), None

"""Watch a plain training loop by hooks on its model and its optimizer."""

from __future__ import annotations

import atexit
from typing import Any

from estimator.callbacks.training import Comparison, Settings, Training, is_watched


class HookedTraining:
    """Watches from the first call of the model on; ends with its ``with`` block, or the program.

    The first batch is what the model is called with; a step is what the optimizer says is one.
    """

    def __init__(self, model: Any, optimizer: Any, settings: Settings, **about: Any) -> None:
        self.training = Training(settings=settings)
        self._model, self._optimizer, self._about = model, optimizer, about
        self._batch: Any = None
        self._handles: list[Any] = []
        if is_watched():
            self._handles = [
                model.register_forward_pre_hook(self._called, with_kwargs=True),
                optimizer.register_step_post_hook(self._stepped),
            ]
            atexit.register(self.end)

    def __enter__(self) -> HookedTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> Comparison | None:
        """Say what was predicted and what measured."""
        atexit.unregister(self.end)
        while self._handles:
            self._handles.pop().remove()
        return self.training.end()

    def _called(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._batch is None:
            self._batch = dict(kwargs) if kwargs and not args else args

    def _stepped(self, *_: Any) -> None:
        if self.training.has_begun:
            self.training.step()
        elif self._batch is not None:
            self._handles.pop(0).remove()
            batch, self._batch = self._batch, None
            self.training.begin(self._model, batch, optimizer=self._optimizer, **self._about)


def precision_of(model: Any, mixed: str | None) -> str:
    """The precision of a training: what is mixed with fp32, else that of the parameters.

    >>> precision_of(None, "bf16")
    'bf16-amp'
    """
    if mixed in ("bf16", "fp16"):
        return f"{mixed}-amp"
    import torch

    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    first = next(iter(model.parameters()), None)
    return "fp32" if first is None else names.get(first.dtype, "fp32")

"""Watch a training of transformers' Trainer: ``Trainer(..., callbacks=[EstimatorCallback()])``."""

from __future__ import annotations

from typing import Any

from estimator.integrations.callbacks.training import (
    Comparison,
    Settings,
    WatchedTraining,
    precision_of,
)

try:
    from transformers import TrainerCallback
except ImportError:
    raise ImportError(
        "this callback is for transformers' Trainer; install transformers and accelerate"
    ) from None


class EstimatorCallback(TrainerCallback):
    """Predicts the step by the first batch, times the others, says both at the end.

    `settings` are those of `Settings`: `store`, `allocation`, `strategy`, `graph`, `report`, `say`.
    """

    def __init__(self, **settings: Any) -> None:
        self.training = WatchedTraining(settings=Settings(**settings))
        self._batch: dict[str, Any] | None = None
        self._hook: Any = None

    @property
    def comparison(self) -> Comparison | None:
        return self.training.comparison

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Wait for the first batch, on the first rank."""
        if state.is_world_process_zero:
            model = known["model"]
            self._hook = model.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._batch is None:
            # The Trainer's own count for its loss is no input of the model.
            self._batch = {k: v for k, v in kwargs.items() if k != "num_items_in_batch"}

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Trace after the first step, count the others."""
        if self.training.has_begun:
            self.training.step()
        elif self._batch is not None:
            self._hook.remove()
            optimizer = known["optimizer"]
            mixed = "bf16" if args.bf16 else "fp16" if args.fp16 else None
            self.training.begin(
                known["model"],
                self._batch,
                optimizer=getattr(optimizer, "optimizer", optimizer),
                precision=precision_of(known["model"], mixed),
                clip_grad_norm=bool(args.max_grad_norm),
                ranks=int(args.world_size),
                accumulation_steps=int(args.gradient_accumulation_steps),
                strategy="fsdp" if args.fsdp else "ddp",
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """An evaluation is no part of a step."""
        self.training.skip()

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Nor is a checkpoint."""
        self.training.skip()

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Say what was predicted and what measured."""
        if self._hook is not None:
            self._hook.remove()
        self.training.end()

"""Watch a training of Lightning's Trainer: ``Trainer(callbacks=[EstimatorCallback()])``."""

from __future__ import annotations

import warnings
from typing import Any

from estimator.integrations.callbacks.training import (
    Comparison,
    Settings,
    WatchedTraining,
    precision_of,
)

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        raise ImportError(
            "this callback is for Lightning's Trainer; install lightning or pytorch-lightning"
        ) from None


class EstimatorCallback(Callback):
    """Predicts the step by the first batch, times the others, says both at the end.

    `settings` are those of `Settings`: `store`, `allocation`, `strategy`, `graph`, `report`, `say`.
    """

    def __init__(self, **settings: Any) -> None:
        self.training = WatchedTraining(settings=Settings(**settings))
        self._steps_before = 0

    @property
    def comparison(self) -> Comparison | None:
        return self.training.comparison

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Trace the first batch, on the first rank."""
        if not trainer.is_global_zero or self.training.has_begun:
            return
        mixed = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(trainer.precision))
        # Without its trainer a module's self.log() does nothing but warn.
        pl_module.trainer = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.training.begin(
                    pl_module,
                    batch,
                    # Several are told by the step, which calls them itself.
                    optimizer=trainer.optimizers[0] if len(trainer.optimizers) == 1 else None,
                    precision=precision_of(pl_module, mixed),
                    clip_grad_norm=bool(trainer.gradient_clip_val),
                    ranks=int(trainer.world_size),
                    nodes=int(trainer.num_nodes),
                    accumulation_steps=int(trainer.accumulate_grad_batches),
                    strategy="fsdp" if "FSDP" in type(trainer.strategy).__name__ else "ddp",
                )
        finally:
            pl_module.trainer = trainer
        self._steps_before = trainer.global_step
        self.training.skip()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step is done once the trainer has counted one."""
        if trainer.global_step != self._steps_before:
            self._steps_before = trainer.global_step
            self.training.step()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """An evaluation is no part of a step."""
        self.training.skip()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say what was predicted and what measured."""
        self.training.end()

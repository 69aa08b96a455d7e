"""Watch a training of Lightning: one line of callbacks (``python examples/lightning_callback.py``).

At its end it says what was predicted of a step and what was measured; needs lightning.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from demo_models import gpt2
from torch.utils.data import DataLoader

from estimator.integrations.callbacks.lightning import EstimatorCallback


class Gpt2(pl.LightningModule):
    """An ordinary module."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """The loss that the model returns."""
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


def main(steps: int = 60, batch: int = 4, **settings: Any) -> None:
    """Train; `settings` are the callback's, such as report="step.json"."""
    model, rows = gpt2(batch * steps, layers=1, vocabulary=1000)
    samples: Any = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[EstimatorCallback(**settings)],
    )
    trainer.fit(Gpt2(model), DataLoader(samples, batch_size=batch))


if __name__ == "__main__":
    main()

"""Watch transformers' Trainer: one line of callbacks.

``python examples/transformers_callback.py`` (needs accelerate) says at its end what was predicted
of a step and what was measured.
"""

from __future__ import annotations

import tempfile
from typing import Any

from demo_models import gpt2
from transformers import Trainer, TrainingArguments

from estimator.integrations.callbacks.transformers import EstimatorCallback


def main(steps: int = 60, batch: int = 4, **settings: Any) -> None:
    """Train; `settings` are the callback's, such as report="step.json"."""
    model, rows = gpt2(batch * steps, layers=1, vocabulary=1000)
    samples: Any = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        callbacks: Any = [EstimatorCallback(**settings)]
        Trainer(model=model, args=arguments, train_dataset=samples, callbacks=callbacks).train()


if __name__ == "__main__":
    main()

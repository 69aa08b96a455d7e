"""Watch a loop of Accelerate: one line around it (``python examples/accelerate_loop.py``).

At its end it says what was predicted of a step and what was measured; needs accelerate.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from demo_models import gpt2
from torch.utils.data import DataLoader

from estimator.integrations.callbacks.training import watch


def main(steps: int = 60, batch: int = 4, **settings: Any) -> None:
    """Train; `settings` are the watch's, such as report="step.json"."""
    plain, rows = gpt2(batch * steps, layers=1, vocabulary=1000)
    samples: Any = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    accelerator = Accelerator(cpu=True)
    model, optimizer, data = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters()), DataLoader(samples, batch_size=batch)
    )
    with watch(accelerator, model, optimizer, **settings):
        for each in data:
            accelerator.backward(model(**each).loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()

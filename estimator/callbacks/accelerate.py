"""Watch a loop of Hugging Face's Accelerate: ``watch(accelerator, model, optimizer)``."""

from __future__ import annotations

import os
from typing import Any

from estimator.callbacks.hooks import HookedTraining, precision_of
from estimator.callbacks.training import Settings


def watch(accelerator: Any, model: Any, optimizer: Any, **settings: Any) -> HookedTraining:
    """Watch a training of what ``accelerator.prepare`` returned.

    `settings` are those of `Settings`: `store`, `allocation`, `strategy`, `graph`, `report`, `say`.
    """
    plain = accelerator.unwrap_model(model)
    ranks = int(accelerator.num_processes)
    is_sharded = str(accelerator.distributed_type).endswith("FSDP")
    return HookedTraining(
        plain,
        getattr(optimizer, "optimizer", optimizer),
        Settings(**{"say": accelerator.print, **settings}),
        ranks=ranks,
        nodes=max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))),
        accumulation_steps=int(accelerator.gradient_accumulation_steps),
        strategy="fsdp" if is_sharded else "ddp",
        precision=precision_of(plain, accelerator.mixed_precision),
    )

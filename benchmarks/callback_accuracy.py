"""Train one model under three frameworks' callbacks, and set what they say beside `validate`.

Each training is a process of its own with the probe's allocator and one device's threads.
Needs accelerate and lightning, and a probed 'local' whose device has all cores (--devices 1).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL = "hf:gpt2,n_layer=4,n_embd=256,n_head=4,vocab_size=2000"
BATCH, SEQ_LEN = 8, 128
FRAMEWORKS = ("accelerate", "transformers", "lightning")
# As the probe's own processes run: docs/accuracy.md.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}


def main() -> None:
    """Run everything, or one training (--train)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--train", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        train(asked.train, asked.steps, asked.report)
        return
    words = ("--on", "1x1:local", "--batch", str(BATCH), "--seq-len", str(SEQ_LEN))
    command = [sys.executable, "-m", "estimator.cli.main", "validate", MODEL, *words]
    (validated,) = json.loads(run([*command, "--repeats", "3", "--json"]))
    told = f"predicted {1e3 * validated['predicted']['step_time_s']:.1f} ms, "
    print(f"validate: {told}measured {1e3 * validated['measured_s']:.1f} ms")
    for framework in FRAMEWORKS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            arguments = ["--train", framework, "--steps", str(asked.steps), "--report", str(report)]
            run([sys.executable, __file__, *arguments])
            seen = json.loads(report.read_text())
        predicted_s = seen["predicted"]["step_time_s"]
        print(
            f"{framework}: predicted {1e3 * predicted_s:.1f} ms, measured "
            f"{1e3 * seen['measured_s']:.1f} ms over {seen['steps']} steps; against validate: "
            f"predicted {predicted_s / validated['predicted']['step_time_s'] - 1:+.1%}, measured "
            f"{seen['measured_s'] / validated['measured_s'] - 1:+.1%} {seen['remark'] or ''}"
        )


def run(command: list[str]) -> str:
    """What a process prints; its errors are shown as they come."""
    environment = os.environ | ALLOCATOR
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if ended.returncode > 1:  # 1: a prediction is far off
        raise SystemExit(ended.returncode)
    return ended.stdout


def train(framework: str, steps: int, report: str) -> None:
    """Train under one framework."""
    import torch

    from estimator.graph.models.model_text import load_model

    model, batch, _, _ = load_model(MODEL, batch=BATCH, seq_len=SEQ_LEN, weights=True, say=print)
    rows = [{name: each[i % BATCH] for name, each in batch.items()} for i in range(BATCH * steps)]
    settings: dict[str, Any] = {"report": report, "store": str(Path(report).with_name("seen.db"))}
    if framework == "transformers":
        train_by_transformers(model, rows, steps, settings)
        return
    data: Any = torch.utils.data.DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]
    if framework == "lightning":
        train_by_lightning(model, data, steps, settings)
        return
    from accelerate import Accelerator

    from estimator.integrations.callbacks.training import watch

    accelerator = Accelerator(cpu=True)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    with watch(accelerator, model, optimizer, **settings):
        for each in data:
            accelerator.backward(model(**each).loss)
            optimizer.step()
            optimizer.zero_grad()


def train_by_transformers(model: Any, rows: list[Any], steps: int, settings: Any) -> None:
    """Train under transformers' Trainer, which clips nothing here."""
    from transformers import Trainer, TrainingArguments

    from estimator.integrations.callbacks.transformers import EstimatorCallback

    arguments = TrainingArguments(
        output_dir=str(Path(settings["report"]).parent),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        optim="adamw_torch",
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    callback = EstimatorCallback(**settings)
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()


def train_by_lightning(model: Any, data: Any, steps: int, settings: Any) -> None:
    """Train under Lightning's Trainer."""
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from estimator.integrations.callbacks.lightning import EstimatorCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EstimatorCallback(**settings)],
    )
    trainer.fit(Module(), data)


if __name__ == "__main__":
    main()

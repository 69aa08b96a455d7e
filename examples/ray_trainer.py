"""Train under Ray Train with as many workers as a job uses well.

``python examples/ray_trainer.py [MACHINE]`` needs ray[train]; with ``local`` (after ``estimator
probe``) it really trains on this machine's devices.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from demo_models import gpt2

import estimator as est
from estimator.integrations.schedulers.launchers import scaling_config, sizes

LAYERS, VOCABULARY, STEPS = 1, 1000, 3


def loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    from ray import train
    from ray.train.torch import prepare_model

    plain, batch = gpt2(4, layers=LAYERS, vocabulary=VOCABULARY)
    model = prepare_model(plain)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(config["steps"]):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        train.report({"step": step, "loss": float(loss)})


def trainer(machine: str, *, max_nodes: int, steps: int = STEPS) -> Any:
    """A TorchTrainer with a worker for each device of the nodes that the model uses well."""
    from ray.train.torch import TorchTrainer

    target = est.load_profile(machine).kind
    graph = est.trace_model(*gpt2(4, layers=LAYERS, vocabulary=VOCABULARY), target=target)
    config = scaling_config(sizes(graph, machine, max_nodes=max_nodes))
    print(config)
    return TorchTrainer(loop, train_loop_config={"steps": steps}, scaling_config=config)


if __name__ == "__main__":
    trainer(sys.argv[1] if len(sys.argv) > 1 else "local", max_nodes=1).fit()

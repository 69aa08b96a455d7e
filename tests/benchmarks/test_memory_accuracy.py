"""How the measured memory of a step is read, and what counts as right at the boundary."""

from __future__ import annotations

from dataclasses import replace

import torch
from memory_accuracy import Case, boundary
from memory_steps import measured_step
from torch import Tensor, nn

from estimator.graph.memory.step import memory_alone
from estimator.graph.trace.trace import trace_graph
from estimator.graph.trace.training_call import TrainingCall


class Residual(nn.Module):
    """One whose backward pass adds gradients up: autograd does so in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = batch + torch.tanh(layer(batch))
        return batch.square().mean()


def test_every_operator_is_found_in_a_real_step_with_the_level_predicted_for_it() -> None:
    model, batch = Residual(), torch.randn(512, 64)
    call = TrainingCall.of(model, batch, lambda output, _batch: output)
    graph = trace_graph(model, batch, loss=lambda output, _batch: output, optimizer="sgd")
    curve = memory_alone(graph.at()).curve()
    step = measured_step(model, call, torch.optim.SGD(model.parameters(), lr=0.1), graph)
    assert sorted(step.begin_ns) == list(range(len(graph.ops)))
    # Before the first operator the profile shows its result already.
    pairs = step.beside(curve.total)[1:]
    assert max(abs(mine - theirs) for mine, theirs in pairs) < 0.001 * step.peak_bytes


def test_at_the_boundary_what_is_right_lies_within_a_tenth_of_the_batch() -> None:
    small = Case(
        model="m",
        optimizer="sgd",
        batch_per_gpu=10,
        checkpoints=False,
        predicted_bytes=1_000,
        measured_bytes=1_000,
        curve_ratio=1.0,
    )
    large = replace(small, batch_per_gpu=20, predicted_bytes=2_000, measured_bytes=2_000)
    # 100 bytes more per sample: at batch 10 a tenth of the batch is 100 bytes.
    assert boundary([small, large]) == (2, 2)
    assert boundary([replace(small, predicted_bytes=1_101), large]) == (1, 2)
    assert boundary([replace(small, predicted_bytes=900), large]) == (1, 2)
    # Another optimizer is another step: nothing to compare with.
    assert boundary([small, replace(large, optimizer="adamw")]) == (0, 0)

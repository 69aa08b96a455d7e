"""Check what an estimate says of a machine that runs other kernels than were traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import estimator as est


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(
    ("machine", "precision", "said"),
    [
        # Volta is 7.0; AMD's names are no numbers; without half precision nothing is flash.
        ("v100-p3", "fp16-amp", True),
        ("a100-sxm-80gb", "fp16-amp", False),
        ("mi250x", "fp16-amp", False),
        ("v100-p3", "fp32", False),
    ],
)
def test_a_machine_without_flash_attention_is_said_to_run_another_kernel(
    machine: str, precision: str, said: bool
) -> None:
    graph = est.trace_model(Attention(), torch.randn(2, 6, 8), precision=precision, target="cuda")
    assumptions = est.estimate(graph, f"1x1:{machine}").assumptions
    assert any("has no flash attention" in text for text in assumptions) == said

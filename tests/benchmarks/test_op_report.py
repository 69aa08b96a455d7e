"""The operator report sees the calls that the tracer predicts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from op_report import clock_operators, make_step

from estimator.api import trace_model
from estimator.graph.models.model_text import load_model

MODEL = """
from torch import nn
from torch.nn import functional as F
import torch
def small(batch=4):
    layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    return layers, torch.randn(batch, 8), lambda y, x: F.cross_entropy(y, x.argmax(1) % 3)
"""


def test_a_clocked_step_makes_the_calls_of_the_traced_step(tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    path.write_text(MODEL)
    text = f"{path}:small"
    model, inputs, loss, _ = load_model(text)
    graph = trace_model(model, inputs, loss=loss)
    traced = Counter(
        (op.phase, op.call.target, tuple(spec.shape for spec in op.call.inputs if spec.shape))
        for op in graph.ops
    )
    seen, _ = clock_operators(make_step(text, None))
    # Autograd detaches what it hands out; a step's update is not traced.
    clocked = Counter(
        {
            key: len(steps[0])
            for key, steps in seen.items()
            if key[0] != "update" and key[1] != "aten.detach.default"
        }
    )
    assert clocked == traced

"""A job is told from others by what it computes, whatever it is called and at whatever batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from estimator import OpGraph, trace_model
from estimator.graph.ir.op_graph import job_content


def traced(*, batch: int = 4, tokens: int = 8, width: int = 16, **options: Any) -> OpGraph:
    model = torch.nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
    return trace_model(model, torch.randn(batch, tokens, width), **options)


def fingerprint(graph: OpGraph) -> str:
    return job_content(graph).fingerprint


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return traced()


def test_one_model_at_two_batch_sizes_and_under_two_names_is_one_job(graph: OpGraph) -> None:
    again = replace(traced(batch=6), name="another name")
    assert again.batch != graph.batch
    assert fingerprint(again) == fingerprint(graph)


@pytest.mark.parametrize(
    "other",
    [{"tokens": 16}, {"width": 32}, {"optimizer": "sgd"}, {"precision": "bf16-amp"}],
    ids=lambda other: next(iter(other)),
)
def test_another_length_width_optimizer_or_precision_is_another_job(
    graph: OpGraph, other: dict[str, Any]
) -> None:
    assert fingerprint(traced(**other)) != fingerprint(graph)


def test_likeness_falls_with_what_differs(graph: OpGraph) -> None:
    content = job_content(graph)
    longer, wider = (job_content(traced(**other)) for other in ({"tokens": 16}, {"width": 32}))
    linear = trace_model(torch.nn.Linear(16, 16), torch.randn(4, 16))
    assert content.likeness(content) == pytest.approx(1.0)
    # The same operators on the same parameters.
    assert content.likeness(longer) == pytest.approx(1.0)
    assert content.likeness(job_content(linear)) < content.likeness(wider) < 1.0
    assert wider.likeness(content) == pytest.approx(content.likeness(wider))
    # 10 times the parameters: e times less alike, by definition.
    larger = replace(content, parameter_bytes=10 * content.parameter_bytes)
    assert content.likeness(larger) == pytest.approx(0.3679, abs=1e-4)
    assert content.likeness(replace(content, optimizer="sgd")) == pytest.approx(0.9)

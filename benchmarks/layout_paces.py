"""Models whose products wait, divided by a layout: what the engine and a testbed's ranks know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from layout_models import Decoder, of_transformers
from testbed.paced_products import flops_of, timed
from torch import nn

from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.plan import Plan
from estimator.graph.trace.trace import trace_graph
from estimator.workload.layouts import Layout

# 256 KiB pass between layers.
_WIDTH = 128
_IDS = torch.zeros(4, 128, dtype=torch.long)


def _decoder(**sizes: Any) -> Callable[[], tuple[nn.Module, Any]]:
    sizes = {"width": _WIDTH, "inner": 256, "words": 256, **sizes}
    return lambda: (Decoder(**sizes), _IDS)


# Sixteen experts a layer, of which each token goes to two.
_experts = of_transformers(
    "qwen3_moe",
    _IDS,
    vocab_size=256,
    hidden_size=_WIDTH,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=_WIDTH // 8,
    num_experts=16,
    num_experts_per_tok=2,
)

MODELS = {
    "decoder": _decoder(),
    "deep": _decoder(layers=4),
    "gpt": _decoder(gated=False, bias=True, inner=512),
    "qwen3_moe": _experts,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """A traced model, the plan that divides it, and the rate of the devices that it waits for."""

    graph: OpGraph
    plan: Plan | None
    flops_per_s: float


def divided(model: str, layout: str, *, rank_s: float) -> Divided:
    """A model whose products take one rank of a layout `rank_s` seconds a step."""
    from layout_oracle import plan_of

    made, batch = MODELS[model]()
    graph = trace_graph(made, batch, optimizer="sgd", name=model)
    asked = Layout.parse(layout)
    plan = plan_of(graph, sequence=asked.sequence) if asked.tp > 1 else None
    local = split_by_layout(graph, asked.of_layers, plan) if asked.divides_layers else graph
    rate = sum(flops_of(op.call) for op in local.ops) / rank_s
    calls = {op.call for op in (*graph.ops, *local.ops)}
    return Divided(graph=timed(graph, calls, rate), plan=plan, flops_per_s=rate)

"""Check which forward values the backward pass of a compiled step computes again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from estimator.graph.compile.parts import split_graph, with_recomputation
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.trace.trace import trace_graph


class Chain(nn.Module):
    """A matmul and some pointwise work on it, the last of it before another matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(torch.exp(self.first(x))))


class Shortcut(nn.Module):
    """Sums along a shortcut, each used beside a matmul and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sin(layer(torch.cos(x)))
        return x


def again(graph: OpGraph) -> list[str]:
    """The forward operators that the backward pass repeats, sorted."""
    forward = {index for index, op in enumerate(graph.ops) if op.phase == "forward"}
    parts = with_recomputation(split_graph(graph))
    repeated = [part.op for part in parts if part.phase == "backward" and part.op in forward]
    return sorted(graph.ops[index].call.target.split(".")[1] for index in repeated)


def test_what_a_product_reads_is_saved_and_what_comes_before_it_is_computed_again() -> None:
    graph = trace_graph(Chain(), torch.randn(4, 8))
    # tanh's result is a factor of the second weight's gradient; exp's own gradient wants exp.
    assert again(graph) == ["exp"]


def test_sums_used_again_beyond_a_product_are_saved() -> None:
    graph = trace_graph(Shortcut(), torch.randn(4, 8, requires_grad=True))
    # Otherwise one kernel would add up the whole chain of sums from its start. The gradients of
    # cos and sin want what the forward pass made them of, which is saved as it is.
    assert again(graph) == []


def test_random_numbers_are_never_drawn_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8))
    graph = trace_graph(model, torch.randn(4, 8), target="cuda")
    assert again(graph) == []
